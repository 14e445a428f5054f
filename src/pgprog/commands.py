"""What the commands do: each takes its arguments and returns an exit code."""

import contextlib
import dataclasses
import importlib
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pgprog.arguments import Compare, Grid, Sample, Train
from pgprog.errors import UsageError, choose
from pgprog.experiment import compare as comparison
from pgprog.experiment import rundir
from pgprog.experiment.config import (
    TITLES,
    CompareConfig,
    RunConfig,
    Settings,
    from_json,
    validate,
)
from pgprog.experiment.executor import exit_code, keep_freed_memory, stop_on_interrupt
from pgprog.experiment.learner import load_policy, make_task
from pgprog.experiment.loop import run, values_of
from pgprog.experiment.watch import Watch, facts_of, warnings_in
from pgprog.imports import without_collection
from pgprog.noise import ReplicaGenerator
from pgprog.report.tables import markdown, print_comparison

T = TypeVar("T", bound=Settings)
A = TypeVar("A", Train, Compare)
READINGS = ("instruments_every", "exact_critic")


def train(args: Train) -> int:
    """Run ``pgprog train``."""
    torch.set_num_threads(1)  # the operations are small: a second thread costs more than it brings
    keep_freed_memory()
    check_checkpoint_every(args.checkpoint_every)
    check_instruments_every(args.instruments_every)
    if args.resume is None:
        config, seed = part(args, RunConfig), args.seed
        if args.group_steps is not None and config.choices.sampling.group:
            config = dataclasses.replace(config, steps=args.group_steps)
        content = configuration(config) | {"seeds": [seed]} | readings(args)
    else:
        config, content = resumed(args, RunConfig)
        args = with_readings(args, content)
        seeds = content.get("seeds")
        if not isinstance(seeds, list) or len(seeds) != 1 or type(seeds[0]) is not int:
            raise UsageError(f"{args.resume} is no run of train, of one seed: its seeds are {str(seeds)[:80]}")
        seed = seeds[0]
    validate(config)
    check_instruments_every(args.instruments_every)
    if args.exact_critic and config.choices.critic == "none":
        raise UsageError(f"--exact-critic with {config.name}: it has no critic, leave it out")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed} is out of range: give an integer in [0, 2**63)")
    make_task(config)  # refuse what cannot run before a directory is made
    if config.advantage is not None:
        run(dataclasses.replace(config, steps=1), [seed])  # the user's function is called once, for nothing
    where = args.resume or args.out or default_directory(config.name.replace(":", "-"))
    console = Console(stderr=args.json)
    with contextlib.ExitStack() as stack:
        resume = args.resume is not None
        directory = stack.enter_context(rundir.open_run(where, overwrite=args.overwrite, resume=resume))
        if not resume:
            rundir.write_json(directory / rundir.CONFIG, content)
        came = stack.enter_context(stop_on_interrupt())
        bars = stack.enter_context(progress_bars(console))
        bar = bars.add_task(config.title, total=config.steps, success="")
        watch, behind = Watch(facts_of(config)), resume

        def on_step(step: int, metrics: dict[str, Any]) -> None:
            nonlocal behind
            if behind:  # what was said before the run was stopped is not said again
                behind = False
                for row in rundir.rows_so_far(directory):
                    watch.see(row)
            for warned in watch.see({"step": step, **values_of(metrics)[0]}):
                say(bars.console, f"Warning, step {warned.step}: {warned.text}.")
            bars.update(bar, completed=step, success=f"success {metrics['success'].mean().item():.3f}")

        result = run(
            config,
            [seed],
            directory,
            on_step,
            lambda: bool(came),
            args.checkpoint_every,
            instruments_every=args.instruments_every,
            exact_critic=args.exact_critic,
        )
        bars.update(bar, completed=result.steps)
        warnings = warnings_in(rundir.rows_so_far(directory), facts_of(config))
        summary = content | {
            "interrupted": result.steps < config.steps,
            "result": dataclasses.asdict(result),
            "warnings": [dataclasses.asdict(warned) for warned in warnings],
        }
        rundir.write_json(directory / rundir.SUMMARY, summary)
    if args.json:
        print(json.dumps(summary))
        return exit_code(came)
    done = f"{result.steps} steps" if result.steps == config.steps else f"{result.steps} of {config.steps} steps"
    say(console, f"{config.title}, seed {seed}: success {result.success[0]:.3f} over all targets after {done}")
    say(console, f"{result.rollouts:,} rollouts, {result.tokens[0]:,} tokens, {result.wall_seconds:.1f} s")
    for warned in warnings:
        say(console, f"Warning, seen at step {warned.step}: {warned.text}.")
    for exception in config.exceptions():
        say(console, f"Exception from the shared settings: {exception}.")
    say(console, f"Saved in {directory}. See completions: pgprog sample --run {directory} --target 23")
    if came:
        say(console, f"Interrupted. Go on: pgprog train --resume {directory}")
    return exit_code(came)


def compare(args: Compare) -> int:
    """Run ``pgprog compare``."""
    torch.set_num_threads(1)
    check_checkpoint_every(args.checkpoint_every)
    check_instruments_every(args.instruments_every)
    workers = workers_of(args.workers)
    if args.resume is None:
        config = part(args, CompareConfig)
        content = configuration(config) | readings(args)
    else:
        config, content = resumed(args, CompareConfig)
        args = with_readings(args, content)
    make_task(config)
    main, equal, budget = comparison.plan(config, None)
    where = args.resume or args.out or default_directory("compare")
    console = Console(stderr=args.json)
    opened = rundir.open_run(where, overwrite=args.overwrite, resume=args.resume is not None)
    with opened as directory, stop_on_interrupt() as came:
        if args.resume is None:
            rundir.write_json(directory / rundir.CONFIG, content)
        say(
            console,
            f"{len(main)} algorithms x {config.seeds} seeds, {config.prompts} prompts a step; "
            + ", ".join(f"{TITLES[job.name]} {job.config.steps} steps" for job in main)
            + f"; then at {budget:,} rollouts each",
        )
        with progress_bars(console) as bars:
            names = {job.name: TITLES[job.name] for job in main}
            names |= {job.name: f"{TITLES[job.config.name]}, equal rollouts" for job in equal}
            tasks = {
                job.name: bars.add_task(names[job.name], total=job.config.steps, success="") for job in (*main, *equal)
            }
            summary, rows = comparison.compare(
                config,
                content,
                directory,
                workers=workers,
                checkpoint_every=args.checkpoint_every,
                instruments_every=args.instruments_every,
                on_progress=lambda p: bars.update(tasks[p.name], completed=p.step, success=f"success {p.success:.3f}"),
                on_idle=import_for_reports,
                came=came,
            )
        from pgprog.report.figures import draw  # late, as it brings matplotlib; see import_for_reports

        figures = draw(directory, summary, rows) if summary["algorithms"] else []
        rundir.write_bytes(directory / "results.md", markdown(summary).encode(errors="replace"))
    if args.json:
        print(json.dumps(summary))
        return exit_code(came)
    print_comparison(console, summary)
    shown = ", ".join(path.name for path in figures)
    say(console, f"Saved in {directory}: summary.json, results.md, curves.csv, {shown} (and .svg)")
    if summary["interrupted"]:
        say(console, f"Go on: pgprog compare --resume {directory}")
    say(console, f"Reproduce: {summary['command']}")
    return exit_code(came)


def sample(args: Sample) -> int:
    """Run ``pgprog sample``."""
    torch.set_num_threads(1)
    if not 1 <= args.n <= 100_000:
        raise UsageError(f"--n {args.n} is out of range: give 1 to 100000")
    directory = args.run
    if (directory / "runs").is_dir():
        algos = sorted(path.name for path in (directory / "runs").iterdir())
        if args.algo is None:
            raise UsageError(
                f"--run {directory} is a comparison: name a run of it with --algo, one of {', '.join(algos)}"
            )
        directory = directory / "runs" / choose("run", args.algo, algos)
    elif args.algo is not None:
        raise UsageError(f"--algo {args.algo}: {directory} is a run and no comparison, leave it out")
    config = validate(from_json(RunConfig, rundir.read_json(directory / rundir.CONFIG), directory / rundir.CONFIG))
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
    table = Table(title=f"{config.title}, seed {seed}, target {args.target}")
    for column in ("completion", "sum", "reward"):
        table.add_column(column, justify="right")
    for entry in rows:
        style = "green" if entry["success"] else None
        table.add_row(" ".join(map(str, entry["completion"])), str(entry["sum"]), f"{entry['reward']:g}", style=style)
    Console().print(table)
    return 0


def import_for_reports(figures: str = "pgprog.report.figures") -> None:
    """Import what the end of a comparison wants: a second's work, which has time while the last runs train."""
    with without_collection():
        for module in ("scipy.stats", figures):
            importlib.import_module(module)


def part(args: Any, kind: type[T]) -> T:
    """The configuration that is part of a command's arguments."""
    return kind(**{name: getattr(args, name) for name in kind.__dataclass_fields__})


def configuration(config: Settings) -> dict[str, Any]:
    """What a run directory says of its making."""
    head = {"command": rundir.command(), "created": rundir.now(), "environment": rundir.environment()}
    return head | dataclasses.asdict(config)


def resumed(args: Train | Compare | Grid, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """The configuration of the run to go on with, and its file; UsageError where settings are given beside it."""
    assert args.resume is not None
    usual, free = type(args)(), {"resume", "json", "checkpoint_every", "instruments_every", "exact_critic", "workers"}
    given = [f.name for f in dataclasses.fields(args) if getattr(args, f.name) != getattr(usual, f.name)]
    if extra := ["--" + name.replace("_", "-") for name in given if name not in free]:
        raise UsageError(f"--resume takes its settings from {args.resume}: leave out {', '.join(extra)}")
    path = args.resume / rundir.CONFIG
    content = rundir.read_json(path)
    if kind is RunConfig and (args.resume / "runs").is_dir():
        made = str(content.get("command") if isinstance(content, dict) else None)[:200]
        command = "grid" if " grid" in made else "compare"
        raise UsageError(
            f"{args.resume} holds many runs: go on with the command that made it, {made}: "
            f"pgprog {command} --resume {args.resume}"
        )
    try:
        return from_json(kind, content, path), content
    except UsageError as error:
        if kind is RunConfig or not isinstance(content, dict) or "algo" not in content:
            raise
        raise UsageError(f"{error}; it is a single run: pgprog train --resume {args.resume}") from error


def readings(args: Train | Compare) -> dict[str, Any]:
    """Which costly instruments are read, and when: no part of what a run is, but of what it says of itself."""
    return {name: getattr(args, name) for name in READINGS if hasattr(args, name)}


def with_readings(args: A, content: dict[str, Any]) -> A:
    """A run that is gone on with reads its instruments as it did, unless told otherwise."""
    usual = type(args)()
    names = [name for name in READINGS if hasattr(usual, name) and name in content]
    kept = {name: content[name] for name in names if type(content[name]) is type(getattr(usual, name))}
    untold = {name: value for name, value in kept.items() if getattr(args, name) == getattr(usual, name)}
    return dataclasses.replace(args, **untold)


def check_checkpoint_every(steps: int) -> None:
    if steps < 1:
        raise UsageError(f"--checkpoint-every {steps} is too small: give 1 or more steps")


def check_instruments_every(steps: int) -> None:
    if steps < 0:
        raise UsageError(f"--instruments-every {steps} is out of range: give 1 or more steps, or 0 for never")


def workers_of(given: int | None) -> int:
    """Of --workers, or one per core."""
    if given is not None and given < 1:
        raise UsageError(f"--workers {given} is too few: give 1 or more")
    return given or cores()


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, and nothing broken that may be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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
