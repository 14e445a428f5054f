"""Memory: flat over a long run, and the peak of the default compare.

*Flat.* A small run (4 prompts, 16 hidden units, two seeds) writes its metrics and checkpoints as ever; its resident
memory is read from /proc after every ``--every`` steps. Reported: the slope of a straight line through the readings
after the warm-up, with its standard error, and the largest reading after the warm-up less the one at its end. The
warm-up is long: memory went on creeping up, by some tens of KiB, for about 3,000 steps. Readings of neighbouring steps
are alike, so the error is that of means of blocks, ten of them.

*Peak.* ``scripts/compare.py`` runs in a process of its own. Of every process below it the kernel keeps the largest
resident size (VmHWM), which is read every ``--poll`` seconds, and last before its end; the sum of their proportional
sizes (Pss, where a page that n processes share counts 1/n to each) is taken at each poll. Linux only.

    python benchmarks/memory.py                          10,000 steps, and the default compare
    python benchmarks/memory.py --steps 500 --compare-steps 20
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.table import Table

from measuring import OUT, ROOT, head, report, table
from pgprog.experiment.config import TITLES, CompareConfig
from pgprog.experiment.loop import run

BLOCKS = 10


@dataclass(frozen=True)
class Args:
    """What to measure."""

    steps: int = 10_000
    """Of the small run."""
    algos: tuple[str, ...] = ("grpo", "ppo")
    """Of the small run, one after the other, each in this process."""
    warm_up: int = 3000
    """Steps that do not count, at most half of all."""
    every: int = 10
    """Steps between readings."""
    compare_steps: int = 1500
    """Of the compare whose peak is taken; 0 leaves it out."""
    workers: int = 2
    poll: float = 0.1
    """Seconds between looks at the compare's processes."""
    out: Path = OUT
    """Receives memory.json."""
    json: bool = False
    """Print JSON in place of the tables."""


def resident() -> float:
    """MiB of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def profile(algo: str, args: Args) -> dict[str, Any]:
    """Readings over a small run, and how flat they are."""
    config = replace(CompareConfig().run_config(algo, args.steps), prompts=4, hidden=16)
    steps = np.arange(args.every, args.steps + 1, args.every)
    readings = np.ones(len(steps))  # made beforehand and touched, so that they grow nothing

    def on_step(step: int, metrics: object) -> None:
        if step % args.every == 0:
            readings[step // args.every - 1] = resident()

    with tempfile.TemporaryDirectory() as directory:
        run(config, [0, 1], Path(directory), on_step)
    return {"steps": steps.tolist(), "mib": readings.tolist()} | flatness(steps, readings, args.warm_up)


def flatness(steps: np.ndarray, mib: np.ndarray, warm_up: int) -> dict[str, float]:
    """Slope and its standard error in KiB per 1000 steps after the warm-up; growth in MiB from its end."""
    warm = min(int((steps <= warm_up).sum()), len(steps) // 2)
    x, y = (np.array([block.mean() for block in np.array_split(v[warm:], BLOCKS)]) for v in (steps, mib))
    x = x - x.mean()
    slope = (x * y).sum() / (x * x).sum()
    residual = y - y.mean() - slope * x
    error = np.sqrt((residual**2).sum() / (BLOCKS - 2) / (x * x).sum())
    return {
        "slope_kib_per_1000_steps": float(slope * 1024 * 1000),
        "slope_error": float(error * 1024 * 1000),
        "at_warm_up_mib": float(mib[warm]),
        "max_after_less_at_warm_up_mib": float(mib[warm:].max() - mib[warm]),
    }


def descendants(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from descendants(int(child))


def number(file: Path, name: str) -> int:
    """Of a line such as ``VmHWM:  123 kB`` of a file below /proc; 0 where there is none."""
    return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name + ":")), 0)


def role(pid: int, parent: int) -> str:
    """What a process of the compare is for."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    if pid == parent:
        return "parent"
    if "resource_tracker" in command:
        return "resource tracker"
    # Workers are forked from a server, and have its command line.
    forking = "forkserver" in command and number(Path(f"/proc/{pid}/status"), "PPid") == parent
    return "server of the workers" if forking else "worker"


def peak(args: Args) -> dict[str, Any]:
    """The largest resident size of each process of a compare, and of all at once."""
    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), "--steps", str(args.compare_steps)]
    command += ["--workers", str(args.workers)]
    seen: dict[int, dict[str, Any]] = {}
    together = 0.0
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen([*command, "--out", str(Path(directory) / "c")], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            together = max(together, look(process.pid, seen))
            time.sleep(args.poll)
    if process.returncode != 0:
        raise SystemExit(f"the compare failed with exit code {process.returncode}: {' '.join(command)}")
    return {
        "processes": sorted(seen.values(), key=lambda entry: -entry["peak_mib"]),
        "all_at_once_mib": together,
    }


def look(parent: int, seen: dict[int, dict[str, Any]]) -> float:
    """Note each process's peak so far; return the MiB that all hold now."""
    together = 0
    try:
        for pid in descendants(parent):
            largest = number(Path(f"/proc/{pid}/status"), "VmHWM") / 1024
            entry = seen.setdefault(pid, {"role": role(pid, parent), "peak_mib": 0.0})
            entry["peak_mib"] = max(entry["peak_mib"], largest)
            together += number(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
    except (FileNotFoundError, ProcessLookupError):  # it ended while it was looked at
        return 0.0
    return together / 1024


def show(args: Args, result: dict[str, Any]) -> list[Table | str]:
    """How flat, and how high."""
    rows = [
        [
            TITLES[algo],
            f"{entry['at_warm_up_mib']:.1f}",
            f"{entry['slope_kib_per_1000_steps']:+.2f} +- {entry['slope_error']:.2f}",
            f"{entry['max_after_less_at_warm_up_mib']:+.2f}",
        ]
        for algo, entry in result["profile"].items()
    ]
    columns = ["", "MiB after the warm-up", "slope, KiB per 1000 steps", "largest after, less that (MiB)"]
    shown: list[Table | str] = [table(f"Resident memory over {args.steps:,} steps of a small run", columns, rows)]
    if result["compare"] is not None:
        entries = result["compare"]["processes"]
        made = [[entry["role"], f"{entry['peak_mib']:.0f}"] for entry in entries]
        made.append(["all at once, shared pages counted once", f"{result['compare']['all_at_once_mib']:.0f}"])
        shown.append(table(f"Peak of a compare of {args.compare_steps} steps", ["process", "MiB"], made))
    return shown


def main(args: Args) -> None:
    torch.set_num_threads(1)
    profiles = {algo: profile(algo, args) for algo in args.algos}
    measured = {"profile": profiles, "compare": peak(args) if args.compare_steps else None}
    result = head() | {"args": {**asdict(args), "out": str(args.out)}} | measured
    report("memory", result, show(args, result), args.out, args.json)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
