"""The loop of a run: a pure function of (config, seeds), with a directory to write to if there is one."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pgprog.algorithms import from_recipe, ppo
from pgprog.algorithms.diagnostics import MAY_BE_UNDEFINED
from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.algorithms.update import Metrics
from pgprog.errors import UsageError, full
from pgprog.experiment import rundir
from pgprog.experiment.config import INSTRUMENTS_EVERY, RunConfig
from pgprog.experiment.instruments import observed, usual_advantage
from pgprog.experiment.learner import Learner, Progress, make_learner, make_task, restore, save
from pgprog.experiment.user_advantage import load_advantage
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

EVALUATION_COMPLETIONS = 256
CHECKPOINT_EVERY = 100

OnStep = Callable[[int, Metrics], None]
"""Called after each step with the number of steps done and the metrics of the last, each (K,)."""


@dataclass(frozen=True)
class Result:
    """What a run has reached; lists are per seed."""

    steps: int
    """Steps done, fewer than asked for if the run was stopped."""
    rollouts: int
    """Completions sampled by each seed; their mean, where a filter makes it differ."""
    tokens: list[int]
    wall_seconds: float
    """Of all seeds together, evaluation aside."""
    success: list[float]
    """Share of sampled completions that meet the target, the mean over all targets."""
    success_sum_targets: list[float]
    """The same, targets weighted as sums of L random digits."""
    success_by_target: list[list[float]]


def train_step_of(config: RunConfig) -> Callable[..., Metrics]:
    """The rung's own step, or that of any recipe."""
    return TRAIN_STEPS[config.algo] if config.recipe is None else from_recipe.train_step


def step_options(config: RunConfig, learner: Learner) -> dict[str, Any]:
    """The arguments of ``train_step_of`` that stay the same through a run."""
    options: dict[str, Any] = {"prompts": config.prompts, "max_grad_norm": config.max_grad_norm}
    if config.choices.sampling.group:
        options["group_size"] = config.group_size
    if learner.critic is not None:
        options["critic"] = learner.critic
    if config.advantage is not None:
        options["advantage"] = load_advantage(config.advantage)
    if config.recipe is not None:
        return options | {"recipe": config.choices, "reference": learner.reference, "past": learner.past}
    if config.algo == "ppo":
        options |= {"epochs": config.ppo_epochs, "clip": config.clip, "ratio_level": config.ratio_level}
        if config.raw_advantages and config.advantage is None:
            options["advantage"] = ppo.raw_advantage
    return options


def run(
    config: RunConfig,
    seeds: Sequence[int],
    directory: Path | None = None,
    on_step: OnStep = lambda step, metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
    checkpoint_every: int = CHECKPOINT_EVERY,
    train_step: Callable[..., Metrics] | None = None,
    instruments_every: int = INSTRUMENTS_EVERY,
    exact_critic: bool = False,
) -> Result:
    """Train one replica per seed, evaluate, and return what was reached.

    Args:
        config: validated.
        seeds: one per replica.
        directory: receives a row of metrics per step and seed, checkpoints and the result; None writes nothing. A
            checkpoint that is there is gone on from, to the same numbers as a run that was never interrupted.
        on_step: for progress.
        should_stop: asked before each step; True ends the run there, saved as it is.
        checkpoint_every: steps between checkpoints; there is one at the end, too.
        train_step: in place of the configuration's own, with the same arguments; not to be resumed without it.
        instruments_every: steps between two readings of the costly instruments, from the first step on; 0 is never.
            They change nothing but the rows of metrics, and belong to the configuration's own train_step.
        exact_critic: compare the critic with exact values at each reading, by enumeration.

    Raises:
        UsageError: a loss that is NaN or infinite, with the step and the seed; a user's advantage that is at fault; a
            checkpoint that does not fit; a directory that cannot be written. The last checkpoint stays.
    """
    learner = make_learner(config, seeds)
    options = step_options(config, learner)
    progress = Progress(0, [0] * len(seeds), [0] * len(seeds), 0.0)
    finished = None
    if directory is not None:
        progress = restore(directory, config, seeds, learner) or progress
        finished = finished_result(directory, config, seeds)
    if train_step is not None:
        instruments_every = 0  # its advantage is its own
    generator, train_step = ReplicaGenerator(seeds, "train"), train_step or train_step_of(config)
    advantage = options.get("advantage") or usual_advantage(config, learner)
    rates, rollouts = base_rates(config, learner), torch.full((len(seeds),), float(config.rollouts_per_step))
    started = time.perf_counter() - progress.wall_seconds
    try:
        if directory is not None:
            steps = progress.step if finished is None else finished.steps
            rundir.cut_rows(directory / rundir.METRICS, steps, seeds)
        if finished is not None:
            return finished
        with rundir.RowWriter(None if directory is None else directory / rundir.METRICS) as log:
            while progress.step < config.steps and not should_stop():
                left = 1 - progress.step / config.steps
                for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * left
                generator.seek(progress.step)
                read: Metrics = {}
                watched: dict[str, Any] = {}
                if instruments_every and progress.step % instruments_every == 0:
                    watched["advantage"] = observed(config, learner, advantage, read, exact_critic=exact_critic)
                metrics = train_step(
                    learner.policy,
                    learner.optimizer,
                    generator,
                    entropy_coef=config.policy_entropy_coef * left,
                    **(options | watched),
                )
                metrics |= read
                paid = metrics.get("sampled", rollouts)
                progress = progress.after(paid, metrics["length"], time.perf_counter() - started)
                log.add(metric_rows(progress, seeds, metrics))
                refuse_divergence(progress.step, seeds, metrics)
                if directory is not None and progress.step % checkpoint_every == 0:
                    log.flush()
                    save(directory, config, seeds, learner, progress)
                on_step(progress.step, metrics)
        if directory is not None and progress.step > 0:
            save(directory, config, seeds, learner, progress)
        result = evaluated(config, seeds, learner.policy, progress)
        if directory is not None:
            rundir.write_json(directory / rundir.RESULT, asdict(result))
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be written ({error.strerror}) after step {progress.step}: "
            f"{'make room' if full(error) else 'mend that'}, then go on from the last checkpoint with --resume"
        ) from error
    return result


def base_rates(config: RunConfig, learner: Learner) -> list[float]:
    """The learning rate that each group of the optimiser starts with."""
    return [config.policy_lr, config.critic_lr][: len(learner.optimizer.param_groups)]


def finished_result(directory: Path, config: RunConfig, seeds: Sequence[int]) -> Result | None:
    """The result of a run that has made all of its steps, if it stands in its directory; UsageError where damaged."""
    path = directory / rundir.RESULT
    if not path.exists():
        return None
    try:
        result = Result(**rundir.read_json(path))
        refuse_other_result(result, len(seeds), make_task(config).max_target + 1)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged ({str(error)[:200]}): remove it, and --resume evaluates again") from error
    return result if result.steps == config.steps else None


def refuse_other_result(result: Result, K: int, targets: int) -> None:
    """Raise TypeError or ValueError for what is no result of so many seeds and targets."""
    lists = (result.tokens, result.success, result.success_sum_targets, result.success_by_target)
    if any(len(each) != K for each in lists) or any(len(row) != targets for row in result.success_by_target):
        raise ValueError(f"it is not of {K} seeds and {targets} targets")
    if bad := [n for n in (result.steps, result.rollouts, *result.tokens) if type(n) is not int or n < 0]:
        raise ValueError(f"{bad[0]!r} is no count")
    shares = [*result.success, *result.success_sum_targets, *(x for row in result.success_by_target for x in row)]
    if odd := [x for x in shares if not 0 <= x <= 1 + 1e-9]:
        raise ValueError(f"{odd[0]!r} is no share")
    if not 0 <= result.wall_seconds < math.inf:
        raise ValueError(f"{result.wall_seconds!r} are no seconds")


def evaluated(config: RunConfig, seeds: Sequence[int], policy: Policy, progress: Progress) -> Result:
    """What has been reached, with a fresh evaluation."""
    by_target = evaluate(policy, seeds)
    return Result(
        steps=progress.step,
        rollouts=round(sum(progress.rollouts) / len(seeds)),
        tokens=progress.tokens,
        wall_seconds=progress.wall_seconds,
        success=by_target.mean(-1).tolist(),
        success_sum_targets=(by_target * replace(policy.task, targets="sum").target_weights()).sum(-1).tolist(),
        success_by_target=by_target.tolist(),
    )


def metric_rows(progress: Progress, seeds: Sequence[int], metrics: Metrics) -> list[dict[str, Any]]:
    """One flat row per seed."""
    return [
        {"seed": seed, "step": progress.step, "rollouts": rollouts, **values}
        for seed, rollouts, values in zip(seeds, progress.rollouts, values_of(metrics), strict=True)
    ]


def values_of(metrics: Metrics) -> list[dict[str, float]]:
    """Metrics of each seed; one that is undefined there (the length of right answers, with none) is left out."""
    columns = torch.stack(list(metrics.values())).T.tolist()
    return [
        {name: x for name, x in zip(metrics, values, strict=True) if x == x or name not in MAY_BE_UNDEFINED}
        for values in columns
    ]


def refuse_divergence(step: int, seeds: Sequence[int], metrics: Metrics) -> None:
    """Stop at the first loss or gradient that is no number."""
    names = [name for name in ("loss", "grad_norm", "value_loss") if name in metrics]
    bad = ~torch.stack([metrics[name] for name in names]).isfinite()
    if bad.any():
        i, k = bad.nonzero()[0].tolist()
        raise UsageError(
            f"{names[i]} is not finite at step {step}, seed {seeds[k]}: the run has diverged, try a lower --lr"
        )


@torch.no_grad()
def evaluate(policy: Policy, seeds: Sequence[int]) -> Float[Tensor, "K targets"]:
    """Success of each replica at each target, from EVALUATION_COMPLETIONS sampled completions."""
    targets = torch.arange(policy.task.max_target + 1).expand(len(seeds), -1)
    chunks = []
    generator = ReplicaGenerator(seeds, "evaluate")
    for chunk in targets.split(2, dim=1):  # so few that what is computed on the way stays in the cache
        tokens = policy.sample(chunk, EVALUATION_COMPLETIONS, generator)
        chunks.append(policy.task.success(chunk, tokens).double().mean(-1))
    return torch.cat(chunks, dim=-1)
