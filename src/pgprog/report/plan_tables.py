"""Tables of ``pgprog plan``, for the terminal; below all, what their figures assume. Free of torch."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pgprog.exact.weight import LARGEST_GROUP

MEMORY = {
    "models": "held",
    "policy memory": "policy",
    "critic memory": "critic",
    "reference memory": "ref.",
    "reward model memory": "rew.",
    "total memory": "total",
    "training GPUs": "GPUs to\ntrain",
    "rollout copy memory": "copy",
    "rollout GPUs": "GPUs to\nsample",
}
GROUPS = {
    "informative share": "informative",
    "share without signal": "no signal",
    "informative groups per step": "informative per step",
    "smallest G with half informative": "smallest G with half",
}
SIGNAL = {
    "signal to noise per rollout": "S/N per rollout",
    "rollouts for S/N 1": "rollouts for S/N 1",
    "efficiency": "efficiency",
    "effective weight": "w",
    "E[A^2]": "E[A^2]",
}
BUDGET = {
    "rollouts per step": "rollouts per step",
    "steps": "steps",
    "signal to noise per step": "S/N per step",
    "informative groups per step": "informative per step",
    "informative groups in all": "informative in all",
}
TIME = {
    "GPU seconds per rollout": "GPU s",
    "generation": "gen.",
    "signal to noise per GPU hour": "S/N per GPU h",
    "efficient rollouts per GPU hour": "efficient per GPU h",
}
TOTAL = {
    "GPU hours in all": "GPU h",
    "wall hours": "wall h",
    "rollout GPUs that keep pace": "GPUs that keep pace",
}
TITLES = {
    "What a rollout is worth": SIGNAL,
    "What the budget buys": BUDGET,
    "What a GPU hour is worth": TIME,
    "What the budget costs": TOTAL,
}
WIDE = 100  # columns
MARKS = "\u2020\u2021\u00a7"
Rows = Sequence[Mapping[str, Any]]


def print_plan(console: Console, found: Mapping[str, Any]) -> None:
    """The recommendations; then every table that has rows; then, in one list, what the tables assume."""
    for said in found["recommendations"]:
        p = said["success_rate"]
        console.print("Recommendation" + ("" if p is None else f" at success {p:g}"), style="bold", highlight=False)
        for reason in said["reasons"]:
            say(console, reason, "  ")
        console.print()
    notes: dict[str, int] = {}
    marks: dict[str, str] = {}
    title = "Memory of the models held, decimal GB, no activations; least GPUs to train, and for a copy to sample"
    print_table(console, title, found["memory"], MEMORY, notes, marks)
    print_table(console, "Groups that carry a signal", found["groups"], GROUPS, notes, marks)
    for p in dict.fromkeys(row["success_rate"] for row in found["signal"]):
        rows = [
            {key: row[key] for key in row if key != "success_rate"}
            for row in found["signal"]
            if row["success_rate"] == p
        ]
        for title, columns in TITLES.items():
            print_table(console, f"{title}, at success {p:g}", rows, columns, notes, marks)
    console.print("What is assumed, by number, and the flags that change it", style="bold", highlight=False)
    for text, i in notes.items():
        say(console, f"{i:>3}  {text}", "     ")


def print_table(
    console: Console, title: str, rows: Rows, columns: Mapping[str, str], notes: dict[str, int], marks: dict[str, str]
) -> None:
    """A row per recipe or group, a column per figure that any row has; below, what each column assumes, by number.

    Args:
        notes: assumptions by number, in which those of this table that are new are put.
        marks: remarks by their text, in the same way; a new one is printed in full.
    """
    shown = {name: head for name, head in columns.items() if any(name in row["figures"] for row in rows)}
    if not shown:
        return
    keys = {"success_rate": "success", "recipe": "recipe", "group_size": "G"}
    keys = {key: head for key, head in keys.items() if key in rows[0]}
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for key, head in keys.items():
        table.add_column(head, no_wrap=True, justify="left" if key == "recipe" else "right")
    for head in shown.values():
        table.add_column(head if console.width < WIDE else head.replace("\n", " "), justify="right")
    before = dict(marks)
    for row in rows:
        cells = [cell(row, name, marks) for name in shown]
        mark = "" if row.get("fits", True) else " *"
        table.add_row(*(f"{row[key]}{mark}" if key == "recipe" else f"{row[key]:g}" for key in keys), *cells)
    console.print(table)
    if not all(row.get("fits", True) for row in rows):
        say(console, "* does not fit, not even training and generation in turns.")
    met = {row.get("remarks", {}).get(name) for row in rows for name in shown}
    for text, mark in marks.items():
        if text in met:
            say(console, f"{mark} as above." if text in before else f"{mark} {text}.", "  ")
    used: dict[str, list[str]] = {}
    for name, head in shown.items():
        assumed = [text for row in rows if name in row["figures"] for text in row["figures"][name]["assumptions"]]
        numbers = sorted({notes.setdefault(text, len(notes) + 1) for text in assumed})
        used.setdefault(ranges(numbers), []).append(head)
    say(console, "Assumes: " + "; ".join(f"{', '.join(heads)}: {which}" for which, heads in used.items()) + ".")
    console.print()


def cell(row: Mapping[str, Any], name: str, marks: dict[str, str]) -> str:
    """A figure of a row, marked where there is a remark; - where the row has none.

    Args:
        marks: by remark; those that are new are put in.
    """
    if name not in row["figures"]:
        return "-"
    value = row["figures"][name]["value"]
    if name == "smallest G with half informative" and (value is None or value > LARGEST_GROUP):
        return "no G" if value is None else f"no practical G ({number(value)})"
    remark = row.get("remarks", {}).get(name)
    return number(value) if remark is None else f"{marks.setdefault(remark, MARKS[len(marks)])} {number(value)}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined: 1-3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def number(value: int | float | None) -> str:
    """Four digits; infinite or beyond all bounds where there is none."""
    if value is None:
        return "inf"
    if abs(value) >= 1e3 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def say(console: Console, text: str, indent: str = "") -> None:
    """A paragraph at the width of the terminal, words kept whole, later lines indented."""
    lines = textwrap.fill(text, console.width, subsequent_indent=indent, break_on_hyphens=False)
    console.print(lines, markup=False, highlight=False, soft_wrap=True)
