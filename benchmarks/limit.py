"""How near a training step comes to the machine's limit, and what holds it back.

*The limit* is the rate of one large square float32 matrix product on one thread, measured between the timings of the
step. *Achieved* is the matrix products' FLOPs of a step over its time. They are counted from shapes, 2 m n k for an
(m, k) by (k, n) product, per replica, with N = P G rows, F = 9 L + 1 prompt features, I = V + 1 input tokens:

    prompt   = 2 P F H + 6 P H^2                          features to state, and the token that opens the completion
    tokens   = 6 R H^2,  R = N (T - 2) + P                the recurrent product: once for a group at its first token,
                                                          never for the last token, which is not read
    heads    = 2 H V (N (T - 1) + P), 2 H V N T           of sample, where a group shares its first, and of score
    backward = 2 P F H + (12 H^2 + 6 I H) P               the features take no gradient
             + 12 R H^2 + 6 N (T - 1) I H                 states, recurrent weights, and the table of the inputs
             + 4 N T H V
    critic   = 2 P F H, forward and backward alike        its last layer is a sum, not a product
    step     = prompt + tokens + heads + backward, and for each further epoch prompt + tokens + head + backward
               [ + critic + epochs (critic + critic) ]

The first epoch's scores take over the recurrent products of the sampling.
torch's own counter (``torch.utils.flop_counter``) sees the shapes of every product as it is made, in the same step. If
the two differ, both are printed and torch's counts: the code has moved on from the formula.

*What holds it back* comes from torch.profiler: the self time of every operation that does work, put into matrix
products, elementwise work, copies and gathers, as shares of the wall time of the profiled steps; what is left is the
cost of calls: Python, views, dispatch, allocation and the autograd engine. An operation's self time holds what it costs
to be called, too. That is bounded by the *floor*: the time of the same step with two prompts, two completions and one
hidden unit, all of its operations on next to nothing, over the time of the step.

    python benchmarks/limit.py [--algo grpo] [--replicas 1 5 50]
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from measuring import OUT, head, least_seconds, report, table, training_step
from pgprog.experiment.config import CRITIC_METHODS, TITLES, CompareConfig, RunConfig

SQUARE = 2048
MATMUL = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::baddbmm_"}
COPIES = {
    *("aten::copy_", "aten::cat", "aten::clone", "aten::fill_", "aten::zero_", "aten::index", "aten::index_select"),
    *("aten::gather", "aten::scatter_", "aten::scatter_add_", "aten::index_add_", "aten::repeat_interleave"),
    *("aten::index_put_", "aten::_index_put_impl_", "aten::index_select_backward", "aten::one_hot"),
}
NO_WORK = {
    *("aten::view", "aten::as_strided", "aten::slice", "aten::select", "aten::transpose", "aten::expand"),
    *("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::unsqueeze", "aten::squeeze", "aten::reshape"),
    *("aten::to", "aten::_to_copy", "aten::detach", "aten::alias", "aten::unbind", "aten::chunk", "aten::split"),
    *("aten::permute", "aten::resize_", "aten::set_", "aten::result_type", "aten::item", "aten::flatten"),
    *("aten::contiguous", "aten::_unsafe_view", "aten::t", "aten::_local_scalar_dense", "aten::new_empty"),
}
KINDS = ("matrix products", "elementwise", "copies and gathers", "calls")
SAID = {
    "matrix products": "the matrix products themselves",
    "elementwise": "elementwise work, which is bound by memory and not by arithmetic",
    "copies and gathers": "copies and gathers, which compute nothing",
    "calls": "the calls: Python, dispatch, allocation and the autograd engine, at the same cost however little they do",
}


@dataclass(frozen=True)
class Args:
    """What to measure."""

    algo: str = "grpo"
    replicas: tuple[int, ...] = (1, 5, 50)
    repeats: int = 5
    """A time is the least of so many means."""
    profiled: int = 10
    """Steps under the profiler."""
    out: Path = OUT
    """Receives limit.json."""
    json: bool = False
    """Print JSON in place of the tables."""


def step_flops(config: RunConfig) -> int:
    """Matrix products of one step and one replica, by the formula above (the default prompt form and length)."""
    P, G, T, H, V = config.prompts, config.completions, config.seq_len, config.hidden, config.digits
    N, F, I = P * G, (config.digits - 1) * config.seq_len + 1, config.digits + 1  # noqa: E741
    R = N * (T - 2) + P
    prompt, tokens = 2 * P * F * H + 6 * P * H**2, 6 * R * H**2
    sampling, head = 2 * H * V * (N * (T - 1) + P), 2 * N * T * H * V
    backward = 2 * P * F * H + (12 * H**2 + 6 * I * H) * P + 12 * R * H**2 + 6 * N * (T - 1) * I * H + 2 * head
    epochs = config.ppo_epochs if config.algo == "ppo" else 1
    critic = 2 * P * F * H if config.algo in CRITIC_METHODS else 0
    first, further = prompt + tokens + sampling + head + backward, prompt + tokens + head + backward
    return first + (epochs - 1) * further + critic + epochs * 2 * critic


def counted_flops(config: RunConfig) -> int:
    """The same, as torch counts it."""
    step = training_step(config, 1)

    def in_place(total: Any, a: torch.Size, b: torch.Size, **_: Any) -> int:
        """Of ``total.baddbmm_(a, b)``, which torch's counter leaves out."""
        return 2 * a.numel() * b[-1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place}) as counter:
        step()
    return counter.get_total_flops()


def kind(name: str) -> str:
    """Which part of the breakdown an operation belongs to."""
    if name in MATMUL:
        return "matrix products"
    if name in COPIES:
        return "copies and gathers"
    return "elementwise" if name.startswith("aten::") and name not in NO_WORK else "calls"


def profiled(config: RunConfig, replicas: int, steps: int) -> dict[str, Any]:
    """Where the wall time of a profiled step goes, by kind, and how many operations do work."""
    step = training_step(config, replicas)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wall = (time.perf_counter() - started) / steps
    seconds, calls = dict.fromkeys(KINDS, 0.0), 0
    largest: dict[str, float] = {}
    for event in seen.key_averages():
        spent = event.self_cpu_time_total * 1e-6 / steps
        if (part := kind(event.key)) != "calls":
            seconds[part] += spent
            calls += event.count
            largest[event.key] = spent
    seconds["calls"] = wall - sum(seconds.values())
    top = sorted(largest.items(), key=lambda item: -item[1])[:8]
    return {
        "shares": {part: spent / wall for part, spent in seconds.items()},
        "operations": calls / steps,
        "largest_operations_shares": {name: spent / wall for name, spent in top},
    }


def verdict(replicas: int, entry: dict[str, Any]) -> str:
    """What the numbers say, in words."""
    shares = entry["shares"]
    first, second = sorted(shares, key=lambda name: -shares[name])[:2]
    speed = entry["achieved_share"]
    said = f"K = {replicas}: {shares[first]:.0%} of the step is {SAID[first]}; then {second}, {shares[second]:.0%}. "
    said += f"At the limit its products would fill {speed:.0%} of it"
    slow = shares["matrix products"] / speed
    said += f"; in their small shapes they take {slow:.1f} times that. " if slow > 1.2 else ", and they run near it. "
    return said + f"Calls alone, on next to nothing, take {entry['floor_share']:.0%}."


def one_size(config: RunConfig, replicas: int, args: Args) -> dict[str, Any]:
    """Step, limit and floor in turns; then the profile."""
    square = torch.randn(SQUARE, SQUARE)
    tiny = replace(config, prompts=2, group_size=2, hidden=1)
    calls = {
        "step": training_step(config, replicas),
        "limit": lambda: square @ square,
        "floor": training_step(tiny, replicas),
    }
    seconds = least_seconds(calls, args.repeats)
    limit = 2 * SQUARE**3 / seconds["limit"]
    flops = replicas * counted_flops(config)
    achieved = flops / seconds["step"]
    return {
        "seconds": seconds["step"],
        "flops": flops,
        "achieved_flops_per_second": achieved,
        "limit_flops_per_second": limit,
        "achieved_share": achieved / limit,
        "floor_share": seconds["floor"] / seconds["step"],
    } | profiled(config, replicas, args.profiled)


def measure(args: Args) -> dict[str, Any]:
    config = CompareConfig().run_config(args.algo, 1000)
    started = time.perf_counter()
    sizes = {replicas: one_size(config, replicas, args) for replicas in args.replicas}
    flops = {"by_formula": step_flops(config), "by_torch": counted_flops(config)}
    verdicts = {replicas: verdict(replicas, entry) for replicas, entry in sizes.items()}
    return {"flops": flops, "replicas": sizes, "verdicts": verdicts, "took_seconds": time.perf_counter() - started}


def show(args: Args, result: dict[str, Any]) -> list[Table | str]:
    """The share of the limit, the breakdown, and the words."""
    speeds, shares = [], []
    for replicas, entry in result["replicas"].items():
        rates = (entry["achieved_flops_per_second"], entry["limit_flops_per_second"])
        row = [f"{entry['seconds'] * 1e3:.2f}", f"{entry['flops'] / 1e6:.0f}", *(f"{rate / 1e9:.1f}" for rate in rates)]
        speeds.append([f"K = {replicas}", *row, f"{entry['achieved_share']:.0%}"])
        parts = [f"{entry['shares'][name]:.0%}" for name in KINDS]
        shares.append([f"K = {replicas}", *parts, f"{entry['floor_share']:.0%}", f"{entry['operations']:.0f}"])
    title = f"{TITLES[args.algo]}: a step against one {SQUARE} x {SQUARE} product"
    columns = ["", "ms", "MFLOP", "GFLOP/s", "limit GFLOP/s", "share"]
    shown: list[Table | str] = [table(title, columns, speeds)]
    shown.append(table("Where the time of a step goes", ["", *KINDS, "floor", "operations"], shares))
    shown += result["verdicts"].values()
    flops = result["flops"]
    if flops["by_formula"] != flops["by_torch"]:
        shown.append(f"The formula counts {flops['by_formula']:,} FLOPs a replica, torch {flops['by_torch']:,}.")
    return shown


def main(args: Args) -> None:
    torch.set_num_threads(1)
    result = head() | {"args": {**asdict(args), "out": str(args.out)}} | measure(args)
    report("limit", result, show(args, result), args.out, args.json)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
