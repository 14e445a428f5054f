"""The effective weight: what an estimator with binary rewards really optimises.

A group is G completions of one prompt with success probability p; given the rewards, the scores
s_i = grad log pi(y_i) are independent, and E[s | r = 1] = grad p / p, E[s | r = 0] = - grad p / (1 - p). So

    E[A_i s_i] = w(p) grad p,        w(p) = E[A_i | r_i = 1] - E[A_i | r_i = 0]

over c ~ Bin(G - 1, p) successes among the others: the estimator climbs W(p), the integral of w, in place of p.
Nothing of the policy enters but p. Letters: p any shape *N; c = 0 .. G - 1 successes among the others.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pgprog.errors import UsageError
from pgprog.foreign import call_on_rewards

LARGEST_GROUP = 1000  # beyond it binomial coefficients leave float64
TOLERANCE = 1e-9  # relative to the largest advantage; in float64

AdvantageOfRewards = Callable[[Tensor], Tensor]
"""From rewards (..., P, G) in {0, 1} to advantages of that shape."""


class GroupAdvantage(NamedTuple):
    """An advantage of binary rewards, as its values: all that it can be."""

    success: Float[Tensor, "*P G"]
    """A of a completion with r = 1, by c."""
    failure: Float[Tensor, "*P G"]
    """A of a completion with r = 0, by c."""


def group_advantage(
    advantage: AdvantageOfRewards, group_size: int, name: str = "the advantage", prompts: int | None = None
) -> GroupAdvantage:
    """Tabulate an advantage by calling it on every number of successes.

    Args:
        advantage: a function of rewards (1, G); a function of a batch of N is tabulated as a group of N.
        name: of the function, for messages.
        prompts: if given, the function is called with as many groups, (P, G), all alike, and may treat them apart (by
            a critic's value, say).

    Returns: success and failure, (G,), or (P, G) with ``prompts``; without gradient.

    Raises:
        UsageError: the function raises, or returns a wrong shape, NaN or a live gradient; or it treats equal rewards
            of a group differently, so that a count does not decide it; a group out of range.
    """
    if not 1 <= group_size <= LARGEST_GROUP:
        raise UsageError(f"a group of {group_size}: the effective weight is computed for 1 to {LARGEST_GROUP}")
    counts = torch.arange(group_size + 1)
    rewards = (torch.arange(group_size) < counts.unsqueeze(1)).double()  # row k: k successes, then failures

    def rows(order: Tensor) -> Tensor:
        return torch.stack(
            [call_on_rewards(name, advantage, row[order].expand(prompts or 1, -1)) for row in rewards], 1
        )

    order = torch.randperm(group_size, generator=torch.Generator().manual_seed(0))
    A, again = rows(torch.arange(group_size)), rows(order)  # (P, G + 1, G)
    success, failure = A[:, 1:, 0], A[:, :-1, -1]
    up, down = (torch.nn.functional.pad(x, pad).unsqueeze(2) for x, pad in ((success, (1, 0)), (failure, (0, 1))))
    rebuilt = torch.where(rewards > 0, up, down)
    for found, wanted in ((A, rebuilt), (again, rebuilt[..., order])):
        if (found - wanted).abs().max() > TOLERANCE * A.abs().max():
            raise UsageError(
                f"{name} gives equal rewards of one group unequal advantages (by place, or at random): a number of "
                "successes does not decide it; enumerate its groups with pgprog.exact.blackbox"
            )
    return GroupAdvantage(success, failure) if prompts else GroupAdvantage(success[0], failure[0])


def refuse_other_rewards(rewards: Tensor) -> None:
    """Raise UsageError unless every reward is 0 or 1."""
    other = rewards[(rewards != 0) & (rewards != 1)]
    if other.numel():
        raise UsageError(
            f"a reward of {other[0].item():g}: the effective weight and its moments are those of rewards in {{0, 1}}; "
            "for any others enumerate all groups of a tiny problem with pgprog.exact.blackbox"
        )


def binomial(n: int, p: Float[Tensor, "*N"]) -> Float[Tensor, "*N K"]:
    """P(c successes of n), c = 0 .. n, on a new last axis; exact at p = 0 and p = 1; with gradient."""
    c = torch.arange(n + 1, dtype=p.dtype)
    ways = torch.tensor([float(math.comb(n, k)) for k in range(n + 1)], dtype=p.dtype)
    p = p.unsqueeze(-1)
    return ways * p**c * (1 - p) ** (n - c)


def effective_weight(table: GroupAdvantage, p: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """w(p) = E[A | r = 1] - E[A | r = 0], over c ~ Bin(G - 1, p).

    RLOO and the plain return 1; the group's mean without std 1 - 1/G; GRPO (G - 1) / sqrt(G) as p -> 0 (ddof 1), and
    as G grows, slowly, 1 / sqrt(p (1 - p)). With a table (P, G), one per prompt, p is (..., P).
    """
    return (binomial(table.success.shape[-1] - 1, p) * (table.success - table.failure)).sum(-1)


def implied_objective(table: GroupAdvantage, p: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """W(p), the integral of w from 0 to p: what the estimator's expectation is the gradient of.

        w(p) = sum_c Bin(c; G - 1, p) b_c    =>    W(p) = sum_j Bin(j; G, p) (1 / G) sum over c < j of b_c

    w is a polynomial in Bernstein form, so its integral is one too. GRPO's tends to 2 arcsin(sqrt(p)) as G grows.
    """
    b = table.success - table.failure
    G = b.shape[-1]
    sums = torch.nn.functional.pad(b.cumsum(-1), (1, 0)) / G
    return (binomial(G, p) * sums).sum(-1)
