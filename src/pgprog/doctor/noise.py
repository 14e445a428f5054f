"""Too little signal, and too much noise: a reward that is rare, and remedies for bias against variance.

    signal to noise per rollout = |E g|^2 / (N tr Cov g)        N rollouts in the batch of g

Both are exact at a policy. No learning rate stands in it: a larger one multiplies signal and noise alike.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pgprog.algorithms.advantages import leave_one_out
from pgprog.algorithms.from_recipe import train_step
from pgprog.algorithms.recipes import Recipe, find
from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, curve, last, mean, moments_of, trained
from pgprog.env import DigitSum
from pgprog.exact.enumeration import every_target
from pgprog.exact.moments import group_moments, random_prompts
from pgprog.exact.recipes import Problem, compared, tiny_problem, true_gradient
from pgprog.exact.scores import score_moments
from pgprog.exact.weight import group_advantage
from pgprog.experiment.config import RunConfig
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, Rollout

LENGTHS = (1, 2, 3, 4)
FULL_LENGTHS = (1, 2, 3, 4, 5)
FULL_RATES = (1, 2, 4, 8)
WIDTH = 16  # hidden units of the policies whose signal is computed
LARGE = 32  # completions of a prompt, against 8
Settings = dict[str, Any]


def sparse(effort: Effort, fault: Settings | None = None) -> Finding:
    """An outcome reward as L grows; then at L = 4 a larger learning rate, a process reward, a larger group.

    Args:
        fault: settings of the sick run; by default those of the others: the outcome reward, G = 8.
    """
    config = RunConfig(algo="rloo", seq_len=4, hidden=32, steps=100, prompts=16, group_size=8, lr=0.02)
    changes: dict[str, Settings] = {
        "sick": fault or {},
        "learning rate x 5": {"lr": 5 * config.lr},
        "process reward": {"reward_form": "halfway"},
        "G = 32": {"group_size": LARGE},
        "G = 32, equal rollouts": {"group_size": LARGE, "prompts": config.prompts * config.group_size // LARGE},
    }
    if effort.full:
        changes |= {f"learning rate x {k}": {"lr": k * config.lr} for k in FULL_RATES[1:]}
    lengths = FULL_LENGTHS if effort.full else LENGTHS if effort.scale >= 1 else LENGTHS[:3]
    proof = {f"L = {L}": at_start(L) for L in lengths}
    runs = {name: trained(replace(config, **change), effort) for name, change in changes.items()}
    J = {name: mean(run.success) for name, run in runs.items()}
    rows = list(proof.values())
    sizes = [float(L) for L in lengths]
    kinds: dict[str, Any] = {"sick": "sick", "G = 32": "cured"}
    falls = [a["signal/noise"] > b["signal/noise"] for a, b in pairwise(rows)]
    return Finding(
        name="sparse",
        title="A reward too rare to learn from",
        sick="As completions grow longer an outcome reward is met less often, and signal to noise falls with it: most "
        "of a batch says nothing, and a larger learning rate only multiplies the noise.",
        cure="Buy signal: more completions of each prompt (more rollouts, that is: larger groups in fewer prompts do "
        "little), or pay for steps on the way, which changes the objective unless it is a potential's.",
        watch="success, frac_all_wrong near 1, signal to noise",
        numbers={"steps": len(runs["sick"].metrics["reward"]), "L": config.seq_len, "success": J},
        proof=proof,
        panels=(
            Panel(
                "L",
                "at an untrained policy, exact",
                (
                    Curve("J, the chance of success", "cured", sizes, [row["J"] for row in rows]),
                    Curve("signal to noise of a rollout", "sick", sizes, [row["signal/noise"] for row in rows]),
                    Curve("empty groups, G = 8", "exact", sizes, [row["empty groups"] for row in rows]),
                ),
                log_y=True,
            ),
            Panel(
                "step",
                "success of the batch, L = 4",
                tuple(curve(n, kinds.get(n, "other"), r.metrics["success"]) for n, r in runs.items()),
            ),
        ),
        checks=(
            Check("exact: signal to noise of a rollout falls with every token more", all(falls)),
            Check(
                "four times the completions of each prompt: half as much success again or more",
                J["G = 32"] > 1.5 * J["sick"],
            ),
            Check("a process reward: more success", J["process reward"] > J["sick"]),
            Check("a learning rate five times as large: less success", J["learning rate x 5"] < J["sick"]),
        ),
    )


def at_start(L: int, group_size: int = 8) -> dict[str, float]:
    """J, |E g|^2 and tr Cov of one group of RLOO, at an untrained policy; exact."""
    policy = Policy(DigitSum(seq_len=L), ReplicaGenerator([0], "init"), WIDTH, torch.float64)
    scores, draw = score_moments(policy, every_target(policy.task)), policy.task.target_weights()
    found = random_prompts(group_moments(group_advantage(leave_one_out, group_size), scores), draw, 1)
    signal = found.mean.square().sum().item()
    p = scores.p[0]
    return {
        "J": (p @ draw).item(),
        "|E g|^2": signal,
        "tr Cov": found.trace.item(),
        "signal/noise": signal / (group_size * found.trace.item()),
        "empty groups": ((p**group_size + (1 - p) ** group_size) @ draw).item(),
    }


def paid_in_penalties(batch: Rollout) -> Tensor:
    """The fault: a failure costs 1 and there is no baseline, A = r - 1. Unbiased, for 1 is a constant, and noisy."""
    return batch.rewards - 1


def others_mean(batch: Rollout) -> Tensor:
    """The cure."""
    return leave_one_out(batch.rewards)


def clip_of(clip: float) -> tuple[str, ...]:
    return ("constraint.kind=clip", f"constraint.clip_low={clip}", f"constraint.clip_high={clip}", "sampling.epochs=4")


KL = ("kl.place=loss", "kl.estimator=k3", "kl.coef=0.1")


def variance_for_bias(effort: Effort, fault: Callable[[Rollout], Tensor] = paid_in_penalties) -> Finding:
    """A noisy estimate, treated with a smaller clip, with a KL penalty, and with a better baseline; equal rollouts."""
    config = RunConfig(recipe="rloo", seq_len=2, hidden=32, steps=160, prompts=8, group_size=8, lr=0.01)
    treated: dict[str, tuple[tuple[str, ...], Callable[[Rollout], Tensor]]] = {
        "sick": ((), fault),
        "clip 0.2": (clip_of(0.2), fault),
        "clip 0.02": (clip_of(0.02), fault),
        "KL penalty": (KL, fault),
        "cured": ((), others_mean),
    }
    problem = tiny_problem(group_size=3)
    proof = {name: treatment(find("rloo", changes), A, problem) for name, (changes, A) in treated.items()}
    runs = {
        name: trained(replace(config, set=changes), effort, partial(train_step, advantage=A))
        for name, (changes, A) in treated.items()
    }
    J = {name: mean(run.success) for name, run in runs.items()}
    fresh = {name: row["fresh"] for name, row in proof.items()}
    stale = {name: row["one update old"] for name, row in proof.items()}
    kinds: dict[str, Any] = {"sick": "sick", "cured": "cured"}
    x = [float(i) for i in range(len(treated))]
    return Finding(
        name="variance-for-bias",
        title="Variance taken for bias",
        sick="A noisy, unbiased gradient looks like steps that go too far: a smaller clip leaves the first gradient as "
        "noisy as it was and turns the later ones, a KL penalty adds a bias, and both slow the run down.",
        cure="Take the variance away where it comes from, by a baseline: the same rollouts, no bias, less tr Cov.",
        watch="grad_norm large and advantage_mean off 0 at an ordinary reward; clip_frac high with a small clip",
        numbers={
            "steps": len(runs["sick"].metrics["reward"]),
            "success": J,
            "grad_norm": {name: last(run.metrics["grad_norm"]) for name, run in runs.items()},
        },
        proof=proof,
        panels=(
            Panel(
                "",
                "first gradient, exact",
                (
                    Curve("tr Cov", "other", x, [row["trace"] for row in fresh.values()], dots=True),
                    Curve("|bias| / |grad J|", "sick", x, [row["relative_bias"] for row in fresh.values()], dots=True),
                ),
                ticks=tuple(treated),
            ),
            Panel(
                "step",
                "success of the batch",
                tuple(curve(n, kinds.get(n, "other"), r.metrics["success"]) for n, r in runs.items()),
            ),
        ),
        checks=(
            Check(
                "exact: noisy is not biased (relative bias below 1e-12)",
                max(fresh[name]["relative_bias"] for name in ("sick", "cured")) < 1e-12,
            ),
            Check(
                "exact: no clip changes the first gradient's variance (to 1e-12)",
                all(abs(fresh[name]["trace"] - fresh["sick"]["trace"]) < 1e-12 for name in ("clip 0.2", "clip 0.02")),
            ),
            Check(
                "exact: a KL penalty in the loss adds bias, 1% of grad J or more",
                fresh["KL penalty"]["relative_bias"] > 0.01,
            ),
            Check(
                "exact: with data one update old the smaller clip has less variance and a wider angle",
                stale["clip 0.02"]["trace"] < stale["sick"]["trace"]
                and stale["clip 0.02"]["angle"] > stale["sick"]["angle"],
            ),
            Check(
                "exact: the baseline takes a third of the variance away or more",
                fresh["cured"]["trace"] < 2 / 3 * fresh["sick"]["trace"],
            ),
            Check(
                "at equal rollouts the baseline beats both by half as much success again or more",
                J["cured"] > 1.5 * max(J["clip 0.02"], J["KL penalty"], J["sick"]),
            ),
            Check("and both are worse than doing nothing", max(J["clip 0.02"], J["KL penalty"]) < J["sick"]),
        ),
    )


def treatment(recipe: Recipe, advantage: Callable[[Rollout], Tensor], problem: Problem) -> dict[str, dict[str, float]]:
    """The first gradient with fresh data, and with data one update old, where the ratio acts; against grad J."""
    one_step = replace(recipe, sampling=replace(recipe.sampling, epochs=1))
    stale = replace(one_step, sampling=replace(one_step.sampling, age=1))
    more = {"reference": problem.reference} if recipe.reference else {}

    def row(recipe: Recipe, **options: Any) -> dict[str, float]:
        step = partial(train_step, recipe=recipe, advantage=advantage)
        return asdict(compared(moments_of(step, problem, **more, **options), true_gradient(problem)))

    return {"fresh": row(one_step), "one update old": row(stale, old=problem.old)}
