"""The ladder, and a user's own function, held against the true gradient: what each optimises, and how noisily.

Every estimator pays the same, N rollouts: P = N / G prompts with G completions of each. What it is made of decides how
its moments are found, and each row says which:

- *group*: A of a group depends on that group alone (and on its prompt): exact, by the number of its successes;
- *batch*: G = 1 and a statistic of all rewards: exact, for the batch is one group of a randomly drawn prompt;
- *sampled*: anything else (a z-score over rewards less a critic's values): prompts and rewards are sampled, scores
  stay exact; marked, with a standard error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pgprog.algorithms import actor_critic, grpo, ppo, reinforce, rloo
from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.algorithms.update import Advantage, update
from pgprog.errors import UsageError
from pgprog.exact.blackbox import gradient_of_step, replicated
from pgprog.exact.moments import EstimatorMoments, group_moments, pooled, random_prompts, sampled_rewards
from pgprog.exact.scores import ScoreMoments
from pgprog.exact.weight import GroupAdvantage, effective_weight, group_advantage, implied_objective
from pgprog.foreign import call_on_rewards
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy, Rollout

RESAMPLES_AT_ONCE = 100
ADVANTAGES: dict[str, Advantage] = {
    "reinforce": reinforce.advantage,
    "actor_critic": actor_critic.advantage,
    "ppo": ppo.advantage,
    "rloo": rloo.advantage,
    "grpo": grpo.advantage,
}
WITH_CRITIC = ("actor_critic", "ppo")


@dataclass(frozen=True)
class Estimator:
    """One row of the table."""

    name: str
    title: str
    advantage: Advantage
    group_size: int
    critic: bool
    """Whether it needs a learned V(prompt)."""


@dataclass(frozen=True)
class Sampled:
    """Moments of the gradient over independent resamples, each with one standard error."""

    resamples: int
    trace: float
    trace_error: float
    second: float
    second_error: float
    mean_norm: float
    """E|g|: no moment, so there is no exact value beside it."""
    mean_norm_error: float


@dataclass(frozen=True)
class Row:
    """An estimator against the true gradient; without unit, but for the angle in degrees."""

    name: str
    title: str
    method: str
    """``group``, ``batch`` or ``sampled``: how the numbers were found."""
    group_size: int
    prompts: int
    rollouts: int
    extra_models: int
    weight: float
    """w where the success probability is J, or the mean of w over targets where it is sampled."""
    weight_range: tuple[float, float]
    """Over the targets."""
    mean_norm_of_gradient: float
    """|E g|."""
    bias: float
    """|E g - grad J|."""
    angle: float
    """Between E g and grad J."""
    trace: float
    second: float
    """E|g|^2."""
    error: float
    """Standard error of the last two: 0 where exact."""
    signal_to_noise: float
    """|E g|^2 / tr Cov(g), of N rollouts."""
    signal_to_noise_per_rollout: float
    squared_advantage: float
    """E[A^2]."""
    sampled: Sampled | None = None


@dataclass(frozen=True)
class Setting:
    """What all estimators share: a policy's exact moments at every target, and the budget."""

    scores: ScoreMoments
    """(P,), one replica."""
    draw: Float[Tensor, "P"]
    values: Float[Tensor, "P"]
    """The critic's V of each target."""
    rollouts: int

    @property
    def gradient(self) -> Float[Tensor, "D"]:
        """grad J."""
        return self.draw @ self.scores.gradient

    @property
    def success(self) -> float:
        """J."""
        return float(self.draw @ self.scores.p)


def with_rewards(rewards: Float[Tensor, "K P G"], targets: Int[Tensor, "K P"], values: Tensor | None) -> Rollout:
    """A rollout of which only the rewards, the targets and the critic's values are real."""
    nothing = rewards.new_zeros(*rewards.shape, 1)
    return Rollout(
        targets=targets,
        tokens=nothing.long(),
        mask=nothing == 0,
        logprobs=nothing,
        entropies=nothing,
        rewards=rewards,
        success=rewards > 0,
        values=None if values is None else values[targets],
    )


def users_estimator(spec: str, advantage: Advantage, group_size: int) -> Estimator:
    """A row for a user's function; whether it wants a critic's values is found by calling it."""
    rewards, targets = torch.zeros(1, 2, group_size, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.long)
    rewards[..., 0] = 1
    try:
        advantage(with_rewards(rewards, targets, None))
        critic = False
    except UsageError:
        advantage(with_rewards(rewards, targets, rewards.new_full((1,), 0.5)))
        critic = True
    return Estimator(spec.rpartition(":")[2], spec.rpartition(":")[2], advantage, group_size, critic)


def measure(estimator: Estimator, setting: Setting, sampled_batches: int = 20_000) -> tuple[Row, Float[Tensor, "D"]]:
    """A row for an estimator at this setting, and E g. Raises: UsageError where its function is at fault."""
    method, moments, weight = estimator_moments(estimator, setting, sampled_batches)
    truth, mean, prompts = setting.gradient, moments.mean, prompts_for(estimator, setting)
    along = mean @ truth / truth.norm()
    across = (mean - along * truth / truth.norm()).norm()
    signal = float(mean.square().sum() / moments.trace)
    rollouts = prompts * estimator.group_size
    row = Row(
        name=estimator.name,
        title=estimator.title,
        method=method,
        group_size=estimator.group_size,
        prompts=prompts,
        rollouts=rollouts,
        extra_models=int(estimator.critic),
        weight=weight,
        weight_range=(float(moments.weight.min()), float(moments.weight.max())),
        mean_norm_of_gradient=float(mean.norm()),
        bias=float((mean - truth).norm()),
        angle=math.degrees(math.atan2(float(across), float(along))),
        trace=float(moments.trace),
        second=float(moments.second),
        error=float(moments.error),
        signal_to_noise=signal,
        signal_to_noise_per_rollout=signal / rollouts,
        squared_advantage=float(moments.squared_advantage),
    )
    return row, mean


def prompts_for(estimator: Estimator, setting: Setting) -> int:
    """How many prompts make the rollouts, at least one."""
    return max(1, setting.rollouts // estimator.group_size)


def estimator_moments(
    estimator: Estimator, setting: Setting, sampled_batches: int
) -> tuple[str, EstimatorMoments, float]:
    """How the moments were found, the moments, and w at p = J."""
    prompts, G = prompts_for(estimator, setting), estimator.group_size
    J = torch.tensor([setting.success], dtype=torch.float64)
    table = table_of(estimator, setting)
    if table is not None and table.success.dim() == 2:
        groups = group_moments(table, setting.scores)
        weight = float((setting.draw * groups.weight).sum()) if estimator.critic else _at(table, J)
        return "group", random_prompts(groups, setting.draw, prompts), weight
    if table is not None:
        groups = group_moments(table, pooled(setting.scores, setting.draw))
        moments = random_prompts(groups, torch.ones_like(setting.draw[:1]), 1)
        return "batch", moments, float(moments.weight)

    def advantage(rewards: Tensor, targets: Tensor) -> Tensor:
        return estimator.advantage(with_rewards(rewards, targets, setting.values if estimator.critic else None))

    found = sampled_rewards(advantage, setting.scores, setting.draw, prompts, G, sampled_batches)
    return "sampled", found, float((setting.draw * found.weight).sum())


def _at(table: GroupAdvantage, p: Tensor) -> float:
    """w(p) of a table that is the same for every prompt."""
    return float(effective_weight(GroupAdvantage(table.success[0], table.failure[0]), p))


def table_of(estimator: Estimator, setting: Setting) -> GroupAdvantage | None:
    """The advantage as a table: (P, G) by target where it is local, (N,) where G = 1 and a batch decides; else None."""
    P, G, name = len(setting.draw), estimator.group_size, estimator.name
    targets = torch.arange(P)
    values = setting.values if estimator.critic else None

    def of_rewards(rewards: Tensor, at: Tensor = targets) -> Tensor:
        return estimator.advantage(with_rewards(rewards.unsqueeze(0), at.unsqueeze(0), values))[0]

    if is_local(of_rewards, P, G, name):
        return group_advantage(of_rewards, G, name, prompts=P)
    if G > 1 or estimator.critic:
        return None
    N = setting.rollouts

    def of_batch(rewards: Tensor) -> Tensor:
        return of_rewards(rewards.view(N, 1), torch.zeros(N, dtype=torch.long)).view(1, N)

    return group_advantage(of_batch, N, name)


def is_local(of_rewards: Callable[[Tensor, Tensor], Tensor], P: int, G: int, name: str) -> bool:
    """Whether A of a group is the same with other groups beside it as alone, on generic batches."""
    generator = torch.Generator().manual_seed(0)
    for chance in (0.2, 0.5, 0.8):
        rewards = (torch.rand(6, G, generator=generator) < chance).double()
        targets = torch.randint(P, (6,), generator=generator)
        together = call_on_rewards(name, lambda r: of_rewards(r, targets), rewards)  # noqa: B023 (called at once)
        try:
            alone = torch.cat([of_rewards(rewards[i : i + 1], targets[i : i + 1]) for i in range(6)])
        except UsageError:
            return False
        if not torch.allclose(together, alone.to(together.dtype), rtol=1e-9, atol=1e-12):
            return False
    return True


def sample_gradients(
    estimator: Estimator,
    policy: Policy,
    critic: Critic | None,
    rollouts: int,
    resamples: int,
    mean: Float[Tensor, "D"],
    on_done: Callable[[int], None] = lambda n: None,
) -> Sampled:
    """Moments of the first gradient of an estimator's own train step, over resamples of prompts and completions.

    Args:
        policy, critic: one replica; copied for each resample, and left alone.
        mean: E g; the trace is E|g - mean|^2.
        on_done: told how many resamples are done.
    """
    parts = []
    for start in range(0, resamples, RESAMPLES_AT_ONCE):
        seeds = range(start, min(start + RESAMPLES_AT_ONCE, resamples))
        g = gradients_of(estimator, policy, critic, rollouts, seeds)
        parts.append(torch.stack([(g - mean).square().sum(1), g.square().sum(1), g.norm(dim=1)], 1))
        on_done(seeds.stop)
    quantities = torch.cat(parts)
    trace, second, norm = quantities.mean(0).tolist()
    errors = (quantities.std(0) / resamples**0.5).tolist()
    return Sampled(resamples, trace, errors[0], second, errors[1], norm, errors[2])


def gradients_of(
    estimator: Estimator, policy: Policy, critic: Critic | None, rollouts: int, seeds: range
) -> Float[Tensor, "R D"]:
    """The gradient (of J, not of the loss) of each resample, drawn as ``pgprog compare`` draws it."""
    options: dict[str, Any] = {"prompts": max(1, rollouts // estimator.group_size)}
    if estimator.group_size > 1:
        options["group_size"] = estimator.group_size
    if estimator.critic:
        assert critic is not None
        options["critic"] = replicated(critic, 0, len(seeds))
    if estimator.name == "ppo":
        options["epochs"] = 1  # where every ratio is 1
    step = TRAIN_STEPS.get(estimator.name) or partial(update, advantage=estimator.advantage)
    copies, generator = replicated(policy, 0, len(seeds)), ReplicaGenerator(seeds, "resample")
    return gradient_of_step(step, copies, generator, **options).double()


@dataclass(frozen=True)
class Curve:
    """An estimator's effective weight and the objective that it implies, over success probabilities."""

    name: str
    title: str
    p: list[float]
    weight: list[float]
    objective: list[float]


def weight_curve(estimator: Estimator, setting: Setting, points: int = 201) -> Curve | None:
    """w(p) and W(p) on a grid, where they depend on p alone; else None."""
    table = None if estimator.critic else table_of(estimator, setting)
    if table is None:
        return None
    if table.success.dim() == 2:
        table = GroupAdvantage(table.success[0], table.failure[0])
    p = torch.linspace(0, 1, points, dtype=torch.float64)
    w, W = effective_weight(table, p), implied_objective(table, p)
    return Curve(estimator.name, estimator.title, p.tolist(), w.tolist(), W.tolist())
