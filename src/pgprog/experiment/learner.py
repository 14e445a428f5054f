"""What a run moves, K replicas of it, and its checkpoint."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgprog.algorithms.sampling import Past, copy_of
from pgprog.env import DigitSum
from pgprog.errors import UsageError, said
from pgprog.experiment import rundir
from pgprog.experiment.config import RunConfig, Settings
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Adam
from pgprog.policy import Critic, Policy, PrefixCritic


class Learner(NamedTuple):
    """Policy, critic and optimiser, and the frozen policies that a recipe may want."""

    policy: Policy
    critic: Critic | PrefixCritic | None
    optimizer: Adam
    reference: Policy | None = None
    """The initial policy: it follows from the seeds, so no checkpoint holds it."""
    past: Past | None = None
    """Parameters of earlier updates."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int
    rollouts: list[int]
    """Completions sampled so far, by each seed."""
    tokens: list[int]
    wall_seconds: float

    def after(self, rollouts: Tensor, length: Tensor, wall_seconds: float) -> "Progress":
        """One step later, with so many more completions of each seed, of so many tokens on average."""
        completions = added(self.rollouts, rollouts)
        return Progress(self.step + 1, completions, added(self.tokens, rollouts * length), wall_seconds)


def added(counts: list[int], more: Tensor) -> list[int]:
    """Each count, and that many more."""
    return [a + b for a, b in zip(counts, more.round().long().tolist(), strict=True)]


def make_task(config: Settings) -> DigitSum:
    """The task of a configuration; raises UsageError where it makes no sense."""
    try:
        return DigitSum(
            seq_len=config.seq_len,
            digits=config.digits,
            variable_length=config.variable_length,
            targets=config.targets,
            prompt_form=config.prompt_form,
            reward_form=config.reward_form,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_learner(config: RunConfig, seeds: Sequence[int]) -> Learner:
    """Fresh policies, critics and their optimiser; replica k depends on seeds[k] alone."""
    task, dtype, recipe = make_task(config), getattr(torch, config.dtype), config.choices
    policy = Policy(task, ReplicaGenerator(seeds, "init"), config.hidden, dtype)
    policy.temperature = recipe.sampling.temperature
    critic = None
    groups = [{"params": list(policy.parameters()), "lr": config.policy_lr}]
    if recipe.critic != "none":
        kind = Critic if recipe.critic == "prompt" else PrefixCritic
        critic = kind(task, ReplicaGenerator(seeds, "critic"), config.hidden, dtype)
        groups.append({"params": list(critic.parameters()), "lr": config.critic_lr})
    optimizer = Adam(groups)
    reference = copy_of(policy) if recipe.reference else None
    past = Past(policy, recipe.sampling.age) if recipe.sampling.age > 0 else None
    return Learner(policy, critic, optimizer, reference, past)


def named_tensors(learner: Learner) -> dict[str, Tensor]:
    """Every tensor that a run goes on from, by name."""
    tensors = {f"policy.{name}": p.detach() for name, p in learner.policy.named_parameters()}
    if learner.critic is not None:
        tensors |= {f"critic.{name}": p.detach() for name, p in learner.critic.named_parameters()}
    if learner.past is not None:
        tensors |= {f"past.{name}": tensor for name, tensor in learner.past.named_tensors().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in learner.optimizer.named_tensors().items()}
    return tensors


def save(directory: Path, config: RunConfig, seeds: Sequence[int], learner: Learner, progress: Progress) -> None:
    """Write the run's checkpoint, whole or not at all."""
    metadata = {
        "config": json.dumps(config.as_dict()),
        "seeds": json.dumps(list(seeds)),
        "step": json.dumps(progress.step),
        "rollouts": json.dumps(progress.rollouts),
        "tokens": json.dumps(progress.tokens),
        "wall_seconds": json.dumps(progress.wall_seconds),
    }
    rundir.save_checkpoint(directory, named_tensors(learner), metadata)


def restore(directory: Path, config: RunConfig, seeds: Sequence[int], learner: Learner) -> Progress | None:
    """Put a fresh learner where the run's checkpoint left it; None where there is no checkpoint.

    Raises:
        UsageError: a checkpoint that is damaged, or of another run or version; with the cure.
    """
    path = directory / rundir.CHECKPOINT
    if not path.exists():
        return None
    try:
        tensors, metadata = load_checked(directory, config, seeds)
        fill(named_tensors(learner), tensors, path)
        return progress_in(metadata, config, seeds, path)
    except UsageError as error:
        raise UsageError(f"{error}; {rundir.cure(path)}") from error


def progress_in(metadata: dict[str, str], config: RunConfig, seeds: Sequence[int], path: Path) -> Progress:
    """What a checkpoint says of how far it is; raises UsageError where that cannot be."""
    names = ("step", "rollouts", "tokens", "wall_seconds")
    step, rollouts, tokens, wall = (metadata_value(metadata, name, path) for name in names)
    if type(step) is not int or not 0 < step <= config.steps:
        raise UsageError(f"{path} is damaged: it is of step {step!r}, of {config.steps}")
    for name, counts in (("rollouts", rollouts), ("tokens", tokens)):
        fits = isinstance(counts, list) and len(counts) == len(seeds)
        if not fits or any(type(n) is not int or n < 0 for n in counts):
            raise UsageError(
                f"{path} is damaged: its {name} are {counts!r}, one count for each of {len(seeds)} seeds wanted"
            )
    if not isinstance(wall, (int, float)) or not 0 <= wall < math.inf:
        raise UsageError(f"{path} is damaged: its wall_seconds are {wall!r}")
    return Progress(step, rollouts, tokens, float(wall))


def metadata_value(metadata: dict[str, str], name: str, path: Path) -> Any:
    """One value of a checkpoint's metadata; raises UsageError where it is no JSON."""
    try:
        return json.loads(metadata[name])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: its {name} cannot be read ({said(error)})") from error


def load_checked(
    directory: Path, config: RunConfig, seeds: Sequence[int] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a checkpoint that was made by this configuration (and these seeds)."""
    tensors, metadata = rundir.load_checkpoint(directory)
    path = directory / rundir.CHECKPOINT
    if missing := {"config", "seeds", "step", "rollouts", "tokens", "wall_seconds"} - metadata.keys():
        raise UsageError(f"{path} is no checkpoint of this version: it lacks {', '.join(sorted(missing))}")
    made_by = metadata_value(metadata, "config", path)
    if not isinstance(made_by, dict):
        raise UsageError(f"{path} is damaged: its config is no object")
    if differing := [name for name, value in config.as_dict().items() if made_by.get(name) != value]:
        name = differing[0]
        raise UsageError(
            f"{path} does not fit {rundir.CONFIG} beside it: {name} is {made_by.get(name)!r} in the one and "
            f"{getattr(config, name)!r} in the other"
        )
    made_with = metadata_value(metadata, "seeds", path)
    if not isinstance(made_with, list) or not made_with or any(type(n) is not int or n < 0 for n in made_with):
        raise UsageError(f"{path} is damaged: its seeds are {made_with!r}")
    if seeds is not None and made_with != list(seeds):
        raise UsageError(f"{path} is of seeds {made_with}, not {list(seeds)}")
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UsageError(f"{path} is damaged: {bad[0]} holds NaN or infinity")
    return tensors, metadata


def load_policy(directory: Path, config: RunConfig) -> tuple[Policy, list[int]]:
    """The policy of a run's checkpoint, and its seeds; raises UsageError where it does not fit the run's config."""
    tensors, metadata = load_checked(directory, config, None)
    seeds = json.loads(metadata["seeds"])
    policy = make_learner(config, seeds).policy
    saved = {n.removeprefix("policy."): t for n, t in tensors.items() if n.startswith("policy.")}
    fill(dict(policy.named_parameters()), saved, directory / rundir.CHECKPOINT)
    return policy, seeds


def fill(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    """Copy saved tensors over mine, by name; raises UsageError where names, shapes or dtypes differ."""
    if mine.keys() != saved.keys():
        raise UsageError(f"{path} does not fit {rundir.CONFIG} beside it: it holds other tensors, of another version")
    for name, tensor in saved.items():
        if mine[name].shape != tensor.shape or mine[name].dtype != tensor.dtype:
            raise UsageError(
                f"{path} does not fit {rundir.CONFIG} beside it: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"{mine[name].dtype} {tuple(mine[name].shape)} wanted"
            )
    with torch.no_grad():
        for name, tensor in saved.items():
            mine[name].copy_(tensor)
