"""What a recipe's step costs, against the ladder's step of the same kind and the extra passes of its definition.

The kind is the rung with as many completions per prompt and as much of a critic: REINFORCE, Actor-Critic, GRPO; PPO for
a clip in several epochs with a critic of prompts. What a
recipe adds by its definition is measured apart and added to the rung's time: a pass of the reference (scores without
gradient), of another sampler, of a critic of prefixes (in place of that of prompts), each further gradient step on the
batch (score, backward, step), each further draw of a filter. What the ratio compares is then the data-driven step with
the rung written out. Left out: trpo and optimal_baseline, whose extra passes are all that they are.

    python benchmarks/recipes.py [--recipes NAME ...] [--replicas 5]
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.table import Table

from measuring import OUT, head, least_seconds, report, table, training_step
from pgprog.algorithms.recipes import RECIPES, at_first_gradient
from pgprog.experiment.config import RunConfig, validate
from pgprog.experiment.executor import keep_freed_memory
from pgprog.experiment.learner import make_learner
from pgprog.noise import ReplicaGenerator
from pgprog.policy import rollout

APART = ("trpo", "optimal_baseline")
REQUIRED = 1.2


@dataclass(frozen=True)
class Args:
    """What to measure."""

    recipes: tuple[str, ...] = tuple(name for name in RECIPES if name not in APART)
    replicas: int = 5
    repeats: int = 7
    """Rounds, of which the least counts."""
    at_least: float = 0.1
    """Seconds that a mean is taken over."""
    out: Path = OUT
    """Where recipes.json goes."""
    json: bool = False
    """Print JSON, in place of a table."""


def rung_of(config: RunConfig) -> RunConfig:
    """The ladder's run of the same kind."""
    recipe = config.choices
    if recipe.critic == "prompt" and recipe.sampling.epochs > 1:
        return replace(config, recipe=None, algo="ppo", set=(), ppo_epochs=recipe.sampling.epochs)
    name = "grpo" if recipe.sampling.group else "reinforce" if recipe.critic == "none" else "actor_critic"
    return replace(config, recipe=None, algo=name, set=())


def passes(config: RunConfig, replicas: int) -> dict[str, Callable[[], object]]:
    """The passes that a recipe may add, each ready to be timed."""
    learner = make_learner(replace(config, recipe=None, algo="actor_critic"), range(replicas))
    prefixes = make_learner(replace(config, recipe="ppo_gae", algo="grpo", set=()), range(replicas)).critic
    policy, generator = learner.policy, ReplicaGenerator(range(replicas), "train")
    batch = rollout(policy, generator, config.prompts, config.completions)
    part = rollout(policy, generator, config.prompts // config.choices.sampling.minibatches, config.completions)
    assert learner.critic is not None and prefixes is not None
    held = [p for group in learner.optimizer.param_groups for p in group["params"]]

    def scores() -> None:
        with torch.no_grad():
            policy.score(batch.targets, batch.tokens)

    def gradient_step() -> None:
        learner.optimizer.zero_grad()
        logprobs, entropies = policy.score(part.targets, part.tokens)
        ratio = (logprobs - part.logprobs.detach()).exp()
        objective = torch.minimum(ratio, ratio.clamp(0.8, 1.2))
        (objective.sum((-3, -2, -1)) + entropies.sum((-3, -2, -1))).sum().backward()
        for p in held:
            assert p.grad is not None
            p.grad.mul_(1 / p.grad.flatten(1).square().sum(-1).sqrt().clamp(min=1).view(-1, *[1] * (p.dim() - 1)))
        learner.optimizer.step()

    def critic_of(critic: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], None]:
        def step() -> None:
            with torch.no_grad():
                critic(*inputs)
            critic(*inputs).square().sum().backward()

        return step

    def draw() -> None:
        with torch.no_grad():
            rollout(policy, generator, config.prompts, config.completions)

    return {
        "scores": scores,
        "gradient_step": gradient_step,
        "critic": critic_of(learner.critic, batch.targets),
        "prefix_critic": critic_of(prefixes, batch.targets, batch.tokens),
        "draw": draw,
    }


def allowed(config: RunConfig, rung: float, each: dict[str, float]) -> float:
    """The rung's seconds and those of the passes that the recipe's definition adds."""
    recipe, seconds = config.choices, rung
    if rung_of(config).algo != "ppo":
        further = each["gradient_step"] + (each["critic"] if recipe.critic != "none" else 0)
        seconds += (recipe.gradient_steps - 1) * further
    seconds += each["scores"] * (recipe.reference + recipe.other_sampler)
    seconds += each["draw"] * (recipe.sampling.dynamic if recipe.sampling.dynamic > 1 else 0)
    if recipe.critic == "prefix":
        seconds += recipe.gradient_steps * (each["prefix_critic"] - each["critic"])
    return seconds


def measure(args: Args) -> dict[str, Any]:
    """Each recipe, its rung and its passes, in turn."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does
    started = time.perf_counter()
    rows = []
    for name in args.recipes:
        config = validate(RunConfig(recipe=name))
        extra = passes(config, args.replicas)
        calls = {"recipe": training_step(config, args.replicas), "rung": training_step(rung_of(config), args.replicas)}
        seconds = least_seconds(calls | extra, args.repeats, args.at_least)
        bound = allowed(config, seconds["rung"], seconds)
        same = at_first_gradient(config.choices)
        rows.append(
            {
                "recipe": name,
                "rung": rung_of(config).algo,
                "recipe_seconds": seconds["recipe"],
                "rung_seconds": seconds["rung"],
                "with_passes_seconds": bound,
                "ratio": seconds["recipe"] / bound,
                "passes": list(config.choices.extra_passes),
                "one_gradient": same == config.choices,
            }
        )
    return {"recipes": rows, "took_seconds": time.perf_counter() - started}


def show(args: Args, result: dict[str, Any]) -> list[Table | str]:
    """One row per recipe."""
    rows = [
        [
            row["recipe"],
            f"{row['recipe_seconds'] * 1e3:.1f}",
            f"{row['rung']} {row['rung_seconds'] * 1e3:.1f}",
            f"{row['with_passes_seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in result["recipes"]
    ]
    worst = max(result["recipes"], key=lambda row: row["ratio"])
    title = f"One training step in ms, {args.replicas} replicas, one thread"
    return [
        table(title, ["recipe", "ms", "its rung, ms", "rung and passes, ms", "ratio"], rows),
        f"The worst is {worst['recipe']}: {worst['ratio']:.2f} times; {REQUIRED} is asked for.",
    ]


def main(args: Args) -> None:
    result = head() | measure(args)
    report("recipes", result, show(args, result), args.out, args.json)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
