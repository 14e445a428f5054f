"""The table of a grid, for the terminal."""

import textwrap
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_grid(console: Console, summary: dict[str, Any]) -> None:
    """Print every cell's mean with its interval below, the reasons of empty cells, and the notes."""
    rows, columns = summary["advantages"], summary["constraints"]
    cells, reasons = by_place(summary), numbered_reasons(summary)
    table = Table(
        title="Success: mean, 95% interval",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        padding=(0, 1, 0, 0),
    )
    table.add_column("advantage")
    for entry in columns.values():
        table.add_column(textwrap.fill(entry["label"], 9), justify="right", min_width=9)
    for row, entry in rows.items():
        table.add_row(entry["label"], *("\n".join(lines(cells[row, column], reasons)) for column in columns))
    if not console.is_terminal:
        console = Console(file=console.file, width=max(console.width, 20 + 13 * len(columns)))
    console.print(table)
    for line in remarks(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def by_place(summary: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The cells, by row and column."""
    return {(cell["advantage"], cell["constraint"]): cell for cell in summary["cells"]}


def numbered_reasons(summary: dict[str, Any]) -> dict[str, int]:
    """The reasons for which cells are empty, numbered from 1."""
    reasons = dict.fromkeys(cell["reason"] for cell in summary["cells"] if cell["status"] == "refused")
    return {reason: number for number, reason in enumerate(reasons, 1)}


def lines(cell: dict[str, Any], reasons: dict[str, int]) -> list[str]:
    """What stands in a cell: mean, interval, and how far it came where that is not the end."""
    if cell["status"] == "refused":
        return [f"({reasons[cell['reason']]})"]
    if cell["status"] == "missing":
        return ["-"]
    score = cell["success"]
    low, high = score["ci95"]
    shown = [f"{score['mean']:.3f}"] + ([] if low is None else [f"{low:.2f}-{high:.2f}"])
    return shown + ([f"{cell['steps']}/{cell['steps_planned']}"] if cell["status"] == "stopped" else [])


def remarks(summary: dict[str, Any]) -> list[str]:
    """What the signs in the cells mean, and the notes."""
    said = [f"({number}) no meaning: {reason}." for reason, number in numbered_reasons(summary).items()]
    if summary["interrupted"]:
        said.append("Interrupted: what was reached is shown and saved; - is a cell before its first step.")
    return said + summary["notes"]
