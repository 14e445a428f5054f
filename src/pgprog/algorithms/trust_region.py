"""TRPO: the step that raises the surrogate most within a bound on the KL from the policy before it.

    maximise  mean_i sum_t ratio A     subject to     KL = mean_i sum_t KL(pi_old(. | s_t) || pi(. | s_t)) <= max_kl

    F x  = g                              F the Fisher matrix of the batch, damped; by conjugate gradients
    step = sqrt(2 max_kl / x^T F x) x     halved until both hold

The batch's states were sampled, the KL at each is exact over actions; its expectation over the batch is the KL of whole
completions (chain rule), as ``exact.values.kl`` enumerates it. D numbers in a replica's parameters, in the order of
``policy.parameters()``, each flattened; replicas never mix.

Paper: Schulman et al. 2015, arXiv:1502.05477, eq. 14 and appendix C.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pgprog.policy import Policy, Rollout

Product = Callable[[Float[Tensor, "K D"]], Float[Tensor, "K D"]]
"""A matrix of each replica times its vector."""


class Solution(NamedTuple):
    """Of K linear systems."""

    x: Float[Tensor, "K D"]
    residual: Float[Tensor, "K"]
    """|b - A x| / |b| as the iteration has it; 0 where b is 0."""


def trust_region_step(
    policy: Policy,
    batch: Rollout,
    A: Float[Tensor, "K P G"] | Float[Tensor, "K P G T"],
    gradient: Sequence[Tensor | None],
    *,
    max_kl: float = 0.01,
    damping: float = 0.01,
    iterations: int = 10,
    backtracks: int = 10,
    tolerance: float = 1e-8,
) -> dict[str, Float[Tensor, "K"]]:
    """Move every replica's parameters in place, by one natural gradient step within its trust region.

        (F + damping) x = -gradient
        theta = theta_old + fraction sqrt(2 max_kl / x^T (F + damping) x) x

    The first fraction of 1, 1/2, 1/4, ... is taken at which KL <= max_kl and mean_i sum_t ratio A is greater than
    before; after ``backtracks`` halvings without one, the replica stays where it is, bit for bit. So it does where the
    gradient is 0, NaN or infinite. Each replica moves as if alone, but for rounding: batched products may round one
    replica otherwise than several, and conjugate gradients enlarge that.

    Args:
        batch: of the policy as it is. Each sequence counts once in KL, Fisher matrix and surrogate, its tokens summed;
            one that is fully masked nowhere.
            ``old_logprobs``, where given, is the ratio's denominator; the KL is from the policy before this step.
            What is not ``valid`` has no part in the surrogate; in the KL, where its mask says so.
        A: the advantage; its scale does not matter.
        gradient: of the loss, for each of ``policy.parameters()`` in order, (K, ...); None is 0. Its scale does not
            matter. Parts that the surrogate has not (an entropy bonus) may make a step fail.
        max_kl: in nats per completion, positive.
        damping: 0 or more, added to F's diagonal. With 0 the first fraction's KL is max_kl to second order, so above it
            half the time, which costs a halving; damping takes it below.
        iterations, tolerance: of ``conjugate_gradients``.
        backtracks: 0 or more.

    Returns:
        ``kl`` (of the move, at most max_kl), ``cg_residual``, ``step_fraction`` (0 where nothing moved),
        ``improvement`` of the surrogate, ``accepted`` (1 or 0); no gradient.

    Bias: with a batch of the policy's own, a direction F^-1 grad J up to noise in both, whose inverse is not unbiased;
    the length depends on the batch.
    Raises: ValueError for a setting out of range, or gradients of other shapes than the parameters.
    """
    for name, value, good in (
        ("max_kl", max_kl, 0 < max_kl < float("inf")),
        ("damping", damping, 0 <= damping < float("inf")),
        ("iterations", iterations, iterations >= 1),
        ("backtracks", backtracks, backtracks >= 0),
        ("tolerance", tolerance, 0 <= tolerance < 1),
    ):
        if not good:
            raise ValueError(
                f"{name} {value} is out of range: max_kl is positive, damping 0 or more, iterations 1 or more, "
                "backtracks 0 or more, tolerance in [0, 1)"
            )
    if A.shape not in (batch.tokens.shape, batch.tokens.shape[:-1]):
        raise ValueError(
            f"advantages have shape {tuple(A.shape)}: {tuple(batch.tokens.shape[:-1])}, one per sequence, or "
            f"{tuple(batch.tokens.shape)}, one per token, wanted"
        )
    parameters = list(policy.parameters())
    shapes = [None if g is None else tuple(g.shape) for g in gradient]
    if len(shapes) != len(parameters) or any(s not in (None, p.shape) for s, p in zip(shapes, parameters, strict=True)):
        raise ValueError(f"gradients have shapes {shapes}: one for each of policy.parameters(), in order, wanted")
    start = _flat(parameters)
    b = -_flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradient, strict=True)])
    b = torch.where(b.isfinite().all(-1, keepdim=True), b, 0)
    log_pi = policy.distributions(batch.targets, batch.tokens)
    F = _fisher(log_pi, parameters, batch.mask)
    x, residual = conjugate_gradients(lambda v: F(v) + damping * v, b, iterations, tolerance)
    step = (2 * max_kl / (x * (F(x) + damping * x)).sum(-1, keepdim=True)).sqrt() * x
    log_pi = log_pi.detach()
    done = ~((b != 0).any(-1) & step.isfinite().all(-1))
    fraction = torch.where(done, 0, torch.ones_like(residual))
    for _ in range(backtracks + 1):
        _move(parameters, start, step, fraction)
        kl, improvement = _outcome(policy, batch, A, log_pi)
        done = done | ((kl <= max_kl) & (improvement > 0))
        if done.all():
            break
        fraction = torch.where(done, fraction, fraction / 2)
    fraction = torch.where(done, fraction, 0)
    _move(parameters, start, step, fraction)
    accepted = fraction > 0
    return {
        "kl": torch.where(accepted, kl, 0),
        "cg_residual": residual,
        "step_fraction": fraction,
        "improvement": torch.where(accepted, improvement, 0),
        "accepted": accepted.to(kl.dtype),
    }


def fisher_vector_product(policy: Policy, batch: Rollout, v: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
    """F v of each replica, exact for the batch's states, without graph.

        F = mean_i sum_t sum_a pi(a | s_t) grad log pi(a | s_t) grad log pi(a | s_t)^T

    That is the Hessian of the KL above at pi = pi_old; its expectation over batches of the policy's own is the Fisher
    matrix of whole completions, E[s s^T] with s = grad log pi(completion). A mean over actions, not over the sampled
    token, so exact where one would be noisy.
    """
    return _fisher(policy.distributions(batch.targets, batch.tokens), list(policy.parameters()), batch.mask)(v)


def _fisher(log_pi: Float[Tensor, "K P G T V"], parameters: Sequence[Tensor], mask: Bool[Tensor, "K P G T"]) -> Product:
    """F v = J^T (w pi (J v)), J the derivative of all log-probabilities; the graph is built once."""
    weight = log_pi.detach().exp() * (mask / _sequences(mask).view(-1, 1, 1, 1)).unsqueeze(-1)
    # J^T u is linear in u, and its derivative by u in the direction v is J v: two backward passes, no forward mode.
    u = torch.zeros_like(log_pi, requires_grad=True)
    J_u = torch.autograd.grad(log_pi, parameters, u, create_graph=True, materialize_grads=True)
    pulled = torch.cat([g.flatten(1) for g in J_u], dim=1)

    def product(v: Tensor) -> Tensor:
        (J_v,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
        F_v = torch.autograd.grad(log_pi, parameters, weight * J_v, retain_graph=True, materialize_grads=True)
        return _flat(F_v)

    return product


def conjugate_gradients(
    product: Product, b: Float[Tensor, "K D"], iterations: int, tolerance: float = 1e-8
) -> Solution:
    """Solve A x = b for K symmetric, positive definite matrices A, given as their products with vectors.

    A replica is done when |b - A x| <= tolerance |b|, or where p^T A p is not positive along its next direction p (A is
    singular there, or NaN), and then stays as it is, whatever the others still do. Without rounding, D iterations solve
    exactly. b = 0, or NaN in it, gives x = 0.
    """
    x, r, p = torch.zeros_like(b), b, b
    squared = b.square().sum(-1)
    goal = tolerance**2 * squared
    for _ in range(iterations):
        active = squared > goal
        if not active.any():
            break
        A_p = product(p)
        curvature = (p * A_p).sum(-1)
        active = (active & (curvature > 0)).unsqueeze(-1)
        length = (squared / curvature).unsqueeze(-1)
        x, r = torch.where(active, x + length * p, x), torch.where(active, r - length * A_p, r)
        before, squared = squared, r.square().sum(-1)
        p = torch.where(active, r + (squared / before).unsqueeze(-1) * p, p)
    size = b.square().sum(-1)
    return Solution(x, torch.where(size == 0, 0, (squared / size).sqrt()))


@torch.no_grad()
def sequence_kl(
    old: Float[Tensor, "K P G T V"], new: Float[Tensor, "K P G T V"], mask: Bool[Tensor, "K P G T"]
) -> Float[Tensor, "K"]:
    """mean_i sum_t KL(old(. | s_t) || new(. | s_t)) from all log-probabilities; no gradient.

    Each term is exact over actions. Infinite where ``new`` leaves out what ``old`` can do.
    """
    per_action = torch.where(old > -torch.inf, old.exp() * (old - new), 0)
    return torch.where(mask, per_action.sum(-1), 0).sum((-3, -2, -1)) / _sequences(mask)


@torch.no_grad()
def _outcome(policy: Policy, batch: Rollout, A: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """KL from ``before``, and how much mean_i sum_t ratio A has grown."""
    log_pi = policy.distributions(batch.targets, batch.tokens)
    logprobs, logprobs_before = (x.gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1) for x in (log_pi, before))
    ratio = 1.0 if batch.old_logprobs is None else (logprobs_before - batch.old_logprobs).exp()
    per_token = A if A.dim() == batch.mask.dim() else A.unsqueeze(-1)
    counts = batch.mask if batch.valid is None else batch.mask & batch.valid.unsqueeze(-1)
    # expm1: a small step would drown in a difference of two surrogates.
    growth = torch.where(counts, ratio * torch.expm1(logprobs - logprobs_before) * per_token, 0)
    return sequence_kl(before, log_pi, batch.mask), growth.sum((-3, -2, -1)) / _sequences(batch.mask)


def _sequences(mask: Bool[Tensor, "K P G T"]) -> Int[Tensor, "K"]:
    """How many have a token that counts; at least 1, to divide by."""
    return mask.any(-1).sum((-2, -1)).clamp(min=1)


@torch.no_grad()
def _move(parameters: Sequence[Tensor], start: Tensor, step: Tensor, fraction: Tensor) -> None:
    """theta = start + fraction step, and exactly start where the fraction is 0."""
    fraction = fraction.unsqueeze(-1)
    theta = torch.where(fraction > 0, start + fraction * step, start)
    for p, part in zip(parameters, theta.split([p[0].numel() for p in parameters], dim=1), strict=True):
        p.copy_(part.view_as(p))


def _flat(tensors: Sequence[Tensor]) -> Float[Tensor, "K D"]:
    """One vector of each replica, without graph."""
    return torch.cat([x.detach().flatten(1) for x in tensors], dim=1)
