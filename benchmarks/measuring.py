"""What the benchmarks share: a training step to time, the least of several times, the machine, and where results go."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from pgprog.experiment.config import RunConfig
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import step_options, train_step_of
from pgprog.noise import ReplicaGenerator

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("runs/benchmarks")
STYLE = {"svg.hashsalt": "pgprog", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}


def training_step(config: RunConfig, replicas: int) -> Callable[[], None]:
    """One step of an algorithm as the loop of a run makes it, ready to be called again and again."""
    seeds = range(replicas)
    learner, generator = make_learner(config, seeds), ReplicaGenerator(seeds, "train")
    options, train_step = step_options(config, learner), train_step_of(config)
    count = 0

    def step() -> None:
        nonlocal count
        generator.seek(count)
        count += 1
        train_step(learner.policy, learner.optimizer, generator, entropy_coef=config.policy_entropy_coef, **options)

    return step


def seconds_per_call(call: Callable[[], object], at_least: float) -> float:
    """The mean over as many calls as fill ``at_least`` seconds, two or more."""
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < at_least or calls < 2:
        call()
        calls += 1
    return elapsed / calls


def least_seconds(calls: Mapping[Any, Callable[[], object]], repeats: int, at_least: float = 0.1) -> dict[Any, float]:
    """Seconds of each call, the least of ``repeats`` means.

    The calls take turns, so that a noisy minute of the machine falls on all of them; noise only ever adds, so that the
    least is the nearest to the truth.
    """
    for call in calls.values():
        call()  # warm
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds_per_call(call, at_least))
    return {name: min(seconds) for name, seconds in times.items()}


def head() -> dict[str, Any]:
    """The command, and the machine that it ran on."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Text in the first column, numbers to the right of it."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def report(
    name: str,
    result: dict[str, Any],
    shown: Sequence[Table | str],
    out: Path,
    as_json: bool,
    figure: Callable[[], Figure] | None = None,
) -> None:
    """Write NAME.json, and NAME.png and .svg where there is a figure; print tables and lines, or the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{name}.json"]
    files[0].write_text(json.dumps(result, indent=1) + "\n")
    if figure is not None:
        with matplotlib.rc_context(STYLE):
            drawn = figure()
            for suffix in (".png", ".svg"):
                files.append(out / (name + suffix))
                drawn.savefig(files[-1], dpi=150, bbox_inches="tight")
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    for item in shown:
        if isinstance(item, Table):
            console.print(item)
        else:
            console.print(item, markup=False, highlight=False, soft_wrap=True)
    console.print("Saved: " + ", ".join(map(str, files)), markup=False, highlight=False, soft_wrap=True)
