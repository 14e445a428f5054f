"""Tables of ``pgprog recipes``, for the terminal; and, in one place, what each choice means. Free of torch."""

import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pgprog.algorithms.recipes import AXES, RECIPES, Recipe, described, differences

MEANINGS = {
    "advantage.baseline": "what is taken off a completion's reward",
    "advantage.scale": "the std that r - mean is divided by; it weighs prompts by their difficulty",
    "advantage.ddof": "that std divides by n - ddof",
    "advantage.eps": "added to that std: shrinks A, most where rewards hardly differ",
    "advantage.credit": "a token is paid for the whole completion, or for what follows it",
    "advantage.whiten": "A is standardised over the batch; over tokens, long completions weigh more",
    "advantage.gamma": "discount per token",
    "advantage.lam": "GAE: 1 trusts the return, 0 trusts the critic",
    "constraint.kind": "clip stops a gradient beyond the bounds, cispo bounds its weight",
    "constraint.ratio": "new / old probability of each token, or of the completion",
    "constraint.clip_low": "the ratio's lower bound is 1 less this",
    "constraint.clip_high": "the ratio's upper bound is 1 plus this",
    "constraint.dual_clip": "where A < 0, a ratio over this gives no gradient",
    "constraint.log_ratio_limit": "a guard against overflow: no gradient beyond",
    "constraint.max_kl": "the trust region's bound, in nats",
    "kl.place": "a penalty for leaving the reference, off the reward or in the loss",
    "kl.level": "charged to the whole completion, or to each token from there on",
    "kl.estimator": "how a token's KL is estimated; it decides which gradient a KL in the loss has",
    "kl.coef": "weight of that penalty",
    "kl.limit": "clamps each token's estimate",
    "aggregation.denominator": "what the sum over tokens is divided by: who weighs how much",
    "aggregation.length": "the constant of constant_length, in tokens",
    "sampling.group": "several completions of each prompt, or one",
    "sampling.epochs": "passes over each batch",
    "sampling.minibatches": "gradient steps per pass: all but the first see stale data",
    "sampling.dynamic": "groups of equal rewards are replaced, from at most so many batches",
    "sampling.temperature": "of the policy itself",
    "sampling.age": "the data are so many updates old",
    "sampling.sampler_dtype": "precision of the sampler's copy",
    "sampling.sampler_temperature": "of the sampler alone",
    "sampling.sampler_top_p": "the sampler's nucleus",
    "sampling.correction": "importance weight of policy against sampler",
    "sampling.cap": "the largest such weight",
}
"""Of each choice, in a line."""

STATES = {"fresh": "Fresh data: the first gradient, ratios 1", "stale": "Stale data: ratios {least:.2f} to {most:.2f}"}
WIDE = 100  # columns
NAMES = 28  # columns, of choices
NOTHING = 1e-12  # relative change that is rounding


def print_list(console: Console, groups: Mapping[str, Sequence[Recipe]]) -> None:
    """Two tables, a row per recipe in each: the axes of what is computed; and the data, the models and the source."""
    axes = _table("What is computed", "recipe", "advantage", "constraint, KL", "aggregation")
    data = _table("From which data", "recipe", "sampling", "extra models", "source, arXiv")
    for group, recipes in groups.items():
        for table in (axes, data):
            table.add_row(f"[bold]{group}[/bold]")
        for recipe in recipes:
            words = described(recipe)
            name = recipe.name if console.width >= WIDE else _broken(recipe.name)
            axes.add_row(*map(escape, (name, words["advantage"], _bounds(recipe), recipe.aggregation.denominator)))
            sampling = words["sampling"].replace("G per prompt", f"G = {recipe.rollouts}")
            data.add_row(*map(escape, (name, sampling, ", ".join(recipe.extra_models) or "-", _source(recipe))))
        for table in (axes, data):
            table.add_section()
    axes.columns[-1].no_wrap = data.columns[1].no_wrap = True
    if console.width < WIDE:  # what most rows have stays on one line
        axes.columns[2].max_width, data.columns[2].max_width = 17, 9
    for table in (axes, data):
        table.padding = (0, 0, 0, 1)
        table.columns[0].no_wrap = True
        console.print(table)
    say(console, "A ratio is of a token where no sequence is named.")
    say(console, "G is the paper's, or the library's default; runs take --group-size (default 8).")
    say(console, "One in full, with its equation, bias, passes and notes: pgprog recipes grpo")
    say(console, "Two compared: pgprog recipes diff trl:grpo verl:grpo")


def _bounds(recipe: Recipe) -> str:
    """The constraint and the KL in fewer words than ``described`` has."""
    kl, said = recipe.kl, []
    if recipe.constraint.kind != "none":
        said.append(described(recipe)["constraint"].replace(", token", ""))
    if kl.place != "none":
        said.append(f"KL {kl.coef:g} {kl.estimator}, " + ("loss" if kl.place == "loss" else f"{kl.level} reward"))
    return "; ".join(said) or "none"


def _source(recipe: Recipe) -> str:
    """The paper or the library's version, without equations and settings: up to the first comma after a number."""
    found = re.match(r"\D*\d[^,;]*", recipe.paper.replace("arXiv:", ""))
    return found.group() if found else recipe.paper


def _broken(name: str) -> str:
    """A long name on two lines, cut at an underscore."""
    return "\n".join(line.replace(" ", "") for line in textwrap.wrap(name.replace("_", "_ "), 18))


def print_recipe(console: Console, recipe: Recipe) -> None:
    """What it says of itself, then every choice by axis, with what else it could be."""
    console.print(f"[bold]{escape(recipe.title)}[/bold]  {escape(recipe.name)}", highlight=False)
    changed = [f"{path} is {shown(x)}, was {shown(was)}" for path, was, x in differences(RECIPES[recipe.name], recipe)]
    facts = {
        "changed": "; ".join(changed) + "; what follows was said of it unchanged" if changed else "",
        "from": recipe.paper,
        "equals": recipe.equals,
        "bias": recipe.bias,
        "notes": recipe.notes,
        "completions per prompt": str(recipe.rollouts),
        "extra models": ", ".join(recipe.extra_models) or "none",
        "extra passes": ", ".join(recipe.extra_passes) or "none",
    }
    table = Table(box=None, show_header=False, padding=(0, 1))
    for label, value in facts.items():
        if value:
            table.add_row(label, escape(value))
    console.print(table)
    words = described(recipe)
    for axis in AXES:
        console.print(_choices(axis, words[axis], getattr(recipe, axis)))
    say(console, "* not the default. Change a choice: --set axis.choice=value, as in --set constraint.clip_high=0.28")


def _choices(axis: str, words: str, record: Any) -> Table:
    table = _table(f"{axis}: {words}", "choice", "value", "or", "what it is")
    hints = get_type_hints(type(record))
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        usual = value == f.default
        table.add_row(
            f.name,
            shown(value) + ("" if usual else " *"),
            escape(_others(value, f.default, hints[f.name])),
            escape(MEANINGS[f"{axis}.{f.name}"]),
            style=None if usual else "bold",
        )
    return table


def _others(value: Any, default: Any, hint: Any) -> str:
    """What --set would take, the default first."""
    if get_origin(hint) is Literal or hint is bool:
        options = [default, *(o for o in get_args(hint) or (False, True) if o != default)]
        return ", ".join(shown(option) for option in options if option != value)
    kinds = get_args(hint) or (hint,)
    kind = "an integer" if int in kinds else "a number"
    usual = [] if value == default else [shown(default)]
    return ", ".join([*usual, kind, *(["none"] if type(None) in kinds and None not in (value, default) else [])])


def print_diff(console: Console, found: dict[str, Any]) -> None:
    """The choices that differ; both on the fixed batch; and what each choice does alone."""
    a, b = found["recipes"]["a"]["name"], found["recipes"]["b"]["name"]
    if not found["differences"]:
        say(console, f"{a} and {b} are the same: no choice differs.")
        return
    batch, completions = found["batch"], found["completions_per_prompt"]
    P, G = len(batch["targets"]), batch["group_size"]
    heads = (a, b) if console.width >= WIDE else (_broken(a), _broken(b))
    table = _table("What differs", "choice", *heads, "what it is")
    table.columns[0].no_wrap = True
    for row in found["differences"]:
        table.add_row(*map(escape, (row["choice"], shown(row["a"]), shown(row["b"]), row["meaning"])))
    if completions:
        both = f"by the paper or the library's defaults; below, {G} for both"
        table.add_row("completions per prompt", str(completions["a"]), str(completions["b"]), both)
    console.print(table)
    for side in ("a", "b"):
        for line in _of_itself(found["recipes"][side]):
            say(console, line, wrap=True)
    lengths = [length for row in batch["lengths"] for length in row]
    say(
        console,
        f"On one fixed batch, {P} prompts x {G} completions of {min(lengths)} to {max(lengths)} tokens, "
        f"{min(batch['successes'])} to {max(batch['successes'])} of a group right; angles to the exact gradient:",
        wrap=True,
    )
    for state in STATES:
        console.print(_sides(found, state, a, b, console.width))
    console.print(_attributions(found["attributions"], a))
    for note in (*_left_out(found["attributions"]), *found["notes"], *_NOTES):
        say(console, note, wrap=True)


def _of_itself(recipe: dict[str, Any]) -> list[str]:
    """What it equals, in the library's own names, and its notes; both are of the recipe without --set."""
    before = " before --set" if recipe["changed"] else ""
    return [
        f"{recipe['name']}{before} {word}: {recipe[key]}"
        for key, word in (("equals", "equals"), ("notes", "notes"))
        if recipe[key]
    ]


_NOTES = (
    "Stale ratios are wider than a healthy run's, so that every bound acts. The angle to grad J on one batch is mostly "
    "sampling noise, common to both; for bias alone: pgprog exact. Entropy bonus and clipping of the norm are left "
    "out. Adam does not see a constant factor of the gradient; SGD, and a bound on its norm, do.",
)


def _sides(found: dict[str, Any], state: str, a: str, b: str, width: int) -> Table:
    title = STATES[state].format(**found["batch"]["ratios"][state])
    table = _table(title, "", "loss", "|g|", "angle to grad J", "bounded")
    if width < WIDE:
        a, b = _broken(a), _broken(b)
    for name, side in ((a, "a"), (b, "b")):
        m = found[side][state]
        bounded = "-" if m["clip_frac"] is None else f"{m['clip_frac']:.1%}"
        table.add_row(escape(name), f"{m['loss']:z.6f}", f"{m['norm']:.6f}", _degrees(m["angle"]), bounded)
    table.add_row("exact gradient, grad J", "", f"{found['exact'][state]['norm']:.6f}", "", "")
    change = found["b_against_a"][state]
    table.add_row(f"{escape(b)} against {escape(a)}", "", _ratio(change), _degrees(change["angle"]), "", style="bold")
    return _right(table)


def _attributions(rows: Sequence[dict[str, Any]], a: str) -> Table:
    table = _table(f"Which matters: {a} with one choice changed", "choice", "fresh |g|", "angle", "stale |g|", "angle")
    for row in rows:
        if row["effect"] is None:
            continue
        cells = []
        for state in STATES:
            change = row["effect"][state]
            same = change["change"] is not None and change["change"] < NOTHING
            cells += ["same", ""] if same else [_ratio(change), _degrees(change["angle"])]
        together = textwrap.fill(_together(row["choices"]), NAMES, break_long_words=False)
        table.add_row(together, *cells)
    table.columns[0].no_wrap = True
    return _right(table)


def _left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{_together(row['choices'])} is not in these numbers: {row['left_out']}." for row in rows if row["left_out"]
    ]


def _together(choices: Sequence[str]) -> str:
    """kl.place, level, coef for choices that are changed at once."""
    words, axis = [], ""
    for choice in choices:
        own, _, name = choice.partition(".")
        words.append(name if own == axis else choice)
        axis = own
    return ", ".join(words)


def _ratio(change: dict[str, Any]) -> str:
    return "none" if change["ratio"] is None else f"x {change['ratio']:.5f}"


def _degrees(angle: float | None) -> str:
    """Two decimals, or a power of ten for what they would hide."""
    if angle is None:
        return "none"
    return f"{angle:.2f}\u00b0" if angle >= 0.01 or angle < 1e-5 else f"{angle:.0e}\u00b0"


def shown(value: Any) -> str:
    """As --set takes it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def say(console: Console, text: str, wrap: bool = False) -> None:
    """Print a line as it is: no markup; nothing broken that may be copied, unless it is prose."""
    console.print(text, markup=False, highlight=False, soft_wrap=not wrap)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1))
    for column in columns:
        table.add_column(escape(column), overflow="fold")
    return table


def _right(table: Table) -> Table:
    """All but the first column."""
    for column in table.columns[1:]:
        column.justify = "right"
    return table
