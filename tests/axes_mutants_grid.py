"""Faults planted in the grid, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants_grid.py [WORD ...]
"""

import sys

import mutants
from mutants import Mutant

CONFIG, GRID, FIGURE = "experiment/grid_config.py", "experiment/grid.py", "report/grid_figures.py"
TESTS = "test_grid.py"

GRID_MUTANTS = [
    # ---- the budget ----
    Mutant(
        "a prompt is one rollout",
        CONFIG,
        "validate(run).most_rollouts_per_step",
        "validate(run).prompts",
        TESTS,
    ),
    Mutant(
        "draws of a filter are free",
        CONFIG,
        "validate(run).most_rollouts_per_step",
        "validate(run).rollouts_per_step",
        TESTS,
    ),
    Mutant(
        "each epoch is paid as a batch",
        CONFIG,
        "replace(run, steps=steps)",
        "replace(run, steps=max(1, steps // run.choices.gradient_steps))",
        TESTS,
    ),
    # ---- what a cell changes ----
    Mutant(
        "methods without groups sample one completion",
        CONFIG,
        '("sampling.group=true",)',
        "()",
        TESTS,
    ),
    Mutant(
        "the row's changes are lost",
        CONFIG,
        "*ADVANTAGES[advantage].changes, *CONSTRAINTS",
        "*CONSTRAINTS",
        TESTS,
    ),
    Mutant("the column's changes are lost", CONFIG, "*CONSTRAINTS[constraint].changes, ", "", TESTS),
    Mutant(
        "--set comes first and is undone",
        CONFIG,
        "(*EVERY_CELL, *ADVANTAGES[advantage].changes, *CONSTRAINTS[constraint].changes, *self.set)",
        "(*EVERY_CELL, *self.set, *ADVANTAGES[advantage].changes, *CONSTRAINTS[constraint].changes)",
        TESTS,
    ),
    Mutant(
        "a clip sees fresh data alone", CONFIG, '("constraint.kind=clip", _STALE)', '("constraint.kind=clip",)', TESTS
    ),
    # ---- cells ----
    Mutant(
        "a combination without meaning is left out",
        GRID,
        'cells.append(Cell(a, c, None, str(error).removeprefix(f"{BASE}: ")))',
        "pass",
        TESTS,
    ),
    Mutant(
        "rows and columns change places",
        GRID,
        'return f"{self.advantage}-{self.constraint}"',
        'return f"{self.constraint}-{self.advantage}"',
        TESTS,
    ),
    Mutant("a grid of nothing but refusals is made", GRID, "if not jobs_of(cells):", "if False:", TESTS),
    Mutant("a run without a step is a result", GRID, "if result.steps > 0:", "if result.steps >= 0:", TESTS),
    Mutant(
        "a cell that was stopped is done",
        GRID,
        '"done" if result.steps == run.steps else',
        '"done" if True else',
        TESTS,
    ),
    Mutant(
        "cells are made anew on resume", GRID, "rundir.run_of(directory, cell.name)", "directory / cell.name", TESTS
    ),
    Mutant("Ctrl-C goes unsaid", GRID, "interrupted = True", "interrupted = False", TESTS),
    Mutant(
        "the score of targets as sums",
        GRID,
        "bootstrap_mean(result.success).as_dict(result.success)",
        "bootstrap_mean(result.success_sum_targets).as_dict(result.success_sum_targets)",
        TESTS,
    ),
    # ---- the figure ----
    Mutant(
        "the heat map is transposed",
        FIGURE,
        "[[mean(cells[row, column]) for column in columns] for row in rows]",
        "[[mean(cells[row, column]) for row in rows] for column in columns]",
        TESTS,
    ),
    Mutant("a refused cell looks like a missing one", FIGURE, '"///" if', '"" if', TESTS),
    Mutant("hatches at another place", FIGURE, "corner = (x - 0.5, y - 0.5)", "corner = (y - 0.5, x - 0.5)", TESTS),
    # ---- what may be deleted ----
    Mutant(
        "a grid's file is no file of a run",
        "experiment/rundir.py",
        "(config|result|summary|grid)",
        "(config|result|summary)",
        TESTS,
    ),
    Mutant(
        "a grid's figure is no file of a run", "experiment/rundir.py", "gradient_noise|grid)", "gradient_noise)", TESTS
    ),
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = GRID_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
