"""The command line: ``pgprog train``, ``pgprog compare``, ``pgprog sample``."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pgprog.errors import UsageError, choose
from pgprog.experiment.config import (
    GROUP_METHODS,
    LADDER,
    TITLES,
    CompareConfig,
    RunConfig,
    Settings,
    run_config_from_json,
    validate,
)

T = TypeVar("T", bound=Settings)
INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


@dataclass(frozen=True, kw_only=True)
class Train(RunConfig):
    """Train one algorithm of the ladder on the digit-sum task.

    Example: pgprog train --algo grpo --steps 400
    """

    group_steps: int | None = None
    """Batches where --algo is rloo or grpo, in place of --steps."""
    seed: int = 0
    """Decides the initial policy, the prompts and the noise."""
    out: Path | None = None
    """Run directory [default: a new one below runs/]."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    json: bool = False
    """Print the summary as JSON, in place of words."""


@dataclass(frozen=True, kw_only=True)
class Compare(CompareConfig):
    """Train several algorithms across seeds, on the same prompts, and compare score, cost and gradient noise.

    Example: pgprog compare --seeds 5 --steps 1500
    """

    workers: int | None = None
    """Processes, one thread each [default: one per core]."""
    out: Path | None = None
    """Run directory [default: a new one below runs/]."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    json: bool = False
    """Print the summary as JSON, in place of tables."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Show completions of a trained policy, their sums and rewards.

    Example: pgprog sample --run runs/grpo --target 23
    """

    run: Path
    """Directory of a run, or of a comparison with --algo."""
    target: int
    """What the digits are to sum to."""
    algo: str | None = None
    """Which algorithm of a comparison."""
    n: int = 8
    """How many completions."""
    seed: int | None = None
    """Which seed's policy [default: the run's first]."""
    noise_seed: int = 0
    """Decides which completions are drawn."""
    json: bool = False
    """Print JSON, in place of a table."""


def train(args: Train) -> int:
    """Run ``pgprog train``."""
    steps = args.group_steps if args.group_steps is not None and args.algo in GROUP_METHODS else args.steps
    config = validate(dataclasses.replace(part(args, RunConfig), steps=steps))
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed {args.seed} is out of range: give an integer in [0, 2**63)")
    import torch

    from pgprog.experiment import rundir
    from pgprog.experiment.loop import make_task, run, step_options

    torch.set_num_threads(1)
    make_task(config), step_options(config, None)  # refuse what cannot run before a directory is made
    directory = rundir.create(args.out or default_directory(config.algo), args.overwrite)
    head = {"command": rundir.command(), "created": rundir.now(), "environment": rundir.environment()}
    rundir.write_json(directory / rundir.CONFIG, config.as_dict() | {"seeds": [args.seed]} | head)
    console = Console(stderr=args.json)
    with stop_on_interrupt() as stopped, progress_bars(console) as bars:
        bar = bars.add_task(TITLES[config.algo], total=config.steps, success="")

        def on_step(step: int, metrics: dict[str, Any]) -> None:
            bars.update(bar, completed=step, success=f"success {metrics['success'].mean().item():.3f}")

        result = run(config, [args.seed], directory, on_step, lambda: bool(stopped))
    summary = head | {
        "config": config.as_dict(),
        "seed": args.seed,
        "interrupted": bool(stopped),
        "result": asdict(result),
    }
    rundir.write_json(directory / rundir.SUMMARY, summary)
    if args.json:
        print(json.dumps(summary))
    else:
        done = f"{result.steps} of {config.steps} steps" if stopped else f"{result.steps} steps"
        console.print(
            f"{TITLES[config.algo]}, seed {args.seed}: success {result.success[0]:.3f} over all targets after {done}"
        )
        console.print(f"{result.rollouts:,} rollouts, {result.tokens[0]:,} tokens, {result.wall_seconds:.1f} s")
        for exception in config.exceptions():
            console.print(f"Exception from the shared settings: {exception}.", markup=False)
        console.print(
            f"Saved in {directory}. See completions: pgprog sample --run {directory} --target 23", soft_wrap=True
        )
    return INTERRUPTED if stopped else 0


def compare(args: Compare) -> int:
    """Run ``pgprog compare``."""
    for algo in args.algos:
        choose("algorithm", algo, LADDER)
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers {args.workers} is too few: give 1 or more")
    import torch

    from pgprog.experiment import compare as comparison
    from pgprog.experiment import rundir
    from pgprog.experiment.loop import make_task
    from pgprog.report.figures import draw
    from pgprog.report.tables import print_comparison

    torch.set_num_threads(1)
    config = part(args, CompareConfig)
    make_task(config)
    main, equal, budget = comparison.plan(config, None)
    directory = rundir.create(args.out or default_directory("compare"), args.overwrite)
    console = Console(stderr=args.json)
    console.print(
        f"{len(main)} algorithms x {config.seeds} seeds, {config.prompts} prompts a step; "
        + ", ".join(f"{TITLES[job.name]} {job.config.steps} steps" for job in main)
        + f"; then at {budget:,} rollouts each"
    )
    with progress_bars(console) as bars:
        tasks = {
            job.name: bars.add_task(job.name.replace("_", " ").replace("-", " "), total=job.config.steps, success="")
            for job in (*main, *equal)
        }
        summary = comparison.compare(
            config,
            directory,
            args.workers or cores(),
            lambda p: bars.update(tasks[p.name], completed=p.step, success=f"success {p.success:.3f}"),
            lambda job: None,
        )
    figures = draw(directory, summary) if summary["algorithms"] else []
    if args.json:
        print(json.dumps(summary))
    else:
        print_comparison(console, summary)
        shown = ", ".join(path.name for path in figures)
        console.print(f"Saved in {directory}: summary.json, curves.csv, {shown} (and .svg)", soft_wrap=True)
        console.print(f"Reproduce: {summary['command']}", markup=False, soft_wrap=True)
    return INTERRUPTED if summary["interrupted"] else 0


def sample(args: Sample) -> int:
    """Run ``pgprog sample``."""
    if args.n < 1:
        raise UsageError(f"--n {args.n} is too few: give 1 or more")
    import torch
    from rich.table import Table

    from pgprog.experiment import rundir
    from pgprog.experiment.loop import load_policy
    from pgprog.noise import ReplicaGenerator

    directory = args.run
    if (directory / "runs").is_dir():
        algos = sorted(path.name for path in (directory / "runs").iterdir())
        if args.algo is None:
            raise UsageError(
                f"--run {directory} is a comparison: name a run of it with --algo, one of {', '.join(algos)}"
            )
        directory = directory / "runs" / choose("run", args.algo, algos)
    config = run_config_from_json(rundir.read_json(directory / rundir.CONFIG), directory / rundir.CONFIG)
    policy, seeds = load_policy(directory, config)
    seed = seeds[0] if args.seed is None else args.seed
    if seed not in seeds:
        raise UsageError(f"--seed {seed} was not trained in {directory}: choose one of {', '.join(map(str, seeds))}")
    if not 0 <= args.target <= policy.task.max_target:
        raise UsageError(
            f"--target {args.target} is out of reach: {config.seq_len} digits sum to 0..{policy.task.max_target}"
        )
    if not 0 <= args.noise_seed < 2**63:
        raise UsageError(f"--noise-seed {args.noise_seed} is out of range: give an integer in [0, 2**63)")
    targets = torch.full((len(seeds), 1), args.target)
    tokens = policy.sample(targets, args.n, ReplicaGenerator([args.noise_seed] * len(seeds), "evaluate"))
    k, task = seeds.index(seed), policy.task
    kept = task.mask(tokens) & (tokens != task.eos)
    rows = [
        {"completion": row[digits].tolist(), "sum": int(row[digits].sum()), "reward": reward, "success": success}
        for row, digits, reward, success in zip(
            tokens[k, 0],
            kept[k, 0],
            task.reward(targets, tokens)[k, 0].tolist(),
            task.success(targets, tokens)[k, 0].tolist(),
            strict=True,
        )
    ]
    if args.json:
        print(json.dumps({"run": str(directory), "seed": seed, "target": args.target, "completions": rows}))
        return 0
    table = Table(title=f"{TITLES[config.algo]}, seed {seed}, target {args.target}")
    for column in ("completion", "sum", "reward"):
        table.add_column(column, justify="right")
    for entry in rows:
        style = "green" if entry["success"] else None
        table.add_row(" ".join(map(str, entry["completion"])), str(entry["sum"]), f"{entry['reward']:g}", style=style)
    Console().print(table)
    return 0


def part(args: Any, kind: type[T]) -> T:
    """The configuration that is part of a command's arguments."""
    return kind(**{name: getattr(args, name) for name in kind.__dataclass_fields__})


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_directory(name: str) -> Path:
    """A new directory below runs/, named by time."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"


def progress_bars(console: Console) -> Progress:
    """Bars with the live success rate."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[success]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """Note Ctrl-C in the list instead of raising; a second one is Python's own again."""
    seen: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: object) -> None:
        seen.append(signum)
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, previous)


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "train": (Train, train),
    "compare": (Compare, compare),
    "sample": (Sample, sample),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point: returns the exit code, 2 for a mistake of the user's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = parse(arguments)
        command = next(run for kind, run in COMMANDS.values() if isinstance(parsed, kind))
        return command(parsed)
    except UsageError as error:
        print(f"pgprog: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pgprog: interrupted", file=sys.stderr)
        return INTERRUPTED


def parse(arguments: list[str]) -> Any:
    """The typed arguments of a command; what cannot be parsed becomes a UsageError, in place of tyro's framed page."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _parse(arguments)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        # A title, then what is wrong, then (below a rule) hints; in a frame where the terminal has one.
        lines = [line.strip("│╭╮╰╯─ \n") for line in said.getvalue().splitlines()][1:]
        message = list(takewhile(lambda line: line.strip("-"), dropwhile(lambda line: not line.strip("-"), lines)))
        command = arguments[0] if arguments and arguments[0] in COMMANDS else None
        raise UsageError(
            f"{' '.join(message).rstrip('.')}; see {' '.join(filter(None, ('pgprog', command, '--help')))}"
        ) from None


def _parse(arguments: list[str]) -> Any:
    return tyro.extras.subcommand_cli_from_dict(
        {name: kind for name, (kind, _) in COMMANDS.items()},
        prog="pgprog",
        description="Policy gradients for language models, from REINFORCE to GRPO, held against exact truth.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    sys.exit(main())
