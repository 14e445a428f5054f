"""Surrogate losses: their gradients, by closed forms and by finite differences; values only where they mean something.

The shapes are generic: two prompts, three completions of unequal length, one of them fully masked.
"""

import math

import pytest
import torch

import oracles
from oracles import close, same
from pgprog.algorithms.objectives import (
    clipped_surrogate,
    policy_gradient_loss,
    sequence_sum_mean,
    token_mean,
    value_loss,
)

NAN = math.nan
LENGTHS = [[4, 1, 0], [2, 3, 4]]  # of T = 4; the third completion of the first prompt is fully masked
MASK = torch.tensor([[[t < n for t in range(4)] for n in row] for row in LENGTHS])
A = torch.tensor([[1.0, -0.5, 0.7], [-2.0, 0.95, 0.0]], dtype=torch.float64)
N = 6


def generic(seed=0, *shape):
    return torch.randn(*shape, *MASK.shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor):
    return tensor.clone().requires_grad_()


def gradient(loss, *leaves):
    return torch.autograd.grad(loss.sum(), leaves)


def finite_difference(f, x):
    """Fourth order, h = 1e-3, entry by entry; f is smooth near x."""
    h, slope = 1e-3, torch.zeros_like(x)
    for i in range(x.numel()):
        step = torch.zeros_like(x).view(-1)
        step[i] = h
        step = step.view_as(x)
        slope.view(-1)[i] = (8 * (f(x + step) - f(x - step)) - (f(x + 2 * step) - f(x - 2 * step))) / (12 * h)
    return slope


# ---- policy_gradient_loss ----


def test_gradient_weights_each_token_by_minus_a_over_n_whatever_the_length():
    """loss = - 1/N sum_i sum_t logp A: no length in a denominator, the fully masked row among the N."""
    logprobs = leaf(generic())
    loss = policy_gradient_loss(logprobs, A, MASK)
    (grad,) = gradient(loss, logprobs)
    expected = torch.zeros_like(grad)
    for p in range(2):
        for g in range(3):
            for t in range(LENGTHS[p][g]):
                expected[p, g, t] = -A[p, g] / N
    close(grad, expected)
    value = -sum(
        A[p, g].item() * logprobs[p, g, t].item() for p in range(2) for g in range(3) for t in range(LENGTHS[p][g])
    )
    close(loss, value / N)
    assert loss.shape == ()


def test_per_token_advantages_weight_each_token_by_their_own():
    logprobs, a = leaf(generic()), generic(1)
    (grad,) = gradient(policy_gradient_loss(logprobs, a, MASK), logprobs)
    close(grad, -a * MASK / N)


def test_a_scalar_advantage_is_the_same_for_all_tokens():
    logprobs = generic()
    same(policy_gradient_loss(logprobs, A, MASK), policy_gradient_loss(logprobs, A[..., None].expand(2, 3, 4), MASK))


def test_losses_of_replicas_are_their_own():
    """Three replicas at once, one loss each, equal to three calls: no mean over K."""
    logprobs, old = leaf(generic(0, 3)), generic(1, 3)
    a = torch.stack([A, -2 * A, A.flip(0)])
    mask = torch.stack([MASK, MASK.flip(0), MASK.flip(1)])
    for loss in (
        lambda *x: policy_gradient_loss(x[0], x[2], x[3]),
        lambda *x: clipped_surrogate(*x).loss,
        lambda *x: clipped_surrogate(*x, ratio_level="sequence").loss,
        lambda *x: sequence_sum_mean(x[0], x[3]),
        lambda *x: token_mean(x[0], x[3]),
    ):
        together = loss(logprobs, old, a, mask)
        assert together.shape == (3,)
        (grads,) = gradient(together, logprobs)
        for k in range(3):
            one = leaf(logprobs[k].detach())
            alone = loss(one, old[k], a[k], mask[k])
            close(together[k], alone)
            close(grads[k], gradient(alone, one)[0])


def test_loss_is_not_zero_though_advantages_sum_to_zero():
    """Not a fault (public-faults A4, C1): A = [1, -1], lengths [1, 3], ratio 1: - (1 - 3) / 2 = 1, gradient -A / 2."""
    mask = torch.tensor([[[True, False, False], [True, True, True]]])
    logprobs = leaf(torch.full((1, 2, 3), -0.7))
    a = torch.tensor([[1.0, -1.0]])
    loss = clipped_surrogate(logprobs, logprobs, a, mask).loss
    close(loss, 1.0)
    close(gradient(loss, logprobs)[0], [[[-0.5, 0, 0], [0.5, 0.5, 0.5]]])


def test_equal_wrong_answers_weigh_the_same_per_token_whatever_their_length():
    """public-faults A6: lengths 10 and 100, A = -1: 1/2 for every token of both (two sequences)."""
    mask = torch.arange(100) < torch.tensor([[[10], [100]]])
    logprobs = leaf(torch.zeros(1, 2, 100))
    (grad,) = gradient(policy_gradient_loss(logprobs, torch.tensor([[-1.0, -1.0]]), mask), logprobs)
    same(grad, 0.5 * mask)


# ---- clipped_surrogate ----

TABLE = [  # A, ratio, objective, its derivative with respect to the log-probability, clipped
    (1.0, 0.5, 0.5, 0.5, False),
    (1.0, 1.1, 1.1, 1.1, False),
    (1.0, 1.3, 1.2, 0.0, True),
    (-1.0, 0.5, -0.8, 0.0, True),
    (-1.0, 1.1, -1.1, -1.1, False),
    (-1.0, 1.3, -1.3, -1.3, False),
    (-1.0, 100.0, -100.0, -100.0, False),
    (0.0, 1.3, 0.0, 0.0, False),
    (0.0, 0.5, 0.0, 0.0, False),
    (2.5, 0.81, 2.5 * 0.81, 2.5 * 0.81, False),
    (2.5, 1.21, 2.5 * 1.2, 0.0, True),
    (-2.5, 0.79, -2.5 * 0.8, 0.0, True),
]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("a", "ratio", "objective", "slope", "clipped"), TABLE)
def test_clip_takes_the_gradient_only_where_the_step_would_go_further(level, a, ratio, objective, slope, clipped):
    """d (ratio A) / d logp = ratio A, and 0 where clipped; public-faults C2 and C3."""
    logprobs, old = leaf(torch.full((1, 1, 1), -1.0 + math.log(ratio))), torch.full((1, 1, 1), -1.0)
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    surrogate = clipped_surrogate(logprobs, old, torch.tensor([[a]]), mask, ratio_level=level)
    close(surrogate.loss, -objective)
    close(gradient(surrogate.loss, logprobs)[0], [[[-slope]]])
    close(surrogate.metrics["clip_frac"], float(clipped))
    close(surrogate.metrics["ratio_min"], ratio)
    close(surrogate.metrics["ratio_max"], ratio)


@pytest.mark.parametrize("clip", [0.1, 0.3])
def test_clip_is_the_width_of_both_sides(clip):
    ratios = torch.tensor([1 - clip - 0.01, 1 - clip + 0.01, 1 + clip - 0.01, 1 + clip + 0.01])
    mask = torch.ones(1, 1, 4, dtype=torch.bool)
    for a, lost in ((1.0, [False, False, False, True]), (-1.0, [True, False, False, False])):
        logprobs = leaf(ratios.log().view(1, 1, 4))
        surrogate = clipped_surrogate(logprobs, torch.zeros(1, 1, 4), torch.tensor([[a]]), mask, clip=clip)
        (grad,) = gradient(surrogate.loss, logprobs)
        close(grad[0, 0], torch.where(torch.tensor(lost), 0, -a * ratios))
        close(surrogate.metrics["clip_frac"], 1 / 4)


@pytest.mark.parametrize("per_token", [False, True])
def test_clipped_surrogate_equals_its_formula_token_by_token(per_token):
    """Plain loops over a generic batch in which some ratios are clipped on either side and some are not."""
    logprobs, old = leaf(generic(0)), generic(0) + 0.3 * generic(1)
    a = generic(2) if per_token else A
    surrogate = clipped_surrogate(logprobs, old, a, MASK)
    total, slopes, clipped, ratios = 0.0, torch.zeros_like(logprobs), 0, []
    for p in range(2):
        for g in range(3):
            for t in range(LENGTHS[p][g]):
                ratio = math.exp(logprobs[p, g, t].item() - old[p, g, t].item())
                adv = a[p, g, t].item() if per_token else a[p, g].item()
                total += min(ratio * adv, min(max(ratio, 0.8), 1.2) * adv)
                lost = (adv > 0 and ratio > 1.2) or (adv < 0 and ratio < 0.8)
                clipped += lost
                slopes[p, g, t] = 0 if lost else -ratio * adv / N
                ratios.append(ratio)
    assert 0 < clipped < len(ratios) == 14
    close(surrogate.loss, -total / N)
    close(gradient(surrogate.loss, logprobs)[0], slopes)
    close(surrogate.metrics["clip_frac"], clipped / 14)
    close(surrogate.metrics["ratio_min"], min(ratios))
    close(surrogate.metrics["ratio_max"], max(ratios))


def test_sequence_ratio_clips_whole_sequences():
    """The ratio of a sequence is the product of its tokens' ratios: all of its tokens or none have a gradient."""
    logprobs, old = leaf(generic(0)), generic(0) + 0.3 * generic(6)
    surrogate = clipped_surrogate(logprobs, old, A, MASK, ratio_level="sequence")
    total, slopes, clipped, ratios = 0.0, torch.zeros_like(logprobs), 0, []
    for p in range(2):
        for g in range(3):
            n, adv = LENGTHS[p][g], A[p, g].item()
            if n == 0:
                total += adv  # a product of nothing is 1, without gradient; it is no sequence, so clip_frac skips it
                continue
            ratio = math.prod(math.exp(logprobs[p, g, t].item() - old[p, g, t].item()) for t in range(n))
            total += min(ratio * adv, min(max(ratio, 0.8), 1.2) * adv)
            lost = (adv > 0 and ratio > 1.2) or (adv < 0 and ratio < 0.8)
            clipped += lost
            slopes[p, g, :n] = 0 if lost else -ratio * adv / N
            ratios.append(ratio)
    assert 0 < clipped < 5
    (grad,) = gradient(surrogate.loss, logprobs)
    close(grad, slopes)
    close(surrogate.metrics["clip_frac"], clipped / 5)
    close(surrogate.metrics["ratio_min"], min(ratios))
    close(surrogate.metrics["ratio_max"], max(ratios))


def test_sequence_ratio_is_the_product_and_a_masked_token_does_not_move_it():
    """public-faults C5 and C6: log-ratios [.4, -.1, .3]: 1.8221, not 1.2214; [.1, -.1, .05]: 1.0513."""
    for log_ratios, ratio in (([0.4, -0.1, 0.3], 1.8221), ([0.1, -0.1, 0.05], 1.0513)):
        exact = math.exp(sum(log_ratios))
        assert round(exact, 4) == ratio
        logprobs = torch.tensor([[[*log_ratios, 9.0]]])
        mask = torch.tensor([[[True, True, True, False]]])
        surrogate = clipped_surrogate(
            logprobs, torch.zeros(1, 1, 4), torch.tensor([[-1.0]]), mask, ratio_level="sequence"
        )
        close(surrogate.loss, exact)
        close(surrogate.metrics["ratio_max"], exact)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_at_ratio_one_equals_that_of_the_policy_gradient(level):
    logprobs = leaf(generic())
    surrogate = clipped_surrogate(logprobs, logprobs, A, MASK, ratio_level=level)
    (plain,) = gradient(policy_gradient_loss(logprobs, A, MASK), logprobs)
    close(gradient(surrogate.loss, logprobs)[0], plain, rtol=1e-15, atol=0)
    same(surrogate.metrics["clip_frac"], torch.tensor(0.0))
    same(surrogate.metrics["ratio_min"], torch.tensor(1.0))
    same(surrogate.metrics["ratio_max"], torch.tensor(1.0))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_of_the_clipped_surrogate_equals_the_finite_difference(level):
    """Truncation of fourth order at h = 1e-3 is ~1e-13 here, rounding too; no ratio is within 2h of a kink."""
    x, old = generic(0), generic(0) + 0.3 * generic(6)
    logprobs = leaf(x)

    def loss(at):
        return clipped_surrogate(at, old, A, MASK, ratio_level=level).loss

    close(gradient(loss(logprobs), logprobs)[0], finite_difference(loss, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_gradient_reaches_the_old_logprobs(level):
    logprobs, old = leaf(generic(0)), leaf(generic(1))
    loss = clipped_surrogate(logprobs, old, A, MASK, ratio_level=level).loss
    assert torch.autograd.grad(loss, old, allow_unused=True) == (None,)


def test_metrics_of_the_surrogate_carry_no_gradient():
    metrics = clipped_surrogate(leaf(generic(0)), generic(1), A, MASK).metrics
    assert set(metrics) == {"clip_frac", "ratio_min", "ratio_max"}
    assert not any(m.requires_grad for m in metrics.values())


# ---- masks ----

LOSSES = {
    "policy_gradient": lambda logprobs, old, a, mask: policy_gradient_loss(logprobs, a, mask),
    "token": lambda *x: clipped_surrogate(*x).loss,
    "sequence": lambda *x: clipped_surrogate(*x, ratio_level="sequence").loss,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, -1e30])
def test_what_is_masked_reaches_neither_loss_nor_gradient(name, garbage):
    logprobs, old = generic(0), generic(0) + 0.3 * generic(6)
    clean, dirty = leaf(logprobs), leaf(logprobs.masked_fill(~MASK, garbage))
    a, b = LOSSES[name](clean, old, A, MASK), LOSSES[name](dirty, old.masked_fill(~MASK, garbage), A, MASK)
    same(a, b)
    same(gradient(a, clean)[0], gradient(b, dirty)[0])
    same(token_mean(dirty, MASK), token_mean(clean, MASK))
    same(sequence_sum_mean(dirty, MASK), sequence_sum_mean(clean, MASK))


@pytest.mark.parametrize(
    "name",
    [
        "policy_gradient",
        "token",
    ],
)
@pytest.mark.parametrize("garbage", [NAN, math.inf])
def test_per_token_advantages_that_are_masked_reach_no_gradient(name, garbage):
    old, a = generic(1), generic(2)
    one, other = leaf(generic(0)), leaf(generic(0))
    clean = LOSSES[name](one, old, a, MASK)
    dirty = LOSSES[name](other, old, a.masked_fill(~MASK, garbage), MASK)
    same(clean, dirty)
    same(gradient(clean, one)[0], gradient(dirty, other)[0])


@pytest.mark.parametrize("name", LOSSES)
def test_everything_masked_gives_a_gradient_of_zero(name):
    logprobs = leaf(torch.full((2, 3, 4), NAN))
    loss = LOSSES[name](logprobs, torch.full((2, 3, 4), NAN), A, torch.zeros(2, 3, 4, dtype=torch.bool))
    same(loss, torch.tensor(0.0))
    same(gradient(loss, logprobs)[0], torch.zeros(2, 3, 4))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_everything_masked_gives_no_loss_no_clip_and_extremes_of_one(level):
    logprobs, nothing = generic(0), torch.zeros(2, 3, 4, dtype=torch.bool)
    surrogate = clipped_surrogate(logprobs, generic(1), A, nothing, ratio_level=level)
    same(surrogate.loss, torch.tensor(0.0))
    same(surrogate.metrics["clip_frac"], torch.tensor(0.0))
    same(surrogate.metrics["ratio_min"], torch.tensor(1.0))
    same(surrogate.metrics["ratio_max"], torch.tensor(1.0))


def test_one_fully_masked_replica_leaves_the_other_alone():
    logprobs, old = generic(0, 2), generic(1, 2)
    mask = torch.stack([torch.zeros_like(MASK), MASK])
    both = clipped_surrogate(logprobs, old, torch.stack([A, A]), mask)
    one = clipped_surrogate(logprobs[1], old[1], A, MASK)
    close(both.loss[1], one.loss)
    for name, metric in one.metrics.items():
        close(both.metrics[name][1], metric)


@pytest.mark.parametrize("a", [1.0, 0.0, -1.0])
def test_a_ratio_beyond_the_floats_has_the_gradient_of_its_branch(a):
    """log-ratio 1000: A > 0 is clipped, gradient 0; A < 0 has loss inf and gradient inf; NaN in neither."""
    logprobs = leaf(torch.full((1, 1, 1), 1000.0))
    surrogate = clipped_surrogate(
        logprobs, torch.zeros(1, 1, 1), torch.tensor([[a]]), torch.ones(1, 1, 1, dtype=torch.bool)
    )
    (grad,) = gradient(surrogate.loss, logprobs)
    same(grad, torch.full((1, 1, 1), math.inf if a < 0 else 0.0))


# ---- aggregation ----


def test_sum_over_the_sequence_then_mean_over_the_sequences():
    """public-faults A5: losses 1, 0 | 1, 0 with lengths 1, 3 | 4, 4: sums 1, 0, 4, 0 over four sequences: 5/4."""
    per_token = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[..., None].expand(2, 2, 4)
    mask = torch.arange(4) < torch.tensor([[[1], [3]], [[4], [4]]])
    close(sequence_sum_mean(per_token, mask), 5 / 4)
    close(token_mean(per_token, mask), 5 / 12)


def test_token_mean_divides_by_the_tokens_that_count():
    """public-faults A3, D3 and G5: ten tokens, two kept, H = 1 each: 1, not 0.2; none kept: 0."""
    mask = torch.tensor([[[True, True] + [False] * 8]])
    close(token_mean(torch.ones(1, 1, 10), mask), 1.0)
    close(token_mean(torch.tensor([[[-0.5, -0.5] + [-1e9] * 8]]), mask), -0.5)
    same(token_mean(torch.full((1, 1, 10), NAN), torch.zeros_like(mask)), torch.tensor(0.0))
    x = leaf(generic())
    same(gradient(token_mean(x, torch.zeros_like(MASK)), x)[0], torch.zeros(2, 3, 4))


def test_a_token_mask_selects_its_own_token():
    """public-faults D1: logp [-1, -2, -3], the second token counts: -2, not -3."""
    close(sequence_sum_mean(torch.tensor([[[-1.0, -2.0, -3.0]]]), torch.tensor([[[False, True, False]]])), -2.0)


# ---- value_loss ----


def test_value_loss_is_the_mean_square_and_its_gradient_flows_to_the_values_alone():
    """d/dV_p mean_pg (r - V)^2 = 2 sum_g (V_p - r_pg) / N."""
    rewards, values = leaf(torch.tensor([[1.0, 0.0, 0.95], [0.0, 0.0, 2.0]])), leaf(torch.tensor([0.3, -0.4]))
    loss = value_loss(values, rewards)
    close(loss, (0.7**2 + 0.3**2 + 0.65**2 + 0.4**2 + 0.4**2 + 2.4**2) / 6)
    close(gradient(loss, values)[0], [2 * (0.9 - 1.95) / 6, 2 * (-1.2 - 2.0) / 6])
    assert torch.autograd.grad(value_loss(values, rewards), rewards, allow_unused=True) == (None,)


def test_value_losses_of_replicas_are_their_own():
    rewards, values = generic(0, 2)[..., 0], leaf(generic(1, 2)[..., 0, 0])
    loss = value_loss(values, rewards)
    assert loss.shape == (2,)
    for k in range(2):
        close(loss[k], value_loss(values[k], rewards[k]))
    (grads,) = gradient(loss, values)
    close(grads, 2 * (values * 3 - rewards.sum(-1)) / N)


# ---- what is refused ----


def test_an_advantage_with_a_gradient_is_refused():
    for loss in LOSSES.values():
        with pytest.raises(ValueError, match="the advantage carries a gradient"):
            loss(generic(0), generic(1), leaf(A), MASK)


@pytest.mark.parametrize("a", [A[0], A[:, :1], A[..., None], A.T, torch.tensor(1.0), A[None]])
def test_an_advantage_of_another_shape_is_refused(a):
    with oracles.as_users_run_it():
        for loss in LOSSES.values():
            with pytest.raises(ValueError, match=r"advantages have shape .*\(2, 3\), one per sequence, or \(2, 3, 4\)"):
                loss(generic(0), generic(1), a, MASK)


@pytest.mark.parametrize("mask", [MASK[..., :3], MASK[0], MASK[..., :1]])
def test_a_mask_of_another_shape_is_refused(mask):
    with oracles.as_users_run_it():
        for loss in LOSSES.values():
            with pytest.raises(ValueError, match=r"logprobs \(2, 3, 4\) and mask .*: both must be \(..., P, G, T\)"):
                loss(generic(0), generic(1), A, mask)


def test_old_logprobs_of_another_shape_are_refused():
    with oracles.as_users_run_it(), pytest.raises(ValueError, match="old_logprobs"):
        clipped_surrogate(generic(0), generic(1)[..., :1], A, MASK)


def test_flat_logprobs_are_refused():
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"both must be \(..., P, G, T\)"):
        policy_gradient_loss(generic(0)[0], A[0], MASK[0])


@pytest.mark.parametrize("clip", [0.0, 1.0, -0.2, 1.5, NAN])
def test_a_clip_out_of_range_is_refused(clip):
    with pytest.raises(ValueError, match="is out of range"):
        clipped_surrogate(generic(0), generic(1), A, MASK, clip=clip)


def test_a_sequence_ratio_takes_no_advantage_per_token():
    with pytest.raises(ValueError, match="takes one advantage per sequence"):
        clipped_surrogate(generic(0), generic(1), generic(2), MASK, ratio_level="sequence")


def test_an_unknown_ratio_level_is_refused():
    with oracles.as_users_run_it(), pytest.raises(ValueError, match="sentence"):
        clipped_surrogate(generic(0), generic(1), A, MASK, ratio_level="sentence")


@pytest.mark.parametrize("values", [torch.zeros(2, 1), torch.zeros(3), torch.tensor(0.0)])
def test_values_that_are_not_one_per_prompt_are_refused(values):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"one per prompt wanted, \(2,\)"):
        value_loss(values, A)
