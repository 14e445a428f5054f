"""The rows and columns of a grid, as data, and its configuration; free of torch, so that ``--help`` answers at once."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pgprog.errors import UsageError, choose, refuse_twice
from pgprog.experiment.config import RunConfig, Settings, validate

BASE = "vpg"
"""The recipe that every cell changes: the return, no constraint, a sum per sequence."""
EVERY_CELL = ("sampling.group=true",)
"""All sample the same batches, groups or not in their advantage, so that the two axes are all that differs."""


class Entry(NamedTuple):
    """A row or a column."""

    label: str
    changes: tuple[str, ...]
    """Of BASE, in the form of --set."""


_STALE = "sampling.epochs=4"  # without it every ratio is 1, and no bound acts
ADVANTAGES = {
    "return": Entry("return r", ()),
    "batch_mean": Entry("batch mean", ("advantage.baseline=batch_mean",)),
    "leave_one_out": Entry("leave one out", ("advantage.baseline=leave_one_out",)),
    "group_mean": Entry("group mean", ("advantage.baseline=group_mean",)),
    "group_z": Entry("group z-score", ("advantage.baseline=group_mean", "advantage.scale=group_std")),
    "value": Entry("V(prompt)", ("advantage.baseline=value",)),
    "value_z": Entry("V z-scored", ("advantage.baseline=value", "advantage.whiten=sequences")),
    "gae": Entry("GAE 0.95", ("advantage.baseline=gae", "advantage.lam=0.95")),
    "gae_whitened": Entry(
        "GAE 0.95 whitened", ("advantage.baseline=gae", "advantage.lam=0.95", "advantage.whiten=tokens")
    ),
    "to_go": Entry("return to go", ("advantage.credit=to_go",)),
}
"""psi; the last two beside the default rows, ROWS."""
CONSTRAINTS = {
    "none": Entry("none", ()),
    "none_stale": Entry("none, 4 epochs", (_STALE,)),
    "clip_token": Entry("clip token 0.2, 4 epochs", ("constraint.kind=clip", _STALE)),
    "clip_sequence": Entry(
        "clip sequence product 0.2, 4 epochs", ("constraint.kind=clip", "constraint.ratio=sequence", _STALE)
    ),
    "clip_sequence_mean": Entry(
        "clip sequence mean (GSPO) 0.2, 4 epochs",
        ("constraint.kind=clip", "constraint.ratio=sequence_mean", _STALE),
    ),
    "cispo": Entry(
        "CISPO 5, 4 epochs", ("constraint.kind=cispo", "constraint.clip_low=1", "constraint.clip_high=4", _STALE)
    ),
    "kl_reward": Entry("KL in reward k1 0.01", ("kl.place=reward", "kl.estimator=k1", "kl.coef=0.01")),
    "kl_loss": Entry("KL in loss k3 0.01", ("kl.place=loss", "kl.estimator=k3", "kl.coef=0.01")),
    "trust_region": Entry("trust region 0.01", ("constraint.kind=trust_region",)),
    "kl_reward_token": Entry(
        "KL in token reward k1 0.01", ("kl.place=reward", "kl.level=token", "kl.estimator=k1", "kl.coef=0.01")
    ),
    "gspo_paper": Entry(
        "clip sequence mean 0.0003, 4 epochs",
        (
            "constraint.kind=clip",
            "constraint.ratio=sequence_mean",
            "constraint.clip_low=3e-4",
            "constraint.clip_high=4e-4",
            _STALE,
        ),
    ),
}
"""How far a step may go; those whose ratio needs stale data pass four times over each batch, and say so. The last two
beside the default columns, COLUMNS; the bounds of ``gspo_paper`` are arXiv:2507.18071's."""
ROWS = tuple(ADVANTAGES)[:-2]
COLUMNS = tuple(CONSTRAINTS)[:-2]


@dataclass(frozen=True, kw_only=True)
class GridConfig(Settings):
    """Advantages x constraints; the task is small, for there are many cells."""

    seq_len: int = 3
    """Tokens of a completion (at most, with --variable-length)."""
    hidden: int = 32
    """Hidden units of the policy, and of the critic."""
    prompts: int = 16
    """Prompts drawn per step, the same number for every cell."""
    group_size: int = 8
    """Completions of each prompt, the same number for every cell."""
    lr: float = 2e-2
    """Learning rate of Adam, decayed linearly to 0; divided by the gradient steps on each batch."""
    group_lr_factor: float = 1.0
    """Multiplies --lr; here all cells are alike."""

    advantages: tuple[str, ...] = ROWS
    """Rows; to_go and gae_whitened are there too."""
    constraints: tuple[str, ...] = COLUMNS
    """Columns; kl_reward_token and gspo_paper are there too."""
    rollouts: int = 25_600
    """Completions that each seed of every cell samples, rounded down to whole steps."""
    seeds: int = 5
    """How many: seeds 0, 1, ... are trained side by side."""
    first_seed: int = 0
    """Begin at another seed, to see whether a result holds."""

    def changes(self, advantage: str, constraint: str) -> tuple[str, ...]:
        """What a cell changes of BASE; those of --set last, so that they win."""
        return (*EVERY_CELL, *ADVANTAGES[advantage].changes, *CONSTRAINTS[constraint].changes, *self.set)

    def run_config(self, advantage: str, constraint: str) -> RunConfig:
        """The run of a cell: as many steps as --rollouts pay for; raises UsageError where it cannot be."""
        shared: dict[str, Any] = {field: getattr(self, field) for field in Settings.__dataclass_fields__}
        run = RunConfig(**shared | {"set": self.changes(advantage, constraint)}, recipe=BASE, steps=1)
        steps = self.rollouts // (cost := validate(run).most_rollouts_per_step)
        if steps < 1:
            raise UsageError(f"--rollouts {self.rollouts} is less than one step: it takes {cost}, give that or more")
        return replace(run, steps=steps)


def checked(names: tuple[str, ...], flag: str, known: dict[str, Entry]) -> None:
    """Raise UsageError for names that are none, unknown or twice there."""
    what = flag.removeprefix("--").removesuffix("s")
    if not names:
        raise UsageError(f"{flag} names no {what}: give one or more of {', '.join(known)}")
    for name in names:
        choose(what, name, known)
    refuse_twice(flag, names)
