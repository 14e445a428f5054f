"""A figure for each mode of ``pgprog doctor``, as PNG and SVG: sick beside cured, exact lines dotted."""

import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pgprog.report.figures import plt, save

COLOURS = {"sick": "#b5473c", "cured": "#2f7d5b", "exact": "black", "other": "#2f5f9e"}
SHADES = ("#2f5f9e", "#d08c28", "#7b4fa0", "#7f7f7f")  # where a panel has several of a kind
DASHES = (":", "--", "-.")


def draw(directory: Path, found: list[dict[str, Any]]) -> list[Path]:
    """Draw the figure of each finding; return the PNG files."""
    return save(directory, {mode["name"]: partial(figure_of, mode) for mode in found})


def figure_of(mode: dict[str, Any]) -> Figure:
    """The panels of a mode side by side, under its title; its sentence below."""
    panels = mode["panels"]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), squeeze=False)
    figure.subplots_adjust(wspace=0.25)
    for panel, on in zip(panels, axes[0], strict=True):
        draw_panel(on, panel)
    figure.suptitle(mode["title"])
    figure.text(0.5, -0.06, textwrap.fill(mode["sick"], 60 * len(panels)), ha="center", va="top", fontsize=8)
    return figure


def draw_panel(on: Axes, panel: dict[str, Any]) -> None:
    """Lines with bands, or points with error bars."""
    seen: dict[str, int] = {}
    for curve in panel["curves"]:
        kind, x, y = curve["kind"], np.asarray(curve["x"]), np.asarray(curve["y"])
        place = seen[kind] = seen.get(kind, -1) + 1
        exact = kind == "exact"
        colour = SHADES[place % len(SHADES)] if kind == "other" else COLOURS[kind]
        dash: Any = DASHES[place % len(DASHES)] if exact else DASHES[place - 1] if place else "-"
        if curve["dots"]:
            bars = None if curve["low"] is None else [y - np.asarray(curve["low"]), np.asarray(curve["high"]) - y]
            on.errorbar(x, y, bars, color=colour, fmt="x" if exact else "o", ms=4, capsize=2, label=curve["label"])
            continue
        on.plot(x, y, color=colour, ls=dash, lw=1.0 if exact else 1.6, label=curve["label"])
        if curve["low"] is not None:
            on.fill_between(x, curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
    if panel["log_y"]:
        on.set_yscale("log")
    if panel["ticks"]:
        on.set_xticks(range(len(panel["ticks"])), [textwrap.fill(tick, 14) for tick in panel["ticks"]], fontsize=8)
    on.set(xlabel=panel["x"], ylabel=panel["y"])
    on.legend(frameon=False, fontsize=7)
