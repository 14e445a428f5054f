"""The ladder's three lessons, each with the cure taken away, and where in a range of settings that bites.

    bonus:      J + c H(pi), c annealed to 0        without it what is never sampled is never rewarded
    raw A:      c grad H against E[A s]             PPO's c is meant for A of unit variance: raw ones are smaller
    long steps: k epochs at the rate of one         and the ratio of whole sequences, which is clipped as one

By default a small run of each; with ``full`` a sweep, one setting at a time, of sick and cured runs on the same seeds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pgprog.algorithms.recipes import find
from pgprog.algorithms.update import Metrics
from pgprog.doctor.mode import Check, Curve, Effort, Finding, Panel, Trace, curve, last, mean, trained
from pgprog.exact.enumeration import every_target, success_probabilities, value_and_gradient
from pgprog.exact.recipes import compared, one_update_old, recipe_moments, tiny_problem, true_gradient
from pgprog.exact.values import entropy
from pgprog.experiment.config import RunConfig, validate
from pgprog.experiment.executor import Job, run_jobs
from pgprog.experiment.loop import train_step_of
from pgprog.policy import Critic, Policy

Settings = dict[str, Any]
PPO = RunConfig(algo="ppo", seq_len=2, hidden=32, steps=300, prompts=32, lr=0.02)
COEFFICIENTS = (0.02, 0.04, 0.08)  # of the bonus; the last cures
LOST = 0.01  # a target with less success than this
KINDS: dict[str, Any] = {"sick": "sick", "cured": "cured"}  # of a run's curve; any other is "other"
WORKERS = 2
AXES: dict[str, tuple[Any, ...]] = {
    "lr": (0.005, 0.02, 0.05),
    "ppo_epochs": (1, 4, 8),
    "entropy_coef": (0.005, 0.02, 0.08),
    "critic_lr": (1e-4, 1e-2, 1e-1),
    "prompt_form": ("state", "tokens"),
}
SHIFTS = (-1.0, 1.0)  # of V at the start, whose right value is near 0
BITES = 0.05  # of success, and two standard errors


# ---- no entropy bonus ----


def no_entropy_bonus(effort: Effort, fault: Settings | None = None) -> Finding:
    """REINFORCE without the bonus, and with three sizes of it; what becomes of each target."""
    fault = {"entropy_coef": 0.0} if fault is None else fault
    config = RunConfig(
        algo="reinforce", seq_len=2, hidden=32, steps=400, prompts=32, lr=0.03, entropy_coef=COEFFICIENTS[-1]
    )
    plans: dict[str, Settings] = {"sick": fault} | {f"bonus {c:g}": {"entropy_coef": c} for c in COEFFICIENTS[:-1]}
    runs = {name: trained(replace(config, **changes), effort, watch=by_target) for name, changes in plans.items()}
    runs["cured"] = trained(config, effort, watch=by_target)
    ends = {
        name: {
            "success": mean(run.success),
            "success, first tenth": first(run.metrics["success"]),
            "entropy, first quarter": first(run.metrics["entropy"], 0.25),
            "entropy at the end": last(run.metrics["entropy"], 0.1),
            "targets lost": mean(run.watched["lost"][-1]),
        }
        for name, run in runs.items()
    }
    sweep = swept(PPO, fault, effort)
    sick, cured = ends["sick"], ends["cured"]
    return Finding(
        name="no-entropy-bonus",
        title="No entropy bonus",
        sick="Without the bonus the policy settles on one answer per target while many of them are wrong: it is ahead "
        "at first, then stands still, for what is never sampled is never rewarded.",
        cure="A bonus, annealed to 0, keeps every target's answers in play until the right one has been found; the "
        "larger the learning rate, the larger the bonus that it takes.",
        watch="entropy falls towards 0 while success is far from 1",
        numbers={"steps": len(runs["sick"].metrics["reward"]), **ends, **sweep},
        proof=None,
        panels=(
            *panels_of(runs, {"success of the batch": "success", "entropy in nats per token": "entropy"}),
            Panel(
                "step",
                f"share of targets with success below {LOST:g}, exact",
                tuple(curve(n, KINDS.get(n, "other"), run.watched["lost"], run.at) for n, run in runs.items()),
            ),
            *sweep_panel(sweep),
        ),
        checks=(
            Check("half of the success or more is lost", sick["success"] < cured["success"] / 2),
            Check(
                "each bonus larger, more success",
                all(a < b for a, b in pairwise(row["success"] for row in ends.values())),
            ),
            Check(
                "a third of the targets more, or more than that, are lost",
                sick["targets lost"] > cured["targets lost"] + 1 / 3,
            ),
            Check(
                "it is ahead in the first tenth, at half of the cured run's entropy in the first quarter or less",
                sick["success, first tenth"] > cured["success, first tenth"]
                and sick["entropy, first quarter"] < cured["entropy, first quarter"] / 2,
            ),
        ),
    )


@torch.no_grad()
def by_target(policy: Policy, critic: nn.Module | None) -> dict[str, Float[Tensor, "K"]]:
    """The share of targets that the policy hardly ever meets, exact."""
    p = success_probabilities(policy, every_target(policy.task))
    return {"lost": (p < LOST).double().mean(1)}


def first(values: Float[Tensor, "N K"], share: float = 0.1) -> float:
    """The mean over the first part of the steps, and over the seeds."""
    return mean(values[: max(1, round(share * len(values)))])


# ---- raw advantages ----


def raw_advantages(effort: Effort, fault: Settings | None = None) -> Finding:
    """PPO with r - V in place of its z-score: at PPO's own bonus, at that of the other rungs, and at a small one."""
    fault = {"raw_advantages": True} if fault is None else fault
    config = replace(PPO, entropy_coef=0.08)
    plans: dict[str, Settings] = {
        "sick": fault,
        "cured": {},
        "raw, bonus of the other rungs": fault | {"ppo_entropy_factor": 1.0},
        "raw, bonus 0.02": fault | {"entropy_coef": 0.02},
    }
    runs = {name: trained(replace(config, **changes), effort) for name, changes in plans.items()}
    ends = {
        name: {
            "success": mean(run.success),
            "entropy half way": mean(run.metrics["entropy"][len(run.metrics["entropy"]) // 2]),
            "advantage_std": first(run.metrics["advantage_std"]),
        }
        for name, run in runs.items()
    }
    whitened = replace(config, **fault).raw_advantages
    proof = {
        "sick": bonus_row("none" if whitened else "sequences", config),
        "cured": bonus_row("sequences", config),
    }
    sweep = swept(PPO, fault, effort)
    sick, cured = ends["sick"], ends["cured"]
    return Finding(
        name="raw-advantages",
        title="Raw advantages in PPO",
        sick="Raw advantages are unbiased, and small while success is rare: the accident of their sign does not bite "
        "here, but a bonus meant for unit variance outweighs them, and the policy stays near uniform.",
        cure="Standardise the advantages, or scale the bonus down with them: either will do.",
        watch="advantage_std far below 1 and entropy that does not fall",
        numbers={"steps": len(runs["sick"].metrics["reward"]), **ends, **sweep},
        proof=proof,
        panels=(
            *panels_of(runs, {"success of the batch": "success", "entropy in nats per token": "entropy"}),
            *sweep_panel(sweep),
        ),
        checks=(
            Check(
                "exact: raw advantages are unbiased (relative bias below 1e-12), whatever V is",
                proof["sick"]["relative_bias"] < 1e-12,
            ),
            Check(
                "exact: the z-score is what is biased: longer, and turned by a degree or more",
                proof["cured"]["scale"] > 1.5 and proof["cured"]["angle"] > 1,
            ),
            Check(
                "exact: beside raw advantages the bonus weighs half as much again or more",
                proof["sick"]["bonus / E g"] > 1.5 * proof["cured"]["bonus / E g"],
            ),
            Check(
                "at PPO's bonus raw advantages cost a fifth of the success or more",
                sick["success"] < 0.8 * cured["success"],
            ),
            Check(
                "at a small bonus they are within 0.1 of the cured run or better: not the sign, but the scale",
                ends["raw, bonus 0.02"]["success"] > cured["success"] - 0.1,
            ),
        ),
    )


def panels_of(runs: dict[str, Trace], columns: dict[str, str]) -> tuple[Panel, ...]:
    """Each column against the step, by its label, a curve for every run."""
    return tuple(
        Panel("step", label, tuple(curve(n, KINDS.get(n, "other"), run.metrics[key]) for n, run in runs.items()))
        for label, key in columns.items()
    )


def bonus_row(whiten: Literal["none", "sequences"], config: RunConfig) -> dict[str, float]:
    """PPO's first gradient against grad J, and |c grad H| / |E g|, c PPO's bonus; H per completion."""
    problem = tiny_problem(group_size=3)
    moments = recipe_moments(find("ppo", (f"advantage.whiten={whiten}",)), problem)
    H = entropy(problem.policy, problem.targets).whole.mean(1)
    bonus = config.policy_entropy_coef * value_and_gradient(problem.policy, H).gradient[0]
    row = asdict(compared(moments, true_gradient(problem)))
    return row | {"bonus / E g": float(bonus.norm() / moments.mean.norm())}


# ---- long steps ----


def long_steps(effort: Effort, fault: Settings | None = None) -> Finding:
    """PPO at the whole learning rate in each epoch, with a ratio of whole sequences; each alone, and both."""
    both: Settings = {"undivided_lr": True, "ratio_level": "sequence"}
    fault = both if fault is None else fault
    config = replace(PPO, lr=0.05)
    plans: dict[str, Settings] = {
        "sick": fault,
        "undivided rate": {k: v for k, v in fault.items() if k == "undivided_lr"},
        "ratio of sequences": {k: v for k, v in fault.items() if k == "ratio_level"},
        "cured": {},
    }
    runs = {name: trained(replace(config, **changes), effort) for name, changes in plans.items()}
    ends = {
        name: {
            "success": mean(run.success),
            "entropy, first quarter": first(run.metrics["entropy"], 0.25),
            "clip_frac": mean(run.metrics["clip_frac"]),
            "kl_old_k3": mean(run.metrics["kl_old_k3"]),
        }
        for name, run in runs.items()
    }
    proof = {level: ratio_row(level) for level in ("token", "sequence")}
    sweep = swept(PPO, fault, effort)
    sick, cured, undivided, sequences = (
        ends[name] for name in ("sick", "cured", "undivided rate", "ratio of sequences")
    )
    return Finding(
        name="long-steps",
        title="Long steps: an undivided learning rate, and the ratio of whole sequences",
        sick="Four epochs at the whole learning rate move four steps on one batch: where the rate is large, too far; "
        "the ratio of sequences is clipped more often and, alone, does no harm here.",
        cure="Divide the learning rate by the gradient steps on a batch; where it is small already, that only slows.",
        watch="kl_old_k3, and clip_frac",
        numbers={"steps": len(runs["sick"].metrics["reward"]), **ends, **sweep},
        proof=proof,
        panels=(
            *panels_of(runs, {"success of the batch": "success", "share clipped": "clip_frac"}),
            *sweep_panel(sweep),
        ),
        checks=(
            Check(
                "exact: the first gradient on a batch is the same for either ratio (to 1e-12)",
                all(
                    abs(proof["token"]["fresh"][key] - proof["sequence"]["fresh"][key]) < 1e-12
                    for key in ("norm", "bias")
                ),
            ),
            Check(
                "exact: one update old, the sequence's clip is another estimator",
                abs(proof["token"]["one update old"]["norm"] - proof["sequence"]["one update old"]["norm"]) > 1e-4,
            ),
            Check("both together cost a tenth of the success or more", sick["success"] < 0.9 * cured["success"]),
            Check("so does the undivided rate alone", undivided["success"] < 0.9 * cured["success"]),
            Check(
                "not reproduced: the ratio of sequences alone costs less than a tenth",
                sequences["success"] > 0.9 * cured["success"],
            ),
            Check(
                "it is clipped more often, half as often again or more",
                sequences["clip_frac"] > 1.5 * cured["clip_frac"],
            ),
            Check(
                "the undivided rate moves the policy further from its batch, twice the KL or more",
                undivided["kl_old_k3"] > 2 * cured["kl_old_k3"],
            ),
        ),
    )


def ratio_row(level: str) -> dict[str, dict[str, float]]:
    """PPO's gradient with this ratio against grad J: on fresh data, and on data one update old."""
    problem, recipe = tiny_problem(group_size=3, step=0.03), find("ppo", (f"constraint.ratio={level}",))
    old, truth = one_update_old(recipe), true_gradient(problem)
    assert old is not None
    return {
        "fresh": asdict(compared(recipe_moments(recipe, problem), truth)),
        "one update old": asdict(compared(recipe_moments(old, problem), truth)),
    }


# ---- sweeps ----


@dataclass(frozen=True)
class Point:
    """One setting of a sweep: success by seed, sick and cured."""

    sick: Sequence[float]
    cured: Sequence[float]

    def as_dict(self) -> dict[str, Any]:
        """Means, and the difference with its standard error, paired by seed; ``bites`` where it is large and sure."""
        lost = torch.tensor(self.cured, dtype=torch.float64) - torch.tensor(self.sick, dtype=torch.float64)
        effect, error = lost.mean().item(), (lost.std() / len(lost) ** 0.5).item()
        return {
            "sick": sum(self.sick) / len(self.sick),
            "cured": sum(self.cured) / len(self.cured),
            "lost": effect,
            "standard error": error,
            "bites": effect > max(BITES, 2 * error),
        }


class Started:
    """A train step, V shifted by a constant before the first."""

    def __init__(self, config: RunConfig, shift: float) -> None:
        self.make, self.shift = train_step_of(config), shift

    def __call__(self, *arguments: Any, critic: Critic, **options: Any) -> Metrics:
        with torch.no_grad():
            critic.value_bias.add_(self.shift)
        self.shift = 0.0
        return self.make(*arguments, critic=critic, **options)


def swept(base: RunConfig, fault: Settings, effort: Effort) -> dict[str, Any]:
    """With ``full``: sick and cured at each value of each axis, and where the fault bites; else nothing.

    A run depends on its configuration and seeds alone, so each is made once; two processes at work. The critic's start
    is no setting: it is shifted in this process.
    """
    if not effort.full:
        return {}
    base = replace(base, steps=effort.of(base.steps))
    pairs = {
        axis: {value: (replace(at, **fault), at) for value in values for at in (replace(base, **{axis: value}),)}
        for axis, values in AXES.items()
    }
    success = all_of({config for axis in pairs.values() for pair in axis.values() for config in pair}, effort)
    points = {
        axis: {
            f"{value:g}" if isinstance(value, float) else str(value): Point(*map(success.__getitem__, pair))
            for value, pair in each.items()
        }
        for axis, each in pairs.items()
    }
    points["critic's V at the start"] = {
        "as drawn": Point(success[replace(base, **fault)], success[base]),
        **{
            f"{shift:+g}": Point(*(shifted(replace(base, **c), shift, effort) for c in (fault, {}))) for shift in SHIFTS
        },
    }
    rows = {axis: {value: point.as_dict() for value, point in each.items()} for axis, each in points.items()}
    return {"sweep": rows, "where it bites": {axis: boundary(each) for axis, each in rows.items()}}


def all_of(configs: set[RunConfig], effort: Effort) -> dict[RunConfig, list[float]]:
    """Success by seed of each run."""
    jobs = [
        Job(str(number), validate(config), tuple(range(effort.seeds)), None) for number, config in enumerate(configs)
    ]
    done = run_jobs(jobs, WORKERS, checkpoint_every=10**9, on_progress=lambda progress: None)
    return {job.config: result.success for job, result in done}


def shifted(config: RunConfig, shift: float, effort: Effort) -> list[float]:
    """Success by seed of a run whose critic starts off by so much."""
    return trained(config, replace(effort, scale=1.0), Started(config, shift)).success.tolist()


def boundary(rows: dict[str, dict[str, Any]]) -> str:
    """Where along an axis it bites, in words."""
    bites = [value for value, row in rows.items() if row["bites"]]
    if not bites:
        return "not reproduced in this range"
    free = [value for value in rows if value not in bites]
    return f"bites at {', '.join(bites)}" + (f"; not at {', '.join(free)}" if free else ", everywhere in this range")


def sweep_panel(sweep: dict[str, Any]) -> tuple[Panel, ...]:
    """What is lost at each setting, with two standard errors; nothing without a sweep."""
    if not sweep:
        return ()
    named = {f"{axis} {value}": row for axis, each in sweep["sweep"].items() for value, row in each.items()}
    x, y = [float(i) for i in range(len(named))], [row["lost"] for row in named.values()]
    bars = [2 * row["standard error"] for row in named.values()]
    low, high = ([a + sign * b for a, b in zip(y, bars, strict=True)] for sign in (-1, 1))
    points = Curve("success of the cured run less the sick one's", "sick", x, y, low, high, dots=True)
    zero = Curve("nothing lost", "exact", [x[0], x[-1]], [0.0, 0.0])
    return (Panel("setting", "success lost", (points, zero), ticks=tuple(named)),)
