"""What ``pgprog doctor`` prints."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

LEGEND = {
    "relative_bias": "relative_bias = |E g - truth| / |truth|",
    "scale": "scale = c of E g = c truth + orthogonal",
    "rest": "rest = |orthogonal| / |E g|",
    "trace": "trace = tr Cov(g)",
}
"""What the names of exact numbers mean; the truth is the gradient that E g should be."""
ROUNDING = 1e-12


def print_finding(console: Console, found: dict[str, Any]) -> None:
    """A mode: the two sentences, what to watch, the numbers, the checks."""
    console.print(Text(f"{found['name']}: {found['title']} ({found['seconds']:.0f} s)", style="bold"))
    for label, key in (("sick ", "sick"), ("cure ", "cure"), ("watch", "watch")):
        line = Text.assemble((f"{label}  ", "dim"), found[key])
        console.print(Padding(line, (0, 0, 0, 2)))
    if explained := legend(found["proof"]):
        console.print(Padding(Text.assemble(("names  ", "dim"), explained), (0, 0, 0, 2)))
    for label, numbers in (("exact", found["proof"]), ("found", found["numbers"])):
        for path, value in flat(numbers or {}):
            console.print(Padding(Text.assemble((f"{label}  ", "dim"), f"{path}  ", value), (0, 0, 0, 2)))
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


def flat(numbers: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Nested numbers as lines: their path, and the value in words; a dict of plain numbers is one line."""
    if not isinstance(numbers, dict):
        return [(" / ".join(path), said(numbers))]
    if path and not any(isinstance(value, dict) for value in numbers.values()):
        return [(" / ".join(path), ", ".join(f"{name} {said(value)}" for name, value in numbers.items()))]
    return [line for name, value in numbers.items() for line in flat(value, (*path, str(name)))]


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
