"""Surrogate losses: scalars to minimise whose gradient is the update. Pure functions of tensors.

Shapes are trailing axes: logprobs and mask (..., P, G, T), advantages (..., P, G) for one scalar per sequence or
(..., P, G, T) for one per token. Each loss comes back as (...): one per replica, and a plain scalar without one.
Gradient flows through ``logprobs``, ``values`` and ``entropies`` alone; the advantage is a constant. Tokens become a
scalar in one way, loss = sum_it w_it l_it: by ``aggregate`` with the weights of ``token_weights``, computed once from
the mask of the whole batch, or by ``sequence_sum_mean``, the ladder's: summed over the sequence, averaged over the
N = P G sequences, no length in a denominator.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0  # a ratio of 5e8


Aggregation = Literal["sequence_sum", "sequence_mean", "token_mean", "prompt_token_mean", "constant_length"]
RatioLevel = Literal["token", "sequence", "sequence_mean"]
KLEstimator = Literal["k1", "k2", "k3", "k3_ratio"]


class Surrogate(NamedTuple):
    """A loss (...), with gradient, and what is worth watching about it."""

    loss: Tensor
    watch: Callable[[], dict[str, Tensor]] = dict
    """Makes ``metrics``: of several epochs, only those of the last are read."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What is worth watching, each (...), without gradient."""
        return self.watch()


def token_weights(
    mask: Bool[Tensor, "*K P G T"], aggregation: Aggregation, *, length: int | None = None
) -> Float[Tensor, "*K P G T"]:
    """The weight of each token in the loss, loss = sum_it w_it l_it, from the mask of the *whole* batch.

        sequence_sum       w = mask / N                                      N = P G, |o_i| tokens in sequence i
        sequence_mean      w = mask / (|o_i| N)
        token_mean         w = mask / sum_i |o_i|                            over the batch
        prompt_token_mean  w = mask / (P sum_{i in the prompt's group} |o_i|)
        constant_length    w = mask / (length N)

    A micro-batch takes its slice of w and gradients add up: however the batch is cut, the gradient is the same. A mean
    of micro-batches' own means is another thing. A fully masked sequence counts in the N of sequence_sum,
    sequence_mean and constant_length, a prompt whose group is fully masked in the P of prompt_token_mean.

    Args:
        length: of constant_length alone, positive.

    Returns:
        w, in float64, whatever it is multiplied with; 0 where masked, everywhere if all is. Counts are exact.

    Bias: sequence_sum keeps that of the advantage; constant_length is it over a constant. In the other three the
    denominator depends on what was sampled: sequence_mean weighs a long answer's token less (wrong ones grow).
    Papers: sequence_mean GRPO, arXiv:2402.03300, eq. 3; prompt_token_mean DAPO, arXiv:2503.14476, eq. 8 as written;
    constant_length Dr. GRPO, arXiv:2503.20783.
    Parity: sequence_sum TRL ``luspo`` (at sequence level constant_length with length 1: each token counts its
    sequence's objective), verl ``seq-mean-token-sum``; sequence_mean TRL ``grpo``, verl and OpenRLHF
    ``seq-mean-token-mean``, slime; token_mean TRL ``dapo`` (``bnpo`` in one micro-batch), verl and OpenRLHF
    ``token-mean``; constant_length TRL ``dr_grpo`` with max_completion_length, verl ``seq-mean-token-sum-norm`` with
    loss_scale_factor. verl and OpenRLHF add 1e-8 to a length; they count fully masked sequences where the trainer
    passes the size of the whole batch, not in a loss called by itself. TRL counts them.
    Raises: ValueError for an unknown aggregation, a length that is missing or not positive, or one without meaning.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation {aggregation!r} is unknown: choose one of {', '.join(get_args(Aggregation))}")
    _same_shape("mask", mask, mask)
    if (length is not None) != (aggregation == "constant_length"):
        raise ValueError(f"length {length} with aggregation {aggregation!r}: constant_length takes one, no other does")
    if length is not None and not 0 < length < math.inf:
        raise ValueError(f"length {length} is out of range: a loss is divided by it, give a positive number of tokens")
    (P, G), m = mask.shape[-3:-1], mask.double()
    match aggregation:
        case "sequence_sum":
            return m / (P * G)
        case "sequence_mean":
            return m / (mask.sum(-1, keepdim=True).clamp(min=1) * (P * G))
        case "token_mean":
            return m / mask.sum((-3, -2, -1), keepdim=True).clamp(min=1)
        case "prompt_token_mean":
            return m / (mask.sum((-2, -1), keepdim=True).clamp(min=1) * P)
        case _:
            assert length is not None
            return m / (P * G * length)


def aggregate(per_token: Float[Tensor, "*K P G T"], weights: Float[Tensor, "*K P G T"]) -> Float[Tensor, "*K"]:
    """Tokens to a scalar: sum_it w_it l_it of each replica; where w is 0 nothing counts, NaN too.

    Gradient flows to ``per_token`` alone: w_it, in its dtype. Raises ValueError where shapes differ, or where weights
    carry a gradient.
    """
    if weights.requires_grad:
        raise ValueError("the weights carry a gradient: they say what a token counts, as constants; detach them")
    _same_shape("values", per_token, weights, "weights")
    return (weights.to(per_token.dtype) * torch.where(weights != 0, per_token, 0)).sum(-1).sum((-2, -1))


def policy_gradient_loss(
    logprobs: Float[Tensor, "*K P G T"],
    advantages: Float[Tensor, "*K P G"] | Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    weights: Float[Tensor, "*K P G T"] | None = None,
) -> Float[Tensor, "*K"]:
    """The one expression of the family.

        loss   = - mean_i sum_t log pi(a_t | s_t) A                  with weights: - sum_it w_it log pi(a_t | s_t) A
        grad J = E[ sum_t grad log pi(a_t | s_t) A ] = - E[ grad loss ]

    Its value means little (0 where advantages sum to 0 and lengths are equal); its gradient is the update.

    Paper: Williams 1992; Sutton et al. 1999, theorem 1. Bias: none of its own; see the advantage and the weights.
    Raises: ValueError where shapes disagree, or where the advantage or the weights carry a gradient.
    """
    return -_weighted(logprobs * _per_token(advantages, logprobs, mask), mask, weights)


def clipped_surrogate(
    logprobs: Float[Tensor, "*K P G T"],
    old_logprobs: Float[Tensor, "*K P G T"],
    advantages: Float[Tensor, "*K P G"] | Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    clip: float | tuple[float, float] = 0.2,
    ratio_level: RatioLevel = "token",
    dual_clip: float | None = None,
    log_ratio_limit: float | None = None,
    weights: Float[Tensor, "*K P G T"] | None = None,
) -> Surrogate:
    """PPO's clipped surrogate.

        ratio     = exp(log pi - log pi_old)
        objective = min(ratio A, clip(ratio, 1 - low, 1 + high) A)          where A < 0: max(that, dual_clip A)
        loss      = - mean_i sum_t objective                                with weights: - sum_it w_it objective

    The ratio is *per token*. Lesson (``--ratio-level sequence`` takes the cure away): the ratio of whole sequences is
    the product of its tokens' ratios, so it leaves [1 - clip, 1 + clip] about T times as soon, and with it the gradient
    of all of its tokens. ``sequence_mean`` is their geometric mean, exp(mean_t log-ratio): near 1 by |o|, its clip is
    tiny (GSPO: 3e-4, 4e-4). Both have one objective per sequence: it counts once, or at each token with its weight.

    Args:
        old_logprobs: of the policy that sampled; detached here.
        clip: one number in (0, 1) for both sides, or (low in (0, 1], high > 0); low 1 is no lower bound.
        dual_clip: > 1, bounds what one bad token can do: where A < 0 the gradient ends at ratio = dual_clip.
        log_ratio_limit: parity alone; beyond it the ratio stands still, without gradient; not in clip_frac.

    Returns:
        the loss, and ``clip_frac`` (share of tokens, or of sequences, whose gradient the clip has taken: A > 0 with
        ratio > 1 + high, or A < 0 with ratio < 1 - low or > dual_clip), ``ratio_min`` and ``ratio_max`` over what is
        not masked, whatever its weight (a ratio above 5e8 shows as that where A >= 0, or with dual_clip).

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 7; (low, high) DAPO, arXiv:2503.14476, eq. 8-10; sequence_mean
    GSPO, arXiv:2507.18071, eq. 5-7; dual_clip Ye et al. 2020, arXiv:1912.09729, eq. 5.
    Edge: at ratio 1 the gradient equals ``policy_gradient_loss``, under sequence_mean with weights ``sequence_mean``;
    nothing unmasked gives a loss of 0, a clip fraction of 0 and extremes of 1.
    Parity: verl dual_clip 3, log_ratio_limit 20 (OpenRLHF too); TRL's delta is dual_clip where it is over 1 + high.
    TRL RLOO "sequence", whose loss, not its gradient, has - A / N more for a fully masked sequence. verl's GSPO has the
    same gradient where the weights are constant within a sequence; it clamps the log-ratio from above alone, at 10.
    Raises: ValueError out of these ranges, where shapes disagree, for a per-token A with one ratio per sequence.
    """
    low, high = _clip_bounds(clip)
    if ratio_level not in ("token", "sequence", "sequence_mean"):
        raise ValueError(f"ratio_level {ratio_level!r} is unknown: choose token, sequence or sequence_mean")
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip {dual_clip} is out of range: it bounds ratios above 1, give more than 1, or None")
    A = _per_token(advantages, logprobs, mask)
    log_ratio, kept = _log_ratio(logprobs, old_logprobs, mask), mask
    if ratio_level != "token":
        if advantages.dim() == logprobs.dim():
            wanted = "takes one advantage per sequence, (..., P, G): a per-token one has no sign"
            raise ValueError(f"ratio_level {ratio_level!r} {wanted}")
        # One ratio and one advantage per sequence, kept on the token axis as its only entry.
        log_ratio, A, kept = log_ratio.sum(-1, keepdim=True), A[..., :1], mask.any(-1, keepdim=True)
        if ratio_level == "sequence_mean":
            log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    if log_ratio_limit is not None:
        log_ratio = _limited(log_ratio, log_ratio_limit, "log_ratio_limit")
    # Where A >= 0, or a dual clip bounds the rest, the gradient ends long before exp overflows: 0 * inf would be NaN.
    capped = log_ratio.clamp(max=MAX_LOG_RATIO)
    ratio = (torch.where(A < 0, log_ratio, capped) if dual_clip is None else capped).exp()
    objective = torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    if dual_clip is not None:
        objective = torch.where(A < 0, torch.maximum(objective, dual_clip * A), objective)
    # Without weights each sequence's one entry counts once; with them it is spread over the tokens.
    loss = -_weighted(objective, kept if weights is None else mask, weights)

    def watch() -> dict[str, Tensor]:
        clipped = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
        if dual_clip is not None:
            clipped = clipped | ((A < 0) & (ratio > dual_clip))
        return _ratio_metrics(ratio, clipped, kept)

    return Surrogate(loss, watch)


def cispo_surrogate(
    logprobs: Float[Tensor, "*K P G T"],
    old_logprobs: Float[Tensor, "*K P G T"],
    advantages: Float[Tensor, "*K P G"] | Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    low: float | None,
    high: float,
    weights: Float[Tensor, "*K P G T"] | None = None,
) -> Surrogate:
    """CISPO: the importance weight is clipped, not the objective, so that no token loses its gradient.

        loss = - mean_i sum_t sg[clip(ratio, low, high)] A log pi           with weights: - sum_it w_it ...

    Args:
        low, high: bounds of the ratio itself, not distances from 1; low None (or 0) is none.

    Returns:
        the loss, and ``clip_frac`` (share of tokens whose weight a bound has changed; they keep a gradient),
        ``ratio_min`` and ``ratio_max`` of the ratio before the clip.

    Paper: MiniMax-M1, arXiv:2506.13585, eq. 4-5, which has no lower bound. Bias: that of the clip; within the bounds
    the gradient is that of ratio A. Edge: at ratio 1 within the bounds the gradient equals ``policy_gradient_loss``.
    Parity: verl and slime low 0.8, high 1.2; TRL low None, high epsilon_high, whose default 0.2 scales all by 0.2.
    Raises: ValueError unless 0 <= low < high, both finite, or where shapes disagree.
    """
    _check_range("low", low, "high", high)
    A = _per_token(advantages, logprobs, mask)
    ratio = _log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    loss = -_weighted(ratio.clamp(low, high) * A * logprobs, mask, weights)

    def watch() -> dict[str, Tensor]:
        return _ratio_metrics(ratio, (ratio > high) if low is None else (ratio > high) | (ratio < low), mask)

    return Surrogate(loss, watch)


def kl_estimate(
    logprobs: Float[Tensor, "*K P G T"],
    ref_logprobs: Float[Tensor, "*K P G T"],
    estimator: KLEstimator,
    old_logprobs: Float[Tensor, "*K P G T"] | None = None,
    *,
    limit: float | None = None,
) -> Float[Tensor, "*K P G T"]:
    """Estimate KL(pi || ref) at each sampled token, l = log pi - log ref.

        k1 = l        k2 = l^2 / 2        k3 = exp(-l) - 1 + l        k3_ratio = exp(log pi - log pi_old) k3

    What each is in expectation over tokens drawn from pi (k3_ratio: from pi_old), as a value and as a loss:

        k1        KL(pi || ref)               gradient 0: it belongs in the reward, detached
        k2        KL to second order          gradient of KL(pi || ref)
        k3        KL(pi || ref), >= 0         gradient of KL(ref || pi)
        k3_ratio  KL(pi || ref)               gradient of KL(pi || ref): per token it is ratio l grad log pi

    k1, k2 and k3 need tokens from pi itself. All this is per state: the states that were visited are taken as given,
    which leaves out how a token moves the KL of later ones. In the reward, k1 has that part.

    Args:
        ref_logprobs: of the reference, detached; no mask: NaN in gives NaN out, see ``kl_penalty``.
        old_logprobs: of the policy that sampled, detached; wanted by k3_ratio, not read by the others.
        limit: parity alone; clamps the result to +-limit, without gradient beyond (verl k3, OpenRLHF: 10).

    Paper: Schulman 2020, "Approximating KL divergence"; k3 in GRPO, arXiv:2402.03300, eq. 4.
    Parity: k1 TRL RLOO and all libraries in the reward; k3 verl ``low_var_kl``, TRL with use_bias_correction_kl False;
    k3_ratio TRL 1.16's default, slime ``--use-unbiased-kl``. Gradient flows through ``logprobs``.
    Raises: ValueError for an unknown estimator, shapes that differ, a limit that is not positive.
    """
    _like("ref_logprobs", ref_logprobs, logprobs)
    log_ratio = logprobs - ref_logprobs.detach()
    # Beyond this k3 is past any limit, and exp would overflow to a gradient of 0 * inf.
    largest = math.inf if limit is None else MAX_LOG_RATIO
    match estimator:
        case "k1":
            kl = log_ratio
        case "k2":
            kl = log_ratio.square() / 2
        case "k3" | "k3_ratio":
            kl = torch.expm1((-log_ratio).clamp(max=largest)) + log_ratio
        case _:
            raise ValueError(f"estimator {estimator!r} is unknown: choose k1, k2, k3 or k3_ratio")
    if estimator == "k3_ratio":
        if old_logprobs is None:
            raise ValueError("estimator 'k3_ratio' takes old_logprobs, of the policy that sampled: none are given")
        _like("old_logprobs", old_logprobs, logprobs)
        kl = (logprobs - old_logprobs.detach()).clamp(max=largest).exp() * kl
    return kl if limit is None else _limited(kl, limit, "limit")


def kl_penalty(
    logprobs: Float[Tensor, "*K P G T"],
    ref_logprobs: Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    estimator: KLEstimator,
    *,
    weights: Float[Tensor, "*K P G T"] | None = None,
    old_logprobs: Float[Tensor, "*K P G T"] | None = None,
    limit: float | None = None,
) -> Float[Tensor, "*K"]:
    """``kl_estimate`` as a loss, mean_i sum_t k or sum_it w_it k: nats per sequence, or whatever the weights count in.

    To be added to a surrogate as beta * kl_penalty; TRL gives it no ``mismatch_weights``. See there for which gradient
    each estimator has: k1 has none in expectation. What is masked counts 0, NaN too. Raises as ``kl_estimate``.
    """
    _same_shape("logprobs", logprobs, mask)
    _like("ref_logprobs", ref_logprobs, logprobs)
    logprobs, ref_logprobs = _unmasked(logprobs, mask), _unmasked(ref_logprobs, mask)
    if old_logprobs is not None:
        _like("old_logprobs", old_logprobs, logprobs)
        old_logprobs = _unmasked(old_logprobs, mask)
    return _weighted(kl_estimate(logprobs, ref_logprobs, estimator, old_logprobs, limit=limit), mask, weights)


def mismatch_weights(
    old_logprobs: Float[Tensor, "*K P G T"],
    sampler_logprobs: Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    cap: float,
    floor: float | None = None,
) -> Float[Tensor, "*K P G T"]:
    """Truncated importance weights for tokens drawn by a sampler that is not quite the policy that is trained.

        ratio = exp(log pi_old - log mu)                    sequence: exp(sum_t ...), the same at each of its tokens
        truncate: w = clip(ratio, floor, cap)               mask: w = ratio where floor <= ratio <= cap, else 0

    A factor of each token's loss, so callers multiply it into the weights of any surrogate:
    ``weights=token_weights(mask, ...) * mismatch_weights(...)``. What is dropped stays in the denominator.

    Returns:
        w, detached; 0 where masked.

    Paper: Ionides 2008, "Truncated importance sampling". Bias: at sequence level what the bounds take, since without
    them E_mu[w f] = E_pi_old[f]; at token level the states stay the sampler's too.
    Parity: TRL ``vllm_importance_sampling_mode`` with cap 3 (its default is sequence, mask); verl ``rollout_is`` token
    or sequence with cap 2, "lo_hi" is mask; slime ``--use-tis`` is token, truncate, cap 2. OpenRLHF's sequence
    statistic is a geometric mean, which this has not.
    Raises: ValueError for an unknown level or mode, unless 0 <= floor < cap, both finite, or where shapes disagree.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level {level!r} is unknown: choose token or sequence")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"mode {mode!r} is unknown: choose truncate or mask")
    _check_range("floor", floor, "cap", cap)
    _same_shape("old_logprobs", old_logprobs, mask)
    log_ratio = _log_ratio(old_logprobs.detach(), sampler_logprobs, mask, "sampler_logprobs")
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    if mode == "truncate":
        ratio = ratio.clamp(floor, cap)
    else:
        ratio = torch.where((ratio >= (floor or 0)) & (ratio <= cap), ratio, 0)
    return torch.where(mask, ratio, 0)


def value_loss(values: Float[Tensor, "*K P"], rewards: Float[Tensor, "*K P G"]) -> Float[Tensor, "*K"]:
    """The critic's regression on the returns, mean (r - V(prompt))^2; gradient flows to the values alone.

    Its minimum is V(prompt) = E[r | prompt]. Raises ValueError where values are not one per prompt.
    """
    if values.shape != rewards.shape[:-1]:
        raise ValueError(f"values have shape {tuple(values.shape)}: one per prompt wanted, {tuple(rewards.shape[:-1])}")
    return (rewards.detach() - values.unsqueeze(-1)).square().mean((-2, -1))


def token_value_loss(
    values: Float[Tensor, "*K P G T"],
    returns: Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    weights: Float[Tensor, "*K P G T"] | None = None,
) -> Float[Tensor, "*K"]:
    """A critic of states on its targets, mean over unmasked tokens of (R - V)^2; gradient flows to the values alone.

    No clip, and no half: verl's and OpenRLHF's is half of it. With weights, sum_it w_it (R - V)^2 (a micro-batch wants
    its slice of ``token_mean``). Nothing unmasked: 0. Raises ValueError where shapes differ.
    """
    _same_shape("values", values, mask)
    _like("returns", returns, values)
    error = _unmasked(returns.detach() - values, mask).square()
    return token_mean(error, mask) if weights is None else _weighted(error, mask, weights)


def sequence_sum_mean(per_token: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"]) -> Float[Tensor, "*K"]:
    """Sum over the tokens of a sequence, then average over all P G sequences; what is masked counts 0, NaN too."""
    _same_shape("values", per_token, mask)
    return _unmasked(per_token, mask).sum(-1).mean((-2, -1))


def token_mean(per_token: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"]) -> Float[Tensor, "*K"]:
    """The mean over the tokens that are not masked, 0 where there is none: for reading, not for the loss."""
    _same_shape("values", per_token, mask)
    tokens = (-3, -2, -1)
    return _unmasked(per_token, mask).sum(tokens) / mask.sum(tokens).clamp(min=1)


def _unmasked(x: Tensor, mask: Tensor) -> Tensor:
    """x, and exactly 0 where masked, NaN too; of one shape. Mostly nothing is masked, and looking is cheaper."""
    return x.contiguous() if mask.all() else torch.where(mask, x, 0)


def _weighted(per_token: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """The default aggregation, or that of the weights; what is masked counts 0 whatever its weight."""
    if weights is None:
        return sequence_sum_mean(per_token, mask)
    return aggregate(torch.where(mask, per_token, 0), weights)


def _log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor, name: str = "old_logprobs") -> Tensor:
    """Of logprobs over ``other``, which is detached; 0 where masked."""
    _like(name, other, logprobs)
    return _unmasked(logprobs - other.detach(), mask)


@torch.no_grad()
def _ratio_metrics(ratio: Tensor, clipped: Tensor, kept: Tensor) -> dict[str, Tensor]:
    tokens = (-3, -2, -1)
    some = kept.any(-1).any(-1).any(-1)
    return {
        "clip_frac": (kept & clipped).sum(tokens).to(ratio.dtype) / kept.sum(tokens).clamp(min=1),
        "ratio_min": torch.where(kept, ratio, torch.inf).amin(tokens).where(some, 1),
        "ratio_max": torch.where(kept, ratio, -torch.inf).amax(tokens).where(some, 1),
    }


def _limited(x: Tensor, limit: float, name: str) -> Tensor:
    if not 0 < limit < math.inf:
        raise ValueError(f"{name} {limit} is out of range: give a positive number, or None for no limit")
    return x.clamp(-limit, limit)


def _clip_bounds(clip: float | tuple[float, float]) -> tuple[float, float]:
    if isinstance(clip, tuple):
        low, high = clip
        if not (0 < low <= 1 and 0 < high < math.inf):
            raise ValueError(
                f"clip {clip} is out of range: a ratio is kept within 1 - low and 1 + high, give 0 < low <= 1, high > 0"
            )
        return low, high
    if not 0 < clip < 1:
        raise ValueError(
            f"clip {clip} is out of range: a ratio is kept within 1 - clip and 1 + clip, give 0 < clip < 1"
        )
    return clip, clip


def _check_range(low_name: str, low: float | None, high_name: str, high: float) -> None:
    if not 0 < high < math.inf:
        raise ValueError(f"{high_name} {high} is out of range: it bounds a ratio, give a positive number")
    if low is not None and not 0 <= low < high:
        raise ValueError(f"{low_name} {low} is out of range: give 0 <= {low_name} < {high_name}, {high}, or None")


def _like(name: str, other: Tensor, logprobs: Tensor) -> None:
    if other.shape != logprobs.shape:
        raise ValueError(f"{name} have shape {tuple(other.shape)}: {tuple(logprobs.shape)} wanted, as logprobs")


def _same_shape(name: str, per_token: Tensor, mask: Tensor, mask_name: str = "mask") -> None:
    if per_token.shape != mask.shape or per_token.dim() < 3 or per_token.numel() == 0:
        shapes = f"{name} {tuple(per_token.shape)} and {mask_name} {tuple(mask.shape)}"
        raise ValueError(f"{shapes}: both must be (..., P, G, T), not empty")


def _per_token(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Check the shapes, and spread one advantage per sequence over its tokens."""
    if advantages.requires_grad:
        raise ValueError("the advantage carries a gradient: it weights grad log pi and must be a constant, detach it")
    _same_shape("logprobs", logprobs, mask)
    if advantages.shape == logprobs.shape[:-1]:
        return _unmasked(advantages, mask.any(-1)).unsqueeze(-1)
    if advantages.shape == logprobs.shape:
        return _unmasked(advantages, mask)  # a NaN after the end would reach the gradient as 0 * NaN
    raise ValueError(
        f"advantages have shape {tuple(advantages.shape)}: {tuple(logprobs.shape[:-1])}, one per sequence, or "
        f"{tuple(logprobs.shape)}, one per token, wanted"
    )
