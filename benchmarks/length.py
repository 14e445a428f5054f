"""What each denominator does to the length of wrong answers, at matched success.

GRPO's advantages (a group's mean, its std) on the variable-length task, one run per denominator, the same seeds and
prompts in each. A token of completion i weighs

    sequence_sum, constant_length    1                      sequence_mean    1/|o_i|
    token_mean                       1 / mean |o|, of the batch
    prompt_token_mean                1 / mean |o|, of the prompt's group

up to a constant. Under 1/|o| a long wrong answer is punished less per token than a short one, and a short right answer
is rewarded more: wrong answers should grow, right ones shrink (arXiv:2503.20783, section 3.1).

Every ``--every`` steps the policy is read from the run's checkpoint, and ``--completions`` of each target are sampled.
Length is tokens, the EOS among them. Longer training makes other lengths whatever the denominator, so runs are compared
where they are equally good: a seed's lengths at success s are interpolated between the last reading below s and the
first that is not. Differences are paired by seed, less sequence_sum's; the gap is wrong less right. A large target
leaves no choice of length, so readings are of the lower half of the targets, which half of the tokens can meet;
training is on all.

    python benchmarks/length.py --out docs/figures      a minute or two
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from rich.table import Table

from measuring import OUT, head, report, table
from pgprog.experiment.config import RunConfig, validate
from pgprog.experiment.executor import keep_freed_memory
from pgprog.experiment.learner import load_policy
from pgprog.experiment.loop import run
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy
from pgprog.stats import bootstrap_mean

DENOMINATORS = ("sequence_sum", "sequence_mean", "token_mean", "prompt_token_mean", "constant_length")
AGAINST = DENOMINATORS[0]
KINDS = ("wrong", "right")


@dataclass(frozen=True)
class Args:
    """What to train and where to read it."""

    seeds: int = 8
    steps: int = 200
    every: int = 10
    """Steps between readings."""
    levels: tuple[float, ...] = (0.2, 0.4, 0.6)
    """Success at which runs are compared."""
    completions: int = 64
    """Of each target, at a reading."""
    reach: float = 0.5
    """Readings are of targets up to this share of the largest, which this share of the tokens can meet."""
    seq_len: int = 8
    digits: int = 4
    hidden: int = 32
    prompts: int = 32
    group_size: int = 8
    lr: float = 6e-3
    entropy_coef: float = 0.02
    out: Path = OUT
    """Receives length.json, length.png and length.svg."""
    json: bool = False
    """Print JSON in place of the tables."""


def config_of(args: Args, denominator: str) -> RunConfig:
    """The run of one denominator."""
    shared = {name: getattr(args, name) for name in ("steps", "seq_len", "digits", "hidden", "prompts", "group_size")}
    rates = {"lr": args.lr, "entropy_coef": args.entropy_coef}
    change = f"aggregation.denominator={denominator}"
    return validate(RunConfig(recipe="grpo", variable_length=True, set=(change,), **shared, **rates))


@torch.no_grad()
def reading(policy: Policy, seeds: Sequence[int], completions: int, reach: float) -> dict[str, list[float]]:
    """Success, and the mean length of wrong and of right completions, per seed; NaN where there are none."""
    targets = torch.arange(int(reach * policy.task.max_target) + 1).expand(len(seeds), -1)
    tokens = policy.sample(targets, completions, ReplicaGenerator(seeds, "evaluate"))
    right = policy.task.success(targets, tokens)
    lengths = policy.task.mask(tokens).sum(-1).double()
    found = {"success": right.double().mean((1, 2)).tolist()}
    for kind, which in (("wrong", ~right), ("right", right)):
        found[kind] = ((lengths * which).sum((1, 2)) / which.sum((1, 2))).tolist()
    return found


def trained(config: RunConfig, args: Args) -> dict[str, list[list[float]]]:
    """Readings over one run, from the untrained policy on: success and lengths, each [reading][seed]."""
    seeds = range(args.seeds)
    readings: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)

        def on_step(step: int, metrics: object) -> None:
            if step % args.every == 0:  # the checkpoint of this step has just been written
                readings.append(reading(load_policy(directory, config)[0], seeds, args.completions, args.reach))

        run(config, seeds, directory, on_step, checkpoint_every=args.every)
    return {name: [each[name] for each in readings] for name in ("success", *KINDS)}


def at_success(level: float, success: Sequence[float], lengths: Sequence[float]) -> float:
    """The length where success first reaches a level, between the two readings around it; NaN where it never does."""
    reached = next((i for i, s in enumerate(success) if s >= level), 0)
    if reached == 0:  # never, or before the first reading
        return float("nan")
    below, above = success[reached - 1], success[reached]
    share = (level - below) / (above - below)
    return (1 - share) * lengths[reached - 1] + share * lengths[reached]


def matched(runs: dict[str, dict[str, list[list[float]]]], level: float, seeds: int) -> dict[str, Any]:
    """Per denominator: lengths of both kinds at a level, and their paired differences, over seeds that all reach it."""
    lengths = {
        name: {
            kind: [
                at_success(level, *([row[k] for row in found[key]] for key in ("success", kind))) for k in range(seeds)
            ]
            for kind in KINDS
        }
        for name, found in runs.items()
    }
    whole = [k for k in range(seeds) if all(np.isfinite(each[kind][k]) for each in lengths.values() for kind in KINDS)]
    for each in lengths.values():
        each["gap"] = [wrong - right for wrong, right in zip(each["wrong"], each["right"], strict=True)]
    result: dict[str, Any] = {"seeds": whole}
    for name, each in lengths.items() if whole else ():
        result[name] = {}
        for kind in each:
            mine = [each[kind][k] for k in whole]
            more = [each[kind][k] - lengths[AGAINST][kind][k] for k in whole]
            result[name][kind] = {
                "length": bootstrap_mean(mine).as_dict(mine),
                "difference": bootstrap_mean(more).as_dict(more),
            }
    return result


def measure(args: Args) -> dict[str, Any]:
    started = time.perf_counter()
    runs = {name: trained(config_of(args, name), args) for name in DENOMINATORS}
    return {
        "levels": {f"{level:g}": matched(runs, level, args.seeds) for level in args.levels},
        "readings": {"every": args.every, **runs},
        "took_seconds": time.perf_counter() - started,
    }


def figures(score: dict[str, Any], signed: bool = False) -> str:
    """A mean with its interval."""
    low, high = score["ci95"]
    sign = "+" if signed else ""
    shown = f"{score['mean']:{sign}.2f}"
    return shown if low is None else f"{shown} [{low:{sign}.2f}, {high:{sign}.2f}]"


def show(args: Args, result: dict[str, Any]) -> list[Table | str]:
    """A table per level of success."""
    shown: list[Table | str] = []
    for level, found in result["levels"].items():
        if not found["seeds"]:
            shown.append(f"Success {level}: no seed reaches it under every denominator.")
            continue
        rows = []
        for name in DENOMINATORS:
            entry = [found[name][kind] for kind in (*KINDS, "gap")]
            rows.append(
                [name, *(cell for e in entry for cell in (figures(e["length"]), figures(e["difference"], True)))]
            )
        title = f"Tokens per completion where success is {level}; {len(found['seeds'])} of {args.seeds} seeds"
        columns = ["denominator", *(c for kind in ("wrong", "right", "gap") for c in (kind, "less sum"))]
        shown.append(table(title, columns, rows))
    return shown


def drawn(args: Args, result: dict[str, Any]) -> Figure:
    """Lengths against success; then the differences of wrong answers at each level."""
    figure, (wrong, right, bars) = plt.subplots(1, 3, figsize=(13, 3.8))
    for i, name in enumerate(DENOMINATORS):
        found, colour = result["readings"][name], f"C{i}"
        for panel, kind in ((wrong, "wrong"), (right, "right")):
            x, y = (np.array(found[key]) for key in ("success", kind))
            panel.plot(x, y, ".", color=colour, ms=2, alpha=0.35)
            panel.plot(x.mean(1), np.nanmean(y, axis=1), color=colour, lw=1.5, label=name)
            panel.set(xlabel="success", ylabel=f"tokens of a {kind} answer")
        for j, level in enumerate(result["levels"].values()):
            if level["seeds"]:
                score = level[name]["wrong"]["difference"]
                at = j + (i - 2) * 0.15
                bars.plot([at], [score["mean"]], "o", color=colour, ms=5)
                if None not in score["ci95"]:
                    bars.plot([at, at], score["ci95"], color=colour, lw=1.5)
    bars.axhline(0, color="black", lw=0.6)
    bars.set_xticks(range(len(args.levels)), [f"{level:g}" for level in args.levels])
    bars.set(xlabel="success", ylabel=f"wrong answers: tokens less {AGAINST}'s")
    wrong.legend(frameon=False, fontsize=7)
    figure.suptitle(
        f"Length at matched success: {args.seeds} seeds, every reading, their mean; differences with 95% CI"
    )
    figure.tight_layout()
    return figure


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()
    result = head() | {"args": {**vars(args), "out": str(args.out)}} | measure(args)
    report("length", result, show(args, result), args.out, args.json, lambda: drawn(args, result))


if __name__ == "__main__":
    main()
