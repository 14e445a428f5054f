"""What ``pgprog doctor`` prints."""

import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LEGEND = {
    "relative_bias": "relative_bias = |E g - truth| / |truth|",
    "scale": "scale = c of E g = c truth + orthogonal",
    "rest": "rest = |orthogonal| / |E g|",
    "trace": "trace = tr Cov(g)",
}
"""What the names of exact numbers mean; the truth is the gradient that E g should be."""
ROUNDING = 1e-12
INDENT = 9  # columns before a number
LONG = 10  # characters, of a name above a column; longer ones are broken


def print_finding(console: Console, found: dict[str, Any]) -> None:
    """A mode: the two sentences, what to watch, the numbers, the checks."""
    console.print(Text(f"{found['name']}: {found['title']} ({found['seconds']:.0f} s)", style="bold"))
    for label, key in (("sick ", "sick"), ("cure ", "cure"), ("watch", "watch")):
        line = Text.assemble((f"{label}  ", "dim"), found[key])
        console.print(Padding(line, (0, 0, 0, 2)))
    if explained := legend(found["proof"]):
        console.print(Padding(Text.assemble(("names  ", "dim"), explained), (0, 0, 0, 2)))
    for label, numbers in (("exact", found["proof"]), ("found", found["numbers"])):
        for block in blocks(numbers or {}, console.width - INDENT):
            lines = Table.grid(padding=(0, 2))
            lines.add_row(Text(label, style="dim"), block)
            console.print(Padding(lines, (0, 0, 0, 2)))
    for check in found["checks"]:
        mark = ("yes", "green") if check["holds"] else ("NO ", "bold red")
        console.print(Padding(Text.assemble(mark, "    ", check["statement"]), (0, 0, 0, 2)))
    console.print()


def names_in(numbers: Any) -> set[str]:
    """Of nested numbers, at every level."""
    if not isinstance(numbers, dict):
        return set()
    return set(numbers).union(*map(names_in, numbers.values()))


def legend(numbers: Any) -> str:
    """What those names mean that occur."""
    return "; ".join(text for name, text in LEGEND.items() if name in names_in(numbers))


def blocks(numbers: dict[str, Any], width: int) -> list[Text | Table]:
    """Numbers as they are printed: single ones side by side, those of the same names as rows of a table if it fits."""
    made: list[Text | Table] = []
    for names, several in groupby(leaves(numbers), lambda leaf: tuple(leaf[1]) if isinstance(leaf[1], dict) else ()):
        rows = list(several)
        if not names:
            made.append(Text("; ".join(f"{' / '.join(path)} {said(value)}" for path, value in rows)))
        elif len(rows) > 1 and (fitting := [t for t in tables_of(names, rows) if columns_of(t) <= width]):
            made.append(fitting[0])
        else:
            lines = [(path, ", ".join(f"{n} {said(x)}" for n, x in value.items())) for path, value in rows]
            made += [Text(f"{' / '.join(path)}: {line}") for path, line in lines]
    return made


def leaves(numbers: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Single numbers, and dicts of plain numbers, with their paths."""
    if not isinstance(numbers, dict) or (path and not any(isinstance(value, dict) for value in numbers.values())):
        return [(path, numbers)]
    return [leaf for name, value in numbers.items() for leaf in leaves(value, (*path, str(name)))]


def tables_of(names: tuple[str, ...], rows: list[tuple[tuple[str, ...], Any]]) -> list[Table]:
    """A row for each path, what all share of it in the head; with a wide gap between columns, and with a narrow one."""
    above = {path[:-1] for path, _ in rows}
    shared = above.pop() if len(above) == 1 else ()
    tables = [Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="") for gap in (2, 1)]
    for table in tables:
        table.add_column(Text(" / ".join(shared)), no_wrap=True)
        for name in names:
            head = [word.replace("_ ", "_") for word in textwrap.wrap(name.replace("_", "_ "), LONG)]
            table.add_column(Text("\n".join(head)), justify="right", no_wrap=True)
        for path, value in rows:
            table.add_row(Text(" / ".join(path[len(shared) :])), *(Text(said(x)) for x in value.values()))
    return tables


def columns_of(table: Table) -> int:
    """How wide a table is."""
    return Console(width=10_000).measure(table).maximum


def said(value: Any) -> str:
    """A number in four digits, 0 where it is rounding; a list in brackets."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(said, value)) + "]"
    if isinstance(value, float):
        return "0" if abs(value) < ROUNDING else f"{value:.4g}"
    return str(value)


def print_summary(console: Console, content: dict[str, Any], where: Path | None) -> None:
    """How many were reproduced, where it is saved, and how to have it again."""
    failed = [found["name"] for found in content["modes"] if not found["reproduced"]]
    number = len(content["modes"])
    text = f"{number - len(failed)} of {number} modes reproduced in {content['seconds']:.0f} s"
    console.print(text + (f"; not: {', '.join(failed)}" if failed else ""), markup=False, highlight=False)
    if where is not None:
        saved = f"Saved in {where}: doctor.json, NAME.png (and .svg)"
        console.print(saved, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Reproduce: {content['command']}", markup=False, highlight=False, soft_wrap=True)
