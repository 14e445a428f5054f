"""Mean and covariance of an estimator's gradient, for binary rewards and a first gradient from fresh data.

    g = (1 / N) sum_i A_i s_i,        s_i = grad log pi(y_i | T_i)

Given prompts and rewards the scores are independent, and only their moments by reward enter:

    m_1 = E[s | r = 1] = grad p / p,                m_0 = E[s | r = 0] = - grad p / (1 - p)
    e_1 = E[|s|^2 | r = 1] = E[|s|^2; r = 1] / p,   e_0 = (E|s|^2 - E[|s|^2; r = 1]) / (1 - p)

The moments of A are those given the rewards that go with them: E[A^2 | r], and E[A_i A_j | r_i, r_j] over the others.
Letters: P targets (or prompts), G completions of each, N = P G rollouts, D parameters; any leading axes *K, replicas.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pgprog.exact.scores import ScoreMoments
from pgprog.exact.weight import GroupAdvantage, binomial, effective_weight, refuse_other_rewards

BatchAdvantage = Callable[[Float[Tensor, "B P G"], Int[Tensor, "B P"]], Float[Tensor, "B P G"]]
"""From the rewards of B independent batches, and their targets, to advantages."""


class GroupMoments(NamedTuple):
    """h = (1 / G) sum_i A_i s_i of one group, for each prompt."""

    mean: Float[Tensor, "*K P D"]
    second: Float[Tensor, "*K P"]
    """E|h|^2."""
    squared_advantage: Float[Tensor, "*K P"]
    """E[A^2]."""
    weight: Float[Tensor, "*K P"]
    """w: the mean is w grad p."""


class EstimatorMoments(NamedTuple):
    """The gradient g of a whole batch."""

    mean: Float[Tensor, "*K D"]
    second: Float[Tensor, "*K"]
    """E|g|^2."""
    trace: Float[Tensor, "*K"]
    """tr Cov(g) = E|g|^2 - |E g|^2."""
    squared_advantage: Float[Tensor, "*K"]
    """E[A^2] of a completion."""
    weight: Float[Tensor, "*K P"]
    """w by target; one where the batch is one group."""
    error: Float[Tensor, "*K"]
    """Standard error of ``second``: 0 where everything is exact."""


def group_moments(table: GroupAdvantage, scores: ScoreMoments) -> GroupMoments:
    """Mean and second moment of one group's gradient, at each prompt.

        E[h]     = w grad p
        E|h|^2   = (1 / G) (p E[A^2 | 1] e_1 + (1 - p) E[A^2 | 0] e_0)
                   + (1 - 1 / G) |grad p|^2 (X_11 - 2 X_10 + X_00)
        X_rr'    = E[A_i A_j | r_i = r, r_j = r'], c ~ Bin(G - 2, p) successes among the rest

    since P(r) P(r') m_r . m_r' is |grad p|^2 with the sign of (r = r').

    Args:
        table: (G,), or (P, G) for an advantage that also knows the prompt (its critic's value, say).

    Edge: p = 0 or 1: what never happens adds nothing.
    """
    p, q = scores.p, scores.gradient.square().sum(-1)
    w = effective_weight(table, p)
    A1, A0, G = table.success, table.failure, table.success.shape[-1]
    others = binomial(G - 1, p)
    squared_1, squared_0 = (others * A1.square()).sum(-1), (others * A0.square()).sum(-1)
    second = squared_1 * scores.second_success + squared_0 * (scores.second - scores.second_success)
    if G > 1:
        rest = binomial(G - 2, p)
        # A_i with r_i = 1 sees r_j; c + r_j successes among its others.
        X_11, X_10, X_00 = A1[..., 1:].square(), A1[..., :-1] * A0[..., 1:], A0[..., :-1].square()
        second = second + (G - 1) * q * (rest * (X_11 - 2 * X_10 + X_00)).sum(-1)
    squared_advantage = p * squared_1 + (1 - p) * squared_0
    return GroupMoments(w.unsqueeze(-1) * scores.gradient, second / G, squared_advantage, w)


def random_prompts(groups: GroupMoments, draw: Float[Tensor, "P"], prompts: int) -> EstimatorMoments:
    """The gradient of ``prompts`` independent groups, whose targets are drawn with these probabilities.

        E[g] = E_T[w grad p],        tr Cov(g) = (1 / P) (E_T E|h|^2 - |E[g]|^2)

    E_T E|h|^2 - |E g|^2 holds the variance within prompts and that of E[h | T] between them.
    """
    mean = (draw.unsqueeze(-1) * groups.mean).sum(-2)
    squared_mean = mean.square().sum(-1)
    trace = ((groups.second * draw).sum(-1) - squared_mean) / prompts
    squared_advantage = (groups.squared_advantage * draw).sum(-1)
    return EstimatorMoments(
        mean, trace + squared_mean, trace, squared_advantage, groups.weight, torch.zeros_like(trace)
    )


def fixed_prompts(groups: GroupMoments, chosen: Int[Tensor, "N"]) -> EstimatorMoments:
    """The gradient of one group for each prompt of a list, given by its place in ``groups``; repeats are allowed."""
    mean, second = groups.mean[..., chosen, :], groups.second[..., chosen]
    g = mean.mean(-2)
    squared_mean = g.square().sum(-1)
    trace = (second - mean.square().sum(-1)).sum(-1) / len(chosen) ** 2
    squared_advantage = groups.squared_advantage[..., chosen].mean(-1)
    weight = groups.weight[..., chosen]
    return EstimatorMoments(g, trace + squared_mean, trace, squared_advantage, weight, torch.zeros_like(trace))


def pooled(scores: ScoreMoments, draw: Float[Tensor, "P"]) -> ScoreMoments:
    """All prompts as one, P = 1: a completion of a randomly drawn prompt succeeds with probability J.

    With G = 1 the pairs (T_i, y_i) are independent and alike, so a batch of N, with a statistic of the whole batch, is
    a group of N of this one prompt.
    """
    return ScoreMoments(
        (scores.p * draw).sum(-1, keepdim=True),
        (scores.gradient * draw.unsqueeze(-1)).sum(-2, keepdim=True),
        (scores.second_success * draw).sum(-1, keepdim=True),
        (scores.second * draw).sum(-1, keepdim=True),
    )


def fixed_prompts_of_one_batch(
    table: GroupAdvantage, scores: ScoreMoments, chosen: Int[Tensor, "N"]
) -> EstimatorMoments:
    """One completion for each prompt of a list, with an advantage that is decided by the count of the whole batch.

    The other rewards have unequal probabilities, so c is Poisson-binomial: of the prompts but i, or but i and j.

        E[g]   = (1 / N) sum_i w_i grad p_i
        E|g|^2 = (1 / N^2) (sum_i (p_i E[A^2 | 1] e_1 + (1 - p_i) E[A^2 | 0] e_0)
                            + sum over i != j of grad p_i . grad p_j (X_11 - X_10 - X_01 + X_00))

    Args:
        table: (N,) values by c: the batch tabulated as a group of N.
        scores: (P,), without replica axis.
        chosen: places in ``scores``; repeats are allowed, they are independent completions.
    """
    N = len(chosen)
    p, gradient = scores.p[chosen], scores.gradient[chosen]
    A1, A0 = table.success, table.failure
    others = torch.stack([poisson_binomial(p[torch.arange(N) != i]) for i in range(N)])
    w = (others * (A1 - A0)).sum(-1)
    squared_1, squared_0 = (others * A1.square()).sum(-1), (others * A0.square()).sum(-1)
    win, total = scores.second_success[chosen], scores.second[chosen]
    second = (squared_1 * win + squared_0 * (total - win)).sum()
    if N > 1:
        X = A1[1:].square() - 2 * A1[:-1] * A0[1:] + A0[:-1].square()  # X_10 and X_01 are the same product of A
        i, j = torch.triu_indices(N, N, 1)
        place = torch.arange(N)
        kept = (place != i.unsqueeze(1)) & (place != j.unsqueeze(1))
        rest = poisson_binomial(p.expand(len(i), N)[kept].view(len(i), N - 2))
        second = second + 2 * ((gradient[i] * gradient[j]).sum(-1) * (rest * X).sum(-1)).sum()
    mean = (w.unsqueeze(-1) * gradient).mean(0)
    second, squared_mean = second / N**2, mean.square().sum()
    squared_advantage = (p * squared_1 + (1 - p) * squared_0).mean()
    return EstimatorMoments(mean, second, second - squared_mean, squared_advantage, w, torch.zeros_like(second))


def poisson_binomial(p: Float[Tensor, "*B n"]) -> Float[Tensor, "*B n1"]:
    """P(c successes) of n independent trials with unequal probabilities, c = 0 .. n; by adding one trial at a time."""
    chances = torch.ones_like(p[..., :1]) if p.shape[-1] else p.new_ones(*p.shape[:-1], 1)
    for i in range(p.shape[-1]):
        q = p[..., i : i + 1]
        up, stay = torch.nn.functional.pad(chances * q, (1, 0)), torch.nn.functional.pad(chances * (1 - q), (0, 1))
        chances = up + stay
    return chances


def sampled_rewards(
    advantage: BatchAdvantage,
    scores: ScoreMoments,
    draw: Float[Tensor, "P"],
    prompts: int,
    group_size: int,
    batches: int = 20_000,
    seed: int = 0,
) -> EstimatorMoments:
    """Moments for an advantage that no count decides: prompts and rewards are sampled, scores stay exact.

    Given targets T and rewards r, E[g | T, r] = sum_T c_T grad p_T and

        E[|g|^2 | T, r] = |E[g | T, r]|^2 + (1 / N^2) sum_i A_i^2 (e_{r_i} - |m_{r_i}|^2)

    with c_T = (1 / N) sum over T_i = T of A_i (r_i / p - (1 - r_i) / (1 - p)). So the noise of completions is gone and
    what is left is small: ``error`` is one standard error of E|g|^2; that of the trace is about the same.

    Args:
        scores: (P,), without replica axis.
        draw: the probability of each target.
    """
    generator = torch.Generator().manual_seed(seed)
    p, gram = scores.p, scores.gradient @ scores.gradient.mT
    e_1, e_0 = _safe(scores.second_success, p), _safe(scores.second - scores.second_success, 1 - p)
    q_1, q_0 = _safe(gram.diagonal(), p**2), _safe(gram.diagonal(), (1 - p) ** 2)
    N = prompts * group_size
    targets = torch.multinomial(draw, batches * prompts, True, generator=generator).view(batches, prompts)
    noise = torch.rand(batches, prompts, group_size, generator=generator, dtype=p.dtype)
    r = (noise < p[targets].unsqueeze(-1)).to(p.dtype)
    A = advantage(r, targets)
    up, down = _safe(torch.ones_like(p), p), -_safe(torch.ones_like(p), 1 - p)
    sign = torch.where(r > 0, up[targets].unsqueeze(-1), down[targets].unsqueeze(-1))
    c = p.new_zeros(batches, len(p)).scatter_add(1, targets, (A * sign).sum(-1)) / N
    spread = torch.where(r > 0, (e_1 - q_1)[targets].unsqueeze(-1), (e_0 - q_0)[targets].unsqueeze(-1))
    seconds = ((c @ gram) * c).sum(-1) + (A.square() * spread).sum((-2, -1)) / N**2
    c_mean = c.mean(0)
    mean, second = c_mean @ scores.gradient, seconds.mean()
    # |mean of c|^2 has the variance of the mean in it.
    excess = (((c - c_mean) @ gram) * (c - c_mean)).sum() / (batches - 1) / batches
    squared_mean = mean.square().sum() - excess
    error = seconds.std() / batches**0.5
    return EstimatorMoments(mean, second, second - squared_mean, A.square().mean(), _safe(c_mean, draw), error)


def _safe(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0: what never happens."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1), 0)


def group_covariance(
    table: GroupAdvantage, pi: Float[Tensor, "Y"], rewards: Float[Tensor, "Y"], s: Float[Tensor, "Y D"]
) -> tuple[Float[Tensor, "D"], Float[Tensor, "D D"]]:
    """Mean and whole covariance matrix of one group's gradient, from every completion's score: tiny tasks only.

        Cov(h) = (1 / G) (E[A^2 | 1] E[s s^T; 1] + E[A^2 | 0] E[s s^T; 0])
                 + (1 - 1 / G) (X_11 - 2 X_10 + X_00) grad p grad p^T - w^2 grad p grad p^T

    Raises: UsageError where a reward is not 0 or 1.
    """
    refuse_other_rewards(rewards)
    success = rewards > 0
    p = pi[success].sum()
    win, lose = (s[k].mT @ (pi[k].unsqueeze(1) * s[k]) for k in (success, ~success))
    gradient = pi[success] @ s[success]
    A1, A0, G = table.success, table.failure, table.success.shape[-1]
    others, w = binomial(G - 1, p), effective_weight(table, p)
    second = ((others @ A1.square()) * win + (others @ A0.square()) * lose) / G
    cross = torch.zeros_like(p)
    if G > 1:
        cross = binomial(G - 2, p) @ (A1[1:].square() - 2 * A1[:-1] * A0[1:] + A0[:-1].square()) * (1 - 1 / G)
    return w * gradient, second + (cross - w.square()) * torch.outer(gradient, gradient)
