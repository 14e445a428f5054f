"""Functions that are not ours: what they do and return is checked at every call."""

from collections.abc import Callable

import torch
from torch import Tensor

from pgprog.errors import UsageError, said


def call_checked(
    name: str, call: Callable[[], object], given: str, wanted: str, fits: Callable[[tuple[int, ...]], bool]
) -> Tensor:
    """Call a user's function and return its tensor, if it is finite, detached, dense, real and of a fitting shape.

    Args:
        name: of the function, for the message.
        call: the call with its arguments in place.
        given: what it was called on, in words.
        wanted: what was expected, in words.
        fits: whether a shape will do.

    Raises:
        UsageError: the function raised, or returned something else. A UsageError of its own goes through.
    """
    try:
        result = call()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name} raised {said(error)} on {given}: {wanted} was expected") from error
    if not isinstance(result, Tensor) or result.layout != torch.strided or result.is_complex():
        raise UsageError(f"{name} returned {type(result).__name__}: {wanted} was expected")
    if not fits(tuple(result.shape)):
        raise UsageError(f"{name} returned shape {tuple(result.shape)}: {wanted} was expected")
    if result.requires_grad:
        raise UsageError(f"{name} returned a tensor with a live gradient: {wanted} was expected")
    if not result.isfinite().all():
        raise UsageError(f"{name} returned NaN or infinity: {wanted} was expected")
    return result


def call_on_rewards(name: str, function: Callable[..., object], rewards: Tensor, *more: Tensor) -> Tensor:
    """Call an advantage on rewards (and more); return A in their shape and dtype, checked as above."""
    shape = tuple(rewards.shape)
    return call_checked(
        name,
        lambda: function(rewards, *more),
        f"rewards of shape {shape}",
        f"a detached, finite tensor of shape {shape}",
        lambda found: found == shape,
    ).to(rewards.dtype)
