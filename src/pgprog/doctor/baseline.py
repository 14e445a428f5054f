"""A baseline that depends on the action: scaled, bent or vanished; and what the mean of A cannot tell.

    E[(r - b) s] = grad J - E[b s],        E[b s] = 0 where b does not depend on the completion, s = grad log pi(y)

Own-sample mean: E[b s] = grad J / G, a scale. b = c |y|: E[b s] = c grad E|y|, another objective. b = r: all is gone.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from pgprog.algorithms.advantages import group_mean, leave_one_out
from pgprog.algorithms.update import update
from pgprog.doctor.mode import (
    Check,
    Curve,
    Effort,
    Finding,
    Panel,
    Trace,
    curve,
    expectation,
    last,
    mean,
    moments_of,
    trained,
)
from pgprog.exact.enumeration import completions, value_and_gradient
from pgprog.exact.recipes import Problem, compared, tiny_problem, true_gradient
from pgprog.experiment.config import RunConfig
from pgprog.policy import Rollout

LENGTH_PRICE = 0.2
CONSTANT = 0.5
DECAY = 0.95
LAGS = 0.01  # a mean of A within this of 0 says nothing at all

Baselined = Callable[[Rollout], Tensor]


def bent(batch: Rollout) -> Tensor:
    """The fault: b = c |y|, what completions of this length are thought to be worth."""
    return batch.rewards - LENGTH_PRICE * batch.mask.sum(-1).to(batch.rewards.dtype)


def vanished(batch: Rollout) -> Tensor:
    """r less the mean of a group of one."""
    return batch.rewards - batch.rewards.unsqueeze(-1).mean(-1)


def own_mean(batch: Rollout) -> Tensor:
    """r less the group's mean, the sample in it."""
    return group_mean(batch.rewards)


def others_mean(batch: Rollout) -> Tensor:
    """The cure: r less the mean of the others."""
    return leave_one_out(batch.rewards)


def constant(batch: Rollout) -> Tensor:
    """r less a constant that once was a good guess: far off, and no function of the completion."""
    return batch.rewards - CONSTANT


class RunningMean:
    """r - b, b the running mean of earlier batches' rewards: it has not seen the completions, and it lags."""

    def __init__(self) -> None:
        self.b: Tensor | None = None

    def __call__(self, batch: Rollout) -> Tensor:
        now = batch.rewards.mean((-2, -1), keepdim=True)
        b = now if self.b is None else self.b
        self.b = DECAY * b + (1 - DECAY) * now
        return batch.rewards - b


def read_mean(mean_advantage: float) -> str:
    """What a mean of A says: that the baseline lags, or nothing; never that it is biased, and never that it is not."""
    if abs(mean_advantage) <= LAGS:
        return "says nothing: a biased baseline may have mean 0 too"
    side = "below" if mean_advantage > 0 else "above"
    return (
        f"the baseline lags: it is {abs(mean_advantage):.2f} {side} what is earned, which costs variance and is no bias"
    )


def action_baseline(effort: Effort, fault: Baselined = bent) -> Finding:
    """Bias by exact expectation, beside the mean of A, for six baselines; three of them depend on the action."""
    kinds: dict[str, Baselined] = {
        "constant": constant,
        "mean of others": others_mean,
        "own mean": own_mean,
        "own mean, G = 1": vanished,
        "length": fault,
    }
    problem = tiny_problem(group_size=3)
    proof = {name: exact_row(advantage, problem) for name, advantage in kinds.items()}
    proof["length"] |= from_priced(fault, problem)
    config = RunConfig(
        algo="rloo", seq_len=3, digits=5, variable_length=True, hidden=32, steps=160, prompts=24, lr=0.01
    )
    at_work: dict[str, Baselined] = {**kinds, "running mean": RunningMean()}
    runs = {name: trained(config, effort, partial(update, advantage=A)) for name, A in at_work.items()}
    ends = {name: {"success": mean(run.success), "length": last(run.metrics["length"])} for name, run in runs.items()}
    drift = mean(runs["running mean"].metrics["advantage_mean"])
    numbers: dict[str, Any] = {"steps": len(runs["constant"].metrics["reward"]), **ends}
    numbers["running mean"] |= {"mean of A": drift, "read as": read_mean(drift)}
    return Finding(
        name="action-baseline",
        title="A baseline that depends on the action",
        sick="A baseline that has seen the completion takes E[b s] off the gradient: the own mean a share 1/G; "
        f"b = {LENGTH_PRICE:g} |y| the gradient of {LENGTH_PRICE:g} E|y|; the mean of a group of one all of it.",
        cure="Take the baseline from the other completions, or from the prompt alone; judge it by exact expectation, "
        "not by the mean of A.",
        watch="length falls where the baseline is bent by it; advantage_mean proves nothing, and its drift says "
        "that the baseline lags",
        numbers=numbers,
        proof=proof,
        panels=panels(proof, runs),
        checks=checks_of(proof, ends, drift),
    )


def exact_row(advantage: Baselined, problem: Problem) -> dict[str, float]:
    """E[A], and E[g] against grad J, over every batch."""
    A = expectation(lambda batch: advantage(batch).mean((-2, -1)), problem)
    return {"mean of A": A} | asdict(
        compared(moments_of(partial(update, advantage=advantage), problem), true_gradient(problem))
    )


def from_priced(advantage: Baselined, problem: Problem) -> dict[str, float]:
    """|E[g] - grad (J - c E|y|)|."""
    mean_gradient = moments_of(partial(update, advantage=advantage), problem).mean
    return {"from grad of J - c E|y|": float((mean_gradient - priced_gradient(problem)).norm())}


def priced_gradient(problem: Problem) -> Float[Tensor, "D"]:
    """grad (J - c E|y|), the mean over the prompts."""
    found = completions(problem.policy, problem.targets)
    length = (found.logprobs.exp() * found.mask.sum(-1)).sum(-1).mean(1)
    return true_gradient(problem) - LENGTH_PRICE * value_and_gradient(problem.policy, length).gradient[0]


def checks_of(proof: dict[str, Any], ends: dict[str, Any], drift: float) -> tuple[Check, ...]:
    """Exact ones first."""
    G = 3
    own, length = proof["own mean"], proof["length"]
    best = ends["mean of others"]["success"]
    return (
        Check(
            "exact: a constant and the mean of the others are unbiased (relative bias below 1e-12)",
            max(proof[name]["relative_bias"] for name in ("constant", "mean of others")) < 1e-12,
        ),
        Check(
            "exact: the own mean is a scale, 1 - 1/G, and no more (to 1e-12)",
            abs(own["scale"] - (1 - 1 / G)) < 1e-12 and own["rest"] < 1e-12,
        ),
        Check("exact: in a group of one nothing is left", proof["own mean, G = 1"]["norm"] == 0),
        Check(
            "exact: b = c |y| gives grad (J - c E|y|) (to 1e-12), another direction",
            length["from grad of J - c E|y|"] < 1e-12 and length["rest"] > 1e-3,
        ),
        Check(
            "exact: mean of A neither proves nor excludes bias: 0 for the own mean, far from 0 for the constant",
            abs(own["mean of A"]) < 1e-12 and own["relative_bias"] > 0.1 and abs(proof["constant"]["mean of A"]) > 0.1,
        ),
        Check("a running mean drifts, and is read as a baseline that lags", "lags" in read_mean(drift)),
        Check(
            "at work, the bent baseline costs a quarter of the success or more", ends["length"]["success"] < 0.75 * best
        ),
        Check("and shortens the completions", ends["length"]["length"] < ends["mean of others"]["length"] - 0.5),
        Check(
            "the vanished one learns nothing; the scaled one keeps nine tenths of the success or more",
            ends["own mean, G = 1"]["success"] < best / 2 and ends["own mean"]["success"] > 0.9 * best,
        ),
    )


def panels(proof: dict[str, Any], runs: dict[str, Trace]) -> tuple[Panel, ...]:
    """The mean of A beside the bias, by baseline; success at work."""
    x = [float(i) for i in range(len(proof))]
    bars = (
        Curve("mean of A, exact", "other", x, [row["mean of A"] for row in proof.values()], dots=True),
        Curve(
            "|E g - grad J| / |grad J|, exact", "sick", x, [row["relative_bias"] for row in proof.values()], dots=True
        ),
    )
    shown: tuple[tuple[str, Any], ...] = (
        ("length", "sick"),
        ("own mean, G = 1", "sick"),
        ("own mean", "other"),
        ("running mean", "other"),
        ("mean of others", "cured"),
    )
    return (
        Panel("baseline", "the mean of A beside the bias", bars, ticks=tuple(proof)),
        Panel(
            "step",
            "success of the batch",
            tuple(curve(name, kind, runs[name].metrics["success"]) for name, kind in shown),
        ),
    )
