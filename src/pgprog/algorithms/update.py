"""The one update that the whole family shares: sample, score, loss, step.

    grad J = sum_t grad log pi(token_t | prompt, tokens_<t) * A

A rung of the ladder is a call of ``update`` with its own A; what else differs is in the call's arguments.
"""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from pgprog.algorithms.objectives import Surrogate, policy_gradient_loss, sequence_sum_mean, token_mean, value_loss
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy, Rollout, rollout

Advantage = Callable[[Rollout], Float[Tensor, "K P G"]]
Constraint = Callable[..., Surrogate]
Metrics = dict[str, Float[Tensor, "K"]]


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
    critic: Critic | None = None,
    constraint: Constraint | None = None,
    epochs: int = 1,
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
        critic: learned V(prompt); its own parameters and loss, so it never moves the policy except through A.
        constraint: (logprobs, old_logprobs, A, mask) -> Surrogate, in place of the plain policy gradient loss.
        epochs: gradient steps on the batch; more than one wants a constraint, for the data go stale.

    Returns:
        ``rollout_metrics`` of the batch, and of the last epoch, before its step: ``loss``, ``value_loss``,
        ``grad_norm`` (before it is scaled down) and the constraint's.

    Raises:
        ValueError: fewer than one prompt, completion or epoch, or a norm that is not positive.
    """
    for name, count in (("prompts", prompts), ("group_size", group_size), ("epochs", epochs)):
        if count < 1:
            raise ValueError(f"{name} {count} is too small: give 1 or more")
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm {max_grad_norm} is no length: give a positive number, or infinity")
    batch = rollout(policy, generator, prompts, group_size)
    if critic is not None:
        batch = batch._replace(values=critic(batch.targets).detach())
    A = advantage(batch).detach()
    old_logprobs = batch.logprobs.detach()
    logprobs, entropies = batch.logprobs, batch.entropies
    for epoch in range(epochs):
        if epoch > 0:
            logprobs, entropies = policy.score(batch.targets, batch.tokens)
        if constraint is None:
            surrogate = Surrogate(policy_gradient_loss(logprobs, A, batch.mask), {})
        else:
            surrogate = constraint(logprobs, old_logprobs, A, batch.mask)
        losses = {"loss": surrogate.loss - entropy_coef * sequence_sum_mean(entropies, batch.mask)}
        if critic is not None:
            losses["value_loss"] = value_loss(critic(batch.targets), batch.rewards)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()  # summed over replicas: their gradients stay their own
        grad_norm = clip_grad_norm(policy.parameters(), max_grad_norm)
        optimizer.step()
    losses = {name: loss.detach() for name, loss in losses.items()}
    return rollout_metrics(batch, A) | losses | {"grad_norm": grad_norm} | surrogate.metrics


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, "K"]:
    """Scale each replica's gradient down to ``max_norm``, in place; return the norms (K,) from before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.flatten(1).square().sum(-1) for g in grads], dim=-1).sum(-1).sqrt()
    if max_norm != float("inf"):
        scale = (max_norm / norm.clamp(min=max_norm)).view(-1, 1, 1)
        for g in grads:
            g.mul_(scale)
    return norm


@torch.no_grad()
def rollout_metrics(batch: Rollout, A: Float[Tensor, "K P G"] | Float[Tensor, "K P G T"]) -> Metrics:
    """What a batch says before it is learned from, each (K,); shares are in [0, 1].

    - ``success``: share of completions that meet the target; ``reward``: the mean of what is paid for them
    - ``entropy``: per token, in nats; ``length``: tokens per completion
    - ``advantage_mean``, ``advantage_std`` (ddof 0), ``frac_zero_advantage``: completions whose A is exactly 0 move
      nothing
    - ``frac_reward_zero_std``: groups of equal rewards, ``frac_all_wrong`` and ``frac_all_right`` its two kinds (G > 1
      only)
    """
    axes = (-2, -1)
    if A.dim() > batch.rewards.dim():
        A = A.where(batch.mask, 0)
        per_sequence = A.sum(-1) / batch.mask.sum(-1).clamp(min=1)
        zero = (A == 0).all(-1)
    else:
        per_sequence, zero = A, A == 0
    mean = per_sequence.mean(axes, keepdim=True)
    metrics = {
        "success": batch.success.to(A.dtype).mean(axes),
        "reward": batch.rewards.mean(axes),
        "entropy": token_mean(batch.entropies, batch.mask),
        "length": batch.mask.sum(-1).to(A.dtype).mean(axes),
        "advantage_mean": per_sequence.mean(axes),
        # Not std(): its kernel rounds one replica otherwise than the same one among others.
        "advantage_std": (per_sequence - mean).square().mean(axes).sqrt(),
        "frac_zero_advantage": zero.to(A.dtype).mean(axes),
    }
    if batch.rewards.shape[-1] > 1:
        equal = batch.rewards.amax(-1) == batch.rewards.amin(-1)
        wrong, right = ~batch.success.any(-1), batch.success.all(-1)
        for name, groups in (
            ("frac_reward_zero_std", equal),
            ("frac_all_wrong", equal & wrong),
            ("frac_all_right", equal & right),
        ):
            metrics[name] = groups.to(A.dtype).mean(-1)
    return metrics
