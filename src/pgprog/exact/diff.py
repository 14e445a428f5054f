"""Two recipes on one fixed batch: loss, gradient norm and angle of each, beside the exact gradient.

One batch of P prompts x G completions is drawn from a policy pi_0 and seen twice:

    fresh   the gradient at pi_0 itself: every ratio is 1
    stale   the gradient at pi_1, to which later steps have moved it: the ratios are pi_1 / pi_0

Beside them stands grad J of that same policy, J the mean over the P prompts of the chance of success, enumerated. As in
``update``, A is computed once, at pi_0. A recipe with one completion per prompt sees the same completions, as P G
prompts x 1. What a recipe computes is that of ``from_recipe``; here is only the batch.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pgprog.algorithms.from_recipe import advantage_of, aggregation_of, charged, objective_of
from pgprog.algorithms.recipes import Recipe, at_first_gradient, differences, refuse
from pgprog.algorithms.sampling import copy_of, informative
from pgprog.algorithms.update import values_of, with_values
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.enumeration import ValueAndGradient, success_probabilities, value_and_gradient
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy, PrefixCritic, Rollout, scored

TASK = DigitSum(seq_len=4, digits=4, variable_length=True)
TARGETS = (0, 1, 2, 3, 4, 5, 6, 8)
GROUP_SIZE = 4
HIDDEN = 8
SEED = 25  # groups of 0 to 3 successes, completions of 1 to 4 tokens
MOVED = 0.5  # each parameter, by up to this: initial weights alone say almost the same at every prefix
STALE = 110  # so that every bound of a ratio acts, that of dual_clip on one token
REFERENCE, NEAR = 111, 0.2
STATES = ("fresh", "stale")

NOT_HERE = {
    "sampling.epochs": "the batch is fixed: a second epoch starts from stale data",
    "sampling.minibatches": "the batch is fixed and whole: a second minibatch starts from stale data",
    "sampling.temperature": "the batch is fixed, of a policy at temperature 1",
    "sampling.age": "the batch is fixed: see its stale form",
}
"""Choices that these numbers leave out, and why."""


class World(NamedTuple):
    """Everything that does not depend on a recipe; float64, one replica."""

    policies: dict[str, Policy]
    """Those of ``STATES``; the fresh one has drawn the tokens."""
    reference: Policy
    critics: dict[str, Critic | PrefixCritic | None]
    """By ``Recipe.critic``."""
    targets: Int[Tensor, "1 P"]
    tokens: Int[Tensor, "1 P G T"]
    exact: dict[str, ValueAndGradient]
    """J and grad J at the prompts, by state."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One recipe's gradient of J at one state; its sign is that of ascent, so an angle under 90 degrees climbs."""

    loss: float
    norm: float
    angle: float | None
    """To the exact gradient, in degrees; None where a gradient is 0."""
    clip_frac: float | None
    """Share of what the constraint has bounded; None where it bounds nothing."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A gradient against another."""

    ratio: float | None
    """Of the norms; None where the other is 0."""
    angle: float | None
    """In degrees."""
    change: float | None
    """|g - other| / |other|."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """What some of the differing choices do, made on the first recipe alone."""

    choices: tuple[str, ...]
    """Changed together; more than one where the first has no meaning without the others."""
    effect: dict[str, Change] | None
    """By state; None where it is left out."""
    left_out: str = ""
    """Why."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two recipes, a then b."""

    a: dict[str, Measured]
    b: dict[str, Measured]
    b_against_a: dict[str, Change]
    attributions: tuple[Attribution, ...]


@cache
def world() -> World:
    """The fixed policies, critics and batch; made once."""

    def generator(seed: int, stream: str) -> ReplicaGenerator:
        return ReplicaGenerator([seed], stream)

    def moved(policy: Policy, seed: int, by: float = MOVED) -> Policy:
        other, noise = copy.deepcopy(policy), generator(seed, "resample")
        with torch.no_grad():
            for p in other.parameters():
                p.add_(2 * noise.uniform(*p.shape[1:], dtype=p.dtype) - 1, alpha=by)
        return other

    targets = torch.tensor([TARGETS])
    fresh = moved(Policy(TASK, generator(SEED, "init"), HIDDEN, torch.float64), SEED)
    policies = {"fresh": fresh, "stale": moved(fresh, STALE)}
    J = {state: success_probabilities(policy, targets[0]).mean(-1) for state, policy in policies.items()}
    return World(
        policies=policies,
        reference=moved(fresh, REFERENCE, NEAR),
        critics={
            "none": None,
            "prompt": Critic(TASK, generator(SEED, "critic"), HIDDEN, torch.float64),
            "prefix": PrefixCritic(TASK, generator(SEED, "critic"), HIDDEN, torch.float64),
        },
        targets=targets,
        tokens=fresh.sample(targets, GROUP_SIZE, generator(SEED, "evaluate")),
        exact={state: value_and_gradient(policy, J[state]) for state, policy in policies.items()},
    )


def batch_of(recipe: Recipe) -> Rollout:
    """The fixed batch as the recipe sees it before its first step: (1, P, G), or (1, P G, 1) without groups.

    Where the recipe filters groups, those of equal rewards do not count; where it samples from a changed copy, the
    tokens are the same, and ``sampler_logprobs`` are those of the copy.
    """
    w, s = world(), recipe.sampling
    targets, tokens, policy = w.targets, w.tokens, w.policies["fresh"]
    if not s.group:
        targets, tokens = targets.repeat_interleave(GROUP_SIZE, dim=1), tokens.flatten(1, 2).unsqueeze(2)
    batch = scored(policy, targets, tokens)
    batch = batch._replace(old_logprobs=batch.logprobs.detach())
    if s.dynamic > 1:
        batch = batch._replace(valid=informative(batch).unsqueeze(-1).expand_as(batch.success))
    with torch.no_grad():
        if recipe.reference:
            batch = batch._replace(ref_logprobs=w.reference.score(targets, tokens)[0])
        if recipe.other_sampler:
            dtype = torch.bfloat16 if s.sampler_dtype == "bfloat16" else None
            sampler = copy_of(policy, dtype=dtype, temperature=s.sampler_temperature, top_p=s.sampler_top_p)
            batch = batch._replace(sampler_logprobs=sampler.score(targets, tokens)[0])
    batch = charged(recipe, batch, policy)
    if batch.valid is not None:
        batch = batch._replace(mask=batch.mask & batch.valid.unsqueeze(-1))
    critic = w.critics[recipe.critic]
    return batch if critic is None else with_values(batch, values_of(critic, batch))


@cache
def gradient_of(recipe: Recipe, state: str) -> tuple[float, Float[Tensor, "D"], float | None]:
    """Loss, its gradient's opposite, and the share that is bounded; without entropy bonus or clipping of gradients."""
    recipe, w = at_first_gradient(recipe), world()
    policy = w.policies[state]
    batch = batch_of(recipe)
    A = advantage_of(recipe, w.policies["fresh"])(batch).detach()
    logprobs, _ = policy.score(batch.targets, batch.tokens)
    surrogate = objective_of(recipe)(logprobs, batch, A, aggregation_of(recipe.aggregation)(batch.mask))
    loss, gradient = value_and_gradient(policy, surrogate.loss)
    bounded = surrogate.metrics.get("clip_frac")
    return loss.item(), -gradient[0], None if bounded is None else bounded.item()


def compare(a: Recipe, b: Recipe) -> Comparison:
    """Both recipes on the fixed batch, and what each choice on which they differ does to the first."""
    g = {state: gradient_of(a, state)[1] for state in STATES}
    return Comparison(
        a=measure(a),
        b=measure(b),
        b_against_a=effect(b, g),
        attributions=tuple(attribute(a, b, g)),
    )


def measure(recipe: Recipe) -> dict[str, Measured]:
    """At each state."""
    found = {}
    for state in STATES:
        loss, g, bounded = gradient_of(recipe, state)
        exact = world().exact[state].gradient[0]
        found[state] = Measured(loss=loss, norm=g.norm().item(), angle=degrees(g, exact), clip_frac=bounded)
    return found


def effect(recipe: Recipe, others: dict[str, Float[Tensor, "D"]]) -> dict[str, Change]:
    """The recipe's gradient against others, by state."""
    return {state: against(gradient_of(recipe, state)[1], other) for state, other in others.items()}


def against(g: Float[Tensor, "D"], other: Float[Tensor, "D"]) -> Change:
    norm = other.norm()
    if norm == 0:
        return Change(ratio=None, angle=None, change=None)
    return Change(ratio=(g.norm() / norm).item(), angle=degrees(g, other), change=((g - other).norm() / norm).item())


def degrees(a: Float[Tensor, "D"], b: Float[Tensor, "D"]) -> float | None:
    """The angle, 2 atan2(|u - v|, |u + v|) of unit vectors u and v, which keeps its digits near 0; None for a 0."""
    if a.norm() == 0 or b.norm() == 0:
        return None
    u, v = a / a.norm(), b / b.norm()
    return math.degrees(2 * math.atan2((u - v).norm().item(), (u + v).norm().item()))


def attribute(a: Recipe, b: Recipe, gradients: dict[str, Float[Tensor, "D"]]) -> list[Attribution]:
    """Start from ``a`` and give one differing choice at a time ``b``'s value.

    A choice that has no meaning alone takes the rest of its axis along, or that and the sampling of groups. The largest
    change comes first, then what is left out.
    """
    paths = [path for path, _, _ in differences(a, b)]
    found: dict[tuple[str, ...], Attribution] = {}
    for path in paths:
        if path in NOT_HERE:
            found[(path,)] = Attribution(choices=(path,), effect=None, left_out=NOT_HERE[path])
            continue
        refused = ""
        for together in widened(path, paths):
            try:
                changed = with_choices(a, b, together)
            except UsageError as error:
                refused = refused or str(error).removeprefix(f"{a.name}: ")
                continue
            if together not in found:
                found[together] = Attribution(choices=together, effect=effect(changed, gradients))
            break
        else:
            found[(path,)] = Attribution(choices=(path,), effect=None, left_out=f"not alone: {refused}")
    return sorted(found.values(), key=size, reverse=True)


def widened(path: str, paths: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of choices to try: this one, its whole axis, and that with the choice of groups; each in order."""
    axis = path.partition(".")[0]
    own = tuple(p for p in paths if p.partition(".")[0] == axis and p not in NOT_HERE)
    grouped = tuple(p for p in paths if p in own or p == "sampling.group")
    return list(dict.fromkeys([(path,), own, grouped]))


def with_choices(a: Recipe, b: Recipe, paths: Sequence[str]) -> Recipe:
    """``a`` with these choices of ``b``; UsageError where the combination has no meaning."""
    for path in paths:
        axis, _, name = path.partition(".")
        a = replace(a, **{axis: replace(getattr(a, axis), **{name: getattr(getattr(b, axis), name)})})
    refuse(replace(a, sampling=replace(a.sampling, epochs=1, minibatches=1)))  # which are not in these numbers
    return a


def size(attribution: Attribution) -> float:
    """The larger of its two changes; -1 where it is left out."""
    if attribution.effect is None:
        return -1.0
    return max(change.change or 0.0 for change in attribution.effect.values())


def notes(a: Recipe, b: Recipe) -> list[str]:
    """What a reader of the numbers must know of these two."""
    said = []
    for recipe in dict.fromkeys((a, b)):
        if not recipe.sampling.group:
            said.append(
                f"{recipe.name} samples one completion per prompt: it sees the same completions as "
                f"{len(TARGETS) * GROUP_SIZE} prompts of one."
            )
        if recipe.sampling.dynamic > 1:
            said.append(f"{recipe.name} filters: groups of equal rewards do not count, and none are drawn for them.")
        if recipe.constraint.kind == "trust_region":
            said.append(f"{recipe.name}: its gradient, before the natural step is made of it.")
        if recipe.other_sampler and recipe.sampling.age == 0:
            said.append(f"{recipe.name}: the tokens stay those of the policy itself; its sampler scores them.")
        if recipe.reference:
            said.append(f"{recipe.name} has a KL in what it maximises; the exact gradient is that of J alone.")
    kinds = {("ratio" if r.constraint.kind == "clip" else "log pi") for r in (a, b)}
    if len(kinds) > 1:
        said.append(
            "A clipped loss is a mean of ratio x A, the other one of log pi x A: compare gradients, not losses."
        )
    return said


def as_dict(found: Comparison) -> dict[str, Any]:
    """Every number, and the exact ones beside them."""
    w = world()
    ratios = {}
    for state in STATES:
        with torch.no_grad():
            logprobs, old = (w.policies[s].score(w.targets, w.tokens)[0] for s in (state, "fresh"))
        ratio = (logprobs - old).exp()[TASK.mask(w.tokens)]
        ratios[state] = {"least": ratio.min().item(), "most": ratio.max().item()}
    return {
        "batch": {
            "task": dataclasses.asdict(TASK),
            "targets": w.targets[0].tolist(),
            "group_size": GROUP_SIZE,
            "successes": TASK.success(w.targets, w.tokens)[0].sum(-1).tolist(),
            "lengths": TASK.mask(w.tokens)[0].sum(-1).tolist(),
            "ratios": ratios,
        },
        "exact": {s: {"J": w.exact[s].value.item(), "norm": w.exact[s].gradient.norm().item()} for s in STATES},
    } | dataclasses.asdict(found)
