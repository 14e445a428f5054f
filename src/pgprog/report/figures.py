"""Figures of a comparison, as PNG and SVG."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pgprog.experiment.config import TITLES
from pgprog.experiment.rundir import write_bytes
from pgprog.experiment.watch import Rows

# The rungs keep their colours; twenty more go round among the other recipes.
COLOURS = {name: to_hex(plt.get_cmap("tab20")(i % 20)) for i, name in enumerate(TITLES)} | {
    "reinforce": "#7f7f7f",
    "actor_critic": "#d08c28",
    "ppo": "#b5473c",
    "rloo": "#2f7d5b",
    "grpo": "#2f5f9e",
}
SMOOTH = 25  # steps, and no more than an eighth of a run


def draw(directory: Path, summary: dict[str, Any], rows_by_run: dict[str, Rows]) -> list[Path]:
    """Draw every figure of a comparison into its directory; return the PNG files."""
    return save(
        directory,
        {
            "learning_curves": partial(learning_curves, summary, rows_by_run),
            "final_success": partial(final_success, summary),
            "success_by_target": partial(success_by_target, summary),
            "gradient_noise": partial(gradient_noise, summary),
        },
    )


def save(directory: Path, figures: dict[str, Callable[[], Figure]]) -> list[Path]:
    """Make each figure in the project's style and write it as PNG and SVG; return the PNG files."""
    paths = []
    with plt.rc_context(
        {"svg.hashsalt": "pgprog", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    ):
        for name, make in figures.items():
            figure = make()
            figure.draw_without_rendering()  # once for both, where bbox_inches="tight" would draw for each
            frame = figure.get_tightbbox().padded(0.1)
            for kind in ("png", "svg"):
                drawn = io.BytesIO()
                figure.savefig(drawn, format=kind, dpi=150, bbox_inches=frame)
                write_bytes(directory / f"{name}.{kind}", drawn.getvalue())
            plt.close(figure)
            paths.append(directory / f"{name}.png")
    return paths


def learning_curves(summary: dict[str, Any], rows_by_run: dict[str, Rows]) -> Figure:
    """Success while training, against steps and against rollouts."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for algo in summary["algorithms"]:
        steps, rollouts, curves = curves_by_seed(rows_by_run[algo])
        for panel, x in zip(panels, (steps, rollouts), strict=True):
            panel.plot(x, curves.mean(0), color=COLOURS[algo], label=TITLES[algo], lw=1.5)
            panel.fill_between(x, curves.min(0), curves.max(0), color=COLOURS[algo], alpha=0.15, lw=0)
    panels[0].set(xlabel="steps", ylabel="success of the batch, running mean", ylim=(0, 1))
    panels[1].set(xlabel="rollouts")
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[1].axvline(summary["equal_rollouts"], color="black", lw=0.8, ls=":")
    panels[1].legend(
        panels[1].lines[-1:], ["equal rollouts, met by\nruns that end there"], frameon=False, loc="lower right"
    )
    panels[0].legend(frameon=False, loc="lower right")
    figure.suptitle(f"Learning curves: mean and range of {summary['config']['seeds']} seeds")
    return figure


def curves_by_seed(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, rollouts, and smoothed success (seeds, steps) from the rows of a run."""
    seeds = dict.fromkeys(row["seed"] for row in rows)
    first = [row for row in rows if row["seed"] == rows[0]["seed"]]
    curves = np.array([[row["success"] for row in rows if row["seed"] == seed] for seed in seeds])
    width = max(1, min(SMOOTH, curves.shape[1] // 8))
    sums = np.cumsum(np.pad(curves, ((0, 0), (1, 0))), axis=1)
    smooth = (sums[:, width:] - sums[:, :-width]) / width
    keep = slice(width - 1, None)
    return np.array([r["step"] for r in first])[keep], np.array([r["rollouts"] for r in first])[keep], smooth


def final_success(summary: dict[str, Any]) -> Figure:
    """Every seed, with mean and interval, beside the score at equal rollouts."""
    figure, panel = plt.subplots(figsize=(8, 3.6))
    ticks = []
    for i, (algo, entry) in enumerate(summary["algorithms"].items()):
        again = entry["at_equal_rollouts"]
        _interval(panel, i - 0.15, entry["success"], COLOURS[algo], "o")
        ticks.append(f"{entry['title']}\n{entry['rollouts']:,} rollouts")
        if again:
            _interval(panel, i + 0.15, again["success"], COLOURS[algo], "D")
    panel.plot([], [], "ko", label="as planned")
    panel.plot([], [], "kD", mfc="white", label=f"at {summary['equal_rollouts']:,} rollouts")
    panel.set(ylabel="success over all targets", ylim=(None, 1.02))
    panel.set_xticks(range(len(ticks)), ticks)
    panel.legend(frameon=False, loc="lower left")
    panel.set_title("Final success: every seed, mean and 95% bootstrap interval")
    return figure


def _interval(panel: Axes, x: float, score: dict[str, Any], colour: str, marker: str) -> None:
    fill = colour if marker == "o" else "white"
    seeds = score["seeds"]
    panel.plot([x - 0.06] * len(seeds), seeds, ".", color=colour, alpha=0.5, ms=4)
    if None not in score["ci95"]:
        panel.plot([x, x], score["ci95"], color=colour, lw=1.5)
    panel.plot([x], [score["mean"]], marker, color=colour, mfc=fill, ms=6)


def success_by_target(summary: dict[str, Any]) -> Figure:
    """Which targets are met; extreme ones have few solutions."""
    figure, panel = plt.subplots(figsize=(7, 3.4))
    for algo, entry in summary["algorithms"].items():
        panel.plot(entry["success_by_target"], color=COLOURS[algo], label=entry["title"], lw=1.5)
    panel.set(xlabel="target", ylabel="success", ylim=(0, 1.02))
    panel.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    panel.set_title("Success by target, mean over seeds")
    return figure


def gradient_noise(summary: dict[str, Any]) -> Figure:
    """Norms of the gradient over resamples, and the trace of its covariance."""
    entries = summary["gradient_noise"]
    titles = [TITLES[algo] for algo in entries]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    for i, (algo, entry) in enumerate(entries.items()):
        spread = np.linspace(-0.2, 0.2, len(entry["norms"]))
        left.plot(i + spread, entry["norms"], ".", color=COLOURS[algo], ms=4)
        left.plot([i - 0.3, i + 0.3], [entry["mean_norm"]] * 2, color=COLOURS[algo], lw=2)
        right.bar(i, entry["trace_covariance"], color=COLOURS[algo], width=0.6)
    for panel, label in ((left, "gradient norm, one dot per resample"), (right, "trace of the gradient's covariance")):
        panel.set_xticks(range(len(titles)), titles, fontsize=8)
        panel.set(ylabel=label, ylim=(0, None))
    first = next(iter(entries.values()))
    figure.suptitle(
        f"Gradient noise at the untrained policy: {first['resamples']} resamples of {first['rollouts']} rollouts"
    )
    return figure
