"""What ``pgprog doctor`` prints."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text


def print_finding(console: Console, found: dict[str, Any]) -> None:
    """A mode: the two sentences, what to watch, the numbers, the checks."""
    console.print(Text(f"{found['name']}: {found['title']} ({found['seconds']:.0f} s)", style="bold"))
    for label, key in (("sick ", "sick"), ("cure ", "cure"), ("watch", "watch")):
        line = Text.assemble((f"{label}  ", "dim"), found[key])
        console.print(Padding(line, (0, 0, 0, 2)))
    for label, numbers in (("exact", found["proof"]), ("found", found["numbers"])):
        for path, value in flat(numbers or {}):
            console.print(Padding(Text.assemble((f"{label}  ", "dim"), f"{path}  ", value), (0, 0, 0, 2)))
    for check in found["checks"]:
        mark = ("yes", "green") if check["holds"] else ("NO ", "bold red")
        console.print(Padding(Text.assemble(mark, "    ", check["statement"]), (0, 0, 0, 2)))
    console.print()


def flat(numbers: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Nested numbers as lines: their path, and the value in words; a dict of plain numbers is one line."""
    if not isinstance(numbers, dict):
        return [(" / ".join(path), said(numbers))]
    if path and not any(isinstance(value, dict) for value in numbers.values()):
        return [(" / ".join(path), ", ".join(f"{name} {said(value)}" for name, value in numbers.items()))]
    return [line for name, value in numbers.items() for line in flat(value, (*path, str(name)))]


def said(value: Any) -> str:
    """A number in four digits; a list in brackets."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(said, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
