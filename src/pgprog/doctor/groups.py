"""Groups that carry nothing, and reward that is too rare to learn from.

    P(all G rewards equal) = p^G + (1 - p)^G        p the prompt's success probability

Such a group has A = 0 for every completion. p is exact here, by enumeration, so prediction and measurement meet with
no fitted number between them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, Trace, curve, last, mean, trained
from pgprog.exact.enumeration import every_target, success_probabilities
from pgprog.experiment.config import RunConfig
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

SIZES = (2, 4, 8, 16)
GROUPS = 200  # of each prompt, replica and G
BINS = 10
LARGEST_Z = 5.0  # over some 400 comparisons: by chance one run in 5,000


def equal_rewards(p: Float[Tensor, "*any"], group_size: int) -> Float[Tensor, "*any"]:
    """p^G + (1 - p)^G."""
    return p**group_size + (1 - p) ** group_size


def smallest_group(p: float, share: float = 0.5) -> int | None:
    """The smallest G with this share of informative groups, at success probability p; None at p = 0 or 1."""
    q = min(p, 1 - p)
    if q <= 0:
        return None
    G = max(2, math.ceil(math.log(1 - share) / math.log1p(-q)))
    while 1 - q**G - (1 - q) ** G < share:
        G += 1
    return G


Prediction = Callable[[Tensor, int], Tensor]


def empty_groups(effort: Effort, fault: int = 2, predicted: Prediction = equal_rewards) -> Finding:
    """Small groups beside large ones at the same rollouts; the share that is empty, over p and G, against theory."""
    config = RunConfig(algo="rloo", seq_len=2, hidden=32, steps=120, prompts=128 // fault, group_size=fault, lr=0.01)
    large = replace(config, prompts=8, group_size=16)
    runs = {"sick": at_work(config, effort, predicted), "cured": at_work(large, effort, predicted)}
    points = {G: measure(runs["cured"].policy, G, effort.of(GROUPS, 50), predicted) for G in SIZES}
    z = torch.cat([point["z"] for point in points.values()])
    at_start = {name: run.watched["predicted"][0].mean().item() for name, run in runs.items()}
    p_start = mean(runs["sick"].watched["p"][0])
    misses = {"sick": batch_z(runs["sick"], config), "cured": batch_z(runs["cured"], large)}
    numbers: dict[str, Any] = {
        "steps": len(runs["sick"].metrics["reward"]),
        "G": {"sick": fault, "cured": 16},
        "success": {name: mean(run.success) for name, run in runs.items()},
        "empty groups at the start, predicted": at_start,
        "frac_reward_zero_std, last fifth": {n: last(run.metrics["frac_reward_zero_std"]) for n, run in runs.items()},
        "z of the batches' shares, over training": misses,
        "smallest G with half of the groups informative, at the start": smallest_group(p_start),
        "p at the start": p_start,
        "over p and G": {
            f"G = {G}": {
                "predicted": mean(point["predicted"]),
                "measured": mean(point["measured"]),
                "largest |z|": point["z"].abs().max().item(),
            }
            for G, point in points.items()
        },
        "comparisons": len(z),
        "mean z^2": z.square().mean().item(),
    }
    spread = 4 * math.sqrt(2 / len(z))
    return Finding(
        name="empty-groups",
        title="Groups that carry nothing",
        sick="Where all rewards of a group are equal every A is 0, and the group was sampled for nothing: a share "
        "p^G + (1 - p)^G of them.",
        cure="Choose G by the success rate, or filter the prompts (dynamic sampling): at success p the smallest G that "
        "leaves half of the groups informative is about 0.69 / p.",
        watch="frac_reward_zero_std, and which kind it is: frac_all_wrong or frac_all_right",
        numbers=numbers,
        proof=None,
        panels=(
            Panel("success probability p", "share of groups with equal rewards", theory(points, predicted)),
            Panel("step", "share of groups with equal rewards", over_training(runs, fault)),
            Panel("step", "success of the batch", tuple(curve(n, n, r.metrics["success"]) for n, r in runs.items())),  # type: ignore[arg-type]
        ),
        checks=(
            Check(
                f"measured shares at every p and G are the predicted ones: no |z| above {LARGEST_Z:g}",
                z.abs().max().item() < LARGEST_Z,
            ),
            Check(
                "and their error bars are right: the mean of z^2 is 1 within 4 standard errors or below",
                z.square().mean().item() < 1 + spread,
            ),
            Check(
                "while training, the mean share is the predicted one within 4 standard errors",
                max(abs(each) for each in misses.values()) < 4,
            ),
            Check(
                "at the start the small groups are empty more often, half as often again or more",
                at_start["sick"] > 1.5 * at_start["cured"],
            ),
        ),
    )


def at_work(config: RunConfig, effort: Effort, predicted: Prediction) -> Trace:
    """Train, and predict the share of empty groups before each step that is watched."""

    @torch.no_grad()
    def watch(policy: Policy, critic: nn.Module | None) -> dict[str, Tensor]:
        p = success_probabilities(policy, every_target(policy.task)).double().clamp(0, 1)
        share = predicted(p, config.group_size)
        return {"p": p.mean(1), "predicted": share.mean(1)}

    return trained(config, effort, watch=watch)


def batch_z(run: Trace, config: RunConfig) -> float:
    """(measured - predicted) / its standard error, over the batches whose policy was watched; each group is a trial."""
    steps = [step for step in run.at if step < len(run.metrics["reward"])]
    measured, share = run.metrics["frac_reward_zero_std"][steps], run.watched["predicted"][: len(steps)]
    variance = (share * (1 - share) / config.prompts).sum()
    return ((measured - share).sum() / variance.sqrt()).item()


@torch.no_grad()
def measure(policy: Policy, G: int, groups: int, predicted: Prediction) -> dict[str, Tensor]:
    """Each prompt and replica by itself: predicted from the exact p, measured over so many groups, and z."""
    task, K = policy.task, policy.replicas
    targets = every_target(task)
    p = success_probabilities(policy, targets).double().clamp(0, 1)
    generator = ReplicaGenerator(range(K), "resample", step=G)
    tokens = policy.sample(targets.repeat(groups).expand(K, -1), G, generator)
    right = task.success(targets.repeat(groups).expand(K, -1), tokens)
    equal = (right.all(-1) | ~right.any(-1)).view(K, groups, -1).double().mean(1)
    share = predicted(p, G)
    error = (share * (1 - share) / groups).clamp(min=0).sqrt()
    expected = groups * share.minimum(1 - share)  # of the rarer of the two
    some = expected > 5  # where a normal approximation holds
    z = ((equal - share) / error)[some]
    return {"p": p.flatten(), "predicted": share.flatten(), "measured": equal.flatten(), "z": z}


def theory(points: dict[int, dict[str, Tensor]], predicted: Prediction) -> tuple[Curve, ...]:
    """Measured shares in bins of p, with two standard errors, and the exact curves."""
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)
    curves = [
        Curve("" if i else "p^G + (1 - p)^G", "exact", grid.tolist(), predicted(grid, G).tolist())
        for i, G in enumerate(SIZES)
    ]
    for G, point in points.items():
        bins = (point["p"] * BINS).long().clamp(max=BINS - 1)
        rows = [(bins == b).nonzero().squeeze(1) for b in range(BINS)]
        kept = [row for row in rows if len(row)]
        x = [point["p"][row].mean().item() for row in kept]
        y = [point["measured"][row].mean().item() for row in kept]
        curves.append(Curve(f"G = {G}, measured in bins of p", "other", x, y, dots=True))
    return tuple(curves)


def over_training(runs: dict[str, Trace], fault: int) -> tuple[Curve, ...]:
    """Measured in the batches, and predicted."""
    measured = tuple(
        curve(f"G = {G}", kind, runs[kind].metrics["frac_reward_zero_std"])  # type: ignore[arg-type]
        for kind, G in (("sick", fault), ("cured", 16))
    )
    exact = tuple(
        Curve(f"predicted, G = {G}", "exact", [float(s) for s in run.at], run.watched["predicted"].mean(1).tolist())
        for run, G in zip(runs.values(), (fault, 16), strict=True)
    )
    return measured + exact
