"""``pgprog grid``: what it does."""

import json
from collections import defaultdict

import torch
from rich.console import Console

from pgprog.arguments import Grid
from pgprog.commands import (
    check_checkpoint_every,
    configuration,
    default_directory,
    import_for_reports,
    part,
    progress_bars,
    resumed,
    say,
    workers_of,
)
from pgprog.experiment import rundir
from pgprog.experiment.executor import Progress, exit_code, stop_on_interrupt
from pgprog.experiment.grid import jobs_of, plan, run_grid
from pgprog.experiment.grid_config import ADVANTAGES, GridConfig
from pgprog.experiment.learner import make_task
from pgprog.report.grid_tables import print_grid


def grid(args: Grid) -> int:
    """Run ``pgprog grid``."""
    torch.set_num_threads(1)
    check_checkpoint_every(args.checkpoint_every)
    workers = workers_of(args.workers)
    if args.resume is None:
        config = part(args, GridConfig)
        content = configuration(config)
    else:
        config, content = resumed(args, GridConfig)
    make_task(config)
    cells = plan(config, None)
    where = args.resume or args.out or default_directory("grid")
    console = Console(stderr=args.json)
    opened = rundir.open_run(where, overwrite=args.overwrite, resume=args.resume is not None)
    with opened as directory, stop_on_interrupt() as came:
        if args.resume is None:
            rundir.write_json(directory / rundir.CONFIG, content)
        say(
            console,
            f"{len(config.advantages)} advantages x {len(config.constraints)} constraints, {len(jobs_of(cells))} of "
            f"{len(cells)} cells with a meaning; {config.rollouts:,} rollouts x {config.seeds} seeds each",
        )
        with progress_bars(console) as bars:  # one per row, of the steps of all its cells
            steps: dict[str, dict[str, int]] = defaultdict(dict)
            row_of = {cell.name: cell.advantage for cell in cells}
            totals = {
                row: sum(c.job.config.steps for c in cells if c.job and c.advantage == row) for row in row_of.values()
            }
            tasks = {row: bars.add_task(ADVANTAGES[row].label, total=totals[row], success="") for row in totals}

            def on_progress(p: Progress) -> None:
                row = row_of[p.name]
                steps[row][p.name] = p.step
                bars.update(tasks[row], completed=sum(steps[row].values()), success=f"success {p.success:.3f}")

            summary = run_grid(
                config,
                content,
                directory,
                workers=workers,
                checkpoint_every=args.checkpoint_every,
                on_progress=on_progress,
                on_idle=lambda: import_for_reports("pgprog.report.grid_figures"),
                came=came,
            )
        from pgprog.report.grid_figures import draw_grid  # late, as it brings matplotlib

        draw_grid(directory, summary)
    if args.json:
        print(json.dumps(summary))
        return exit_code(came)
    print_grid(console, summary)
    say(console, f"Saved in {directory}: grid.json, grid.png (and .svg)")
    if summary["interrupted"]:
        say(console, f"Go on: pgprog grid --resume {directory}")
    say(console, f"Reproduce: {summary['command']}")
    return exit_code(came)
