"""How the cost of one training step grows with K, P, G, L and the hidden size: a table and a figure.

One size at a time is moved away from the default step (5 replicas, 64 prompts, groups of 8 where the algorithm has
groups, 5 tokens, 64 hidden units), on one thread. A time is the least of ``--repeats`` means, and all points take
turns, so that a noisy minute falls on all of them. *Growth* is the exponent between a size and the one before it,
log(time ratio) / log(size ratio): 0 where a size is free, 1 where cost is proportional to it.

    python benchmarks/scaling.py [--algos grpo reinforce] [--repeats 5] [--out DIR]
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from matplotlib.figure import Figure
from rich.table import Table

from measuring import OUT, head, least_seconds, report, table, training_step
from pgprog.experiment.config import GROUP_METHODS, TITLES, CompareConfig, RunConfig
from pgprog.report.figures import COLOURS

REPLICAS = 5
SIZES = {
    "K": (1, 2, 5, 10, 20, 50),
    "P": (16, 32, 64, 128, 256),
    "G": (2, 4, 8, 16, 32),
    "L": (2, 5, 10, 20),
    "hidden": (16, 32, 64, 128, 256),
}
FIELDS = {"P": "prompts", "G": "group_size", "L": "seq_len", "hidden": "hidden"}
MEANING = {
    "K": "K, replicas",
    "P": "P, prompts",
    "G": "G, completions of a prompt",
    "L": "L, tokens",
    "hidden": "hidden units",
}


@dataclass(frozen=True)
class Args:
    """What to measure."""

    algos: tuple[str, ...] = ("grpo", "reinforce")
    repeats: int = 5
    at_least: float = 0.1
    """Seconds that each repeat fills with steps."""
    out: Path = OUT
    """Receives scaling.json, scaling.png and scaling.svg."""
    json: bool = False
    """Print JSON in place of the table."""


Point = tuple[str, str, int]
"""Algorithm, which size, its value."""


def setting(point: Point) -> tuple[RunConfig, int]:
    """The run of a point, and how many replicas it has."""
    algo, axis, size = point
    config = CompareConfig().run_config(algo, 1000)
    return (config, size) if axis == "K" else (replace(config, **{FIELDS[axis]: size}), REPLICAS)


def points(algos: tuple[str, ...]) -> list[Point]:
    """Every size of every axis that an algorithm has."""
    axes = {algo: [axis for axis in SIZES if axis != "G" or algo in GROUP_METHODS] for algo in algos}
    return [(algo, axis, size) for algo in algos for axis in axes[algo] for size in SIZES[axis]]


def growth(sizes: list[int], seconds: list[float]) -> list[float | None]:
    """The exponent from each size to the next; the first has none."""
    pairs = zip(sizes, sizes[1:], seconds, seconds[1:], strict=False)
    return [None, *(math.log(t1 / t0) / math.log(n1 / n0) for n0, n1, t0, t1 in pairs)]


def curves(seconds: dict[Point, float]) -> list[dict[str, Any]]:
    """A curve per algorithm and axis."""
    found = []
    for algo, axis in dict.fromkeys(point[:2] for point in seconds):
        sizes = [size for a, x, size in seconds if (a, x) == (algo, axis)]
        times = [seconds[algo, axis, size] for size in sizes]
        exponents = growth(sizes, times)
        found.append({"algo": algo, "axis": axis, "sizes": sizes, "seconds": times, "growth": exponents})
    return found


def show(measured: list[dict[str, Any]]) -> list[Table | str]:
    """A table per algorithm, a row per size."""
    shown: list[Table | str] = []
    for algo in dict.fromkeys(curve["algo"] for curve in measured):
        rows = []
        for curve in (c for c in measured if c["algo"] == algo):
            for size, seconds, exponent in zip(curve["sizes"], curve["seconds"], curve["growth"], strict=True):
                per_replica = seconds / (size if curve["axis"] == "K" else REPLICAS)
                said = "" if exponent is None else f"{exponent:.2f}"
                rows.append([f"{curve['axis']} = {size}", f"{seconds * 1e3:.2f}", f"{per_replica * 1e3:.2f}", said])
        shown.append(table(f"{TITLES[algo]}: one training step", ["size", "ms", "ms per replica", "growth"], rows))
    return shown


def draw(measured: list[dict[str, Any]]) -> Figure:
    """A panel per axis, a line per algorithm, and the slope of proportional cost."""
    figure, panels = plt.subplots(1, len(SIZES), figsize=(14, 3.2), sharey=True, layout="constrained")
    for panel, axis in zip(panels, SIZES, strict=True):
        for curve in (c for c in measured if c["axis"] == axis):
            milliseconds = [1e3 * seconds for seconds in curve["seconds"]]
            algo, sizes = curve["algo"], curve["sizes"]
            panel.loglog(sizes, milliseconds, "o-", ms=3, color=COLOURS[algo], label=TITLES[algo])
            panel.loglog(sizes, [milliseconds[-1] * size / sizes[-1] for size in sizes], "k:", lw=0.7)
        panel.set(xlabel=MEANING[axis])
        panel.set_xticks(SIZES[axis], [str(size) for size in SIZES[axis]])
        panel.minorticks_off()
    panels[0].set(ylabel="ms per training step")
    panels[0].legend(frameon=False)
    figure.suptitle("Cost of a training step, one thread; dotted: proportional to the size")
    return figure


def main(args: Args) -> None:
    torch.set_num_threads(1)
    steps = {point: training_step(*setting(point)) for point in points(args.algos)}
    measured = curves(least_seconds(steps, args.repeats, args.at_least))
    result = head() | {"args": {**asdict(args), "out": str(args.out)}, "curves": measured}
    report("scaling", result, show(measured), args.out, args.json, lambda: draw(measured))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
