"""What the instruments cost: the time of a training step with them over the time without, paired in one run.

Three steps take turns: *bare*, whose metrics are the success, length and losses that a run cannot do without; *cheap*,
with the metrics of every step; *reading*, with the costly instruments too. Of a run that takes a reading every N
steps, instruments are the share

    (cheap - bare + (reading - cheap) / N) / bare

The three take turns, step by step, so that a noisy minute of the machine falls on all alike; a time is the lower
quartile of a step's processor time, which does not count while the process waits for its turn.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from measuring import OUT, head, report, table, training_step
from pgprog.algorithms import diagnostics, update
from pgprog.experiment.config import INSTRUMENTS_EVERY, LADDER, RunConfig
from pgprog.experiment.instruments import observed, usual_advantage
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import step_options, train_step_of
from pgprog.noise import ReplicaGenerator


def bare(config: RunConfig, replicas: int) -> Callable[[], None]:
    """A step without instruments."""
    step = training_step(config, replicas)

    def few(batch: Any, A: Any) -> dict[str, Any]:
        return {
            "success": batch.success.to(A.dtype).mean((-2, -1)),
            "length": batch.mask.sum(-1).to(A.dtype).mean((-2, -1)),
        }

    def call() -> None:
        with (
            patch.object(update, "rollout_metrics", few),
            patch.object(update, "step_metrics", lambda *a, **k: {}),
        ):
            step()

    return call


def reading(config: RunConfig, replicas: int) -> Callable[[], None]:
    """A step with a reading of the costly instruments."""
    seeds = range(replicas)
    learner, generator = make_learner(config, seeds), ReplicaGenerator(seeds, "train")
    options, train_step = step_options(config, learner), train_step_of(config)
    advantage = options.get("advantage") or usual_advantage(config, learner)
    count = 0

    def step() -> None:
        nonlocal count
        generator.seek(count)
        count += 1
        measured = observed(config, learner, advantage, {})
        more = options | {"advantage": measured, "entropy_coef": config.policy_entropy_coef}
        train_step(learner.policy, learner.optimizer, generator, **more)

    return step


def quartiles(steps: dict[str, Callable[[], None]], calls: int) -> dict[str, float]:
    """Seconds of each step: the lower quartile over its calls, which take turns."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for call in range(calls + 2):
        for kind, step in steps.items():
            started = time.process_time()
            step()
            if call >= 2:  # warm
                times[kind].append(time.process_time() - started)
    return {kind: sorted(each)[len(each) // 4] for kind, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algos", nargs="+", default=list(LADDER))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--every", type=int, default=INSTRUMENTS_EVERY)
    parser.add_argument("--steps", type=int, default=150, help="of each kind")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, shown = [], []
    for algo in args.algos:
        for K in args.replicas:
            config = RunConfig(algo=algo)
            kinds = {"bare": bare, "cheap": training_step, "reading": reading}
            seconds = quartiles({kind: make(config, K) for kind, make in kinds.items()}, args.steps)
            cheap = seconds["cheap"] / seconds["bare"] - 1
            once = (seconds["reading"] - seconds["cheap"]) / seconds["bare"]
            share = cheap + once / args.every
            rows.append({"algo": algo, "replicas": K, "seconds": seconds, "cheap": cheap, "once": once, "share": share})
            milliseconds = [f"{seconds[kind] * 1e3:.2f}" for kind in kinds]
            shown.append((algo, str(K), *milliseconds, f"{cheap:.1%}", f"{once:.2f}", f"{share:.1%}"))
    columns = (
        "algorithm",
        "K",
        "bare ms",
        "cheap ms",
        "reading ms",
        "cheap",
        "one reading, steps",
        f"N = {args.every}",
    )
    title = f"Instruments: share of a bare step's time, {diagnostics.MICROBATCHES} microbatches a reading"
    report(
        "instruments", head() | {"every": args.every, "rows": rows}, [table(title, columns, shown)], args.out, args.json
    )


if __name__ == "__main__":
    main()
