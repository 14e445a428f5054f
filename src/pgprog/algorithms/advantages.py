"""psi, the advantage: how good was this completion? Pure functions of rewards and values.

Shapes are trailing axes: rewards (..., P, G), P prompts and G completions of each; any leading axes are independent
replicas. A group is the last axis. Everything returned is in the units of the reward (z-scores: in standard
deviations), carries no gradient where its inputs carry none, and is to be treated as a constant by the loss.

Conventions, here and nowhere else:

- *Unscorable rewards.* ``valid (..., P, G)`` marks the completions that count. The others get A = 0 exactly, enter no
  mean and no std, and their reward may be anything, NaN included. Without ``valid`` every reward must be finite.
- *Equal rewards* give exactly 0. A mean of equal numbers is not always that number (0.95 in float32 at G = 8 leaves
  6e-8, which a division by std + eps would blow up), so everything is measured from the smallest reward of the group.
- *A group of one* has no others to be compared with: an axis of one is refused (ValueError); where ``valid`` leaves
  one, A = 0.
- *std* has ddof 1, as in TRL, verl, slime and OpenRLHF, and eps is added to it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def total_return(
    rewards: Float[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None
) -> Float[Tensor, "*K P G"]:
    """The plain return, A = r.

    Paper: Williams 1992, "Simple statistical gradient-following algorithms", with no baseline.
    Bias: none, E[A grad log pi] = grad J. Edge: a batch of failures has no gradient at all.
    """
    _, valid = _check(rewards, valid)
    return torch.where(valid, rewards, 0)


def batch_mean(
    rewards: Float[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None
) -> Float[Tensor, "*K P G"]:
    """REINFORCE's baseline, A = r - mean(r), the mean over all N = P G completions of the batch.

    Paper: Williams 1992, with the reward averaged over the batch as reinforcement baseline.
    Bias: the mean holds the sample that it baselines, so E[A grad log pi] = (1 - 1/N) grad J: a scale, and no more.
    Edge: N = 1 gives A = 0.
    """
    r, valid = _check(rewards, valid)
    batch = (-2, -1)
    r = _from_smallest(r, valid, batch)
    return torch.where(valid, r - _mean(r, valid, batch), 0)


def value_baseline(
    rewards: Float[Tensor, "*K P G"], values: Float[Tensor, "*K P"], valid: Bool[Tensor, "*K P G"] | None = None
) -> Float[Tensor, "*K P G"]:
    """Actor-Critic's baseline, A = r - V(prompt).

    Args:
        values: (..., P), one per prompt; detached here, so that no gradient reaches the critic through A.

    Paper: Sutton, McAllester, Singh & Mansour 1999, "Policy gradient methods ... with function approximation".
    Bias: none, whatever V is, as long as V has not seen these completions; a bad V costs variance only.
    Raises: ValueError where values are not (..., P): (P, 1) against (P,) would broadcast to P x P.
    """
    _, valid = _check(rewards, valid)
    if values.shape != rewards.shape[:-1]:
        raise ValueError(f"values have shape {tuple(values.shape)}: one per prompt wanted, {tuple(rewards.shape[:-1])}")
    return torch.where(valid, rewards - values.detach().unsqueeze(-1), 0)


def leave_one_out(
    rewards: Float[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None
) -> Float[Tensor, "*K P G"]:
    """RLOO, A_i = r_i - mean(r_j, j != i): the baseline is the mean of the others in the group.

    Paper: Kool, van Hoof & Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
    arXiv:2402.14740, eq. 8. Equals G / (G - 1) times the centred reward.
    Bias: none, E[A grad log pi] = grad J exactly: the baseline of i has not seen i.
    Edge: equal rewards 0; G = 1 raises; one valid completion 0.
    Parity: TRL's RLOOTrainer (beta 0), verl's rloo and OpenRLHF's rloo for groups of two or more.
    """
    r, valid = _check_group(rewards, valid)
    n = valid.sum(-1, keepdim=True)
    r = _from_smallest(r, valid, (-1,))
    others = (torch.where(valid, r, 0).sum(-1, keepdim=True) - r) / (n - 1).clamp(min=1)
    return torch.where(valid & (n > 1), r - others, 0)


def group_z_score(
    rewards: Float[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None, *, ddof: int = 1, eps: float = 1e-6
) -> Float[Tensor, "*K P G"]:
    """GRPO, A = (r - mean) / (std + eps), mean and std over the group.

    Paper: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    Bias: for rewards in {0, 1} the gradient is w(p) grad p with p the prompt's success probability and a weight w that
    depends on p: about (G - 1) / sqrt(G) where success is rare, 1.74 at p = 1/2 (G = 8). It is the gradient of another
    objective.
    Edge: equal rewards 0, with eps = 0 too; G = 1 raises; one valid completion 0; |A| <= (n - 1) / sqrt(n) (ddof 1).
    Parity: verl's grpo (eps 1e-6); TRL's GRPOTrainer with scale_rewards="group" has eps 1e-4, OpenRLHF's group_norm
    1e-9.
    """
    r, valid = _check_group(rewards, valid)
    return _z_score(r, valid, (-1,), ddof, eps)


def standardize(
    advantages: Float[Tensor, "*K P G"],
    valid: Bool[Tensor, "*K P G"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Float[Tensor, "*K P G"]:
    """PPO's usual treatment of its advantages, (A - mean(A)) / (std(A) + eps) over the batch.

    Paper: not in Schulman et al. 2017 (arXiv:1707.06347); in its reference implementations, see Huang et al. 2022, "The
    37 implementation details of PPO", no. 7, and Andrychowicz et al. 2021, arXiv:2006.05990.
    Bias: mean and std hold the sample; the direction is right only as the batch grows.
    Edge: equal advantages 0; one sample 0.
    """
    # Not refused, as a NaN reward is: an advantage that has diverged with its critic stays with its own replica.
    a, valid = _check(advantages, valid, finite=False)
    return _z_score(a, valid, (-2, -1), ddof, eps)


def group_rows(
    rewards: Sequence[float | None], ids: Sequence[object]
) -> tuple[Float[Tensor, "P G"], Bool[Tensor, "P G"]]:
    """Put flat rewards onto the group axis: the only door from rows to (P, G).

    Args:
        rewards: one per row; None or NaN is unscorable; infinity is not, and every advantage refuses it.
        ids: the prompt of each row, any hashable; rows of one prompt need not stand together, nor be equally many.

    Returns:
        rewards (P, G) in float64 and valid (P, G): groups in order of first appearance, rows in order within them, G
        the largest group. What does not count is 0 and not valid. Raises ValueError where the lengths differ or there
        is no row.
    """
    if len(rewards) != len(ids) or not ids:
        raise ValueError(f"{len(rewards)} rewards and {len(ids)} ids: give one id per reward, and at least one row")
    groups: dict[object, list[float]] = {}
    for reward, group in zip(rewards, ids, strict=True):
        groups.setdefault(group, []).append(float("nan") if reward is None else float(reward))
    width = max(map(len, groups.values()))
    table = torch.tensor([row + [float("nan")] * (width - len(row)) for row in groups.values()], dtype=torch.float64)
    valid = ~table.isnan()
    return torch.where(valid, table, 0), valid


def _check(rewards: Tensor, valid: Tensor | None, finite: bool = True) -> tuple[Tensor, Tensor]:
    """Refuse wrong shapes and unmarked NaN; return the rewards with 0 where not valid, and valid."""
    if rewards.dim() < 2:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}: (..., P, G) wanted, prompts by completions")
    if rewards.numel() == 0:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}: an empty batch has no advantage")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are {rewards.dtype}: floats wanted, use rewards.float()")
    if valid is None:
        valid = torch.ones_like(rewards, dtype=torch.bool)
    elif valid.shape != rewards.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"valid is {valid.dtype} {tuple(valid.shape)}: bool {tuple(rewards.shape)} wanted, as the rewards"
        )
    rewards = torch.where(valid, rewards, 0)
    if finite and not rewards.isfinite().all():
        raise ValueError("a reward is NaN or infinite: mark it with valid=rewards.isfinite() to leave it out")
    return rewards, valid


def _check_group(rewards: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    if rewards.dim() and rewards.shape[-1] < 2:
        raise ValueError(
            f"group size G = {rewards.shape[-1]}: a completion is compared with others of its prompt, give 2 or more"
        )
    return _check(rewards, valid)


def _from_smallest(r: Tensor, valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Measure r from the smallest valid one, so that equal rewards are exactly 0."""
    smallest = torch.where(valid, r, torch.inf).amin(dims, keepdim=True)
    return torch.where(valid, r - smallest, 0)


def _mean(r: Tensor, valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.where(valid, r, 0).sum(dims, keepdim=True) / valid.sum(dims, keepdim=True).clamp(min=1)


def _z_score(r: Tensor, valid: Tensor, dims: tuple[int, ...], ddof: int, eps: float) -> Tensor:
    if ddof not in (0, 1) or not 0 <= eps < float("inf"):
        raise ValueError(f"ddof {ddof} and eps {eps}: ddof is 0 or 1, eps 0 or a positive number")
    r = _from_smallest(r, valid, dims)
    centred = torch.where(valid, r - _mean(r, valid, dims), 0)
    n = valid.sum(dims, keepdim=True)
    std = (centred.square().sum(dims, keepdim=True) / (n - ddof).clamp(min=1)).sqrt()
    return torch.where(valid & (std != 0), centred / (std + eps), 0)
