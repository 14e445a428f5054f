"""The one update that the whole family shares: sample, score, loss, step.

    grad J = sum_t grad log pi(token_t | prompt, tokens_<t) * A

A rung of the ladder is a call of ``update`` with its own A; what else differs is in the call's arguments.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pgprog.algorithms.advantages import reward_to_go
from pgprog.algorithms.diagnostics import rollout_metrics, step_metrics
from pgprog.algorithms.objectives import (
    Surrogate,
    aggregate,
    policy_gradient_loss,
    sequence_sum_mean,
    token_value_loss,
    value_loss,
)
from pgprog.algorithms.sampling import Draw, refuse_less_than_one
from pgprog.noise import ReplicaGenerator
from pgprog.optimizer import Optimizer
from pgprog.policy import Critic, Policy, PrefixCritic, Rollout, rollout

Advantage = Callable[[Rollout], Float[Tensor, "K P G"] | Float[Tensor, "K P G T"]]
Weights = Float[Tensor, "K P G T"] | None
Objective = Callable[[Float[Tensor, "K P G T"], Rollout, Tensor, Weights], Surrogate]
"""(logprobs, batch, A, weights) to a loss; ``batch.old_logprobs`` is there, and weights None sums each sequence."""
Metrics = dict[str, Float[Tensor, "K"]]


def policy_gradient(logprobs: Tensor, batch: Rollout, A: Tensor, weights: Weights) -> Surrogate:
    """The objective without a constraint, sum_t log pi(a_t | s_t) A."""
    return Surrogate(policy_gradient_loss(logprobs, A, batch.mask, weights=weights))


def update(
    policy: Policy,
    optimizer: Optimizer,
    generator: ReplicaGenerator,
    advantage: Advantage,
    *,
    prompts: int = 64,
    group_size: int = 1,
    entropy_coef: float = 0.02,
    max_grad_norm: float = 1.0,
    critic: Critic | PrefixCritic | None = None,
    draw: Draw = rollout,
    objective: Objective = policy_gradient,
    aggregation: Callable[[Bool[Tensor, "K P G T"]], Weights] = lambda mask: None,
    epochs: int = 1,
    minibatches: int = 1,
    trust_region: Callable[[Policy, Rollout, Tensor], Metrics] | None = None,
) -> Metrics:
    """Advance every replica by one batch; return its metrics, each (K,).

        loss = - mean_i sum_t log pi(a_t | s_t) A  -  entropy_coef * mean_i sum_t H(pi(. | s_t))  [ + mean_i (r - V)^2 ]

    Args:
        policy: K replicas; changed in place, as is the critic.
        optimizer: over the parameters of both, elementwise (Adam, SGD), so that replicas stay apart.
        generator: source of prompts and noise, at the step that is to be made.
        advantage: A of a rollout, (K, P, G) or (K, P, G, T); evaluated once, before the first epoch, and detached.
        prompts, group_size: P prompts, G completions of each.
        entropy_coef: weight of the entropy bonus, in reward per nat; 0 takes it away.
        max_grad_norm: positive; each replica's policy gradient is scaled down to this norm, infinity leaves it alone.
        critic: learned V(prompt), or V of every prefix; its own parameters and loss, so it never moves the policy
            except through A. It regresses on what is paid from there on.
        draw: makes the batch; see ``sampling``.
        objective: what stands in place of sum_t log pi A: a clipped ratio, say.
        aggregation: from the mask of a (mini-)batch to the weight of each of its tokens, in place of a sum per
            sequence and a mean over sequences; for the bonus, too.
        epochs, minibatches: a gradient step on each of the ``minibatches`` parts of the batch, ``epochs`` times over;
            more than one step wants an objective with a constraint, for the data go stale.
        trust_region: moves the policy by its gradient, in place of the optimiser; one step on the whole batch.

    Returns:
        ``rollout_metrics`` of the batch, and of the last step, before it is made: ``loss``, ``value_loss``,
        ``grad_norm`` (before it is scaled down), ``step_metrics`` and those of objective and trust region.

    Raises:
        ValueError: fewer than one prompt, completion, epoch or minibatch, more minibatches than prompts, or a norm
            that is not positive, or an entropy coefficient that is not finite.
    """
    refuse_less_than_one(prompts=prompts, group_size=group_size, epochs=epochs, minibatches=minibatches)
    if minibatches > prompts:
        raise ValueError(f"minibatches {minibatches} of {prompts} prompts: give no more than there are prompts")
    if not abs(entropy_coef) < float("inf"):
        raise ValueError(f"entropy_coef {entropy_coef} is no weight: give a finite number, 0 for no bonus")
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm {max_grad_norm} is no length: give a positive number, or infinity")
    batch = draw(policy, generator, prompts, group_size)
    if batch.valid is not None:
        batch = batch._replace(mask=batch.mask & batch.valid.unsqueeze(-1))
    values = None if critic is None else values_of(critic, batch)
    if values is not None:
        batch = with_values(batch, values)
    A = advantage(batch).detach()
    moved = epochs * minibatches > 1 or batch.old_logprobs is not None  # the ratio may differ from 1
    if batch.old_logprobs is None:
        batch = batch._replace(old_logprobs=batch.logprobs.detach())
    fresh = minibatches == 1  # the scores and values of the rollout serve for the first step
    for _ in range(epochs):
        for part, A_part in minibatches_of(batch, A, minibatches):
            logprobs, entropies = part.logprobs, part.entropies
            if not fresh:
                logprobs, entropies = policy.score(part.targets, part.tokens)
                values = None if critic is None else values_of(critic, part)
            fresh = False
            weights = aggregation(part.mask)
            surrogate = objective(logprobs, part, A_part, weights)
            bonus = sequence_sum_mean(entropies, part.mask) if weights is None else aggregate(entropies, weights)
            losses = {"loss": surrogate.loss - entropy_coef * bonus}
            if values is not None:
                losses["value_loss"] = critic_loss(values, part)
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()  # summed over replicas: their gradients stay their own
            grad_norm = clip_grad_norm(policy.parameters(), max_grad_norm)
            natural = {} if trust_region is None else trust_region(policy, batch, A)
            optimizer.step()
    losses = {name: loss.detach() for name, loss in losses.items()}
    distances = step_metrics(part, logprobs, moved=moved)
    return rollout_metrics(batch, A) | losses | {"grad_norm": grad_norm} | surrogate.metrics | natural | distances


def values_of(critic: Critic | PrefixCritic, batch: Rollout) -> Float[Tensor, "K P"] | Float[Tensor, "K P G T"]:
    """The critic's V of each prompt, or of each prefix, with gradient to the critic."""
    if isinstance(critic, PrefixCritic):
        return critic(batch.targets, batch.tokens)
    return critic(batch.targets)


def with_values(batch: Rollout, values: Float[Tensor, "K P"] | Float[Tensor, "K P G T"]) -> Rollout:
    """The batch and its values before the update, which carry no gradient there.

    Copies: an advantage that works in place is not to change what the critic learns.
    """
    if values.dim() == batch.tokens.dim():
        return batch._replace(prefix_values=values.detach().clone())
    return batch._replace(values=values.detach().clone())


def critic_loss(values: Float[Tensor, "K P"] | Float[Tensor, "K P G T"], batch: Rollout) -> Float[Tensor, "K"]:
    """The regression of the critic on what is paid after its prompt, or after each prefix."""
    if values.dim() == batch.tokens.dim():
        assert batch.token_rewards is not None
        return token_value_loss(values, reward_to_go(batch.token_rewards, batch.mask), batch.mask)
    return value_loss(values, batch.rewards)


def minibatches_of(batch: Rollout, A: Tensor, parts: int) -> Iterator[tuple[Rollout, Tensor]]:
    """Cut along the prompts, as evenly as it goes; prompts are random, so their order is as good as another."""
    if parts == 1:
        yield batch, A
        return
    axis, P = batch.targets.dim() - 1, batch.targets.shape[-1]
    for number in range(parts):
        start, end = P * number // parts, P * (number + 1) // parts

        def cut(x: Tensor, start: int = start, end: int = end) -> Tensor:
            return x.narrow(axis, start, end - start)

        held = {n: cut(x) for n, x in batch._asdict().items() if isinstance(x, Tensor) and x.dim() > axis}
        yield batch._replace(**held), cut(A)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, "K"]:
    """Scale each replica's gradient down to ``max_norm``, in place; return the norms (K,) from before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(-1) for g in grads], dim=-1).sum(-1).sqrt()
    if (norm > max_norm).any():
        scale = (max_norm / norm.clamp(min=max_norm)).view(-1, 1, 1)
        for g in grads:
            g.mul_(scale)
    return norm
