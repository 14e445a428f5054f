"""Tables of a comparison and of a run, for the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pgprog.experiment.config import TITLES


def print_comparison(console: Console, summary: dict[str, Any]) -> None:
    """Print score, cost, differences, gradient noise and notes."""
    for table in (scores(summary), seeds(summary), equal(summary), differences(summary), noise(summary)):
        console.print(table)
    for algo, entry in summary["algorithms"].items():
        for exception in entry["exceptions"]:
            console.print(f"Exception from the shared settings: {TITLES[algo]}: {exception}.", markup=False)
    for note in summary["notes"]:
        console.print(note, markup=False)
    if summary["interrupted"]:
        console.print("Interrupted: what was reached is shown and saved; the rest is missing.", style="bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def interval(score: dict[str, Any]) -> str:
    """A mean with its interval, if there is one."""
    low, high = score["ci95"]
    return f"{score['mean']:.3f}" if low is None else f"{score['mean']:.3f} [{low:.3f}, {high:.3f}]"


def scores(summary: dict[str, Any]) -> Table:
    """Final success, and what it cost."""
    title = (
        f"Success after training, and its cost (rollouts and tokens of a seed; seconds of {summary['config']['seeds']})"
    )
    table = _table(title, "algorithm", "success [95% CI]", "steps", "rollouts", "tokens", "wall s")
    for entry in summary["algorithms"].values():
        steps = f"{entry['steps']}" + (
            "" if entry["steps"] == entry["steps_planned"] else f" of {entry['steps_planned']}"
        )
        table.add_row(
            entry["title"],
            interval(entry["success"]),
            steps,
            f"{entry['rollouts']:,}",
            f"{entry['tokens']:,.0f}",
            f"{entry['wall_seconds']:.0f}",
        )
    return table


def seeds(summary: dict[str, Any]) -> Table:
    """Every seed, and the mean with targets weighted as sums of random digits."""
    table = _table("Every seed, and the mean over targets drawn as sums of digits", "algorithm", "seeds", "sum-drawn")
    for entry in summary["algorithms"].values():
        scores = " ".join(f"{value:.3f}".removeprefix("0") for value in entry["success"]["seeds"])
        table.add_row(entry["title"], scores, f"{entry['success_sum_targets']['mean']:.3f}")
    return table


def equal(summary: dict[str, Any]) -> Table:
    """The score where all spend the same."""
    title = f"Success at equal rollouts ({summary['equal_rollouts']:,} a seed, annealing ends there)"
    table = _table(title, "algorithm", "success [95% CI]", "steps", "rollouts")
    for entry in summary["algorithms"].values():
        if again := entry["at_equal_rollouts"]:
            table.add_row(entry["title"], interval(again["success"]), f"{again['steps']}", f"{again['rollouts']:,}")
    return table


def differences(summary: dict[str, Any]) -> Table:
    """Neighbours on the ladder, seed by seed."""
    table = _table(
        "Paired differences in success, seed by seed", "step of the ladder", "difference [95% CI]", "every seed"
    )
    for entry in summary["paired_differences"]:
        seeds = " ".join(f"{value:+.3f}" for value in entry["difference"]["seeds"])
        table.add_row(f"{TITLES[entry['from']]} -> {TITLES[entry['to']]}", interval(entry["difference"]), seeds)
    return table


def noise(summary: dict[str, Any]) -> Table:
    """Gradient noise at the untrained policy."""
    entries = summary["gradient_noise"]
    first = next(iter(entries.values()))
    title = f"Gradient at the untrained policy: means of {first['resamples']} resamples, no entropy term"
    table = _table(title, "algorithm", "rollouts", "|g|", "Var |g|", "|g|^2", "tr Cov", "zero")
    for algo, entry in entries.items():
        table.add_row(
            TITLES[algo],
            f"{entry['prompts']} x {entry['rollouts'] // entry['prompts']}",
            f"{entry['mean_norm']:.4f}",
            f"{entry['var_norm']:.5f}",
            f"{entry['mean_squared_norm']:.5f}",
            f"{entry['trace_covariance']:.5f}",
            f"{entry['no_gradient']:.0%}",
        )
    return table
