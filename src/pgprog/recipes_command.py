"""``pgprog recipes``: its arguments, and what it does; free of torch but for ``diff``."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from pgprog.algorithms.recipes import (
    AXES,
    LADDER_RECIPES,
    LIBRARIES,
    PAPERS,
    RECIPES,
    Recipe,
    described,
    differences,
    find,
)
from pgprog.errors import UsageError

GROUPS = {"ladder": LADDER_RECIPES, "papers": PAPERS, "libraries": LIBRARIES}


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """Named algorithms and library defaults by axis; one in full; or what changes between two.

    Example: pgprog recipes grpo_kl

    Example: pgprog recipes diff trl:grpo verl:grpo
    """

    words: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME | diff NAME NAME]", help_behavior_hint="")
    ] = ()
    """Nothing, to list them all; a name, to show that one; diff and two names, to compare them."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change one choice of what is shown, or of both that are compared, as in constraint.clip_high=0.28."""
    json: bool = False
    """Print JSON, in place of tables."""


def recipes(args: Recipes) -> int:
    """Run ``pgprog recipes``."""
    match args.words:
        case ():
            if args.set:
                raise UsageError(f"--set {args.set[0]} without a recipe: name one, as in pgprog recipes grpo")
            return list_all(args.json)
        case ("diff", *names):
            if len(names) != 2:
                given = f"{len(names)} ({', '.join(names)})" if names else "none"
                raise UsageError(
                    f"diff compares two recipes and got {given}: name two, as in pgprog recipes diff trl:grpo verl:grpo"
                )
            return diff(find(names[0], args.set), find(names[1], args.set), args.set, args.json)
        case (name,):
            return show(find(name, args.set), args.json)
    raise UsageError(
        f"recipes {' '.join(args.words)}: give one name, or diff and two, as in pgprog recipes diff trl:grpo verl:grpo"
    )


def list_all(as_json: bool) -> int:
    """One row per recipe."""
    if as_json:
        print(json.dumps({group: [facts(recipe) for recipe in them] for group, them in GROUPS.items()}))
        return 0
    from rich.console import Console

    from pgprog.report.recipe_tables import print_list

    print_list(Console(), GROUPS)
    return 0


def show(recipe: Recipe, as_json: bool) -> int:
    """One recipe, every choice of it."""
    if as_json:
        print(json.dumps(facts(recipe)))
        return 0
    from rich.console import Console

    from pgprog.report.recipe_tables import print_recipe

    print_recipe(Console(), recipe)
    return 0


def diff(a: Recipe, b: Recipe, changes: tuple[str, ...], as_json: bool) -> int:
    """Every choice on which two differ, and what both compute on one batch."""
    from pgprog.report.recipe_tables import MEANINGS, print_diff, say

    differing = differences(a, b)
    completions = {"a": a.rollouts, "b": b.rollouts} if a.rollouts != b.rollouts else None
    if not (differing or as_json):
        from rich.console import Console

        say(Console(), f"{a.name} and {b.name} are the same: no choice differs.")
        if completions:
            say(Console(), f"Completions per prompt do: {a.rollouts} and {b.rollouts}, by paper or library.")
        return 0
    import torch
    from rich.console import Console

    from pgprog.exact import diff as batch

    torch.set_num_threads(1)
    found = batch.as_dict(batch.compare(a, b)) | {
        "recipes": {"a": facts(a), "b": facts(b)},
        "differences": [{"choice": path, "a": x, "b": y, "meaning": MEANINGS[path]} for path, x, y in differing],
        "completions_per_prompt": completions,
        "notes": [*(f"--set {change} holds for both." for change in changes), *batch.notes(a, b)],
    }
    if as_json:
        print(json.dumps(found))
    else:
        print_diff(Console(), found)
    return 0


def facts(recipe: Recipe) -> dict[str, Any]:
    """A recipe as data: what it says of itself, each axis in words, and every choice.

    ``changed`` is what --set has made of it; what it says of its bias and its equals was said before that.
    """
    return {
        "name": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "equals": recipe.equals,
        "bias": recipe.bias,
        "notes": recipe.notes,
        "rollouts": recipe.rollouts,
        "extra_models": list(recipe.extra_models),
        "extra_passes": list(recipe.extra_passes),
        "axes": described(recipe),
        "changed": {path: {"was": was, "is": value} for path, was, value in differences(RECIPES[recipe.name], recipe)},
        "choices": {axis: dataclasses.asdict(getattr(recipe, axis)) for axis in AXES},
    }
