"""Tables of ``pgprog exact`` and ``pgprog foundations``, for the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pgprog.exact.foundations import Identity, Number


def print_identities(console: Console, identities: list[Identity]) -> None:
    """Each identity with its numbers, what they must be, and whether they are."""
    for identity in identities:
        mark = "[green]holds[/green]" if identity.holds else "[bold red]DOES NOT HOLD[/bold red]"
        console.print(f"\n[bold]{identity.number}. {escape(identity.claim)}[/bold]: {mark}", soft_wrap=True)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 3))
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for number in identity.numbers:
            style = None if number.holds else "bold red"
            table.add_row(escape(number.label), _values(number), _expected(number), style=style)
        console.print(table)
    held = sum(identity.holds for identity in identities)
    style = "bold green" if held == len(identities) else "bold red"
    console.print(f"\n{held} of {len(identities)} identities hold.", style=style)


def _values(number: Number) -> str:
    values = "  ".join(_short(v) for v in number.value)
    return values if number.error is None else f"{values} +- {number.error:.5f}"


def _expected(number: Number) -> str:
    if number.expected is None:
        return ""
    expected = set(number.expected)
    wanted = [_short(v) for v in (expected if len(expected) == 1 else number.expected)]
    return f"must be {'  '.join(wanted)} within {number.tolerance:.0e}"


def _short(value: float) -> str:
    """Up to six decimals; what rounding leaves of a zero as a power of ten."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-6 else f"{value:.6f}".rstrip("0").rstrip(".")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if i == 0 else "right", overflow="fold")
    return table


def print_exact(console: Console, found: dict[str, Any]) -> None:
    """What each estimator optimises, how noisily, and the sampled figures beside the exact ones."""
    whose = "the untrained policy" if found["run"] is None else f"the policy of {found['run']}"
    task = found["task"]
    console.print(
        f"At {whose}, seed {found['seed']}: L = {task['seq_len']}, {task['digits']} digits, exact success "
        f"{found['success']:.5f}, |grad J| = {found['gradient_norm']:.5f}; {found['rollouts']} rollouts for each.",
        soft_wrap=True,
    )
    for table in (bias(found), variance(found), sampled(found), critics(found)):
        if table.row_count:
            console.print(table)
    if any(row["method"] == "sampled" for row in found["estimators"]):
        console.print("* sampled: no count decides this advantage; prompts and rewards are sampled, scores exact.")
    for line in found["explanations"]:
        console.print(line, markup=False)
    console.print(f"{found['wall_seconds']:.1f} s.")


def _title(row: dict[str, Any]) -> str:
    return escape(row["title"]) + " *" * (row["method"] == "sampled")


def bias(found: dict[str, Any]) -> Table:
    """What an estimator optimises, and what it is made of."""
    columns = ("estimator", "P x G", "models", "w at J", "w by target", "|bias|", "angle")
    table = _table("What it optimises: E[g] = E_T[w(p) grad p]", *columns)
    for row in found["estimators"]:
        low, high = row["weight_range"]
        table.add_row(
            _title(row),
            f"{row['prompts']} x {row['group_size']}",
            f"+{row['extra_models']}",
            f"{row['weight']:.4f}",
            f"{low:.4f}" if high - low < 5e-5 else f"{low:.3f} .. {high:.3f}",
            f"{row['bias']:.2e}",
            f"{row['angle']:.2f}\u00b0",
        )
    return table


def variance(found: dict[str, Any]) -> Table:
    """How noisy an estimator is at equal rollouts."""
    columns = ("estimator", "E[A^2]", "E|g|^2", "tr Cov", "signal/noise", "|g|, sampled")
    table = _table(f"How noisily, at {found['rollouts']} rollouts; signal to noise is per rollout", *columns)
    for row in found["estimators"]:
        s = row["sampled"]
        table.add_row(
            _title(row),
            f"{row['squared_advantage']:.5f}",
            _with_error(row["second"], row["error"]),
            f"{row['trace']:.5f}",
            f"{row['signal_to_noise_per_rollout']:.2e}",
            _with_error(s["mean_norm"], s["mean_norm_error"]) if s else "",
        )
    return table


def sampled(found: dict[str, Any]) -> Table:
    """Exact against sampled; z is their distance in standard errors."""
    rows = [row for row in found["estimators"] if row["sampled"]]
    n = rows[0]["sampled"]["resamples"] if rows else 0
    columns = ("estimator", "tr Cov", "sampled", "z", "E|g|^2", "sampled", "z")
    table = _table(f"Exact against {n} resamples; (..) is one standard error, in the last digits", *columns)
    for row in rows:
        s = row["sampled"]
        table.add_row(
            _title(row),
            f"{row['trace']:.5f}",
            _with_error(s["trace"], s["trace_error"]),
            f"{z_score(row, 'trace'):+.1f}",
            f"{row['second']:.5f}",
            _with_error(s["second"], s["second_error"]),
            f"{z_score(row, 'second'):+.1f}",
        )
    return table


def _with_error(value: float, error: float) -> str:
    """0.13137(68) for 0.13137 +- 0.00068."""
    if error == 0:
        return f"{value:.5f}"
    return f"{value:.5f}({error * 1e5:.0f})"


def z_score(row: dict[str, Any], name: str) -> float:
    """(sampled - exact) in standard errors of both."""
    error = (row["sampled"][f"{name}_error"] ** 2 + row["error"] ** 2) ** 0.5
    return (row["sampled"][name] - row[name]) / error if error else 0.0


def critics(found: dict[str, Any]) -> Table:
    """GAE with a right and a wrong critic."""
    title = "What a critic does: one completion of a random prompt, V off by an error"
    table = _table(title, "V", "gamma", "lambda", "error", "|bias| / |grad J|", "tr Cov")
    for point in found["critic"]:
        table.add_row(
            point["baseline"],
            f"{point['gamma']:g}",
            f"{point['lam']:g}",
            f"{point['error']:g}",
            f"{point['relative_bias']:.1e}" if point["relative_bias"] < 1e-3 else f"{point['relative_bias']:.3f}",
            f"{point['trace']:.4f}",
        )
    return table


def print_recipes(console: Console, found: dict[str, Any]) -> None:
    """Every recipe's first gradient against grad J, with fresh data and with data one update old."""
    task = found["task"]
    p, before = (", ".join(f"{x:.3f}" for x in found[f"success_by_target{ago}"]) for ago in ("", "_one_update_ago"))
    console.print(
        f"At a tiny policy, seed {found['seed']}: L <= {task['seq_len']}, {task['digits']} digits, targets "
        f"{' and '.join(map(str, found['targets']))}, success {p}, |grad J| = {found['gradient_norm']:.5f}; "
        f"{found['completions']} completions for each recipe, every batch of them.",
        soft_wrap=True,
    )
    console.print(
        "bias = |E[g] - grad J| / |grad J|, c the best scale, rest = |E[g] - c grad J| / |E[g]|.",
        markup=False,
        soft_wrap=True,
    )
    stale = f"One update old: success was {before}, KL {found['kl_of_the_update']:.4f} nats"
    tables = (recipe_table(found, "fresh", "Fresh data"), recipe_table(found, "stale", stale))
    for table in tables:
        if table.row_count:
            console.print(table)
    for line in recipe_notes(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{found['wall_seconds']:.1f} s.")


def recipe_table(found: dict[str, Any], which: str, title: str) -> Table:
    """Bias over |grad J|, the best scale, and what no scale takes away."""
    columns = ("recipe", "bias", "c", "rest", "angle", "tr Cov")
    penalised = {"fresh": "penalised", "stale": "stale_penalised"}[which]
    charged = any(row[penalised] for row in found["recipes"])
    table = _table(title, *columns, *(["of J - KL"] if charged else []))
    for row in found["recipes"]:
        marked = escape(row["title"]) + " *" * (row["acceptance"] < 1)
        shown = [(marked, row[which], row[penalised])]
        shown += [(f"{marked}, F^-1 g", row["natural"], None)] if which == "fresh" else []
        for name, numbers, other in shown:
            if numbers is None:
                continue
            cells = (f"{numbers['scale']:.4f}", _share(numbers["rest"]), f"{numbers['angle']:.2f}\u00b0")
            other_cell = [_share(other["relative_bias"]) if other else ""] if charged else []
            table.add_row(name, _share(numbers["relative_bias"]), *cells, f"{numbers['trace']:.5g}", *other_cell)
    return table


def _share(value: float) -> str:
    """Rounding is no bias."""
    return "0" if value < ROUNDING else f"{value:.4f}"


ROUNDING = 1e-9


def recipe_notes(found: dict[str, Any]) -> list[str]:
    """What the marks mean, and what is missing."""
    rows, said = found["recipes"], []
    filtered = [row for row in rows if row["acceptance"] < 1]
    if filtered:
        chances = ", ".join(f"{row['acceptance']:.4f} for {row['title']}" for row in filtered)
        said.append(
            "* of the groups that its filter keeps, their prompts drawn from the two; the chance of a group, with "
            f"fresh data: {chances}."
        )
    if missing := [row["title"] for row in rows if row["stale"] is None]:
        said.append(f"No stale data, by the recipe's own rules: {', '.join(missing)}.")
    if any(row["penalised"] for row in rows):
        said.append("of J - KL: the bias against grad (J - coef KL(pi || ref)), ref another policy.")
    said.append(f"0 is rounding: less than {ROUNDING:g}.")
    return said
