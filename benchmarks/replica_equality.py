"""Whole runs of one seed alone and among five, compared bit for bit.

python benchmarks/replica_equality.py [--steps 1500] [--seed 3]
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from pgprog.experiment import rundir
from pgprog.experiment.config import LADDER, CompareConfig
from pgprog.experiment.loop import run


@dataclass(frozen=True)
class Args:
    """What to run."""

    steps: int = 1500
    seed: int = 3
    algos: tuple[str, ...] = LADDER


def rows(algo: str, args: Args, seeds: list[int]) -> list[dict[str, float]]:
    """Metrics of ``args.seed`` from a run of all ``seeds``."""
    config = CompareConfig(steps=args.steps)
    with tempfile.TemporaryDirectory() as directory:
        run(config.run_config(algo, config.steps_of(algo)), seeds, Path(directory), instruments_every=0)
        return [row for row in rundir.read_rows(Path(directory) / rundir.METRICS) if row["seed"] == args.seed]


def main(args: Args) -> int:
    """Compare every algorithm; 1 if any run differs."""
    torch.set_num_threads(1)
    failed = False
    for algo in args.algos:
        alone, among = rows(algo, args, [args.seed]), rows(algo, args, sorted({0, 1, 2, 3, 4, args.seed}))
        first = next((a["step"] for a, b in zip(alone, among, strict=True) if a != b), None)
        result = "equal bit for bit" if first is None else f"differs from step {first}"
        print(f"{algo:<14} {len(alone)} steps: {result}")
        failed |= first is not None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
