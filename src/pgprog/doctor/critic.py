"""A critic whose updates stop while the policy goes on.

    tr Cov(g) of A = r - V grows with the distance of V from V_exact = p; E[g] is grad J all the same

Variance at a policy is exact here, from the moments of its scores (``exact/moments.py``), for the critic's V and for
the exact one: g of one completion of a random prompt.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pgprog.algorithms import actor_critic
from pgprog.algorithms.update import Metrics
from pgprog.doctor.mode import Check, Effort, Finding, Panel, Trace, curve, mean, trained
from pgprog.exact.enumeration import every_target
from pgprog.exact.moments import group_moments, random_prompts
from pgprog.exact.scores import ScoreMoments, score_moments
from pgprog.exact.weight import GroupAdvantage
from pgprog.experiment.config import RunConfig
from pgprog.policy import Policy

Pace = Callable[[float], float]
"""From the share of the run that is done to a factor of the critic's learning rate."""
STOP = 0.05


def stops(done: float) -> float:
    """The fault: no updates of the critic after a twentieth of the run, when it is still too high."""
    return 0.0 if done >= STOP else 1.0


def keeps_up(done: float) -> float:
    """The cure: the critic's own rate throughout."""
    return 1.0


class Paced:
    """Actor-Critic's step, the critic's learning rate times ``pace``."""

    def __init__(self, pace: Pace, steps: int) -> None:
        self.pace, self.steps, self.step = pace, steps, 0

    def __call__(self, policy: Policy, optimizer: Any, *arguments: Any, **options: Any) -> Metrics:
        optimizer.param_groups[1]["lr"] *= self.pace(self.step / self.steps)  # the loop sets it anew before each step
        self.step += 1
        return actor_critic.train_step(policy, optimizer, *arguments, **options)


def stops_later(done: float) -> float:
    """No updates from a quarter of the run on, when V has come down to p; from there on it lags below."""
    return 0.0 if done >= 0.25 else 1.0


@torch.no_grad()
def exact_noise(policy: Policy, critic: nn.Module | None) -> dict[str, Tensor]:
    """tr Cov with the critic's V, with the exact one, their ratio, |V - V_exact|, and J; each (K,).

    With the potential reward the return is [sum == T] - 1: V + 1 is what the critic makes of the success.
    """
    assert critic is not None
    targets, draw = every_target(policy.task), policy.task.target_weights().to(policy.head_weight.dtype)
    judged = copy.copy(policy)
    judged.task = replace(policy.task, reward_form="outcome")
    with torch.enable_grad():
        scores = score_moments(judged, targets)
    V = critic(targets.expand(policy.replicas, -1)) + (policy.task.reward_form == "potential")
    learned, exact = trace(scores, V, draw), trace(scores, scores.p, draw)
    error = ((V - scores.p).abs() * draw).sum(-1)
    return {"trace": learned, "exact": exact, "excess": learned / exact, "error": error, "J": scores.p @ draw}


def trace(scores: ScoreMoments, V: Float[Tensor, "K P"], draw: Float[Tensor, "P"]) -> Float[Tensor, "K"]:
    """tr Cov of (r - V) s, one completion of a random prompt: a group of one, so E[A^2 | r] = (r - V)^2."""
    V = V.unsqueeze(-1)
    return random_prompts(group_moments(GroupAdvantage(1 - V, -V), scores), draw, 1).trace


def lagging_critic(effort: Effort, fault: Pace = stops) -> Finding:
    """The critic stops early, with V far too high; beside it one that goes on, and one that stops when V is right."""
    config = RunConfig(
        algo="actor_critic", seq_len=2, hidden=16, steps=240, prompts=24, lr=0.01, reward_form="potential"
    )
    steps = effort.of(config.steps)

    def at_work(pace: Pace) -> Trace:
        return trained(config, effort, Paced(pace, steps), exact_noise, points=8)

    runs = {"sick": at_work(fault), "cured": at_work(keeps_up), "stops when V is right": at_work(stops_later)}
    quarter = {name: at_quarter(run) for name, run in runs.items()}
    ends = {name: {key: mean(values[-1]) for key, values in run.watched.items()} for name, run in runs.items()}
    sick, cured = runs["sick"], runs["cured"]
    rise = mean(sick.watched["trace"][-1]) / mean(sick.watched["trace"][1])
    numbers = {
        "steps": steps,
        "critic stops at step": round(STOP * steps),
        "after a quarter of the run": quarter,
        "at the end": ends,
        "sick trace, end over first point after the stop": rise,
    }
    others = runs["stops when V is right"]
    return Finding(
        name="lagging-critic",
        title="A critic whose updates stop",
        sick="With V frozen too high the gradient's variance is a multiple of what the exact V leaves, and rises, long "
        "before the reward curve says anything; the gradient is unbiased throughout.",
        cure="Keep the critic learning at least as fast as the policy, and judge it by its error and by the variance.",
        watch="value_loss stays above the variance of the returns, advantage_mean off 0 and grad_norm large, while the "
        "reward looks ordinary",
        numbers=numbers,
        proof=None,
        panels=(
            Panel(
                "step",
                "tr Cov of a completion's gradient, exact",
                (
                    curve("sick: V frozen too high", "sick", sick.watched["trace"][1:], sick.at[1:]),
                    curve("cured", "cured", cured.watched["trace"][1:], cured.at[1:]),
                    replace(curve("sick policy, exact V", "exact", sick.watched["exact"][1:], sick.at[1:]), low=None),
                    replace(
                        curve("cured policy, exact V", "exact", cured.watched["exact"][1:], cured.at[1:]), low=None
                    ),
                ),
            ),
            Panel(
                "step",
                "tr Cov over that with the exact V",
                (
                    curve("sick", "sick", sick.watched["excess"][1:], sick.at[1:]),
                    curve("cured", "cured", cured.watched["excess"][1:], cured.at[1:]),
                    curve("stops when V is right", "other", others.watched["excess"][1:], others.at[1:]),
                ),
            ),
            Panel(
                "step",
                "success, exact",
                (
                    curve("sick", "sick", sick.watched["J"], sick.at),
                    curve("cured", "cured", cured.watched["J"], cured.at),
                    curve("stops when V is right", "other", others.watched["J"], others.at),
                ),
            ),
        ),
        checks=(
            Check(
                "after a quarter of the run the sick variance is 1.5 times that of the exact V or more",
                quarter["sick"]["excess"] > 1.5,
            ),
            Check("and the cured one within a quarter of it", abs(quarter["cured"]["excess"] - 1) < 0.25),
            Check(
                "while the rewards do not tell the two apart yet (within 0.05)",
                abs(quarter["sick"]["J"] - quarter["cured"]["J"]) < 0.05,
            ),
            Check("the sick variance goes on rising", rise > 1.2),
            Check("in the end the sick policy succeeds less", ends["sick"]["J"] < ends["cured"]["J"]),
            Check(
                "a critic that stops when V is right lags below, which costs nothing (variance at most 1.1 times)",
                ends["stops when V is right"]["excess"] < 1.1,
            ),
        ),
    )


def at_quarter(run: Trace) -> dict[str, float]:
    """What was watched after a quarter of the run."""
    place = next(i for i, step in enumerate(run.at) if 4 * step >= run.at[-1])
    return {name: mean(values[place]) for name, values in run.watched.items()}
