"""How much faster than the straightforward baseline: the whole default compare, and each algorithm.

Measured in one run, from which the ratios are taken:

- the baseline (``naive_baseline.py``): every algorithm, one seed after the other, one thread;
- ours on the same one thread: the same algorithm, all seeds in one ``run``, metrics and checkpoints written, in the
  middle of the baseline's seeds, so that both see the machine in the same state;
- the whole compare, ``scripts/compare.py`` in a process of its own with its two workers, from start-up to the last
  figure: once before all of that and once after it, of which the mean counts. It does more than the baseline: it also
  measures gradient noise, runs the comparison at equal rollouts, and draws.

``--share`` below 1 makes that share of the steps on both sides of the one-thread part and scales up: training linearly
in the steps, evaluation not at all. The compare is never scaled, for what it takes to start would be scaled with it,
but runs in full, once.

    python benchmarks/speed.py                the full measurement, minutes
    python benchmarks/speed.py --share 0.1    a tenth of the steps on one thread, and one compare
"""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.table import Table

import naive_baseline
from measuring import OUT, ROOT, head, report, table
from pgprog.experiment.config import LADDER, TITLES, CompareConfig
from pgprog.experiment.loop import run

AIM, REQUIRED = 8, 5


@dataclass(frozen=True)
class Args:
    """What to measure."""

    seeds: int = 5
    steps: int = 1500
    """Of the algorithms with one completion per prompt; rloo and grpo take 4/15 of it."""
    workers: int = 2
    """Of the compare."""
    share: float = 1.0
    """Of the steps that are made on one thread, on both sides; the times are scaled up to all of them."""
    algos: tuple[str, ...] = LADDER
    out: Path = OUT
    """Receives speed.json."""
    json: bool = False
    """Print JSON in place of the table."""


def planned_steps(algo: str, args: Args) -> int:
    return CompareConfig(steps=args.steps).steps_of(algo)


def steps_made(algo: str, args: Args) -> int:
    return max(1, round(planned_steps(algo, args) * args.share))


def baseline_seconds(algo: str, seed: int, args: Args) -> float:
    """One seed of the baseline, scaled up."""
    steps = steps_made(algo, args)
    made = naive_baseline.train(algo, steps, seed)
    return made.train_seconds * planned_steps(algo, args) / steps + made.evaluate_seconds


def our_seconds(algo: str, args: Args) -> float:
    """All seeds of ours on this thread, scaled up."""
    steps = steps_made(algo, args)
    config = CompareConfig(steps=args.steps).run_config(algo, steps)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        training = run(config, range(args.seeds), Path(directory)).wall_seconds
    rest = time.perf_counter() - started - training
    return training * planned_steps(algo, args) / steps + rest


def one_algorithm(algo: str, args: Args) -> dict[str, Any]:
    """Both sides of an algorithm on one thread, ours in the middle."""
    half = (args.seeds + 1) // 2
    baseline = [baseline_seconds(algo, seed, args) for seed in range(half)]
    ours = our_seconds(algo, args)
    baseline += [baseline_seconds(algo, seed, args) for seed in range(half, args.seeds)]
    return {
        "steps": planned_steps(algo, args),
        "baseline_seconds": sum(baseline),
        "baseline_seconds_by_seed": baseline,
        "our_seconds": ours,
        "ratio": sum(baseline) / ours,
    }


def compare_seconds(args: Args) -> float:
    """Wall time of one process that makes the whole compare."""
    command = [sys.executable, str(ROOT / "scripts" / "compare.py")]
    command += ["--seeds", str(args.seeds), "--steps", str(args.steps), "--workers", str(args.workers)]
    if args.algos != LADDER:
        command += ["--algos", *args.algos]
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        subprocess.run([*command, "--out", str(Path(directory) / "compare")], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started


def warm_up(args: Args) -> None:
    """What only a first call pays: imports, allocations, the creation of kernels."""
    for algo in args.algos:
        naive_baseline.train(algo, 2, 0)
        run(CompareConfig().run_config(algo, 2), range(args.seeds))


def measure(args: Args) -> dict[str, Any]:
    """Everything, in the order that the head of this file says."""
    compares = [compare_seconds(args)]
    warm_up(args)
    algorithms = {algo: one_algorithm(algo, args) for algo in args.algos}
    if args.share == 1:
        compares.append(compare_seconds(args))
    baseline, ours = (sum(entry[side] for entry in algorithms.values()) for side in ("baseline_seconds", "our_seconds"))
    return {
        "algorithms": algorithms,
        "one_thread": {"baseline_seconds": baseline, "our_seconds": ours, "ratio": baseline / ours},
        "compare": {
            "workers": args.workers,
            "seconds": compares,
            "mean_seconds": statistics.fmean(compares),
            "ratio": baseline / statistics.fmean(compares),
        },
    }


def show(args: Args, result: dict[str, Any]) -> list[Table | str]:
    """The ratios as a table, and what they are of."""
    rows = [
        [TITLES[algo], f"{e['steps']}", f"{e['baseline_seconds']:.1f}", f"{e['our_seconds']:.1f}", f"{e['ratio']:.1f}"]
        for algo, e in result["algorithms"].items()
    ]
    one, whole = result["one_thread"], result["compare"]
    rows.append(["all, one thread", "", *(f"{one[k]:.1f}" for k in ("baseline_seconds", "our_seconds", "ratio"))])
    whole_row = [one["baseline_seconds"], whole["mean_seconds"], whole["ratio"]]
    rows.append([f"the whole compare, {args.workers} workers", "", *(f"{value:.1f}" for value in whole_row)])
    seconds = " and ".join(f"{value:.1f}" for value in whole["seconds"])
    said = f"The compare took {seconds} s; {REQUIRED} times faster is asked for, {AIM} aimed at."
    scaled = f"SCALED UP, but for the compare, from a share of {args.share:g} of the steps; --share 1 measures all."
    columns = ["", "steps", "baseline s", "ours s", "times faster"]
    title = f"Seconds for {args.seeds} seeds: baseline on one thread, ours"
    return [table(title, columns, rows), said, *([scaled] if args.share < 1 else [])]


def main(args: Args) -> int:
    if not 0 < args.share <= 1:
        print(f"--share {args.share:g} is out of range: give 0 < share <= 1", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    result = head() | {"args": {**asdict(args), "out": str(args.out)}, "scaled_up": args.share < 1} | measure(args)
    report("speed", result, show(args, result), args.out, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
