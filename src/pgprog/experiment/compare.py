"""All algorithms of the ladder across seeds, on the same prompts, and what each one cost."""

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pgprog.algorithms.recipes import RECIPES, advantage_words
from pgprog.errors import UsageError, refuse_twice
from pgprog.experiment import rundir
from pgprog.experiment.config import INSTRUMENTS_EVERY, LADDER, TITLES, CompareConfig, RunConfig, seeds_of
from pgprog.experiment.executor import Job, Measurement, Progress, run_jobs
from pgprog.experiment.gradients import GradientNoise, ratio_of_single_successes
from pgprog.experiment.loop import EVALUATION_COMPLETIONS, Result
from pgprog.experiment.watch import Rows, facts_of, warnings_in
from pgprog.stats import bootstrap_mean, percentile_coverage

EQUAL = "-equal-rollouts"


@dataclass
class Outcome:
    """What a comparison has reached so far; an algorithm is missing where it was not reached."""

    main: dict[str, Result] = field(default_factory=dict)
    equal: dict[str, Result] = field(default_factory=dict)
    noise: dict[str, GradientNoise] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    """The metrics of each run, by its name."""
    warnings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Of each algorithm's main run."""
    interrupted: bool = False


def plan(config: CompareConfig, directory: Path | None) -> tuple[list[Job], list[Job], int]:
    """The runs of a comparison, those that repeat it at equal rollouts, and how many rollouts that is."""
    if not config.names:
        raise UsageError(f"--algos names no algorithm: give one or more of {', '.join(LADDER)}")
    if config.recipes and config.algos != LADDER:
        raise UsageError("--algos and --recipes: give one of them, the rungs are recipes too")
    seeds = seeds_of(config.seeds, config.first_seed)
    if config.group_steps is not None and config.group_steps < 1:
        raise UsageError(f"--group-steps {config.group_steps} is too small: give 1 or more")
    refuse_twice("--recipes" if config.recipes else "--algos", config.names)
    runs = {algo: config.run_config(algo, config.steps_of(algo)) for algo in config.names}
    smallest = min(run.steps * run.most_rollouts_per_step for run in runs.values())
    budget = smallest if config.equal_rollouts is None else config.equal_rollouts
    if budget < (most := max(run.most_rollouts_per_step for run in runs.values())):
        if config.equal_rollouts is not None:
            raise UsageError(
                f"--equal-rollouts {budget} is less than one step: the largest takes {most}, give that or more"
            )
        budget = most

    def job(name: str, run: RunConfig) -> Job:
        return Job(name, run, seeds, None if directory is None else rundir.run_of(directory, name))

    main = [job(algo, run) for algo, run in runs.items()]
    # A run whose annealing ends at the budget, unless the main one already does.
    again = {algo: dataclasses.replace(run, steps=budget // run.most_rollouts_per_step) for algo, run in runs.items()}
    equal = [job(algo + EQUAL, run) for algo, run in again.items() if run.steps != runs[algo].steps]
    return main, equal, budget


def compare(
    config: CompareConfig,
    head: dict[str, Any],
    directory: Path,
    *,
    workers: int,
    checkpoint_every: int,
    on_progress: Callable[[Progress], None],
    on_idle: Callable[[], None] = lambda: None,
    instruments_every: int = INSTRUMENTS_EVERY,
    came: Sequence[int] = (),
) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Run the whole comparison and write ``summary.json`` and ``curves.csv``; return the summary, and all metrics.

    Runs that stand finished in the directory are not repeated, others are gone on with. A signal that ``came`` ends the
    comparison with what was reached, saved and marked as interrupted. ``head`` (command, time, versions) opens the
    summary; ``on_idle``, see ``run_jobs``.
    """
    main, equal, budget = plan(config, directory)
    outcome = Outcome()
    prepare([*main, *equal])
    noise = [Measurement(job.name, job.config) for job in main]
    jobs: list[Job | Measurement] = [*noise, *main, *equal]
    try:
        for done, result in run_jobs(jobs, workers, checkpoint_every, on_progress, on_idle, instruments_every, came):
            if isinstance(done, Measurement):
                outcome.noise[done.name] = result
                continue
            if result.steps > 0:  # a signal may reach a run before its first step
                rows = outcome.rows[done.name] = rows_of(done)  # now, while others train
                if not done.name.endswith(EQUAL):
                    outcome.main[done.name], outcome.warnings[done.name] = result, warnings_of(done, rows)
                elif result.steps == done.config.steps:  # part of a run compares with nothing
                    outcome.equal[done.config.name] = result
    except KeyboardInterrupt:
        outcome.interrupted = True
    for job in main:
        if job.config.steps * job.config.most_rollouts_per_step == budget and complete(config, outcome, job.name):
            outcome.equal.setdefault(job.name, outcome.main[job.name])
    for job in (*main, *equal):
        if job.name not in outcome.rows:
            outcome.rows[job.name] = rows_of(job)
    summary = head | summarise(config, outcome, budget)
    rundir.write_json(directory / rundir.SUMMARY, summary)
    write_curves(directory / "curves.csv", [*main, *equal], outcome.rows)
    return summary, outcome.rows


def prepare(jobs: Iterable[Job]) -> None:
    """Make each run's directory, with its configuration, before the first of them starts."""
    for job in jobs:
        assert job.directory is not None
        job.directory.mkdir(parents=True, exist_ok=True)
        rundir.write_json(job.directory / rundir.CONFIG, job.config.as_dict() | {"seeds": list(job.seeds)})


def summarise(config: CompareConfig, outcome: Outcome, budget: int) -> dict[str, Any]:
    """Everything that a comparison has to say, for machines and for the tables."""
    reached = [algo for algo in config.names if algo in outcome.main]
    measured = [algo for algo in config.names if algo in outcome.noise]
    return {
        "interrupted": outcome.interrupted,
        "config": dataclasses.asdict(config) | {"group_steps": config.group_steps_planned},
        "evaluation": {"completions_per_target": EVALUATION_COMPLETIONS},
        "equal_rollouts": budget,
        "algorithms": {algo: algorithm_summary(config, outcome, algo) for algo in reached},
        "paired_differences": [
            paired(a, b, outcome)
            for a, b in pairwise(reached)
            if complete(config, outcome, a) and complete(config, outcome, b)
        ],
        "gradient_noise": {algo: outcome.noise[algo].as_dict() for algo in measured},
        "notes": notes(config, outcome, budget),
    }


def complete(config: CompareConfig, outcome: Outcome, algo: str) -> bool:
    """Whether an algorithm has made all of its steps."""
    return algo in outcome.main and outcome.main[algo].steps == config.steps_of(algo)


def algorithm_summary(config: CompareConfig, outcome: Outcome, algo: str) -> dict[str, Any]:
    """One algorithm: score, cost, and score at equal rollouts."""
    run, result = config.run_config(algo, config.steps_of(algo)), outcome.main[algo]
    again = outcome.equal.get(algo)
    return {
        "title": RECIPES[algo].title,
        "advantage": advantage_words(run.choices),
        "exceptions": run.exceptions(),
        "steps": result.steps,
        "steps_planned": run.steps,
        "prompts_per_step": run.prompts,
        "rollouts_per_step": run.rollouts_per_step,
        "rollouts": result.rollouts,
        "tokens": float(np.mean(result.tokens)),
        "wall_seconds": result.wall_seconds,
        "success": bootstrap_mean(result.success).as_dict(result.success),
        "success_sum_targets": bootstrap_mean(result.success_sum_targets).as_dict(result.success_sum_targets),
        "success_by_target": np.mean(result.success_by_target, axis=0).tolist(),
        "warnings": outcome.warnings[algo],
        "at_equal_rollouts": again
        and {
            "steps": again.steps,
            "rollouts": again.rollouts,
            "success": bootstrap_mean(again.success).as_dict(again.success),
        },
    }


def rows_of(job: Job) -> Rows:
    """The metrics that a run has written; none where it has not begun."""
    assert job.directory is not None
    return rundir.rows_so_far(job.directory)


def warnings_of(job: Job, rows: Rows) -> list[dict[str, Any]]:
    """Each kind of warning that a run gave: in how many seeds, and what it said of the first of them."""
    said: dict[str, dict[str, Any]] = {}
    for seed in job.seeds:
        for warned in warnings_in((row for row in rows if row["seed"] == seed), facts_of(job.config)):
            first = {"kind": warned.kind, "seeds": 0, "of": len(job.seeds), "step": warned.step, "text": warned.text}
            said.setdefault(warned.kind, first)["seeds"] += 1
    return list(said.values())


def paired(a: str, b: str, outcome: Outcome) -> dict[str, Any]:
    """Success of b minus that of a, seed by seed: both saw the same prompts."""
    differences = (np.asarray(outcome.main[b].success) - np.asarray(outcome.main[a].success)).tolist()
    return {"from": a, "to": b, "difference": bootstrap_mean(differences).as_dict(differences)}


def notes(config: CompareConfig, outcome: Outcome, budget: int) -> list[str]:
    """What a reader must know before he believes the numbers."""
    said = [note_on_intervals(config.seeds)]
    for algo, result in outcome.equal.items():
        if (drawn := result.rollouts / budget) < 0.95:
            said.append(
                f"{TITLES[algo]} spent {drawn:.0%} of the equal rollouts: its steps are planned for the most that its "
                "filter may draw, and it drew less."
            )
    if {"rloo", "grpo"} <= outcome.noise.keys():
        G, ratio = config.group_size, outcome.noise["grpo"].mean_norm / max(outcome.noise["rloo"].mean_norm, 1e-300)
        said.append(
            f"Untrained, GRPO's gradient is {ratio:.3f} times as long as RLOO's, on the same completions. In a group "
            "with one success it divides by a std of 1/sqrt(G), which makes its advantages (G - 1)/sqrt(G) = "
            f"{ratio_of_single_successes(G):.3f} times RLOO's at G = {G}; in groups with more successes by less. "
            "The network enters only through its success probabilities."
        )
    return said


def note_on_intervals(n: int) -> str:
    """What intervals over n seeds are worth."""
    if n == 1:
        return "One seed has no interval: nothing here tells an algorithm from its luck."
    return (
        f"Intervals are 95% percentile bootstraps over {n} seeds. With few seeds they are too narrow: for normal "
        f"scores and {n} seeds they cover the mean {percentile_coverage(n):.1%} of the time."
    )


def write_curves(path: Path, jobs: Sequence[Job], rows_by_run: dict[str, Rows]) -> None:
    """All metrics of all runs in one table, a row per run, seed and step."""
    columns = list(dict.fromkeys(chain.from_iterable(row for job in jobs for row in rows_by_run[job.name])))
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["run", "algo", *columns])
    for job in jobs:
        writer.writerows([job.name, job.config.name, *map(row.get, columns)] for row in rows_by_run[job.name])
    rundir.write_bytes(path, file.getvalue().encode())
