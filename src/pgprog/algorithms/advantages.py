"""psi, the advantage: how good was this completion? Pure functions of rewards and values.

Shapes are trailing axes: rewards (..., P, G), P prompts and G completions of each, or (..., P, G, T), one per token;
any leading axes are independent replicas. A group is the axis G. Everything returned is in the units of the reward
(z-scores: in standard deviations), carries no gradient where its inputs carry none, and is to be treated as a constant
by the loss.

Conventions, here and nowhere else:

- *Unscorable rewards.* ``valid (..., P, G)`` marks the completions that count. The others get A = 0 exactly, enter no
  mean and no std, and their reward may be anything, NaN included. Without ``valid`` every reward must be finite.
  ``mask (..., P, G, T)`` does the same for tokens.
- *Equal rewards* give exactly 0. A mean of equal numbers is not always that number (0.95 in float32 at G = 8 leaves
  6e-8, which a division by std + eps would blow up), so everything is measured from the smallest reward of the group.
- *A group of one* has no others to be compared with: an axis of one is refused (ValueError); where ``valid`` leaves
  one, A = 0.
- *std* has ddof 1, as in TRL, verl, slime and OpenRLHF, and eps is added to it; in ``whiten`` to the variance.
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


def group_mean(
    rewards: Float[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None
) -> Float[Tensor, "*K P G"]:
    """Dr. GRPO's advantage, A = r - mean(r) over the group.

    Paper: Liu et al. 2025, arXiv:2503.20783; GRPO without its division by the std.
    Bias: the mean holds the sample that it baselines, so E[A grad log pi] = (1 - 1/G) grad J: a scale, and no more;
    A = (1 - 1/G) ``leave_one_out``.
    Edge: equal rewards 0; G = 1 raises; one valid completion 0.
    Parity: TRL's GRPOTrainer with scale_rewards="none", verl's grpo with norm_adv_by_std_in_grpo=False (its trainer
    hands that to no other estimator: grpo_vectorized divides all the same), OpenRLHF's dr_grpo, slime's
    --disable-grpo-std-normalization. verl takes groups of one, and gives them the plain reward (rloo_vectorized: 0).
    """
    r, valid = _check_group(rewards, valid)
    return _centred(r, valid, (-1,))


def batch_scaled(
    rewards: Float[Tensor, "*K P G"], valid: Bool[Tensor, "*K P G"] | None = None, *, ddof: int = 1, eps: float = 1e-4
) -> Float[Tensor, "*K P G"]:
    """A = (r - mean) / (std + eps), the mean over the group, the std of the raw rewards over the whole batch.

    Paper: Liu et al. 2025, arXiv:2508.08221 ("Lite PPO").
    Bias: for rewards in {0, 1} the gradient of each prompt is w grad p, w = E[A | r = 1] - E[A | r = 0] over everything
    else in the batch. All prompts share the divisor, so that w goes to (1 - 1/G) / std(r) for each of them as P grows:
    a scale. With P = 1 it is ``group_z_score``.
    Edge: a group of equal rewards 0, however much the groups differ; G = 1 raises; one valid completion 0, though its
    reward counts in the std.
    Parity: TRL's GRPOTrainer with scale_rewards="batch".
    """
    r, valid = _check_group(rewards, valid)
    std = _variance(_centred(r, valid, (-2, -1)), valid, (-2, -1), ddof, eps).sqrt()
    return torch.where((std != 0) & valid, _centred(r, valid, (-1,)) / (std + eps), 0)


def optimal_constant(
    rewards: Float[Tensor, "*K P G"],
    squared_norms: Float[Tensor, "*K P G"],
    valid: Bool[Tensor, "*K P G"] | None = None,
    *,
    leave_own_out: bool = False,
) -> Float[Tensor, "*K P G"]:
    """A = r - b*, with the constant that leaves the least variance; s = grad log pi of the whole completion.

        b* = sum r |s|^2 / sum |s|^2 over the batch

    E[r |s|^2] / E|s|^2 is the constant b that minimises tr Cov of (r - b) s; here are sums in place of the means.

    Args:
        squared_norms: |s|^2, finite and 0 or more; detached here. All equal, b* is the mean; all 0, taken as equal.
        leave_own_out: b* of each completion from the other N - 1 of the batch.

    Paper: Weaver & Tao 2001, "The optimal reward baseline for gradient-based reinforcement learning"; Greensmith,
    Bartlett & Baxter 2004, JMLR 5. Optimal among constants and for prompts that are alike: one b for all.
    Bias: E[A s] = grad J - E[b* s], where b* holds the sample; E[b* s] = grad J / N where all norms are equal, of order
    1/N otherwise. None with ``leave_own_out``.
    Edge: equal rewards 0; one valid completion 0; with ``leave_own_out`` a batch of one raises.
    """
    r, valid = _check(rewards, valid)
    if squared_norms.shape != rewards.shape:
        raise ValueError(f"squared_norms have shape {tuple(squared_norms.shape)}: {tuple(rewards.shape)} wanted")
    w = torch.where(valid, squared_norms.detach(), 0)
    if not ((w >= 0) & w.isfinite()).all():
        raise ValueError("a squared norm is negative, NaN or infinite: mark it with valid to leave it out")
    if leave_own_out and rewards.shape[-2:].numel() < 2:
        raise ValueError("leave_own_out with a batch of one: a completion is compared with others, give 2 or more")
    total = _sum_of_others if leave_own_out else _sum
    r = _from_smallest(r, valid, (-2, -1))
    mean = total(r) / total(valid.to(r.dtype)).clamp(min=1)
    b = torch.where(total(w) > 0, total(w * r) / total(w), mean)
    return torch.where(valid, r - b, 0)


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
    1e-9. Where rewards are equal theirs is the rounding of a mean over eps: up to 1e-7 in OpenRLHF, in float64.
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


def reward_to_go(
    rewards: Float[Tensor, "*K P G T"], mask: Bool[Tensor, "*K P G T"], *, gamma: float = 1.0
) -> Float[Tensor, "*K P G T"]:
    """The discounted return from each token on, G_t = r_t + gamma G_t+1; 0 where masked; no gradient of its own.

    Args:
        rewards: one per token; what stands where masked is not seen. An outcome belongs on the last token:
            ``at_last_token``.
        mask: a masked token in the middle (a tool's) is no step: it is skipped and not discounted.
        gamma: discount per token, 0 to 1.

    Paper: Sutton, McAllester, Singh & Mansour 1999. Bias: none at gamma = 1, token t being paid for what comes after
    it; below 1, E[sum_t G_t s_t] is not the gradient of J, nor of the discounted J, which has gamma^t G_t.
    Raises: ValueError for shapes that differ, an unmasked reward that is NaN or infinite, gamma outside 0 to 1.
    Parity: verl's reinforce_plus_plus before it whitens (0.9.1; slime and OpenRLHF discount masked tokens too).
    """
    _check_discounts(gamma=gamma)
    return _backwards(_check_tokens(rewards, mask), mask, gamma)


def at_last_token(rewards: Float[Tensor, "*K P G"], mask: Bool[Tensor, "*K P G T"]) -> Float[Tensor, "*K P G T"]:
    """An outcome as a reward per token: r at the last unmasked token, 0 elsewhere; a fully masked row has none at all.

    Raises: ValueError where the mask is not one of these completions' tokens.
    Parity: slime and OpenRLHF. verl writes it at the last position, where a mask that ends earlier loses it.
    """
    _check_mask(rewards, mask)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, rewards.unsqueeze(-1), 0)


def gae(
    rewards: Float[Tensor, "*B T"],
    values: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    gamma: float,
    lam: float,
    bootstrap: Float[Tensor, "*B"] | None = None,
) -> Float[Tensor, "*B T"]:
    """Generalised advantage estimates, 0 where masked; values are detached here, as in ``value_baseline``.

        delta_t = r_t + gamma V(s_t+1) - V(s_t),        A_t = delta_t + gamma lambda A_t+1

    lambda = 1 gives G_t - V(s_t), lambda = 0 the TD error delta_t.

    Args:
        values: V(s_t), before token t.
        mask: a masked token in the middle (a tool's) is no step: the token before it looks at the one after it.
        gamma, lam: 0 to 1.
        bootstrap: V after the last token. 0, the default, says that the completion has ended there; one that was only
            cut off goes on, and is worth its V. A fully masked row has no use for it.

    Paper: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Bias: none at gamma = lambda = 1, or where V is exact
    (lambda, any; gamma = 1); else that of V, less as lambda grows.
    Raises: ValueError as ``reward_to_go`` does. V may be anything: a critic that has diverged spoils its own replica.
    Parity: verl's compute_gae_advantage_return before it whitens; slime and OpenRLHF where the mask has no hole. The
    critic's target there is A + V.
    """
    _check_discounts(gamma=gamma, lam=lam)
    r = _check_tokens(rewards, mask, least=1)
    if values.shape != mask.shape:
        raise ValueError(f"values have shape {tuple(values.shape)}: one per token wanted, {tuple(mask.shape)}")
    after = torch.zeros_like(r[..., 0]) if bootstrap is None else bootstrap.detach()
    if after.shape != mask.shape[:-1]:
        raise ValueError(f"bootstrap has shape {tuple(after.shape)}: one per row wanted, {tuple(mask.shape[:-1])}")
    V, deltas = torch.where(mask, values.detach(), 0), torch.empty_like(r)
    for t in reversed(range(r.shape[-1])):
        deltas[..., t] = r[..., t] + gamma * after - V[..., t]
        after = torch.where(mask[..., t], V[..., t], after)
    return _backwards(deltas, mask, gamma * lam)


def whiten(
    advantages: Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    floor: bool = False,
) -> Float[Tensor, "*K P G T"]:
    """(A - mean(A)) / sqrt(var(A) + eps) over all unmasked tokens of the batch; 0 where masked.

    Every token counts once, so a long completion weighs more in mean and var than a short one.

    Args:
        ddof: 1 or 0, of the variance.
        eps: under the root, unlike that of ``standardize``.
        floor: sqrt(max(var, eps)) instead.

    Bias: mean and var hold the sample; as the batch grows a constant is subtracted, which is harmless, and all is
    divided by a constant, which is a scale.
    Edge: equal advantages 0, with eps = 0 too; one token 0; no token 0; a NaN stays with its own replica.
    Raises: ValueError for shapes that differ, ddof other than 0 and 1, eps below 0.
    Parity: verl's masked_whiten (which adds 1e-8 to counts of tokens too), slime's distributed_masked_whiten and TRL's
    PPO; OpenRLHF has ddof 0 and the floor.
    """
    A = _centred(_check_tokens(advantages, mask, finite=False), mask, (-3, -2, -1))
    var = _variance(A, mask, (-3, -2, -1), ddof, eps)
    scale = (var.clamp(min=eps) if floor else var + eps).sqrt()
    return torch.where(mask & (var != 0), A / scale, 0)


def reinforce_plus_plus(
    rewards: Float[Tensor, "*K P G T"],
    mask: Bool[Tensor, "*K P G T"],
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    floor: bool = False,
) -> Float[Tensor, "*K P G T"]:
    """REINFORCE++, A = whiten(G_t): no group and no critic; the batch is its own baseline.

    Args:
        rewards: one per token, the outcome ``at_last_token``; a KL penalty in the reward, -beta k1_t, is added before.
        gamma, ddof, eps, floor: see ``reward_to_go`` and ``whiten``.

    Paper: Hu 2025, arXiv:2501.03262. Bias: at gamma = 1 that of ``whiten`` alone.
    Edge: equal returns 0; groups of one are fine. Parity: verl's and slime's reinforce_plus_plus; OpenRLHF's reinforce
    with ddof 0 and the floor.
    """
    return whiten(reward_to_go(rewards, mask, gamma=gamma), mask, ddof=ddof, eps=eps, floor=floor)


def reinforce_plus_plus_baseline(
    rewards: Float[Tensor, "*K P G"],
    mask: Bool[Tensor, "*K P G T"],
    valid: Bool[Tensor, "*K P G"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    floor: bool = False,
) -> Float[Tensor, "*K P G T"]:
    """REINFORCE++ with a baseline, A = whiten(r - mean of the group), the same at each token of a completion.

    Paper: Hu 2025, arXiv:2501.03262.
    Bias: with equal lengths the mean over tokens is 0, and the gradient of each prompt is w grad p for rewards in
    {0, 1}, w = E[A | r = 1] - E[A | r = 0] over everything else in the batch: as with ``batch_scaled`` almost one w for
    all prompts. With unequal lengths the mean over tokens is not 0 (long completions count more), and is subtracted
    from all: A depends on the lengths that were drawn.
    Edge: G = 1 raises; one valid completion 0, and its tokens are not counted. A group of equal rewards is 0 only if
    the mean over tokens is; if all groups are, all A are 0.
    Parity: verl's and slime's reinforce_plus_plus_baseline; OpenRLHF's reinforce_baseline with ddof 0 and the floor.
    """
    A = group_mean(rewards, valid)
    _check_mask(rewards, mask)
    if valid is not None:
        mask = mask & (valid & (valid.sum(-1, keepdim=True) > 1)).unsqueeze(-1)
    return whiten(A.unsqueeze(-1).expand(mask.shape), mask, ddof=ddof, eps=eps, floor=floor)


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


def _sum(x: Tensor) -> Tensor:
    return x.sum((-2, -1), keepdim=True)


def _sum_of_others(x: Tensor) -> Tensor:
    """Over the batch without oneself: from both ends, for the sum less x is rounding where x is most of it."""
    flat = x.flatten(-2)
    before = torch.nn.functional.pad(flat, (1, -1)).cumsum(-1)
    after = torch.nn.functional.pad(flat, (-1, 1)).flip(-1).cumsum(-1).flip(-1)
    return (before + after).view_as(x)


def _centred(r: Tensor, valid: Tensor, dims: tuple[int, ...]) -> Tensor:
    r = _from_smallest(r, valid, dims)
    return torch.where(valid, r - _mean(r, valid, dims), 0)


def _variance(centred: Tensor, valid: Tensor, dims: tuple[int, ...], ddof: int, eps: float) -> Tensor:
    if ddof not in (0, 1) or not 0 <= eps < float("inf"):
        raise ValueError(f"ddof {ddof} and eps {eps}: ddof is 0 or 1, eps 0 or a positive number")
    n = valid.sum(dims, keepdim=True)
    return centred.square().sum(dims, keepdim=True) / (n - ddof).clamp(min=1)


def _z_score(r: Tensor, valid: Tensor, dims: tuple[int, ...], ddof: int, eps: float) -> Tensor:
    centred = _centred(r, valid, dims)
    std = _variance(centred, valid, dims, ddof, eps).sqrt()
    return torch.where(valid & (std != 0), centred / (std + eps), 0)


def _backwards(x: Tensor, mask: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_t+1 over the unmasked t, 0 at the others."""
    y = torch.zeros_like(x[..., 0])
    found: list[Tensor] = []
    for t in reversed(range(x.shape[-1])):
        y = torch.where(mask[..., t], x[..., t] + decay * y, y)
        found.insert(0, y)
    return torch.where(mask, torch.stack(found, -1), 0)


def _check_tokens(x: Tensor, mask: Tensor, least: int = 3, finite: bool = True) -> Tensor:
    """Refuse wrong shapes and unmasked NaN; return x with 0 where masked."""
    if mask.shape != x.shape or mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype} {tuple(mask.shape)}: bool {tuple(x.shape)} wanted, one per token")
    if x.dim() < least or x.numel() == 0:
        axes = "(..., T)" if least == 1 else "(..., P, G, T)"
        raise ValueError(f"shape {tuple(x.shape)}: {axes} wanted, one number per token and at least one token")
    if not x.is_floating_point():
        raise ValueError(f"numbers per token are {x.dtype}: floats wanted, use .float()")
    x = torch.where(mask, x, 0)
    if finite and not x.isfinite().all():
        raise ValueError("a reward is NaN or infinite at an unmasked token: mask it, or give the token a number")
    return x


def _check_mask(rewards: Tensor, mask: Tensor) -> None:
    if mask.shape[:-1] != rewards.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"rewards are {tuple(rewards.shape)}, mask is {mask.dtype} {tuple(mask.shape)}: (..., P, G) and bool "
            "(..., P, G, T) wanted"
        )


def _check_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} {value} is out of range: a discount is a number from 0 to 1")
