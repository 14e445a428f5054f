"""A recipe as a call of ``update``: the building blocks of the ladder, chosen by data.

Each axis becomes one argument: ``advantage_of``, ``objective_of``, ``aggregation_of`` and ``draw_of``. Nothing is
computed here that is not a call of ``advantages``, ``objectives``, ``sampling`` or ``trust_region``.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pgprog.algorithms import advantages
from pgprog.algorithms.objectives import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    kl_estimate,
    kl_penalty,
    mismatch_weights,
    policy_gradient_loss,
    token_weights,
)
from pgprog.algorithms.recipes import AggregationChoice, KLChoice, Recipe
from pgprog.algorithms.sampling import Draw, Past, copy_of, dynamic, sampled_by, score_squared_norms
from pgprog.algorithms.trust_region import trust_region_step
from pgprog.algorithms.update import Advantage, Metrics, Objective, Weights, update
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Critic, Policy, PrefixCritic, Rollout, rollout


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    generator: ReplicaGenerator,
    *,
    recipe: Recipe,
    critic: Critic | PrefixCritic | None = None,
    reference: Policy | None = None,
    past: Past | None = None,
    advantage: Advantage | None = None,
    prompts: int = 64,
    group_size: int = 1,
    entropy_coef: float = 0.02,
    max_grad_norm: float = 1.0,
) -> Metrics:
    """One step of a recipe for every replica; see ``update``.

    Args:
        recipe: as ``recipes.find`` gives it, so without contradictions.
        critic: of prompts or of prefixes, as ``recipe.critic`` says.
        reference: the frozen policy that a KL penalty is measured from, where there is one.
        past: the parameters of earlier updates, where the data are stale.
        advantage: a user's own, in place of the recipe's.

    Raises: ValueError where critic, reference or past are wanted and missing.
    """
    kinds = {"none": type(None), "prompt": Critic, "prefix": PrefixCritic}
    if not isinstance(critic, kinds[recipe.critic]):
        raise ValueError(f"{recipe.name} wants a critic of kind {recipe.critic!r}, and got {type(critic).__name__}")
    if past is not None:
        past.remember(policy)
    c, s = recipe.constraint, recipe.sampling
    return update(
        policy,
        optimizer,
        generator,
        advantage or advantage_of(recipe, policy),
        prompts=prompts,
        group_size=group_size,
        entropy_coef=entropy_coef,
        max_grad_norm=max_grad_norm,
        critic=critic,
        draw=draw_of(recipe, reference, past),
        objective=objective_of(recipe),
        aggregation=aggregation_of(recipe.aggregation),
        epochs=s.epochs,
        minibatches=s.minibatches,
        trust_region=partial(natural_step, max_kl=c.max_kl) if c.kind == "trust_region" else None,
    )


def advantage_of(recipe: Recipe, policy: Policy | None = None) -> Advantage:
    """A of a rollout, (K, P, G) or (K, P, G, T); the policy is wanted by ``optimal_constant`` alone."""

    def advantage(batch: Rollout) -> Tensor:
        A = _baselined(recipe, batch, policy)
        if recipe.kl.place == "reward" and recipe.kl.level == "token" and A.dim() < batch.mask.dim():
            # The baseline is of the reward alone; each token is charged for the KL from it on.
            charge = advantages.reward_to_go(-kl_rewards(recipe.kl, batch), batch.mask)
            A = torch.where(batch.mask, A.unsqueeze(-1) + charge, 0)
        return _whitened(recipe, A, batch)

    return advantage


def _baselined(recipe: Recipe, batch: Rollout, policy: Policy | None) -> Tensor:
    a, r, valid = recipe.advantage, batch.rewards, batch.valid
    if a.baseline == "gae":
        assert batch.token_rewards is not None and batch.prefix_values is not None
        return advantages.gae(batch.token_rewards, batch.prefix_values, batch.mask, a.gamma, a.lam)
    if a.credit == "to_go":
        assert batch.token_rewards is not None
        return advantages.reward_to_go(batch.token_rewards, batch.mask, gamma=a.gamma)
    if a.scale == "group_std":
        return advantages.group_z_score(r, valid, ddof=a.ddof, eps=a.eps)
    if a.scale == "batch_std":
        return advantages.batch_scaled(r, valid, ddof=a.ddof, eps=a.eps)
    if a.baseline == "value":
        assert batch.values is not None
        return advantages.value_baseline(r, batch.values, valid)
    if a.baseline == "optimal_constant":
        assert policy is not None
        norms = score_squared_norms(policy, batch.targets, batch.tokens)
        return advantages.optimal_constant(r, norms, valid, leave_own_out=True)
    plain = {
        "none": advantages.total_return,
        "batch_mean": advantages.batch_mean,
        "group_mean": advantages.group_mean,
        "leave_one_out": advantages.leave_one_out,
    }
    return plain[a.baseline](r, valid)


def _whitened(recipe: Recipe, A: Tensor, batch: Rollout) -> Tensor:
    how = recipe.advantage.whiten
    if how == "none":
        return A
    if how == "sequences":
        return advantages.standardize(A, batch.valid)
    per_token = torch.where(batch.mask, A if A.dim() == batch.mask.dim() else A.unsqueeze(-1), 0)
    floor = how == "tokens_floor"
    return advantages.whiten(per_token, batch.mask, ddof=0 if floor else 1, floor=floor)


def aggregation_of(choice: AggregationChoice) -> Callable[[Bool[Tensor, "K P G T"]], Weights]:
    """The weight of each token of a batch."""
    if choice.denominator == "sequence_sum":
        return lambda mask: None  # what update does by itself, and cheaper

    def weights(mask: Tensor) -> Tensor:
        constant = choice.denominator == "constant_length"
        length = (choice.length or mask.shape[-1]) if constant else None
        return token_weights(mask, choice.denominator, length=length)

    return weights


def objective_of(recipe: Recipe) -> Objective:
    """The surrogate loss, with the KL penalty where that stands in the loss."""
    c, kl, s = recipe.constraint, recipe.kl, recipe.sampling

    def objective(logprobs: Tensor, batch: Rollout, A: Tensor, weights: Weights) -> Surrogate:
        old, mask = batch.old_logprobs, batch.mask
        assert old is not None
        mine = weights
        if s.correction != "none":
            assert batch.sampler_logprobs is not None
            level: Literal["token", "sequence"] = "token" if s.correction.startswith("token") else "sequence"
            mode: Literal["truncate", "mask"] = "truncate" if s.correction.endswith("truncate") else "mask"
            if mine is None:
                mine = token_weights(mask, "sequence_sum" if c.ratio == "token" else "sequence_mean")
            before = batch.logprobs.detach()  # the policy before its first step on the batch
            mine = mine * mismatch_weights(before, batch.sampler_logprobs, mask, level=level, mode=mode, cap=s.cap)
        if c.kind == "clip":
            surrogate = clipped_surrogate(
                logprobs,
                old,
                A,
                mask,
                clip=(c.clip_low, c.clip_high),
                ratio_level=c.ratio,
                dual_clip=c.dual_clip,
                log_ratio_limit=c.log_ratio_limit,
                weights=mine,
            )
        elif c.kind == "cispo":
            low = None if c.clip_low == 1 else 1 - c.clip_low
            surrogate = cispo_surrogate(logprobs, old, A, mask, low=low, high=1 + c.clip_high, weights=mine)
        else:
            surrogate = Surrogate(policy_gradient_loss(logprobs, A, mask, weights=mine))
        if kl.place != "loss":
            return surrogate
        assert batch.ref_logprobs is not None
        penalty = kl_penalty(
            logprobs,
            batch.ref_logprobs,
            mask,
            kl.estimator,
            weights=weights,
            old_logprobs=old if kl.estimator == "k3_ratio" else None,
            limit=kl.limit,
        )
        return Surrogate(
            surrogate.loss + kl.coef * penalty, lambda: surrogate.metrics | {"kl_penalty": penalty.detach()}
        )

    return objective


def draw_of(recipe: Recipe, reference: Policy | None = None, past: Past | None = None) -> Draw:
    """Sample as the recipe says, then charge and score what it needs."""
    s = recipe.sampling
    if recipe.reference and reference is None:
        raise ValueError(f"{recipe.name} measures its KL from a frozen policy: give reference")
    if s.age > 0 and past is None:
        raise ValueError(f"{recipe.name} samples from the policy of {s.age} updates ago: give past")

    def draw(policy: Policy, generator: ReplicaGenerator, prompts: int, group_size: int) -> Rollout:
        batch = sample(policy, generator, prompts, group_size)
        if recipe.reference:
            assert reference is not None
            with torch.no_grad():
                batch = batch._replace(ref_logprobs=reference.score(batch.targets, batch.tokens)[0])
        return charged(recipe, batch, policy)

    def sample(policy: Policy, generator: ReplicaGenerator, prompts: int, group_size: int) -> Rollout:
        make = rollout
        if s.age > 0:
            assert past is not None
            make = past.draw
        elif recipe.other_sampler:
            dtype = torch.bfloat16 if s.sampler_dtype == "bfloat16" else None
            sampler = copy_of(policy, dtype=dtype, temperature=s.sampler_temperature, top_p=s.sampler_top_p)
            make = partial(sampled_by, sampler)
        if s.dynamic > 1:
            return dynamic(policy, generator, prompts, group_size, attempts=s.dynamic, draw=make)
        return make(policy, generator, prompts, group_size)

    return draw


def charged(recipe: Recipe, batch: Rollout, policy: Policy) -> Rollout:
    """The batch with what each token is paid, where that matters, and less the KL, where that is in the reward."""
    kl = recipe.kl
    if kl.place == "reward" and kl.level == "sequence":
        batch = batch._replace(rewards=batch.rewards - kl_rewards(kl, batch).sum(-1))
    if recipe.advantage.baseline == "gae" or recipe.advantage.credit == "to_go":
        paid = policy.task.process_rewards(batch.targets, batch.tokens, batch.rewards.dtype)
        if kl.place == "reward":
            paid = paid - kl_rewards(kl, batch)
        batch = batch._replace(token_rewards=paid)
    return batch


def natural_step(policy: Policy, batch: Rollout, A: Tensor, *, max_kl: float) -> Metrics:
    """Move the policy by the natural gradient, and leave nothing of its gradient to the optimiser."""
    gradient = [p.grad for p in policy.parameters()]
    for p in policy.parameters():
        p.grad = None
    return trust_region_step(policy, batch, A, gradient, max_kl=max_kl)


def kl_rewards(kl: KLChoice, batch: Rollout) -> Float[Tensor, "K P G T"]:
    """coef KL of each token, 0 where masked, as a constant: what is taken off the reward."""
    assert batch.ref_logprobs is not None
    estimate = kl_estimate(batch.logprobs.detach(), batch.ref_logprobs, kl.estimator, limit=kl.limit)
    return kl.coef * torch.where(batch.mask, estimate, 0)
