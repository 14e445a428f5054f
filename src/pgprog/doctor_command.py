"""``pgprog doctor``: its arguments, free of torch, and what it does."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pgprog.errors import UsageError, choose

TITLES = {
    "live-advantage": "a gradient path through the advantage",
    "live-kl": "a gradient path through the KL in the reward",
    "action-baseline": "a baseline that depends on the action",
    "lagging-critic": "a critic whose updates stop",
    "shift": "log-probabilities shifted by one",
    "prompt-loss": "prompt tokens in the loss",
    "sparse": "a reward too rare to learn from",
    "variance-for-bias": "variance taken for bias",
    "empty-groups": "groups that carry nothing",
    "sampler-mismatch": "a sampler that disagrees with the trainer",
    "stale": "data that are some updates old",
    "length-bias": "length bias of a denominator",
    "no-entropy-bonus": "no entropy bonus",
    "raw-advantages": "raw advantages in PPO",
    "long-steps": "an undivided learning rate, and the ratio of whole sequences",
}
"""Every mode, in the order of the tour."""
NOT_REPRODUCED = 1  # the exit code where a check fails


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """See each failure of a policy gradient happen, with its proof and its cure; exits 1 if one is not reproduced.

    Example: pgprog doctor

    Example: pgprog doctor --run runs/grpo

    Example: pgprog doctor empty-groups --out runs/doctor
    """

    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint="")
    ] = ()
    """Which modes [default: the tour of all]; see --list."""
    run: Path | None = None
    """Examine a run of your own in place: its instruments, its warnings, and the mode that each points to."""
    list: bool = False
    """List the modes, and run none."""
    seeds: int = 6
    """Replicas of each training, side by side."""
    full: bool = False
    """Sweeps as well, which take longer."""
    out: Path | None = None
    """Directory for doctor.json and a figure of each mode, PNG and SVG [default: none are written]."""
    json: bool = False
    """Print JSON, in place of text."""


def doctor(args: Doctor) -> int:
    """Run ``pgprog doctor``."""
    names = tuple(dict.fromkeys(choose("mode", name, TITLES) for name in args.names)) or tuple(TITLES)
    if not 2 <= args.seeds <= 100:
        raise UsageError(f"--seeds {args.seeds} is out of range: give 2 to 100, for what one seed does proves nothing")
    if args.run is not None:
        return examine(args.run, args)
    if args.list:
        return list_modes(names, args.json)
    import torch
    from rich.console import Console

    from pgprog.doctor.mode import Effort
    from pgprog.doctor.tour import tour
    from pgprog.report.doctor_tables import print_finding, print_summary

    torch.set_num_threads(1)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    console, started = Console(stderr=args.json), time.perf_counter()
    found: list[dict[str, Any]] = []
    modes = tour(names, Effort(seeds=args.seeds, full=args.full))
    for number, name in enumerate(names, 1):
        with console.status(f"{number} of {len(names)}: {TITLES[name]}"):
            finding, seconds = next(modes)
        found.append(finding.as_dict() | {"seconds": seconds})
        if not args.json:
            print_finding(console, found[-1])
    content = {
        "command": command(args),
        "seeds": args.seeds,
        "full": args.full,
        "seconds": time.perf_counter() - started,
        "reproduced": all(each["reproduced"] for each in found),
        "modes": found,
    }
    if args.out is not None:
        from pgprog.experiment.rundir import write_bytes  # late, as they bring torch and matplotlib
        from pgprog.report.doctor_figures import draw

        draw(args.out, found)
        write_bytes(args.out / "doctor.json", (json.dumps(content, indent=1) + "\n").encode())
    if args.json:
        print(json.dumps(content))
    else:
        print_summary(console, content, args.out)
    return 0 if content["reproduced"] else NOT_REPRODUCED


def examine(run: Path, args: Doctor) -> int:
    """What a run of one's own says."""
    if args.names or args.list or args.full or args.out is not None:
        raise UsageError(f"--run {run} reads that run and makes no failure happen: leave out names and other flags")
    if (run / "runs").is_dir():
        runs = ", ".join(sorted(path.name for path in (run / "runs").iterdir()))
        raise UsageError(f"--run {run} is a comparison: give one of its runs below {run / 'runs'}: {runs}")
    from rich.console import Console

    from pgprog.doctor.own_run import examined

    found = examined(run)
    if args.json:
        print(json.dumps(found))
        return 0
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{found['name']}, {found['steps']} of {found['steps_planned']} steps")
    for seed, each in found["seeds"].items():
        say(f"seed {seed}, last: " + ", ".join(f"{name} {value:.3g}" for name, value in each["last"].items()))
        for warned in each["warnings"]:
            say(f"  seen at step {warned['step']}: {warned['text']}.")
        if not each["warnings"]:
            say("  no warning")
    say("What each number is: docs/metrics.md")
    return 0


def list_modes(names: tuple[str, ...], as_json: bool) -> int:
    """One line per mode."""
    if as_json:
        print(json.dumps({name: TITLES[name] for name in names}))
        return 0
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {TITLES[name]}")
    return 0


def command(args: Doctor) -> str:
    """What reproduces it."""
    words = ["pgprog doctor", *args.names, *(["--full"] if args.full else [])]
    return " ".join([*words, *([f"--seeds {args.seeds}"] if args.seeds != Doctor.seeds else [])])
