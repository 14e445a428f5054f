"""Figures of ``pgprog exact``, as PNG and SVG."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pgprog.report.figures import COLOURS, plt, save

OWN = "#7b4fa0"  # a user's function


def draw(directory: Path, found: dict[str, Any]) -> list[Path]:
    """Draw every figure that there is something for; return the PNG files."""
    figures: dict[str, tuple[bool, Callable[[dict[str, Any]], Figure]]] = {
        "effective_weight": (bool(found["curves"]), effective_weight),
        "exact_noise": (True, noise),
        "critic": (bool(found["critic"]), critic),
    }
    return save(directory, {name: partial(make, found) for name, (wanted, make) in figures.items() if wanted})


def effective_weight(found: dict[str, Any]) -> Figure:
    """w(p), and the objective that it is the derivative of."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for curve in found["curves"]:
        colour = COLOURS.get(curve["name"], OWN)
        left.plot(curve["p"], curve["weight"], color=colour, label=curve["title"], lw=1.6)
        right.plot(curve["p"], curve["objective"], color=colour, label=curve["title"], lw=1.6)
    p = np.linspace(0.001, 0.999, 400)
    left.plot(p, 1 / np.sqrt(p * (1 - p)), color="black", lw=0.8, ls=":", label="1 / sqrt(p (1 - p))")
    right.plot(p, 2 * np.arcsin(np.sqrt(p)), color="black", lw=0.8, ls=":", label="2 arcsin(sqrt(p))")
    at = np.asarray(found["success_by_target"])
    left.plot(at, np.zeros_like(at), "|", color="black", ms=7, clip_on=False, label="the targets, here")
    highest = max(max(curve["weight"]) for curve in found["curves"])
    left.set(xlabel="success probability p", ylabel="effective weight w(p)", ylim=(0, 1.6 * highest))
    right.set(xlabel="success probability p", ylabel="implied objective, the integral of w")
    left.legend(frameon=False)
    right.legend(frameon=False)
    figure.suptitle(f"What each estimator optimises: E[g] = w(p) grad p, G = {found['group_size']}")
    return figure


def noise(found: dict[str, Any]) -> Figure:
    """Trace and signal to noise, exact, with the sampled trace and its error bar."""
    rows = found["estimators"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6))
    figure.subplots_adjust(wspace=0.25)
    for i, row in enumerate(rows):
        colour = COLOURS.get(row["name"], OWN)
        left.bar(i, row["trace"], color=colour, width=0.6, alpha=1.0 if row["method"] != "sampled" else 0.5)
        right.bar(i, row["signal_to_noise_per_rollout"], color=colour, width=0.6)
        if s := row["sampled"]:
            left.errorbar(i, s["trace"], 2 * s["trace_error"], color="black", fmt="o", ms=3, capsize=3)
    titles = [row["title"] + " *" * (row["method"] == "sampled") for row in rows]
    for panel, label in ((left, "trace of the covariance"), (right, "signal to noise per rollout")):
        panel.set_xticks(range(len(rows)), titles)
        panel.set(ylabel=label, ylim=(0, None))
    figure.suptitle(
        f"Noise at {found['rollouts']} rollouts: exact bars, dots sampled with 2 standard errors (* rewards sampled)"
    )
    return figure


def critic(found: dict[str, Any]) -> Figure:
    """Bias and variance over lambda, for each error of the critic; gamma dashed where it is not 1."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    prefix = [point for point in found["critic"] if point["baseline"] == "prefix"]
    errors = sorted({point["error"] for point in prefix})
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.8, len(errors)))
    for gamma in sorted({point["gamma"] for point in prefix}, reverse=True):
        for error, colour in zip(errors, shades, strict=True):
            points = [x for x in prefix if x["error"] == error and x["gamma"] == gamma]
            lam = [x["lam"] for x in points]
            line: dict[str, Any] = {"color": colour, "ls": "-" if gamma == 1 else "--", "marker": ".", "lw": 1.4}
            left.plot(lam, [x["relative_bias"] for x in points], label=f"gamma {gamma:g}, V off by {error:g}", **line)
            right.plot(lam, [x["trace"] for x in points], **line)
    for point in found["critic"]:
        if point["baseline"] == "prompt":
            colour = shades[errors.index(point["error"])]
            right.axhline(point["trace"], color=colour, lw=0.8, ls=":")
    left.set(xlabel="lambda", ylabel="|bias| / |grad J|", ylim=(0, None))
    right.set(xlabel="lambda", ylabel="trace of the covariance (dotted: V of the prompt)", ylim=(0, None))
    left.legend(frameon=False)
    figure.suptitle("A critic: bias and variance of GAE, one completion of a random prompt")
    return figure
