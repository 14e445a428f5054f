"""Data of age d: sampled by the policy of d updates ago, learned from by the present one.

    E_old[A grad log pi]                              without a ratio
    E_old[grad min(ratio A, clip(ratio) A)]           ratio = pi / old of a token: beyond 1 +- clip there is no gradient
    E_old[min(pi / old, cap) A grad log pi]           truncated importance weights of sequences

All three are exact for data one update old (``exact/recipes.py``), whatever the size of that update.
"""

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from pgprog.algorithms.recipes import find
from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, Trace, curve, exact_success, last, mean, trained
from pgprog.exact.recipes import compared, recipe_moments, tiny_problem, true_gradient
from pgprog.experiment.config import RunConfig
from pgprog.policy import Policy

AGES = (0, 1, 4, 16)
UPDATES = (0.01, 0.03, 0.1, 0.3)  # of the tiny problem's one update: no parameter moves further
Changes = tuple[str, ...]
TREATMENTS: dict[str, Changes] = {
    "no ratio": (),
    "clip 0.2": ("constraint.kind=clip",),
    "weights, cap 2": ("sampling.correction=sequence_truncate", "sampling.cap=2"),
}
UNTRUNCATED: Changes = ("sampling.correction=sequence_truncate", "sampling.cap=1e5")


def stale(effort: Effort, fault: int = AGES[-1]) -> Finding:
    """RLOO at four ages, without a ratio, with a clipped one, and with truncated importance weights."""
    config = RunConfig(recipe="rloo", seq_len=2, hidden=32, steps=160, prompts=8, group_size=8, lr=0.01)
    ages = (*(d for d in AGES if d < fault), fault)
    proof = {f"update of {step:g}": one_update_old(step) for step in UPDATES}
    fresh = trained(config, effort, watch=true_success)  # where every ratio is 1: one run for all treatments
    runs: dict[str, dict[int, Trace]] = {
        name: {0: fresh}
        | {d: trained(replace(config, set=at_age(d, changes)), effort, watch=true_success) for d in ages if d}
        for name, changes in TREATMENTS.items()
    }
    rows = {name: {f"age {d}": at_work(run) for d, run in each.items()} for name, each in runs.items()}
    return Finding(
        name="stale",
        title="Stale data",
        sick="The older the data, the further the ratio's tails reach; without a ratio the policy is moved by what "
        "another policy earned, and each step repeats what the ones in between have done already.",
        cure="Keep the data young, or weigh each sequence by pi / old, truncated; a clip bounds the step as well, but "
        "what it leaves points backwards, so that old data bring the policy nowhere.",
        watch="token_ratio_max and token_ratio_min, ess, and clip_frac where there is a clip: all grow with age",
        numbers={"steps": len(runs["no ratio"][0].metrics["reward"]), "oldest": fault, **rows},
        proof=proof,
        panels=panels(proof, runs, rows, ages, fault),
        checks=checks_of(proof, rows, ages, fault),
    )


def at_age(d: int, changes: Changes) -> Changes:
    """Settings of data d updates old, 1 or more."""
    return (f"sampling.age={d}", *changes)


def one_update_old(step: float) -> dict[str, Any]:
    """E[g] of each treatment against grad J, with data one update old; the distance of the two policies."""
    problem = tiny_problem(group_size=3, step=step)
    truth = true_gradient(problem)
    kinds = TREATMENTS | {"weights, no cap": UNTRUNCATED}
    rows = {
        name: asdict(compared(recipe_moments(find("rloo", at_age(1, changes)), problem), truth))
        for name, changes in kinds.items()
    }
    return {"KL(old || policy)": problem.distance} | rows


def true_success(policy: Policy, critic: nn.Module | None) -> dict[str, Tensor]:
    """The policy's own success, exact: that of the batch is the old policy's."""
    return {"J": exact_success(policy)}


def at_work(run: Trace) -> dict[str, float]:
    """Success at the end and half way; both tails of the ratio, the effective sample size and the share clipped."""
    half = run.watched["J"][len(run.at) // 2]
    names = ("token_ratio_min", "token_ratio_q01", "token_ratio_q99", "token_ratio_max", "ess", "clip_frac")
    readings = {name: mean(run.metrics[name]) for name in names if name in run.metrics}
    largest = run.metrics.get("token_ratio_max")
    far = {} if largest is None else {"largest ratio": largest.max().item()}
    return (
        {"success": mean(run.success), "half way": mean(half), "entropy": last(run.metrics["entropy"])} | readings | far
    )


def checks_of(
    proof: dict[str, Any], rows: dict[str, dict[str, Any]], ages: tuple[int, ...], fault: int
) -> tuple[Check, ...]:
    """Exact ones first."""
    bare = [row["no ratio"]["relative_bias"] for row in proof.values()]
    plain, clipped, weighted = (rows[name] for name in TREATMENTS)
    old = f"age {fault}"
    tails = [plain[f"age {d}"].get("token_ratio_max", 1.0) for d in ages]
    ess = [plain[f"age {d}"].get("ess", 1.0) for d in ages]
    return (
        Check(
            "exact: one update old and without a ratio, biased, and more so after a larger update",
            bare[0] > 1e-3 and all(a < b for a, b in pairwise(bare)),
        ),
        Check(
            "exact: importance weights of sequences without a cap leave no bias (relative bias below 1e-12)",
            max(row["weights, no cap"]["relative_bias"] for row in proof.values()) < 1e-12,
        ),
        Check(
            "exact: a cap of 2 leaves a tenth of the uncorrected bias or less, and the clip, where it acts, has more",
            all(
                row["weights, cap 2"]["relative_bias"] < 0.1 * row["no ratio"]["relative_bias"]
                for row in proof.values()
            )
            and list(proof.values())[-1]["clip 0.2"]["relative_bias"] > bare[-1],
        ),
        Check(
            "the upper tail of the ratio reaches further with every age, beyond 2 at the oldest",
            all(a < b for a, b in pairwise(tails)) and tails[-1] > 2,
        ),
        Check("and the effective sample size falls with it", all(a > b for a, b in pairwise(ess))),
        Check(
            "the share clipped is larger at the oldest than one update old",
            clipped[old].get("clip_frac", 0) > clipped.get("age 1", {}).get("clip_frac", 0) > 0,
        ),
        Check(
            "without a ratio the oldest data cost two fifths of the success or more",
            plain[old]["success"] < 0.6 * plain["age 0"]["success"],
        ),
        Check(
            "truncated weights give a part of it back: a third more than without, or more",
            weighted[old]["success"] > 4 / 3 * plain[old]["success"],
        ),
        Check(
            "the clip keeps the policy near its start: twice the entropy of the others or more",
            clipped[old]["entropy"] > 2 * max(plain[old]["entropy"], weighted[old]["entropy"]),
        ),
    )


def panels(
    proof: dict[str, Any],
    runs: dict[str, dict[int, Trace]],
    rows: dict[str, dict[str, Any]],
    ages: tuple[int, ...],
    fault: int,
) -> tuple[Panel, ...]:
    """Bias one update old; success by age; the tails over training."""
    kinds: dict[str, Literal["sick", "cured", "other"]] = {
        "no ratio": "sick",
        "clip 0.2": "other",
        "weights, cap 2": "cured",
    }
    x = [float(i) for i in range(len(ages))]
    bias = tuple(
        Curve(name, kind, list(UPDATES), [row[name]["relative_bias"] for row in proof.values()])
        for name, kind in kinds.items()
    )
    success = tuple(
        Curve(
            name,
            kind,
            x,
            [mean(runs[name][d].success) for d in ages],
            [runs[name][d].success.min().item() for d in ages],
            [runs[name][d].success.max().item() for d in ages],
        )
        for name, kind in kinds.items()
    )
    tails = tuple(
        curve(f"token_ratio_max, age {d}", "other", run.metrics["token_ratio_max"])
        for d, run in runs["no ratio"].items()
        if "token_ratio_max" in run.metrics
    )
    return (
        Panel("size of the update", "|E g - grad J| / |grad J|, one update old, exact", bias),
        Panel("age, in updates", "success at the end, exact", success, ticks=tuple(map(str, ages))),
        Panel("step", "ratio of new to old, no ratio in the loss", tails, log_y=True),
    )
