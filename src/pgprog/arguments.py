"""The arguments of the commands, as typed data; free of torch, so that ``--help`` answers at once."""

from dataclasses import dataclass
from pathlib import Path

from pgprog.experiment.config import INSTRUMENTS_EVERY, CompareConfig, RunConfig
from pgprog.experiment.grid_config import GridConfig


@dataclass(frozen=True, kw_only=True)
class Train(RunConfig):
    """Train one algorithm of the ladder, or any recipe, on the digit-sum task.

    Example: pgprog train --algo grpo --steps 400
    """

    group_steps: int | None = None
    """Batches where --algo is rloo or grpo, in place of --steps."""
    seed: int = 0
    """Decides the initial policy, the prompts and the noise."""
    out: Path | None = None
    """Run directory [default: a new one below runs/]."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Path | None = None
    """Go on with the run in this directory, by its own settings; give no others."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    instruments_every: int = INSTRUMENTS_EVERY
    """Steps between readings of the costly instruments (signal and noise of the gradient); 0 is never."""
    exact_critic: bool = False
    """At those readings, how far the critic is from the exact values, by enumeration: slow on a large task."""
    json: bool = False
    """Print the summary as JSON, in place of words."""


@dataclass(frozen=True, kw_only=True)
class Compare(CompareConfig):
    """Train several algorithms across seeds, on the same prompts, and compare score, cost and gradient noise.

    Example: pgprog compare --seeds 5 --steps 1500
    """

    workers: int | None = None
    """Processes, one thread each [default: one per core]."""
    out: Path | None = None
    """Run directory [default: a new one below runs/]."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Path | None = None
    """Go on with the run in this directory, by its own settings; give no others."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    instruments_every: int = INSTRUMENTS_EVERY
    """Steps between readings of the costly instruments (signal and noise of the gradient); 0 is never."""
    json: bool = False
    """Print the summary as JSON, in place of tables."""


@dataclass(frozen=True, kw_only=True)
class Grid(GridConfig):
    """Train every advantage under every constraint, on one budget, across seeds: a heat map with intervals.

    Example: pgprog grid --advantages leave_one_out group_z --constraints none clip_token trust_region
    """

    workers: int | None = None
    """Processes, one thread each [default: one per core]."""
    out: Path | None = None
    """Run directory [default: a new one below runs/]."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Path | None = None
    """Go on with the grid in this directory, by its own settings; give no others."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    json: bool = False
    """Print grid.json, in place of the table."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Show completions of a trained policy, their sums and rewards.

    Example: pgprog sample --run runs/grpo --target 23
    """

    run: Path
    """Directory of a run, or of a comparison with --algo."""
    target: int
    """What the digits are to sum to."""
    algo: str | None = None
    """Which algorithm of a comparison."""
    n: int = 8
    """How many completions."""
    seed: int | None = None
    """Which seed's policy [default: the run's first]."""
    noise_seed: int = 0
    """Decides which completions are drawn."""
    json: bool = False
    """Print JSON, in place of a table."""
