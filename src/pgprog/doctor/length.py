"""A denominator that holds the sequence's own length.

    1/|o|:  E[(r - b) s / |o|] = E[(r - p) s / |o|]        s = grad log pi(y), b the mean of the others: no G in it

So the turn is the same in groups of any size, while that of a mean over all tokens of the batch fades as it grows:
its denominator holds the sample's own length among ever more. Lengths at work are exact, over all completions.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pgprog.algorithms.recipes import find
from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, Trace, mean, trained
from pgprog.exact.blackbox import Moments
from pgprog.exact.enumeration import completions, every_target, value_and_gradient
from pgprog.exact.recipes import Compared, Problem, compared, recipe_moments, rewards_of, tiny_problem, true_gradient
from pgprog.experiment.config import RunConfig
from pgprog.policy import Policy

SIZES = (2, 3, 4)
LEVEL = 0.2  # success at which lengths are compared
REACH = 0.5  # lengths are read on targets up to this share of the largest: the others leave no choice


def denominator(name: str) -> tuple[str, ...]:
    return (f"aggregation.denominator={name}",)


def length_bias(effort: Effort, fault: str = "sequence_mean") -> Finding:
    """Denominators: the turn of the first gradient over G, where it moves lengths, and lengths at matched success."""
    kinds = {"sick": fault, "token_mean": "token_mean", "cured": "sequence_sum"}
    problems = {G: tiny_problem(group_size=G) for G in SIZES}
    proof: dict[str, Any] = {
        name: {f"G = {G}": exact_row(which, problem) for G, problem in problems.items()}
        for name, which in kinds.items()
    }
    proof["sick, from the formula"] = asdict(by_formula(problems[SIZES[0]]))
    config = RunConfig(
        recipe="grpo",
        variable_length=True,
        seq_len=6,
        digits=3,
        hidden=32,
        steps=120,
        prompts=16,
        lr=0.01,
    )
    runs = {
        name: trained(replace(config, set=denominator(which)), effort, watch=lengths, points=30)
        for name, which in kinds.items()
    }
    matched = {name: at_level(run) for name, run in runs.items()}
    numbers: dict[str, Any] = {
        "steps": len(runs["sick"].metrics["reward"]),
        f"tokens at success {LEVEL:g}": {name: summary(found) for name, found in matched.items()},
        "less the cured run's, by seed": {
            name: {kind: paired(found[kind], matched["cured"][kind]) for kind in found}
            for name, found in matched.items()
            if name != "cured"
        },
        "at the end": {
            name: {"success": mean(run.success)} | {kind: mean(run.watched[kind][-1]) for kind in ("wrong", "right")}
            for name, run in runs.items()
        },
    }
    return Finding(
        name="length-bias",
        title="Length bias of a denominator",
        sick="Divided by its own length, a long wrong answer is punished less per token and a short right one rewarded "
        "more: the gap between their lengths is pushed apart, and no batch size takes the turn away.",
        cure="Sum over each sequence, or divide by a constant; a mean over the batch's tokens has a turn that fades "
        "as the batch grows.",
        watch="length_wrong less length_right, which widens at the same success",
        numbers=numbers,
        proof=proof,
        panels=panels(proof, runs),
        checks=checks_of(proof, numbers),
    )


def exact_row(which: str, problem: Problem) -> dict[str, float]:
    """E[g] of RLOO with a denominator against grad J, and how fast a step along it widens the gap."""
    moments = recipe_moments(find("rloo", denominator(which)), problem)
    rate = float(moments.mean @ gap_gradient(problem) / moments.mean.norm())
    return asdict(compared(moments, true_gradient(problem))) | {"gap, per unit step": rate}


def by_formula(problem: Problem) -> Compared:
    """The mean over the prompts of sum over y of pi(y) (r(y) - p) grad log pi(y) / |y|; no group in it."""
    found = completions(problem.policy, problem.targets)
    logprobs, r = found.logprobs[0], rewards_of(problem)
    pi = logprobs.detach().exp()
    p = (pi * r).sum(1, keepdim=True)
    value = (pi * (r - p) / found.mask.sum(-1) * logprobs).sum(1).mean()
    gradient = value_and_gradient(problem.policy, value.unsqueeze(0)).gradient[0]
    return compared(noiseless(gradient), true_gradient(problem))


def noiseless(gradient: Float[Tensor, "D"]) -> Moments:
    """A gradient without noise, as moments."""
    return Moments(gradient, gradient.new_zeros(len(gradient), len(gradient)))


def gap_gradient(problem: Problem) -> Float[Tensor, "D"]:
    """grad of E[|y|; wrong] / P(wrong) - E[|y|; right] / P(right), over the given prompts."""
    found = completions(problem.policy, problem.targets)
    wrong, right = conditional_lengths(found.logprobs.exp(), found.mask.sum(-1), rewards_of(problem) == 1)
    return value_and_gradient(problem.policy, wrong - right).gradient[0]


def conditional_lengths(
    pi: Float[Tensor, "K P Y"], length: Tensor, right: Tensor
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """Tokens of a wrong and of a right answer, all prompts equally likely."""

    def of(which: Tensor) -> Tensor:
        return (pi * which * length).sum((1, 2)) / (pi * which).sum((1, 2))

    return of(~right), of(right)


@torch.no_grad()
def lengths(policy: Policy, critic: nn.Module | None) -> dict[str, Float[Tensor, "K"]]:
    """Success and the lengths of wrong and right answers on the smaller targets, exact."""
    targets = every_target(policy.task)[: int(REACH * policy.task.max_target) + 1]
    found = completions(policy, targets)
    rows = found.tokens.expand(1, len(targets), -1, -1)
    right = policy.task.success(targets.unsqueeze(0), rows)[0]
    pi, length = found.logprobs.exp().double(), found.mask.sum(-1)
    wrong_length, right_length = conditional_lengths(pi, length, right)
    success = (pi * right).sum(-1).mean(-1)
    return {"success": success, "wrong": wrong_length, "right": right_length, "gap": wrong_length - right_length}


def at_level(run: Trace) -> dict[str, Float[Tensor, "K"]]:
    """Each seed's lengths where its success first reaches LEVEL, on the line between two readings; NaN where never."""
    kinds = ("wrong", "right", "gap")
    success = run.watched["success"].T.tolist()
    return {
        kind: torch.tensor([where(s, y) for s, y in zip(success, run.watched[kind].T.tolist(), strict=True)])
        for kind in kinds
    }


def where(success: Sequence[float], values: Sequence[float]) -> float:
    """The value where success first reaches LEVEL; NaN where it never does, or begins above."""
    for (s, v), (s_next, v_next) in pairwise(zip(success, values, strict=True)):
        if s < LEVEL <= s_next:
            return v + (LEVEL - s) / (s_next - s) * (v_next - v)
    return float("nan")


def summary(found: dict[str, Tensor]) -> dict[str, Any]:
    """Means over the seeds that reach it, and how many do."""
    reached = ~found["gap"].isnan()
    means = {kind: mean(values[reached]) for kind, values in found.items()} if reached.any() else {}
    return means | {"seeds": int(reached.sum())}


def paired(a: Tensor, b: Tensor) -> dict[str, float]:
    """Mean and standard error of a - b over the seeds that have both; nothing for fewer than two."""
    d = (a - b)[~(a - b).isnan()].double()
    return {"mean": d.mean().item(), "standard error": (d.std() / len(d) ** 0.5).item()} if len(d) > 1 else {}


def surely_positive(score: dict[str, float]) -> bool:
    """By two standard errors."""
    return bool(score) and score["mean"] > 2 * score["standard error"]


def checks_of(proof: dict[str, Any], numbers: dict[str, Any]) -> tuple[Check, ...]:
    """Exact ones first."""
    angle = {name: [row["angle"] for row in proof[name].values()] for name in ("sick", "token_mean", "cured")}
    rate = {name: proof[name][f"G = {SIZES[0]}"]["gap, per unit step"] for name in ("sick", "cured")}
    formula = proof["sick, from the formula"]["angle"]
    gap = numbers["less the cured run's, by seed"]["sick"]
    return (
        Check(
            "exact: 1/|o| turns the gradient by the same angle at every G, a degree or more",
            max(angle["sick"]) - min(angle["sick"]) < 1e-6 and angle["sick"][0] > 1,
        ),
        Check("exact: that angle is the formula's, without any group in it", abs(angle["sick"][0] - formula) < 1e-6),
        Check(
            "exact: the turn of token_mean falls with G",
            all(a > b for a, b in pairwise(angle["token_mean"])),
        ),
        Check("exact: a sum per sequence has no turn (below 1e-5 degrees)", max(angle["cured"]) < 1e-5),
        Check("exact: a step along the sick gradient widens the gap by more", rate["sick"] > rate["cured"]),
        Check(
            f"at success {LEVEL:g} the gap is wider than the cured run's, by two standard errors or more",
            surely_positive(gap["gap"]),
        ),
        Check(
            "wrong answers are longer, by two standard errors or more",
            surely_positive(gap["wrong"]),
        ),
    )


def panels(proof: dict[str, Any], runs: dict[str, Trace]) -> tuple[Panel, ...]:
    """The turn over G; lengths over success."""
    kinds: dict[str, Literal["sick", "cured", "other"]] = {"sick": "sick", "cured": "cured", "token_mean": "other"}
    turns = tuple(
        Curve(name, kind, [float(G) for G in SIZES], [row["angle"] for row in proof[name].values()])
        for name, kind in kinds.items()
    )

    def over_success(key: str) -> tuple[Curve, ...]:
        return tuple(
            Curve(
                name,
                kind,
                runs[name].watched["success"].mean(1).tolist(),
                runs[name].watched[key].mean(1).tolist(),
            )
            for name, kind in kinds.items()
        )

    return (
        Panel("G", "angle of E g to grad J in degrees, exact", turns),
        Panel("success, exact", "tokens of a right answer", over_success("right")),
        Panel("success, exact", "tokens, wrong less right", over_success("gap")),
    )
