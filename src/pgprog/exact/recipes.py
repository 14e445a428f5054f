"""What a recipe's first gradient is, exactly: its mean and covariance, with fresh data and with data one update old.

    E[g] = sum over batches of P(batch) g(batch),        g the gradient of J: minus that of the recipe's loss

by calling ``from_recipe.train_step``, as training does, on every batch of a tiny problem with unequal lengths. The P
prompts are given, so the truth is grad J, J the mean over them of the expected reward. *Fresh*: P(batch) is of the
policy itself. *One update old*: of the policy before its last update, ``old``; the present one scores, so the ratio
acts, or a correction does, or nothing. Recipes without groups see each prompt G times with one completion: the same
completions for all, P G of them.
A filter of groups: conditional on acceptance, I being that a group has unequal rewards. ``dynamic`` takes the first P
groups that it finds, so here a batch is P independent groups, the prompt of each drawn from the given ones:

    P(T | I) = P(I | T) / sum over T' of P(I | T'),        P(I | T) = 1 - p^G - (1 - p)^G

and what ``dynamic`` does after its last attempt is left out. The covariance holds the spread between prompts then.
A trust region: of the gradient that its step is made of, and of the natural direction, F^-1 g with the exact F.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pgprog.algorithms.from_recipe import train_step
from pgprog.algorithms.recipes import Recipe, at_first_gradient, refuse
from pgprog.algorithms.sampling import copy_of, informative_groups
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.blackbox import Moments, black_box_moments, first_gradient, runs
from pgprog.exact.enumeration import MEMORY_LIMIT, completions, refuse_what_is_too_large, value_and_gradient
from pgprog.exact.values import expected_return, kl
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy, PrefixCritic

ADAM_EPS = 1e-8
RANK_TOLERANCE = 1e-9  # of singular values, relative to the largest: below it a direction changes no probability


@dataclass(frozen=True)
class Problem:
    """Prompts, and whatever a recipe may want; one replica each, in float64."""

    policy: Policy
    old: Policy
    """The policy before its last update."""
    reference: Policy
    """Another policy, so that a KL from it is not 0."""
    critic: Critic
    prefix_critic: PrefixCritic
    targets: Int[Tensor, "P"]
    group_size: int
    """G, completions of each prompt."""

    @property
    def distance(self) -> float:
        """KL(old || policy) in nats per completion, the mean over the prompts."""
        return kl(self.old, self.policy, self.targets).whole.mean().item()


@dataclass(frozen=True)
class Compared:
    """E[g], its mean and covariance, against a true gradient."""

    norm: float
    """|E g|."""
    bias: float
    """|E g - truth|."""
    relative_bias: float
    """That over |truth|."""
    scale: float
    """c = <E g, truth> / |truth|^2."""
    rest: float
    """|E g - c truth| / |E g|: what no scale takes away, the sine of the angle."""
    angle: float
    """In degrees."""
    trace: float
    """tr Cov(g), of P G completions."""


@dataclass(frozen=True)
class RecipeRow:
    """A recipe at a problem."""

    name: str
    title: str
    said: str
    """The bias that the recipe states."""
    prompts: int
    group_size: int
    acceptance: float
    """P(I), the chance that a filter keeps a group of a random prompt; 1 without one."""
    fresh: Compared
    penalised: Compared | None
    """Against grad (J - coef KL(pi || ref)), where there is a KL penalty."""
    natural: Compared | None
    """F^-1 E[g] against F^-1 grad J, where there is a trust region."""
    stale: Compared | None
    """With data one update old; None where the recipe cannot have it."""
    stale_penalised: Compared | None


def tiny_problem(
    seed: int = 0,
    *,
    seq_len: int = 2,
    digits: int = 2,
    hidden: int = 4,
    group_size: int = 3,
    prompt_form: Literal["state", "tokens"] = "state",
    step: float = 0.05,
) -> Problem:
    """Two prompts, the least and the largest target, in the variable-length form: success and lengths differ.

    Args:
        seed: of the old policy and the critics; the reference is of the next one.
        step: theta = theta_old + step g / (|g| + 1e-8), g = grad J at theta_old: Adam's first update at that learning
            rate, so no parameter moves further. 0 makes the two policies equal.

    Raises: UsageError where the enumeration, or the covariance of so many parameters, is too large.
    """
    # H units have 3 H^2 parameters and more; four matrices of their products are held at a time.
    if (needed := 4 * (3 * hidden**2) ** 2 * 8) > MEMORY_LIMIT:
        raise UsageError(
            f"hidden {hidden}: a covariance of {3 * hidden**2:,} parameters and more needs {needed / 2**30:,.1f} GiB, "
            f"over the limit of {MEMORY_LIMIT / 2**30:.1f} GiB: give a smaller --hidden"
        )
    task = DigitSum(seq_len=seq_len, digits=digits, variable_length=True, prompt_form=prompt_form)
    targets = torch.tensor([0, task.max_target])

    def policy_of(number: int) -> Policy:
        return Policy(task, ReplicaGenerator([number], "init"), hidden, torch.float64)

    old, critic_noise = policy_of(seed), ReplicaGenerator([seed], "critic")
    refuse_what_is_too_large(old, targets.tolist(), prune=False)
    g = value_and_gradient(old, expected_return(old, targets).mean(1)).gradient
    policy = copy.deepcopy(old)
    parts = (step * g / (g.abs() + ADAM_EPS)).split([p[0].numel() for p in policy.parameters()], dim=1)
    with torch.no_grad():
        for p, part in zip(policy.parameters(), parts, strict=True):
            p.add_(part.view_as(p))
    return Problem(
        policy=policy,
        old=old,
        reference=policy_of(seed + 1),
        critic=Critic(task, critic_noise, hidden, torch.float64),
        prefix_critic=PrefixCritic(task, critic_noise, hidden, torch.float64),
        targets=targets,
        group_size=group_size,
    )


def measure(recipe: Recipe, problem: Problem, on_part: Callable[[], None] = lambda: None) -> RecipeRow:
    """A recipe's row at its own temperature: of a tempered policy J is that of what it samples.

    ``on_part`` is called twice, when fresh and stale data are done. Raises: UsageError where there are too many
    batches, or none that a filter accepts.
    """
    problem = tempered(problem, recipe.sampling.temperature)
    fresh, stale = with_fresh_data(recipe), one_update_old(recipe)
    truth = true_gradient(problem)
    penalised = true_gradient(problem, recipe.kl.coef) if recipe.reference else None
    moments = recipe_moments(fresh, problem)
    on_part()
    later = None if stale is None else recipe_moments(stale, problem)
    on_part()
    natural = None
    if recipe.constraint.kind == "trust_region":
        F_inverse = inverse_fisher(problem)
        turned = Moments(F_inverse @ moments.mean, F_inverse @ moments.covariance @ F_inverse)
        natural = compared(turned, F_inverse @ truth)
    targets, G = slots(recipe, problem)
    return RecipeRow(
        name=recipe.name,
        title=recipe.title,
        said=recipe.bias,
        prompts=len(targets),
        group_size=G,
        acceptance=chance_of_acceptance(fresh, problem).mean().item(),
        fresh=compared(moments, truth),
        penalised=None if penalised is None else compared(moments, penalised),
        natural=natural,
        stale=None if later is None else compared(later, truth),
        stale_penalised=None if later is None or penalised is None else compared(later, penalised),
    )


def tempered(problem: Problem, temperature: float) -> Problem:
    """The problem with every policy at this temperature, the reference too."""
    policies = {name: copy.deepcopy(getattr(problem, name)) for name in ("policy", "old", "reference")}
    for policy in policies.values():
        policy.temperature = temperature
    return replace(problem, **policies)


def with_fresh_data(recipe: Recipe) -> Recipe:
    """The recipe at age 0; without another sampler no correction either, for its weights would be 1."""
    fresh = replace(recipe, sampling=replace(recipe.sampling, age=0))
    return fresh if fresh.other_sampler else replace(fresh, sampling=replace(fresh.sampling, correction="none"))


def one_update_old(recipe: Recipe) -> Recipe | None:
    """The recipe at age 1; None where ``refuse`` says that it cannot be."""
    stale = replace(recipe, sampling=replace(recipe.sampling, age=1))
    try:
        refuse(stale)
    except UsageError:
        return None
    return stale


def recipe_moments(recipe: Recipe, problem: Problem) -> Moments:
    """Mean and covariance of the recipe's first gradient, over every batch of the policy that samples.

    Clipping of the gradient's norm and the entropy bonus are off; minibatches are one, a trust region's step is left
    out. Data are one update old where ``recipe.sampling.age`` is not 0.
    """
    if recipe.sampling.dynamic == 1:
        return moments_at_prompts(recipe, problem)
    P = len(problem.targets)
    share = chance_of_acceptance(recipe, problem)
    prompts, ways = runs(P, P)  # the prompts of a batch, in any order
    weights = ways * (share / share.sum())[prompts].prod(1)
    return mixture(
        [moments_at_prompts(recipe, replace(problem, targets=problem.targets[of])) for of in prompts], weights
    )


def mixture(parts: Sequence[Moments], weights: Float[Tensor, "N"]) -> Moments:
    """The moments of a gradient that is of part i with probability w_i."""
    mean = sum_of(w * part.mean for w, part in zip(weights, parts, strict=True))
    spread = (part.covariance + torch.outer(part.mean - mean, part.mean - mean) for part in parts)
    return Moments(mean, sum_of(w * each for w, each in zip(weights, spread, strict=True)))


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Of one shape."""
    return torch.stack(list(tensors)).sum(0)


def moments_at_prompts(recipe: Recipe, problem: Problem) -> Moments:
    """Those of batches with just these prompts, given that all groups are accepted where there is a filter."""
    targets, G = slots(recipe, problem)
    critics = {"none": None, "prompt": problem.critic, "prefix": problem.prefix_critic}
    sampler = sampler_of(recipe, problem)
    estimator = first_gradient(
        partial(train_step, recipe=at_first_gradient(recipe)),
        problem.policy,
        targets,
        G,
        completions(sampler, problem.targets).tokens,
        critic=critics[recipe.critic],
        reference=problem.reference if recipe.reference else None,
        old=problem.old if recipe.sampling.age else None,
    )
    return black_box_moments(
        estimator,
        outcome_probabilities(sampler, problem).repeat_interleave(problem.group_size, 0),
        recipe.title,
        alike=problem.group_size,
        accepted=partial(all_informative, problem) if recipe.sampling.dynamic > 1 else None,
    )


def slots(recipe: Recipe, problem: Problem) -> tuple[Int[Tensor, "P"], int]:
    """The prompts of a batch and the completions of each: P x G, or P G x 1 with each prompt G times."""
    if recipe.sampling.group:
        return problem.targets, problem.group_size
    return problem.targets.repeat_interleave(problem.group_size), 1


def sampler_of(recipe: Recipe, problem: Problem) -> Policy:
    """The policy that the data come from."""
    s = recipe.sampling
    if s.age:
        return problem.old
    dtype = torch.bfloat16 if s.sampler_dtype == "bfloat16" else None
    return copy_of(problem.policy, dtype=dtype, temperature=s.sampler_temperature, top_p=s.sampler_top_p)


def outcome_probabilities(policy: Policy, problem: Problem) -> Float[Tensor, "P Y"]:
    """pi(completion | prompt), without graph."""
    return completions(policy, problem.targets).logprobs[0].exp().detach()


def rewards_of(problem: Problem) -> Float[Tensor, "P Y"]:
    """What each completion is paid."""
    tokens = completions(problem.policy, problem.targets).tokens
    rows = tokens.expand(1, len(problem.targets), -1, -1)
    return problem.policy.task.reward(problem.targets.unsqueeze(0), rows, torch.float64)[0]


def all_informative(problem: Problem, outcomes: Int[Tensor, "B S"]) -> Bool[Tensor, "B"]:
    """I: whether every group of a batch has unequal rewards."""
    owner = torch.arange(len(problem.targets)).repeat_interleave(problem.group_size)
    r = rewards_of(problem)[owner, outcomes].unflatten(1, (-1, problem.group_size))
    return (r.amax(-1) > r.amin(-1)).all(1)


def chance_of_acceptance(recipe: Recipe, problem: Problem) -> Float[Tensor, "P"]:
    """P(I | T) of a group, from the success probability of the policy that samples; 1 without a filter."""
    sampler = sampler_of(recipe, problem)
    p = (outcome_probabilities(sampler, problem) * rewards_of(problem)).sum(1)
    return informative_groups(p, problem.group_size) if recipe.sampling.dynamic > 1 else torch.ones_like(p)


def true_gradient(problem: Problem, kl_coef: float = 0.0) -> Float[Tensor, "D"]:
    """grad (J - kl_coef KL(pi || ref)), both the mean over the given prompts, by enumeration."""
    value = expected_return(problem.policy, problem.targets).mean(1)
    if kl_coef:
        value = value - kl_coef * kl(problem.policy, problem.reference, problem.targets).whole.mean(1)
    return value_and_gradient(problem.policy, value).gradient[0]


def inverse_fisher(problem: Problem) -> Float[Tensor, "D D"]:
    """The pseudo-inverse of F, undamped: what F^-1 is on the directions that change a probability.

        F = mean over prompts of sum over y of pi(y) s s^T,        s = grad log pi(y)

    Every E[g] lies in the span of the scores, and so does grad J: the pseudo-inverse loses nothing of them.
    """
    logprobs = completions(problem.policy, problem.targets).logprobs[0]
    s = torch.stack([_score(problem.policy, logprob) for logprob in logprobs.flatten()])
    rows = (logprobs.detach().exp().flatten() / len(logprobs)).sqrt().unsqueeze(1) * s
    _, size, directions = torch.linalg.svd(rows, full_matrices=False)
    real = size > RANK_TOLERANCE * size[0]
    return (directions[real].mT / size[real].square()) @ directions[real]


def _score(policy: Policy, logprob: Float[Tensor, ""]) -> Float[Tensor, "D"]:
    gradients = torch.autograd.grad(logprob, list(policy.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def compared(moments: Moments, truth: Float[Tensor, "D"]) -> Compared:
    """The numbers of a row. Raises: UsageError for a truth of 0, which has no direction."""
    mean, size = moments.mean, truth.norm()
    if not size > 0:
        raise UsageError(
            "grad J is 0 at this policy: nothing is biased relative to it, give another seed or temperature"
        )
    scale = mean @ truth / size.square()
    rest, along = (mean - scale * truth).norm(), scale * size
    bias = float((mean - truth).norm())
    return Compared(
        norm=float(mean.norm()),
        bias=bias,
        relative_bias=bias / float(size),
        scale=float(scale),
        rest=float(rest / mean.norm()) if mean.norm() > 0 else 0.0,
        angle=math.degrees(math.atan2(float(rest), float(along))),
        trace=float(moments.trace),
    )
