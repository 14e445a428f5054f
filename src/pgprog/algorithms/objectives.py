"""Surrogate losses: scalars to minimise whose gradient is the update. Pure functions of tensors.

Shapes are trailing axes: logprobs and mask (..., P, G, T), advantages (..., P, G) for one scalar per sequence or
(..., P, G, T) for one per token. Each loss comes back as (...): one per replica, and a plain scalar without one.
Gradient flows through ``logprobs`` and ``entropies`` alone; the advantage is a constant. Tokens become a scalar in one
place, ``sequence_sum_mean``: summed over the sequence, averaged over the N = P G sequences. No length enters a
denominator.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0  # a ratio of 5e8


class Surrogate(NamedTuple):
    """A loss (...), with gradient, and what is worth watching about it."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """Each (...), without gradient."""


def policy_gradient_loss(
    logprobs: Float[Tensor, "*K P G T"],
    advantages: Float[Tensor, "*K P G"] | Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
) -> Float[Tensor, "*K"]:
    """The one expression of the family.

        loss   = - mean_i sum_t log pi(a_t | s_t) A
        grad J = E[ sum_t grad log pi(a_t | s_t) A ] = - E[ grad loss ]

    Its value means little (0 where advantages sum to 0 and lengths are equal); its gradient is the update.

    Paper: Williams 1992; Sutton et al. 1999, theorem 1. Bias: none of its own; see the advantage.
    Raises: ValueError where shapes disagree, or where the advantage carries a gradient.
    """
    return -sequence_sum_mean(logprobs * _per_token(advantages, logprobs, mask), mask)


def clipped_surrogate(
    logprobs: Float[Tensor, "*K P G T"],
    old_logprobs: Float[Tensor, "*K P G T"],
    advantages: Float[Tensor, "*K P G"] | Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    clip: float = 0.2,
    ratio_level: Literal["token", "sequence"] = "token",
) -> Surrogate:
    """PPO's clipped surrogate.

        ratio = exp(log pi - log pi_old)        loss = - mean_i sum_t min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)

    The ratio is *per token*. Lesson (``--ratio-level sequence`` takes the cure away): the ratio of whole sequences is
    the product of its tokens' ratios, so it leaves [1 - clip, 1 + clip] about T times as soon, and with it the gradient
    of all of its tokens.

    Args:
        old_logprobs: of the policy that sampled; detached here.
        clip: in (0, 1); both sides.

    Returns:
        the loss, and ``clip_frac`` (share of tokens, or of sequences, whose gradient the clip has taken: A > 0 with
        ratio > 1 + clip, or A < 0 with ratio < 1 - clip), ``ratio_min`` and ``ratio_max`` over what is not masked
        (a ratio above 5e8 shows as that where A >= 0).

    Paper: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Edge: at ratio 1 the gradient equals ``policy_gradient_loss``;
    nothing unmasked gives a loss of 0, a clip fraction of 0 and extremes of 1.
    """
    if not 0 < clip < 1:
        raise ValueError(
            f"clip {clip} is out of range: a ratio is kept within 1 - clip and 1 + clip, give 0 < clip < 1"
        )
    if ratio_level not in ("token", "sequence"):
        raise ValueError(f"ratio_level {ratio_level!r} is unknown: choose token or sequence")
    A = _per_token(advantages, logprobs, mask)
    if old_logprobs.shape != logprobs.shape:
        raise ValueError(
            f"old_logprobs have shape {tuple(old_logprobs.shape)}: {tuple(logprobs.shape)} wanted, as logprobs"
        )
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)
    kept = mask
    if ratio_level == "sequence":
        if advantages.dim() == logprobs.dim():
            raise ValueError(
                "ratio_level 'sequence' takes one advantage per sequence, (..., P, G): a per-token one has no sign"
            )
        # One ratio and one advantage per sequence, kept on the token axis as its only entry.
        log_ratio, A, kept = log_ratio.sum(-1, keepdim=True), A[..., :1], mask.any(-1, keepdim=True)
    # Where A >= 0 the clip takes the gradient long before exp overflows, and 0 * inf would be NaN.
    ratio = torch.where(A < 0, log_ratio, log_ratio.clamp(max=MAX_LOG_RATIO)).exp()
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    with torch.no_grad():
        clipped = kept & (((A > 0) & (ratio > 1 + clip)) | ((A < 0) & (ratio < 1 - clip)))
        tokens = (-3, -2, -1)
        metrics = {
            "clip_frac": clipped.sum(tokens) / kept.sum(tokens).clamp(min=1),
            "ratio_min": torch.where(kept, ratio, torch.inf).amin(tokens).where(kept.any(-1).any(-1).any(-1), 1),
            "ratio_max": torch.where(kept, ratio, -torch.inf).amax(tokens).where(kept.any(-1).any(-1).any(-1), 1),
        }
    return Surrogate(-sequence_sum_mean(objective, kept), metrics)


def value_loss(values: Float[Tensor, "*K P"], rewards: Float[Tensor, "*K P G"]) -> Float[Tensor, "*K"]:
    """The critic's regression on the returns, mean (r - V(prompt))^2; gradient flows to the values alone.

    Its minimum is V(prompt) = E[r | prompt]. Raises ValueError where values are not one per prompt.
    """
    if values.shape != rewards.shape[:-1]:
        raise ValueError(f"values have shape {tuple(values.shape)}: one per prompt wanted, {tuple(rewards.shape[:-1])}")
    return (rewards.detach() - values.unsqueeze(-1)).square().mean((-2, -1))


def sequence_sum_mean(per_token: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"]) -> Float[Tensor, "*K"]:
    """Sum over the tokens of a sequence, then average over all P G sequences; what is masked counts 0, NaN too."""
    _same_shape("values", per_token, mask)
    return torch.where(mask, per_token, 0).sum(-1).mean((-2, -1))


def token_mean(per_token: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"]) -> Float[Tensor, "*K"]:
    """The mean over the tokens that are not masked, 0 where there is none: for reading, not for the loss."""
    _same_shape("values", per_token, mask)
    tokens = (-3, -2, -1)
    return torch.where(mask, per_token, 0).sum(tokens) / mask.sum(tokens).clamp(min=1)


def _same_shape(name: str, per_token: Tensor, mask: Tensor) -> None:
    if per_token.shape != mask.shape or per_token.dim() < 3 or per_token.numel() == 0:
        raise ValueError(
            f"{name} {tuple(per_token.shape)} and mask {tuple(mask.shape)}: both must be (..., P, G, T), not empty"
        )


def _per_token(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Check the shapes, and spread one advantage per sequence over its tokens."""
    if advantages.requires_grad:
        raise ValueError("the advantage carries a gradient: it weights grad log pi and must be a constant, detach it")
    _same_shape("logprobs", logprobs, mask)
    if advantages.shape == logprobs.shape[:-1]:
        return torch.where(mask.any(-1), advantages, 0).unsqueeze(-1)
    if advantages.shape == logprobs.shape:
        return torch.where(mask, advantages, 0)  # a NaN after the end would reach the gradient as 0 * NaN
    raise ValueError(
        f"advantages have shape {tuple(advantages.shape)}: {tuple(logprobs.shape[:-1])}, one per sequence, or "
        f"{tuple(logprobs.shape)}, one per token, wanted"
    )
