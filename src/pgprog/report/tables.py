"""Tables of a comparison, for the terminal and for a page."""

from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from pgprog.experiment.config import TITLES


class Rows(NamedTuple):
    """A table before anyone has decided how it looks; the first column is a name, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def print_comparison(console: Console, summary: dict[str, Any]) -> None:
    """Print score, cost, differences, gradient noise and notes."""
    for rows in comparison(summary):
        table = Table(title=rows.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for i, column in enumerate(rows.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows.rows:
            table.add_row(*row)
        console.print(table)
    for line in remarks(summary):
        console.print(line, markup=False)


def markdown(summary: dict[str, Any]) -> str:
    """The same as a page, with the command that made it."""
    parts = [f"Made by `{summary['command']}` with pgprog {summary['environment']['pgprog']}, {summary['created']}.\n"]
    for rows in comparison(summary):
        lines = [f"**{rows.title}**\n", *(_line(row) for row in (rows.columns, _rule(rows.columns), *rows.rows))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, *(line + "\n" for line in remarks(summary))])


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rule(columns: tuple[str, ...]) -> tuple[str, ...]:
    return ("---", *["--:"] * (len(columns) - 1))


def comparison(summary: dict[str, Any]) -> list[Rows]:
    """Every table of a comparison."""
    tables = [scores(summary), seeds(summary), equal(summary), differences(summary)]
    if summary["gradient_noise"]:
        tables.append(noise(summary))
    return [table for table in tables if table.rows]


def remarks(summary: dict[str, Any]) -> list[str]:
    """Exceptions from the shared settings, and what a reader must know."""
    said: dict[str, list[str]] = {}
    for algo, entry in summary["algorithms"].items():
        for exception in entry["exceptions"]:
            said.setdefault(exception, []).append(TITLES[algo])
    lines = [f"Exception from the shared settings, {' and '.join(who)}: {what}." for what, who in said.items()]
    for entry in summary["algorithms"].values():
        for warned in entry.get("warnings", ()):
            where = f"{warned['seeds']} of {warned['of']} seeds, first seen at step {warned['step']}"
            lines.append(f"Warning, {entry['title']} ({where}): {warned['text']}.")
    if summary["interrupted"]:
        lines.append(
            "Interrupted: what was reached is shown and saved. Differences, and success at equal rollouts, are of "
            "complete runs alone."
        )
    return [*lines, *summary["notes"]]


def interval(score: dict[str, Any]) -> str:
    """A mean with its interval, if there is one."""
    low, high = score["ci95"]
    return f"{score['mean']:.3f}" if low is None else f"{score['mean']:.3f} [{low:.3f}, {high:.3f}]"


def scores(summary: dict[str, Any]) -> Rows:
    """Final success, and what it cost."""
    rows: list[tuple[str, ...]] = []
    for entry in summary["algorithms"].values():
        steps = f"{entry['steps']}"
        if entry["steps"] != entry["steps_planned"]:
            steps += f" of {entry['steps_planned']}"
        cost = (steps, f"{entry['rollouts']:,}", f"{entry['tokens']:,.0f}", f"{entry['wall_seconds']:.0f}")
        rows.append((entry["title"], interval(entry["success"]), *cost))
    n = summary["config"]["seeds"]
    title = f"Success after training, and its cost: rollouts and tokens of a seed, seconds of {n} seeds together"
    return Rows(title, ("algorithm", "success [95% CI]", "steps", "rollouts", "tokens", "wall s"), rows)


def seeds(summary: dict[str, Any]) -> Rows:
    """Every seed, and the mean with targets weighted as sums of random digits."""
    rows: list[tuple[str, ...]] = []
    for entry in summary["algorithms"].values():
        each = " ".join(f"{value:.3f}".removeprefix("0") for value in entry["success"]["seeds"])
        rows.append((entry["title"], each, f"{entry['success_sum_targets']['mean']:.3f}"))
    title = "Every seed; and the mean with targets weighted as sums of random digits"
    return Rows(title, ("algorithm", "seeds", "sum-drawn"), rows)


def equal(summary: dict[str, Any]) -> Rows:
    """The score where all spend the same."""
    rows: list[tuple[str, ...]] = []
    for entry in summary["algorithms"].values():
        if again := entry["at_equal_rollouts"]:
            rows.append((entry["title"], interval(again["success"]), f"{again['steps']}", f"{again['rollouts']:,}"))
    title = f"Success at equal rollouts: {summary['equal_rollouts']:,} a seed, where the annealing ends"
    return Rows(title, ("algorithm", "success [95% CI]", "steps", "rollouts"), rows)


def differences(summary: dict[str, Any]) -> Rows:
    """Neighbours on the ladder, seed by seed."""
    rows: list[tuple[str, ...]] = []
    for entry in summary["paired_differences"]:
        each = " ".join(f"{value:+.3f}".replace("0.", ".", 1) for value in entry["difference"]["seeds"])
        rows.append((f"{TITLES[entry['from']]} to {TITLES[entry['to']]}", interval(entry["difference"]), each))
    title = "Paired differences in success, each against the one before"
    return Rows(title, ("algorithms", "difference [95% CI]", "every seed"), rows)


def noise(summary: dict[str, Any]) -> Rows:
    """Gradient noise at the untrained policy."""
    entries = summary["gradient_noise"]
    rows: list[tuple[str, ...]] = [
        (
            TITLES[algo],
            f"{entry['prompts']} x {entry['rollouts'] // entry['prompts']}",
            f"{entry['mean_norm']:.4f}",
            f"{entry['var_norm']:.5f}",
            f"{entry['mean_squared_norm']:.5f}",
            f"{entry['trace_covariance']:.5f}",
            f"{entry['no_gradient']:.0%}",
        )
        for algo, entry in entries.items()
    ]
    n = next(iter(entries.values()))["resamples"]
    title = f"Gradient g at the untrained policy, {n} resamples, no entropy term; zero: resamples without a gradient"
    return Rows(title, ("algorithm", "rollouts", "mean norm", "Var norm", "mean g^2", "tr Cov(g)", "zero"), rows)
