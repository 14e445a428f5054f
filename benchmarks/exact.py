"""Time and memory of exact enumeration: each case in a fresh process, the least of several runs, one thread.

python benchmarks/exact.py            all cases, a table
python benchmarks/exact.py CASE       one case in this process, as JSON
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from pgprog.env import DigitSum
from pgprog.exact.enumeration import every_target
from pgprog.exact.scores import score_moments
from pgprog.exact.values import objective_gradient
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy


def policy(seq_len: int) -> Policy:
    """Untrained, hidden 64, in float64."""
    return Policy(DigitSum(seq_len=seq_len), ReplicaGenerator([0], "init"), 64, torch.float64)


CASES: dict[str, tuple[int, Callable[[Policy], object], int]] = {
    "J and grad J, L = 3": (3, objective_gradient, 20),
    "J and grad J, L = 5": (5, objective_gradient, 5),
    "moments of the scores, L = 3": (3, lambda p: score_moments(p, every_target(p.task)), 3),
    "moments of the scores, L = 5": (5, lambda p: score_moments(p, every_target(p.task)), 1),
}


def measure(case: str) -> dict[str, float]:
    """Seconds, the least of several, and the peak memory of this process in GiB."""
    seq_len, call, runs = CASES[case]
    torch.set_num_threads(1)
    model, seconds = policy(seq_len), []
    for _ in range(runs):
        started = time.perf_counter()
        call(model)
        seconds.append(time.perf_counter() - started)
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return {"runs": runs, "seconds": min(seconds), "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}


def main() -> None:
    """Every case in a process of its own."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(
            f"{case:32} {found['seconds']:8.3f} s (least of {found['runs']}), peak {found['gib']:.2f} GiB", flush=True
        )


if __name__ == "__main__":
    main()
