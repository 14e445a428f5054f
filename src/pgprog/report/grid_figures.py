"""The heat map of a grid, as PNG and SVG."""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pgprog.report.figures import save
from pgprog.report.grid_tables import by_place, lines, numbered_reasons


def draw_grid(directory: Path, summary: dict[str, Any]) -> list[Path]:
    """Draw the heat map into the grid's directory; return the PNG file."""
    return save(directory, {"grid": lambda: heat_map(summary)})


def heat_map(summary: dict[str, Any]) -> Figure:
    """Mean success by colour, with its interval in figures; hatched where the combination has no meaning."""
    rows, columns = summary["advantages"], summary["constraints"]
    cells, reasons = by_place(summary), numbered_reasons(summary)
    grid = np.array([[mean(cells[row, column]) for column in columns] for row in rows])
    figure, panel = plt.subplots(figsize=(2.6 + 1.05 * len(columns), 1.6 + 0.55 * len(rows)))
    low, high = (np.nanmin(grid), np.nanmax(grid)) if np.isfinite(grid).any() else (0.0, 1.0)
    image = panel.imshow(grid, cmap="viridis", vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
    figure.colorbar(image, ax=panel, label="success over all targets", pad=0.02)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            cell = cells[row, column]
            if cell["status"] in ("refused", "missing"):
                hatch = "///" if cell["status"] == "refused" else ""
                corner = (x - 0.5, y - 0.5)
                panel.add_patch(Rectangle(corner, 1, 1, facecolor="#eeeeee", edgecolor="#aaaaaa", hatch=hatch, lw=0))
            dark = grid[y, x] < (low + high) / 2  # False where NaN
            text = "\n".join(lines(cell, reasons))
            panel.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    panel.set_xticks(range(len(columns)), [textwrap.fill(e["label"], 13) for e in columns.values()], fontsize=7)
    panel.set_yticks(range(len(rows)), [e["label"] for e in rows.values()])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.set_title(
        f"Advantages x constraints at {summary['budget']['rollouts_per_seed']:,} rollouts: mean of "
        f"{summary['config']['seeds']} seeds, 95% interval",
        fontsize=9,
        loc="left",
    )
    said = [textwrap.fill(f"({number}) {reason}", 150) for reason, number in reasons.items()]
    figure.text(0.02, -0.01, "\n".join(said), fontsize=6.5, va="top")
    return figure


def mean(cell: dict[str, Any]) -> float:
    """Of success; NaN where there is none."""
    return float(cell["success"]["mean"]) if "success" in cell else float("nan")
