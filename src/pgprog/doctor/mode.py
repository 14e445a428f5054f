"""The form of a mode, and what every mode needs: training with a fault in it, exact moments, curves.

A mode is a function ``(effort, fault) -> Finding`` in a module of its own, listed in ``tour.MODES``. The fault is a
small function; all else of a sick run is the cured run's. It reaches the one ``update`` as its advantage, as its
objective (for what an advantage cannot do, which is detached), as its draw or as its critic:

    trained(config, effort, partial(update, advantage=..., objective=...))       seeds side by side, as replicas
    moments_of(partial(update, advantage=..., objective=...), problem)           the same call, on every batch there is

A check is a statement that the numbers could refute: with the cure in the place of the fault one of them must fail.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pgprog.algorithms.update import Metrics
from pgprog.exact.blackbox import Moments, black_box_moments, first_gradient, replicated
from pgprog.exact.enumeration import completions, every_target, success_probabilities
from pgprog.exact.recipes import Problem, outcome_probabilities
from pgprog.experiment.config import RunConfig, validate
from pgprog.experiment.loop import run, train_step_of
from pgprog.policy import Policy, Rollout, scored

POINTS = 24  # of a curve, so many means of consecutive steps

TrainStep = Callable[..., Metrics]
Watch = Callable[[Policy, nn.Module | None], dict[str, Float[Tensor, "K"]]]
"""What is measured at a policy and its critic, beside what ``update`` says of its batch."""


@dataclass(frozen=True)
class Effort:
    """How much of a mode to run."""

    seeds: int = 6
    """Replicas of each run."""
    scale: float = 1.0
    """Of a mode's own numbers of steps and of samples; its checks are tuned for 1."""
    full: bool = False
    """Sweeps as well, which may take longer."""

    def of(self, number: int, least: int = 4) -> int:
        """A number of steps or samples, scaled."""
        return max(least, round(number * self.scale))


@dataclass(frozen=True)
class Curve:
    """y over x, with the least and the greatest of the seeds, or a standard error's bounds, where there are any."""

    label: str
    kind: Literal["sick", "cured", "exact", "other"]
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    dots: bool = False
    """Points with error bars, in place of a line with a band."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a mode's figure."""

    x: str
    y: str
    curves: tuple[Curve, ...]
    log_y: bool = False
    ticks: tuple[str, ...] = ()
    """Names of x = 0, 1, ..., where x is no quantity."""


class Check(NamedTuple):
    """What makes a mode reproducible."""

    statement: str
    holds: bool


@dataclass(frozen=True)
class Finding:
    """A mode, shown."""

    name: str
    title: str
    sick: str
    """What happens, in one sentence."""
    cure: str
    """In one sentence."""
    watch: str
    """The instruments that show it, by their names in metrics.jsonl, and how they move."""
    numbers: dict[str, Any]
    """Measured, by sampling; success is exact, of the policies that were reached."""
    proof: dict[str, Any] | None
    """Exact, by enumeration."""
    panels: tuple[Panel, ...]
    """Sick beside cured, with the exact line where there is one."""
    checks: tuple[Check, ...]

    @property
    def reproduced(self) -> bool:
        return all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self) | {"checks": [check._asdict() for check in self.checks]}
        return found | {"reproduced": self.reproduced}


class Trace(NamedTuple):
    """A training, N steps of K seeds."""

    metrics: dict[str, Float[Tensor, "N K"]]
    at: list[int]
    """The steps before which something was watched; the last is N, the end."""
    watched: dict[str, Float[Tensor, "M K"]]
    success: Float[Tensor, "K"]
    """At the end, exact, over the task's own distribution of targets."""
    policy: Policy
    """As it is at the end."""


def trained(
    config: RunConfig,
    effort: Effort,
    train_step: TrainStep | None = None,
    watch: Watch | None = None,
    points: int = POINTS,
) -> Trace:
    """Train by ``experiment.loop.run``, the step replaced where one is given.

    Args:
        train_step: called as the configuration's own would be.
        watch: called before ``points`` of the steps, at equal distances, and at the end.
    """
    config = validate(replace(config, steps=effort.of(config.steps)))
    make = train_step or train_step_of(config)
    every = -(-config.steps // points)
    held: list[tuple[Policy, nn.Module | None]] = []
    rows: list[Metrics] = []
    at: list[int] = []
    seen: list[dict[str, Tensor]] = []

    def look(step: int) -> None:
        if watch is not None:
            at.append(step)
            seen.append({name: value.detach().double() for name, value in watch(*held[0]).items()})

    def step(policy: Policy, *arguments: Any, critic: nn.Module | None = None, **options: Any) -> Metrics:
        if not held:
            held.append((policy, critic))
        if len(rows) % every == 0:
            look(len(rows))
        more = {} if critic is None else {"critic": critic}
        return make(policy, *arguments, **more, **options)

    run(config, range(effort.seeds), train_step=step, on_step=lambda _, metrics: rows.append(metrics))
    look(config.steps)
    metrics = {name: torch.stack([row[name].double() for row in rows]) for name in rows[0]}
    watched = {name: torch.stack([row[name] for row in seen]) for name in (seen[0] if seen else ())}
    return Trace(metrics, at, watched, exact_success(held[0][0]), held[0][0])


@torch.no_grad()
def exact_success(policy: Policy) -> Float[Tensor, "K"]:
    """J with the outcome reward, whatever the policy was paid."""
    p = success_probabilities(policy, every_target(policy.task))
    return p.double() @ policy.task.target_weights()


def moments_of(train_step: TrainStep, problem: Problem, **options: Any) -> Moments:
    """Mean and covariance of the first gradient that a train step makes, over every batch of the policy's.

    With ``old=problem.old`` over every batch of that one, for a recipe whose data are one update old. The order of a
    prompt's completions must not matter: one order is tried for all. ``options`` as in ``first_gradient``.
    """
    estimator = first_gradient(
        train_step,
        problem.policy,
        problem.targets,
        problem.group_size,
        completions(problem.policy, problem.targets).tokens,
        **options,
    )
    pi = outcome_probabilities(options.get("old", problem.policy), problem).repeat_interleave(problem.group_size, 0)
    return black_box_moments(estimator, pi, alike=problem.group_size)


def expectation(statistic: Callable[[Rollout], Float[Tensor, "B"]], problem: Problem) -> float:
    """E of a number of a batch of fresh data, (B,) of B batches, over every batch; exact.

    As in ``moments_of`` the order of a prompt's completions must not matter.
    """
    targets, G, tokens = problem.targets, problem.group_size, completions(problem.policy, problem.targets).tokens

    @torch.no_grad()
    def estimator(outcomes: Tensor) -> Tensor:
        script = tokens[outcomes].view(len(outcomes), len(targets), G, -1)
        copies = replicated(problem.policy, 0, len(outcomes))
        return statistic(scored(copies, targets.expand(len(outcomes), -1), script)).double().unsqueeze(1)

    pi = outcome_probabilities(problem.policy, problem).repeat_interleave(G, 0)
    return black_box_moments(estimator, pi, alike=G).mean.item()


def curve(
    label: str, kind: Literal["sick", "cured", "exact", "other"], values: Float[Tensor, "N K"], at: Sequence[int] = ()
) -> Curve:
    """Mean, least and greatest of the seeds; without ``at`` over blocks of steps, N of them or POINTS means."""
    if at:
        x = [float(step) for step in at]
    else:
        parts = values.split(-(-len(values) // POINTS))
        ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        x = [float(end) - (len(part) - 1) / 2 for end, part in zip(ends, parts, strict=True)]
        values = torch.stack([part.mean(0) for part in parts])
    return Curve(label, kind, x, values.mean(1).tolist(), values.amin(1).tolist(), values.amax(1).tolist())


def last(values: Float[Tensor, "N K"], share: float = 0.2) -> float:
    """The mean over the last part of the steps, and over the seeds."""
    return values[-max(1, round(share * len(values))) :].mean().item()


def mean(values: Tensor) -> float:
    return values.double().mean().item()
