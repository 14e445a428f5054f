"""Every advantage under every constraint, on one budget: the cells of a grid, and what each has reached."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pgprog.algorithms.recipes import find
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.compare import note_on_intervals, prepare
from pgprog.experiment.config import seeds_of
from pgprog.experiment.executor import Job, Progress, run_jobs
from pgprog.experiment.grid_config import ADVANTAGES, BASE, CONSTRAINTS, GridConfig, checked
from pgprog.experiment.loop import EVALUATION_COMPLETIONS, Result
from pgprog.stats import bootstrap_mean


@dataclass(frozen=True)
class Cell:
    """One advantage under one constraint: a run, or the reason why there is none."""

    advantage: str
    constraint: str
    job: Job | None
    reason: str | None = None

    @property
    def name(self) -> str:
        """Of the run, and of its folder."""
        return f"{self.advantage}-{self.constraint}"


def plan(config: GridConfig, directory: Path | None) -> list[Cell]:
    """Every cell, row by row; those without meaning with the reason that ``recipes.refuse`` gives.

    Raises: UsageError where names, seeds or settings cannot be, or no cell has a meaning.
    """
    checked(config.advantages, "--advantages", ADVANTAGES)
    checked(config.constraints, "--constraints", CONSTRAINTS)
    seeds = seeds_of(config.seeds, config.first_seed)
    cells = []
    for a in config.advantages:
        for c in config.constraints:
            cell = Cell(a, c, None)
            try:
                find(BASE, config.changes(a, c))
            except UsageError as error:
                cells.append(Cell(a, c, None, str(error).removeprefix(f"{BASE}: ")))
                continue
            where = None if directory is None else rundir.run_of(directory, cell.name)
            cells.append(Cell(a, c, Job(cell.name, config.run_config(a, c), seeds, where)))
    if not jobs_of(cells):  # then it is what all share, such as --set, or there is little to see
        raise UsageError(f"no cell of the grid can be run; {cells[0].name}: {cells[0].reason}")
    return cells


def jobs_of(cells: list[Cell]) -> list[Job]:
    """The runs of the cells that have one."""
    return [cell.job for cell in cells if cell.job is not None]


def run_grid(
    config: GridConfig,
    head: dict[str, Any],
    directory: Path,
    *,
    workers: int,
    checkpoint_every: int,
    on_progress: Callable[[Progress], None],
    on_idle: Callable[[], None] = lambda: None,
    came: Sequence[int] = (),
) -> dict[str, Any]:
    """Train every cell and write ``grid.json``; return what it says.

    Cells that stand finished in the directory are not repeated, others are gone on with; a signal that ``came`` ends
    the grid with what was reached. ``head`` (command, time, versions) opens the file; ``on_idle``, see ``run_jobs``.
    """
    cells = plan(config, directory)
    prepare(jobs_of(cells))
    results: dict[str, Result] = {}
    interrupted = False
    try:
        for job, result in run_jobs(jobs_of(cells), workers, checkpoint_every, on_progress, on_idle, came=came):
            if result.steps > 0:  # a signal may reach a run before its first step
                results[job.name] = result
    except KeyboardInterrupt:
        interrupted = True
    summary = head | summarise(config, cells, results) | {"interrupted": interrupted}
    rundir.write_json(directory / rundir.GRID, summary)
    return summary


def summarise(config: GridConfig, cells: list[Cell], results: dict[str, Result]) -> dict[str, Any]:
    """Everything that a grid has to say, for machines, the table and the heat map."""
    return {
        "config": asdict(config),
        "budget": {"rollouts_per_seed": config.rollouts},
        "evaluation": {"completions_per_target": EVALUATION_COMPLETIONS},
        "advantages": {name: ADVANTAGES[name]._asdict() for name in config.advantages},
        "constraints": {name: CONSTRAINTS[name]._asdict() for name in config.constraints},
        "cells": [cell_summary(config, cell, results.get(cell.name)) for cell in cells],
        "notes": notes(config, cells),
    }


def cell_summary(config: GridConfig, cell: Cell, result: Result | None) -> dict[str, Any]:
    """One cell; ``status`` is done, stopped (before its last step), missing (before its first) or refused."""
    said: dict[str, Any] = {
        "advantage": cell.advantage,
        "constraint": cell.constraint,
        "changes": list(config.changes(cell.advantage, cell.constraint)),
    }
    if cell.job is None:
        return said | {"status": "refused", "reason": cell.reason}
    run = cell.job.config
    said |= {"run": cell.name, "exceptions": run.exceptions(), "steps_planned": run.steps}
    if result is None:
        return said | {"status": "missing"}
    return said | {
        "status": "done" if result.steps == run.steps else "stopped",
        "steps": result.steps,
        "rollouts": result.rollouts,
        "tokens": float(np.mean(result.tokens)),
        "wall_seconds": result.wall_seconds,
        "success": bootstrap_mean(result.success).as_dict(result.success),
    }


def notes(config: GridConfig, cells: list[Cell]) -> list[str]:
    """What a reader must know before he believes the numbers."""
    runs = jobs_of(cells)
    first = runs[0].config
    said = [
        f"Every cell is {BASE} with its row's and its column's changes, {first.prompts} prompts x {first.completions} "
        f"completions a step, {len(runs[0].seeds)} seeds on the same prompts.",
        note_on_intervals(config.seeds),
    ]
    where: dict[str, list[str]] = {}
    for job in runs:
        for exception in job.config.exceptions():
            where.setdefault(exception, []).append(job.name)
    return said + [f"In {len(names)} cells: {exception}." for exception, names in where.items()]
