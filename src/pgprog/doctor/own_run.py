"""``pgprog doctor --run DIR``: what the instruments of a run of one's own say, and the mode that it points to."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pgprog.experiment import rundir
from pgprog.experiment.columns import rows_with
from pgprog.experiment.config import RunConfig, from_json, validate
from pgprog.experiment.watch import facts_of, warnings_in

ALWAYS = ("success", "entropy", "grad_norm", "length_wrong")


def examined(directory: Path) -> dict[str, Any]:
    """Every warning of a run, seed by seed, and the last reading of its instruments.

    Raises: UsageError where the directory is no run, or lacks a column that an instrument needs: which one, and since
    which version it is written.
    """
    rows_with(directory, ALWAYS[:3])
    path = directory / rundir.CONFIG
    config = validate(from_json(RunConfig, rundir.read_json(path), path))
    rows_with(directory, wanted(config))
    rows = rundir.read_rows(directory / rundir.METRICS)
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    return {
        "run": str(directory),
        "name": config.name,
        "steps": max(row["step"] for row in rows),
        "steps_planned": config.steps,
        "seeds": {str(seed): of_seed([row for row in rows if row["seed"] == seed], config) for seed in seeds},
    }


def wanted(config: RunConfig) -> tuple[str, ...]:
    """The columns that the warnings of this run read."""
    recipe = config.choices
    names = list(ALWAYS)
    names += ["frac_reward_zero_std"] if config.completions > 1 else []
    names += ["explained_variance"] if recipe.critic != "none" else []
    names += ["token_ratio_q99", "ess"] if recipe.gradient_steps > 1 or recipe.sampling.age > 0 else []
    names += ["sampled"] if recipe.sampling.dynamic > 1 else []
    return tuple(names)


def of_seed(rows: list[dict[str, Any]], config: RunConfig) -> dict[str, Any]:
    """The warnings of one seed, and the last value of each column that they read."""
    last: dict[str, float] = {}
    for row in rows:
        last |= {name: row[name] for name in wanted(config) if name in row}
    return {"last": last, "warnings": [asdict(warned) for warned in warnings_in(rows, facts_of(config))]}
