"""The loop of a run: a pure function of (config, seeds), with a directory to write to if there is one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Adam

from pgprog.algorithms import TRAIN_STEPS, ppo
from pgprog.algorithms.update import Metrics
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.config import CRITIC_METHODS, GROUP_METHODS, RunConfig, Settings
from pgprog.experiment.user_advantage import load_advantage
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy

EVALUATION_COMPLETIONS = 256

OnStep = Callable[[int, Metrics], None]
"""Called after each step with the number of steps done and the metrics of the last, each (K,)."""


class Learner(NamedTuple):
    """What a run moves, K replicas of it."""

    policy: Policy
    critic: Critic | None
    optimizer: Adam


@dataclass(frozen=True)
class Result:
    """What a run has reached; lists are per seed."""

    steps: int
    """Steps done, fewer than asked for if the run was stopped."""
    rollouts: int
    """Completions sampled by each seed."""
    tokens: list[int]
    wall_seconds: float
    """Of all seeds together, evaluation aside."""
    success: list[float]
    """Share of sampled completions that meet the target, the mean over all targets."""
    success_sum_targets: list[float]
    """The same, targets weighted as sums of L random digits."""
    success_by_target: list[list[float]]


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
    task, dtype = make_task(config), getattr(torch, config.dtype)
    policy = Policy(task, ReplicaGenerator(seeds, "init"), config.hidden, dtype)
    critic = None
    groups = [{"params": list(policy.parameters()), "lr": config.policy_lr}]
    if config.algo in CRITIC_METHODS:
        critic = Critic(task, ReplicaGenerator(seeds, "critic"), config.hidden, dtype)
        groups.append({"params": list(critic.parameters()), "lr": config.critic_lr})
    return Learner(policy, critic, Adam(groups))


def step_options(config: RunConfig, critic: Critic | None) -> dict[str, Any]:
    """The arguments of the algorithm's ``train_step`` that stay the same through a run."""
    options: dict[str, Any] = {"prompts": config.prompts, "max_grad_norm": config.max_grad_norm}
    if config.algo in GROUP_METHODS:
        options["group_size"] = config.group_size
    if critic is not None:
        options["critic"] = critic
    if config.algo == "ppo":
        options |= {"epochs": config.ppo_epochs, "clip": config.clip, "ratio_level": config.ratio_level}
        if config.raw_advantages:
            options["advantage"] = ppo.raw_advantage
    if config.advantage is not None:
        options["advantage"] = load_advantage(config.advantage)
    return options


def run(
    config: RunConfig,
    seeds: Sequence[int],
    directory: Path | None = None,
    on_step: OnStep = lambda step, metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train one replica per seed, evaluate, and return what was reached.

    Args:
        config: validated.
        seeds: one per replica.
        directory: receives a row of metrics per step and seed, and the final checkpoint; None writes nothing.
        on_step: for progress.
        should_stop: asked before each step; True ends the run there, saved as it is.

    Raises:
        UsageError: a loss that is NaN or infinite, with the step and the seed; a user's advantage that is at fault.
    """
    learner = make_learner(config, seeds)
    options = step_options(config, learner.critic)
    generator = ReplicaGenerator(seeds, "train")
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    tokens = torch.zeros(len(seeds), dtype=torch.long)
    started, done = time.perf_counter(), 0
    with rundir.RowWriter(None if directory is None else directory / rundir.METRICS) as log:
        while done < config.steps and not should_stop():
            generator.seek(done)
            left = 1 - done / config.steps
            for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * left
            metrics = TRAIN_STEPS[config.algo](
                learner.policy, learner.optimizer, generator, entropy_coef=config.policy_entropy_coef * left, **options
            )
            done += 1
            tokens += (metrics["length"] * config.rollouts_per_step).round().long()
            log.add(metric_rows(done, seeds, config, metrics))
            refuse_divergence(done, seeds, metrics)
            on_step(done, metrics)
    wall = time.perf_counter() - started
    if directory is not None:
        save_learner(directory, learner, seeds, done)
    by_target = evaluate(learner.policy, seeds)
    return Result(
        steps=done,
        rollouts=done * config.rollouts_per_step,
        tokens=tokens.tolist(),
        wall_seconds=wall,
        success=by_target.mean(-1).tolist(),
        success_sum_targets=(by_target * sum_target_weights(learner.policy.task)).sum(-1).tolist(),
        success_by_target=by_target.tolist(),
    )


def metric_rows(step: int, seeds: Sequence[int], config: RunConfig, metrics: Metrics) -> list[dict[str, Any]]:
    """One flat row per seed."""
    columns = torch.stack(list(metrics.values())).T.tolist()
    head = {"step": step, "rollouts": step * config.rollouts_per_step}
    return [
        {"seed": seed, **head, **dict(zip(metrics, values, strict=True))}
        for seed, values in zip(seeds, columns, strict=True)
    ]


def refuse_divergence(step: int, seeds: Sequence[int], metrics: Metrics) -> None:
    """Stop at the first loss or gradient that is no number."""
    for name in ("loss", "grad_norm"):
        bad = ~metrics[name].isfinite()
        if bad.any():
            seed = seeds[int(bad.nonzero()[0, 0])]
            raise UsageError(
                f"{name} is not finite at step {step}, seed {seed}: the run has diverged, try a lower --lr"
            )


@torch.no_grad()
def evaluate(policy: Policy, seeds: Sequence[int]) -> Float[Tensor, "K targets"]:
    """Success of each replica at each target, from EVALUATION_COMPLETIONS sampled completions."""
    targets = torch.arange(policy.task.max_target + 1).expand(len(seeds), -1)
    chunks = []
    generator = ReplicaGenerator(seeds, "evaluate")
    for chunk in targets.split(256, dim=1):  # bounds the memory of a task with many targets
        tokens = policy.sample(chunk, EVALUATION_COMPLETIONS, generator)
        chunks.append(policy.task.success(chunk, tokens).double().mean(-1))
    return torch.cat(chunks, dim=-1)


def sum_target_weights(task: DigitSum) -> Float[Tensor, "targets"]:
    """How often each target is the sum of L random digits."""
    weights = torch.ones(1, dtype=torch.float64)
    for _ in range(task.seq_len):
        shifted = [torch.nn.functional.pad(weights, (d, task.digits - 1 - d)) for d in range(task.digits)]
        weights = torch.stack(shifted).mean(0)
    return weights


def save_learner(directory: Path, learner: Learner, seeds: Sequence[int], step: int) -> None:
    """Write policy, critic and optimiser to the run's checkpoint."""
    tensors = {f"policy.{name}": p.detach() for name, p in learner.policy.named_parameters()}
    if learner.critic is not None:
        tensors |= {f"critic.{name}": p.detach() for name, p in learner.critic.named_parameters()}
    for index, state in learner.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    rundir.save_checkpoint(directory, tensors, {"step": str(step), "seeds": ",".join(map(str, seeds))})


def load_policy(directory: Path, config: RunConfig) -> tuple[Policy, list[int]]:
    """The policy of a run's checkpoint, and its seeds; raises UsageError where it does not fit the run's config."""
    tensors, metadata = rundir.load_checkpoint(directory)
    seeds = [int(seed) for seed in metadata["seeds"].split(",")]
    policy = make_learner(config, seeds).policy
    state = {name.removeprefix("policy."): t for name, t in tensors.items() if name.startswith("policy.")}
    try:
        policy.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{directory / rundir.CHECKPOINT} does not fit {rundir.CONFIG} beside it: {reason}") from error
    return policy, seeds
