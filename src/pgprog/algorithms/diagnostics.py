"""Instruments: what a batch, and the step made from it, say about the health of a run. Each beside its formula.

Pure functions of tensors with trailing axes (..., P, G[, T]); each comes back as one value per replica, (...), without
gradient. ``rollout_metrics`` and ``step_metrics`` are part of every step; ``gradient_noise`` costs about a gradient
step, so that a run takes it once in a while. Undefined (a mean of nothing, a variance explained where there is none)
is NaN: a row of metrics leaves it out. How to read each: ``docs/metrics.md``.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pgprog.algorithms.advantages import reward_to_go
from pgprog.algorithms.objectives import MAX_LOG_RATIO, Surrogate, kl_estimate, token_mean
from pgprog.algorithms.sampling import replicas_of
from pgprog.policy import Policy, Rollout

GROUP_QUANTILES = (0.1, 0.5, 0.9)
RATIO_QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
MICROBATCHES = 4  # the noise of gbar decides how well |E g|^2 is known, and more parts cost more
MAY_BE_UNDEFINED = ("length_right", "length_wrong", "explained_variance", "grad_snr")


def rollout_metrics(batch: Rollout, A: Float[Tensor, "*K P G"] | Float[Tensor, "*K P G T"]) -> dict[str, Tensor]:
    """What a batch says before it is learned from; shares are in [0, 1], of the completions that count (``valid``).

    - ``success``: share of completions that meet the target; ``reward``: the mean of what is paid for them
    - ``entropy``: per token, in nats; ``length``: tokens per completion, ``length_right`` and ``length_wrong`` of those
      that meet the target and those that do not
    - ``advantage_mean``, ``advantage_std`` (ddof 0), ``frac_zero_advantage``: completions whose A is exactly 0 move
      nothing
    - ``sampled``: completions that a filter had to draw, where there is one
    - ``frac_reward_zero_std``: groups of equal rewards, ``frac_all_wrong`` and ``frac_all_right`` its two kinds (G > 1
      only; where rewards are not 0 or 1 a group may be of neither: some right, some wrong, all paid alike)
    - ``group_mean_q10``, ``_q50``, ``_q90`` and ``group_std_...`` (ddof 1): over the groups (G > 1 only)
    - ``explained_variance``: of the critic, where there is one
    """
    with torch.no_grad():
        if A.dim() > batch.rewards.dim():
            A = A.where(batch.mask, 0)
            per_sequence = A.sum(-1) / batch.mask.sum(-1).clamp(min=1)
            zero = (A == 0).all(-1)
        else:
            per_sequence, zero = A, A == 0
        success, length = batch.success, batch.mask.sum(-1).to(A.dtype)
        means = {
            "success": success.to(A.dtype),
            "reward": batch.rewards,
            "length": length,
            "advantage_mean": per_sequence,
            "frac_zero_advantage": zero.to(A.dtype),
        }
        metrics = dict(zip(means, mean_of(torch.stack(list(means.values())), batch.valid).unbind(), strict=True))
        # Not std(): its kernel rounds one replica otherwise than the same one among others.
        centred = per_sequence - metrics["advantage_mean"][..., None, None]
        metrics["advantage_std"] = mean_of(centred.square(), batch.valid).sqrt()
        metrics["entropy"] = token_mean(batch.entropies, batch.mask)
        metrics["length_right"], metrics["length_wrong"] = mean_length(length, torch.stack([success, ~success]))
        if batch.sampled is not None:
            metrics["sampled"] = batch.sampled
        if batch.rewards.shape[-1] > 1:
            metrics |= group_metrics(batch.rewards, batch.success, batch.valid)
        return metrics | critic_metrics(batch)


def mean_of(x: Float[Tensor, "*any P G"], valid: Bool[Tensor, "*K P G"] | None) -> Float[Tensor, "*any"]:
    """Over the completions that count; 0 where none does."""
    if valid is None:
        return x.mean((-2, -1))
    return torch.where(valid, x, 0).sum((-2, -1)) / valid.sum((-2, -1)).clamp(min=1)


def mean_length(length: Float[Tensor, "*K P G"], of: Bool[Tensor, "kinds *K P G"]) -> Float[Tensor, "kinds *K"]:
    """Tokens per completion of each kind, sum of |o_i| / number of them; one that a filter took out has length 0.

    Wrong answers that grow while right ones do not are what a denominator |o_i| brings about. NaN where there is none.
    """
    return (of * length).sum((-2, -1)) / (of & (length > 0)).sum((-2, -1))


def group_metrics(
    rewards: Float[Tensor, "*K P G"], success: Bool[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None
) -> dict[str, Tensor]:
    """Groups that teach nothing, of two kinds, and how mean and std (ddof 1) are spread over the groups.

        frac_reward_zero_std = mean over groups of [max r = min r],  and [all wrong], [all right] among them

    Expected for a prompt with success probability p: p^G + (1 - p)^G; see ``sampling.informative_groups``. G > 1. A
    group counts where all of it is valid; where some are not, the quantiles are left out.
    """
    equal = rewards.amax(-1) == rewards.amin(-1)
    wrong, right = ~success.any(-1), success.all(-1)
    kinds = {"frac_reward_zero_std": equal, "frac_all_wrong": equal & wrong, "frac_all_right": equal & right}
    if valid is not None:
        counts = valid.all(-1)
        return {name: (groups & counts).sum(-1) / counts.sum(-1).clamp(min=1) for name, groups in kinds.items()}
    metrics = {name: groups.to(rewards.dtype).mean(-1) for name, groups in kinds.items()}
    mean = rewards.mean(-1, keepdim=True)
    std = ((rewards - mean).square().sum(-1) / (rewards.shape[-1] - 1)).sqrt().masked_fill(equal, 0)
    spread = quantiles(torch.stack([mean.squeeze(-1), std]), GROUP_QUANTILES)
    for name, of_groups in zip(("group_mean", "group_std"), spread, strict=True):
        metrics |= {f"{name}_q{q * 100:02.0f}": v for q, v in zip(GROUP_QUANTILES, of_groups.unbind(-1), strict=True)}
    return metrics


def critic_metrics(batch: Rollout) -> dict[str, Tensor]:
    """``explained_variance`` of V(prompt) against r, or of V(prefix) against the reward to go; nothing without V."""
    if batch.prefix_values is not None:
        assert batch.token_rewards is not None
        paid, mask = reward_to_go(batch.token_rewards, batch.mask), batch.mask
        return {"explained_variance": explained_variance(paid.flatten(-3), batch.prefix_values.flatten(-3), mask)}
    if batch.values is not None:
        values = batch.values.unsqueeze(-1).expand_as(batch.rewards)
        return {"explained_variance": explained_variance(batch.rewards.flatten(-2), values.flatten(-2))}
    return {}


def explained_variance(
    returns: Float[Tensor, "*K N"], values: Float[Tensor, "*K N"], mask: Bool[Tensor, "*K P G T"] | None = None
) -> Float[Tensor, "*K"]:
    """The share of the returns' variance that the critic's values account for.

        1 - Var(r - V) / Var(r)                                             over the N that count, ddof 0

    At most 1; 0 is what a constant explains, below 0 V is worse than no critic. A shift of V does not show. The exact V
    explains Var(E[r | s]) / Var(r): less than 1, and little where each prompt is nearly decided by luck.

    Edge: equal returns: NaN. Parity: verl ``critic/vf_explained_var`` (1e-5 added to Var(r)).
    """
    m = None if mask is None else mask.flatten(-3)
    # From the smallest: equal returns then have a variance of exactly 0, however 0.95 is rounded.
    r = returns - (returns if m is None else returns.masked_fill(~m, torch.inf)).amin(-1, keepdim=True)
    both = torch.stack([r, r - values])
    if m is None:
        total, left = (both - both.mean(-1, keepdim=True)).square().sum(-1)
    else:
        both = both.masked_fill(~m, 0)
        mean = both.sum(-1, keepdim=True) / m.sum(-1, keepdim=True)
        total, left = (both - mean).masked_fill(~m, 0).square().sum(-1)
    return torch.where(total > 0, 1 - left / total, torch.nan)


def step_metrics(batch: Rollout, logprobs: Float[Tensor, "*K P G T"], *, moved: bool) -> dict[str, Tensor]:
    """How far the policy of the last gradient step, before it is made, is from those that it is measured against.

    - ``token_ratio_min``, ``_q01``, ``_q50``, ``_q99``, ``_max``: pi / pi_old of tokens, before any clip
    - ``kl_old_k1``, ``kl_old_k3``: KL(pi_old || pi); ``kl_sampler_k1``, ``kl_sampler_k3``: KL(sampler || pi)
    - ``ess``: effective sample size of the sequences' weights, pi over what the tokens came from
    - ``kl_ref_k1``, ``kl_ref_k3``: KL(pi || reference), pi being the policy before the batch

    Args:
        batch: the part of the batch that the last step saw.
        logprobs: of that step.
        moved: whether the ratio can differ from 1: several steps on a batch, or stale data. Where it cannot, ratios
            and what follows from them are left out. ``kl_sampler`` is there where the sampler is another policy, and
            ``kl_ref`` where there is a reference.
    """
    metrics: dict[str, Tensor] = {}
    old, sampler, mask = batch.old_logprobs, batch.sampler_logprobs, batch.mask
    with torch.no_grad():
        if moved and old is not None:
            metrics |= ratio_quantiles(logprobs, old, mask) | kl_metrics("kl_old", old, logprobs, mask)
        if sampler is not None:
            metrics |= kl_metrics("kl_sampler", sampler, logprobs, mask)
        came_from = sampler if sampler is not None else old if moved else None
        if came_from is not None:
            metrics["ess"] = effective_sample_size(torch.where(mask, logprobs - came_from, 0).sum(-1), mask.any(-1))
        if batch.ref_logprobs is not None:
            metrics |= kl_metrics("kl_ref", batch.logprobs, batch.ref_logprobs, mask)
    return metrics


def ratio_quantiles(
    logprobs: Float[Tensor, "*K P G T"], old_logprobs: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"]
) -> dict[str, Tensor]:
    """Both tails of ratio = exp(log pi - log pi_old) over the tokens that are not masked; above 5e8 shown as that."""
    ratio = torch.where(mask, logprobs - old_logprobs, 0).clamp(max=MAX_LOG_RATIO).exp()
    found = quantiles(ratio.flatten(-3), RATIO_QUANTILES, mask.flatten(-3)).unbind(-1)
    names = ("min", "q01", "q50", "q99", "max")
    return {f"token_ratio_{name}": value for name, value in zip(names, found, strict=True)}


def kl_metrics(
    name: str, sampled_by: Float[Tensor, "*K P G T"], other: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"]
) -> dict[str, Tensor]:
    """KL(sampled_by || other) per token, from tokens of the first: two unbiased estimates, l = log first - log other.

        k1 = l                                      may be negative by chance, lasting only where the tokens are not its
        k3 = exp(-l) - 1 + l                        never negative

    Parity: k1 verl ``actor/ppo_kl`` for KL(pi_old || pi); k3 TRL ``kl`` for the reference (where it is not corrected).
    """
    return {f"{name}_{k}": token_mean(kl_estimate(sampled_by, other, k), mask) for k in ("k1", "k3")}


def effective_sample_size(log_weights: Float[Tensor, "*K P G"], counted: Bool[Tensor, "*K P G"]) -> Float[Tensor, "*K"]:
    """The share of the sample that is left when it is weighted: (sum w)^2 / (n sum w^2), over the n that count.

    1 where all weights are equal, 1/n where one outweighs all others. w = exp(log_weights), of sequences: the product
    of their tokens' ratios. A single large weight that was not drawn does not show: it bounds trust from above.

    Paper: Kong 1992; verl ``rollout_is_eff_sample_size``. Edge: nothing counts: 1.
    """
    log_w = log_weights.masked_fill(~counted, -torch.inf)
    largest = log_w.amax((-2, -1), keepdim=True)
    w = torch.where(counted, (log_w - largest).exp(), 0)  # a common factor does not matter
    n = counted.sum((-2, -1))
    ess = w.sum((-2, -1)).square() / (n * w.square().sum((-2, -1)))
    return torch.where(n > 0, ess, 1)


def quantiles(
    x: Float[Tensor, "*K N"], shares: Sequence[float], counted: Bool[Tensor, "*K N"] | None = None
) -> Float[Tensor, "*K Q"]:
    """Quantiles along the last axis, on the line between neighbours: x_(h), h = q (n - 1), x_(0) the smallest of n.

    The default of numpy. ``counted`` marks the n that count; where none does, what comes back is not finite.
    """
    q = torch.tensor(shares, dtype=x.dtype)
    if counted is None:
        ordered, h = x.sort(-1).values, q * (x.shape[-1] - 1)
        place = h.floor()
        low, high = ordered[..., place.long()], ordered[..., h.ceil().long()]
    else:
        ordered, h = x.masked_fill(~counted, torch.inf).sort(-1).values, q * (counted.sum(-1, keepdim=True) - 1)
        h = h.clamp(min=0)
        place = h.floor()
        low, high = ordered.gather(-1, place.long()), ordered.gather(-1, h.ceil().long())
    return low + (high - low) * (h - place)


class GradientNoise(NamedTuple):
    """What microbatches say of the gradient g of a whole batch, each (K,)."""

    signal: Tensor
    """|E g|^2, estimated without bias: negative by chance where there is next to none."""
    noise: Tensor
    """tr Cov(g), estimated without bias."""


def signal_and_noise(parts: Sequence[Float[Tensor, "K M ..."]], share: float = 1.0) -> GradientNoise:
    """Signal and noise of a batch's gradient, from those of M parts of it with different prompts.

        gbar = mean_m g_m        S = sum_m |g_m - gbar|^2 / (M - 1)
        E S = tr Cov(g_m)        E|gbar|^2 = |E g|^2 + tr Cov(g_m) / M

        signal = |gbar|^2 - S / M                       |E g|^2
        noise  = share S / M                            tr Cov(g) of the whole batch

    Args:
        parts: one tensor per parameter, the gradients of M >= 2 parts of equal size.
        share: of the batch that the parts make up together; what is left over makes g less noisy still.

    Bias: none where the parts are independent and alike, as with a group's own baseline and a fixed denominator. A
    statistic of the whole batch (its mean, its std, its count of tokens) ties them together by O(1/N).
    """
    M, squared_mean, S = parts[0].shape[1], [], []
    for g in parts:
        g = g.flatten(2)
        gbar = g.mean(1, keepdim=True)
        squared_mean.append(gbar.square().sum((1, 2)))
        S.append((g - gbar).square().sum((1, 2)) / (M - 1))
    noise = torch.stack(S).sum(0) / M
    return GradientNoise(torch.stack(squared_mean).sum(0) - noise, share * noise)


def gradient_metrics(found: GradientNoise) -> dict[str, Tensor]:
    """``grad_signal``, ``grad_noise`` and ``grad_snr``, their ratio: |E g|^2 / tr Cov(g); NaN without any noise.

    A ratio of two unbiased estimates is a little biased; over a stretch of steps divide the mean signal by the mean
    noise.
    """
    snr = torch.where(found.noise > 0, found.signal / found.noise, torch.nan)
    return {"grad_signal": found.signal, "grad_noise": found.noise, "grad_snr": snr}


def gradient_noise(
    policy: Policy,
    batch: Rollout,
    A: Float[Tensor, "K P G"] | Float[Tensor, "K P G T"],
    objective: Callable[..., Surrogate],
    weights: Float[Tensor, "K P G T"] | None,
    microbatches: int = MICROBATCHES,
) -> GradientNoise:
    """Signal and noise of the gradient that a batch is about to give, without its entropy bonus; see above.

    The batch is cut along the prompts; A and the weights of tokens are those of the whole batch, so that the parts'
    gradients have the batch's own as their mean. Each part is scored by a replica of its own, all in one pass: nothing
    is drawn, and the policy and its ``.grad`` are not touched. Prompts that do not fill the parts are left out.

    Args:
        batch: with ``old_logprobs``.
        objective, weights: as ``update`` calls the one with the other.
        microbatches: M; fewer where there are fewer prompts.

    Raises: ValueError for fewer than two prompts.
    """
    P = batch.targets.shape[1]
    M = min(microbatches, P)
    if M < 2:
        raise ValueError(f"{P} prompts in {microbatches} microbatches: noise is seen between parts, give 2 or more")
    size = P // M

    def cut(x: Tensor) -> Tensor:
        return x.detach()[:, : M * size].unflatten(1, (M, size)).flatten(0, 1)

    part = batch._replace(sampled=None)
    part = part._replace(**{name: cut(x) for name, x in part._asdict().items() if x is not None})
    each = replicas_of(policy, torch.arange(policy.replicas).repeat_interleave(M))
    with torch.enable_grad():
        logprobs, _ = each.score(part.targets, part.tokens)
        of_part = None if weights is None else cut(weights) * (P / size)
        loss = objective(logprobs, part, cut(A), of_part).loss.sum()
    g = torch.autograd.grad(loss, list(each.parameters()), materialize_grads=True)
    return signal_and_noise([x.unflatten(0, (-1, M)) for x in g], share=M * size / P)


def smallest_group(p: float, share: float = 0.5) -> int | None:
    """The smallest G with 1 - p^G - (1 - p)^G >= share: so many completions, for so many groups to teach something.

    As if every prompt were solved with probability p; where prompts differ it takes more. None where no G does: p is 0
    or 1. Raises ValueError for p outside [0, 1] or a share outside (0, 1).
    """
    if not (0 <= p <= 1 and 0 < share < 1):
        raise ValueError(f"p {p} and share {share}: give a probability, and a share in (0, 1)")
    if (q := min(p, 1 - p)) <= 0:
        return None

    def informative(G: int) -> float:
        return -math.expm1(G * math.log1p(-q)) - q**G

    high = 2
    while informative(high) < share:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if informative(middle) >= share else (middle, high)
    return high
