"""Tables of a comparison and of a run, for the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pgprog.experiment.config import TITLES


def print_comparison(console: Console, summary: dict[str, Any]) -> None:
    """Print score, cost, differences, gradient noise and notes."""
    for table in (scores(summary), costs(summary), differences(summary), noise(summary)):
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
    """Final success."""
    table = _table("Success after training", "algorithm", "success [95% CI]", "every seed", "on sums of digits")
    for entry in summary["algorithms"].values():
        seeds = " ".join(f"{value:.3f}".removeprefix("0") for value in entry["success"]["seeds"])
        table.add_row(entry["title"], interval(entry["success"]), seeds, f"{entry['success_sum_targets']['mean']:.3f}")
    return table


def costs(summary: dict[str, Any]) -> Table:
    """What each algorithm spent, and its score where all spend the same."""
    equal = f"success at {summary['equal_rollouts']:,} rollouts"
    table = _table(
        "Cost per seed, and success at equal rollouts",
        "algorithm",
        "steps",
        "rollouts",
        "tokens",
        "wall s, all seeds",
        equal,
    )
    for entry in summary["algorithms"].values():
        again = entry["at_equal_rollouts"]
        table.add_row(
            entry["title"],
            f"{entry['steps']}" + ("" if entry["steps"] == entry["steps_planned"] else f" of {entry['steps_planned']}"),
            f"{entry['rollouts']:,}",
            f"{entry['tokens']:,.0f}",
            f"{entry['wall_seconds']:.1f}",
            interval(again["success"]) if again else "-",
        )
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
    title = f"Gradient at the untrained policy, {first['resamples']} resamples, no entropy term"
    table = _table(title, "algorithm", "rollouts", "mean |g|", "Var |g|", "mean |g|^2", "tr Cov(g)", "no gradient")
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
