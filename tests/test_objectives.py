"""Surrogate losses: their gradients, by closed forms and by finite differences; values only where they mean something.

The shapes are generic: two prompts, three completions of unequal length, one of them fully masked.
"""

import itertools
import math

import pytest
import torch

import oracles
from oracles import close, same
from pgprog.algorithms.objectives import (
    aggregate,
    cispo_surrogate,
    clipped_surrogate,
    kl_estimate,
    kl_penalty,
    mismatch_weights,
    policy_gradient_loss,
    sequence_sum_mean,
    token_mean,
    token_value_loss,
    token_weights,
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
    return torch.autograd.grad(loss.sum(), leaves, retain_graph=True)


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
    "sequence_mean": lambda *x: clipped_surrogate(*x, ratio_level="sequence_mean").loss,
    "dual_clip": lambda *x: clipped_surrogate(*x, dual_clip=1.5, log_ratio_limit=1.0).loss,
    "cispo": lambda *x: cispo_surrogate(*x, low=0.9, high=1.2).loss,
    # Weights of 1 everywhere: what is masked counts 0 whatever its weight.
    "weighted": lambda logprobs, old, a, mask: policy_gradient_loss(logprobs, a, mask, weights=ONES),
    "weighted sequence": lambda *x: clipped_surrogate(*x, ratio_level="sequence", weights=ONES).loss,
}
ONES = torch.ones(2, 3, 4, dtype=torch.float64)


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
        "dual_clip",
        "cispo",
        "weighted",
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
    with oracles.as_users_run_it():
        for loss in (clipped_surrogate, lambda *x: cispo_surrogate(*x, low=None, high=2.0)):
            with pytest.raises(ValueError, match="old_logprobs"):
                loss(generic(0), generic(1)[..., :1], A, MASK)


def test_flat_logprobs_are_refused():
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"both must be \(..., P, G, T\)"):
        policy_gradient_loss(generic(0)[0], A[0], MASK[0])


@pytest.mark.parametrize("clip", [0.0, 1.0, -0.2, 1.5, NAN])
def test_a_clip_out_of_range_is_refused(clip):
    with pytest.raises(ValueError, match="is out of range"):
        clipped_surrogate(generic(0), generic(1), A, MASK, clip=clip)


def test_a_sequence_ratio_takes_no_advantage_per_token():
    for level in ("sequence", "sequence_mean"):
        with pytest.raises(ValueError, match=f"'{level}' takes one advantage per sequence"):
            clipped_surrogate(generic(0), generic(1), generic(2), MASK, ratio_level=level)


def test_an_unknown_ratio_level_is_refused():
    with oracles.as_users_run_it(), pytest.raises(ValueError, match="sentence"):
        clipped_surrogate(generic(0), generic(1), A, MASK, ratio_level="sentence")


@pytest.mark.parametrize("values", [torch.zeros(2, 1), torch.zeros(3), torch.tensor(0.0)])
def test_values_that_are_not_one_per_prompt_are_refused(values):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"one per prompt wanted, \(2,\)"):
        value_loss(values, A)


# ---- the axes: a larger batch, with everything that goes wrong in one ----

MASKED = [[[t < n for t in range(5)] for n in row] for row in [[5, 1, 0], [2, 3, 5], [0, 0, 0], [4, 4, 2]]]
MASKED[3][0][1] = False  # a token of a tool, in the middle
BATCH_MASK = torch.tensor(MASKED)
BATCH_A = torch.tensor([[1.0, -0.5, 0.7], [-2.0, 0.95, 0.0], [0.3, 0.3, 0.3], [0.95, -0.95, -1.3]], dtype=torch.float64)
AGGREGATIONS = ["sequence_sum", "sequence_mean", "token_mean", "prompt_token_mean", "constant_length"]


def weights_of(mask, aggregation):
    return token_weights(mask, aggregation, length=7 if aggregation == "constant_length" else None)


def batch(seed=0, *shape, scale=1.0):
    """NaN at what is masked, as after the end of a completion."""
    values = torch.randn(*shape, 4, 3, 5, generator=torch.Generator().manual_seed(seed))
    return (scale * values).masked_fill(~BATCH_MASK, NAN)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


# ---- token_weights and aggregate ----


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_weights_equal_their_words_with_any_leading_axes(aggregation):
    masks = torch.stack([BATCH_MASK, BATCH_MASK.flip(0), BATCH_MASK.roll(1, -2), torch.zeros_like(BATCH_MASK)])
    length = 7 if aggregation == "constant_length" else None
    expected = torch.zeros(4, 4, 3, 5)
    for k in range(3):
        expected[k] = torch.tensor(oracles.token_weight(masks[k].tolist(), aggregation, length))
    close(weights_of(BATCH_MASK, aggregation), expected[0], rtol=1e-15, atol=0)
    close(weights_of(masks, aggregation), expected, rtol=1e-15, atol=0)
    close(weights_of(masks.view(2, 2, 4, 3, 5), aggregation), expected.view(2, 2, 4, 3, 5), rtol=1e-15, atol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_what_is_masked_are_zero_and_all_masked_gives_no_loss(aggregation):
    """public-faults A3: everything masked: 0 with finite gradients."""
    x = leaf(batch())
    nothing = torch.zeros_like(BATCH_MASK)
    w = weights_of(nothing, aggregation)
    same(w, torch.zeros(4, 3, 5))
    loss = policy_gradient_loss(x, BATCH_A, nothing, weights=w)
    same(loss, torch.tensor(0.0))
    same(gradient(loss, x)[0], torch.zeros(4, 3, 5))
    same(weights_of(BATCH_MASK, aggregation)[~BATCH_MASK], torch.zeros((~BATCH_MASK).sum()))


def test_fully_masked_rows_count_where_sequences_do():
    """Two of three sequences masked away: 1/3, 1/3 and 1/(3 x 7), not 1; a prompt masked away counts as a prompt."""
    mask = torch.zeros(2, 3, 5, dtype=torch.bool)
    mask[0, 0, :2] = True
    for aggregation, weight in (
        ("sequence_sum", 1 / 6),
        ("sequence_mean", 1 / 12),
        ("token_mean", 1 / 2),
        ("prompt_token_mean", 1 / 4),
        ("constant_length", 1 / 42),
    ):
        close(weights_of(mask, aggregation)[mask], [weight, weight], rtol=1e-15, atol=0)


def test_three_meanings_of_token_level():
    """public-faults A5: losses 1, 0 | 1, 0 with lengths 1, 3 | 4, 4."""
    per_token = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[..., None].expand(2, 2, 4)
    mask = torch.arange(4) < torch.tensor([[[1], [3]], [[4], [4]]])
    for aggregation, value in (("sequence_mean", 0.5), ("token_mean", 5 / 12), ("prompt_token_mean", 0.375)):
        close(aggregate(per_token, token_weights(mask, aggregation)), value, rtol=1e-15)


def test_weight_of_a_wrong_answers_token_by_its_length():
    """public-faults A6: lengths 10 and 100, A = -1."""
    mask = torch.arange(100) < torch.tensor([[[10], [100]]])
    for aggregation, length, short, long in (
        ("sequence_mean", None, 0.05, 0.005),
        ("token_mean", None, 1 / 110, 1 / 110),
        ("constant_length", 128, 1 / 256, 1 / 256),
        ("sequence_sum", None, 1 / 2, 1 / 2),
    ):
        logprobs = leaf(torch.zeros(1, 2, 100))
        w = token_weights(mask, aggregation, length=length)
        loss = policy_gradient_loss(logprobs, torch.tensor([[-1.0, -1.0]]), mask, weights=w)
        close(gradient(loss, logprobs)[0][0, :, 0], [short, long], rtol=1e-15)


def test_token_mean_of_the_batch_is_not_the_mean_of_micro_batches_means():
    """public-faults A1 and A2: 1 and 3 tokens, losses 1 and 0: .25; 100 of .5 and 900 of .3: .32; 4 x 2 ones: 1."""
    for lengths, losses, right, wrong in (
        ([1, 3], [1.0, 0.0], 0.25, 0.5),
        ([100, 900], [0.5, 0.3], 0.32, 0.4),
        ([2, 2, 2, 2], [1.0] * 4, 1.0, None),
    ):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None]
        per_token = torch.tensor(losses)[:, None, None].expand(mask.shape)
        w = token_weights(mask, "token_mean")
        parts = [aggregate(x, v) for x, v in zip(per_token.split(1), w.split(1), strict=True)]
        close(sum(parts), right)
        if wrong is not None:
            own = [token_mean(x, m) for x, m in zip(per_token.split(1), mask.split(1), strict=True)]
            close(sum(own) / len(own), wrong)


def test_masked_tokens_are_not_in_the_denominator():
    """public-faults A3, G5: 30 tokens, 5 masked: S / 25; entropies 1 at two tokens of ten: 1, and -c H has slope -1."""
    mask = ones(1, 1, 30)
    mask[..., 25:] = False
    x = generic(3)[0, 0, 0] + torch.arange(30.0).view(1, 1, 30)
    close(aggregate(x, token_weights(mask, "token_mean")), sum(x[0, 0, :25].tolist()) / 25)
    close(aggregate(x, token_weights(mask, "sequence_mean")), sum(x[0, 0, :25].tolist()) / 25)
    two = torch.arange(10).view(1, 1, 10) < 2
    c = leaf(torch.tensor(0.02))
    bonus = -c * aggregate(torch.ones(1, 1, 10), token_weights(two, "token_mean"))
    close(gradient(bonus, c)[0], -1.0)


def test_sentinels_at_padding_enter_no_metric():
    """public-faults D3: logp -.5, -.5, then a sentinel: 1.0 in sum, -0.5 in mean."""
    mask = torch.arange(5).view(1, 1, 5) < 2
    for sentinel in (-1e9, NAN, -math.inf):
        logp = torch.tensor([[[-0.5, -0.5] + [sentinel] * 3]])
        close(-aggregate(logp, token_weights(mask, "sequence_sum")), 1.0)
        close(aggregate(logp, token_weights(mask, "token_mean")), -0.5)
        close(token_mean(logp, mask), -0.5)


def test_aggregations_differ_though_the_objective_is_one_per_sequence():
    """public-faults A7: five different losses and gradients; a switch that does nothing would give one."""
    logprobs, old = leaf(batch(0)), batch(0) + batch(1, scale=0.3)
    for level in ("token", "sequence", "sequence_mean"):
        losses, grads = [], []
        for aggregation in AGGREGATIONS:
            w = weights_of(BATCH_MASK, aggregation)
            loss = clipped_surrogate(logprobs, old, BATCH_A, BATCH_MASK, ratio_level=level, weights=w).loss
            losses.append(round(loss.item(), 9))
            grads.append(tuple(gradient(loss, logprobs)[0].flatten().tolist()))
        assert len(set(losses)) == len(set(grads)) == 5


def test_aggregate_is_the_weighted_sum_and_its_gradient_the_weight():
    x, w = leaf(batch(0, 2)), generic(1, 2)[..., :1].repeat(1, 2, 1, 5)[:, :4] * BATCH_MASK
    out = aggregate(x, w)
    for k in range(2):
        total = sum(
            w[k, p, g, t].item() * x[k, p, g, t].item()
            for p, g, t in itertools.product(range(4), range(3), range(5))
            if MASKED[p][g][t]
        )
        close(out[k], total)
    same(gradient(out, x)[0], w)


def test_a_weight_of_zero_silences_what_is_not_masked():
    x = leaf(torch.tensor([[[2.0, NAN, math.inf]]]))
    out = aggregate(x, torch.tensor([[[0.5, 0.0, 0.0]]]))
    same(out, torch.tensor(1.0))
    same(gradient(out, x)[0], torch.tensor([[[0.5, 0.0, 0.0]]]))


def test_nan_weights_are_loud():
    assert aggregate(torch.ones(1, 1, 2), torch.tensor([[[1.0, NAN]]])).isnan()


# ---- micro-batches ----

WEIGHTED = {
    "policy_gradient": lambda x, old, a, mask, w: policy_gradient_loss(x, a, mask, weights=w),
    "token": lambda x, old, a, mask, w: clipped_surrogate(x, old, a, mask, weights=w).loss,
    "sequence": lambda x, old, a, mask, w: (
        clipped_surrogate(x, old, a, mask, clip=(0.5, 1.5), ratio_level="sequence", weights=w).loss
    ),
    "sequence_mean": lambda x, old, a, mask, w: (
        clipped_surrogate(x, old, a, mask, ratio_level="sequence_mean", weights=w).loss
    ),
    "dual_clip": lambda x, old, a, mask, w: (
        clipped_surrogate(x, old, a, mask, clip=(0.2, 0.28), dual_clip=1.7, weights=w).loss
    ),
    "cispo": lambda x, old, a, mask, w: cispo_surrogate(x, old, a, mask, low=None, high=1.3, weights=w).loss,
    "k1": lambda x, old, a, mask, w: kl_penalty(x, old, mask, "k1", weights=w),
    "k2": lambda x, old, a, mask, w: kl_penalty(x, old, mask, "k2", weights=w),
    "k3": lambda x, old, a, mask, w: kl_penalty(x, old, mask, "k3", weights=w),
    "k3_ratio": lambda x, old, a, mask, w: kl_penalty(x, old, mask, "k3_ratio", weights=w, old_logprobs=-old),
    "mismatch": lambda x, old, a, mask, w: policy_gradient_loss(
        x, a, mask, weights=w * mismatch_weights(old, -old, mask, level="sequence", mode="truncate", cap=2.0)
    ),
    "value": lambda x, old, a, mask, w: token_value_loss(x, old, mask, weights=w),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_cutting_the_batch_changes_nothing(name, aggregation):
    """Weights of the whole batch, sliced over prompts into 1, 2 and 4 parts: sums of losses and gradients are one."""
    x, old = batch(0), batch(0) + batch(1, scale=0.4)
    w = weights_of(BATCH_MASK, aggregation)
    whole = leaf(x)
    expected = WEIGHTED[name](whole, old, BATCH_A, BATCH_MASK, w)
    (grad,) = gradient(expected, whole)
    assert grad.isfinite().all() and (grad != 0).sum() > 5
    for size in (4, 2, 1):
        logprobs = leaf(x)
        parts = zip(*(tensor.split(size) for tensor in (logprobs, old, BATCH_A, BATCH_MASK, w)), strict=True)
        losses = [WEIGHTED[name](*part) for part in parts]
        close(sum(losses), expected, rtol=1e-14)
        close(gradient(sum(losses), logprobs)[0], grad, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_losses_of_replicas_are_their_own(name):
    """No leading axis, one and two: each replica's loss and gradient are those that it has alone."""
    x, old = batch(0, 2, 2), batch(0, 2, 2) + batch(1, 2, 2, scale=0.4)
    a = torch.stack([BATCH_A, -2 * BATCH_A, BATCH_A.flip(1), BATCH_A + 1]).view(2, 2, 4, 3)
    mask = BATCH_MASK.expand(2, 2, 4, 3, 5).clone()
    mask[0, 1], mask[1, 0, 0] = False, False
    w = token_weights(mask, "token_mean")
    logprobs = leaf(x)
    both = WEIGHTED[name](logprobs, old, a, mask, w)
    assert both.shape == (2, 2)
    (grads,) = gradient(both, logprobs)
    for i in range(2):
        row = leaf(x[i])
        close(WEIGHTED[name](row, old[i], a[i], mask[i], w[i]), both[i])
        for j in range(2):
            one = leaf(x[i, j])
            alone = WEIGHTED[name](one, old[i, j], a[i, j], mask[i, j], token_weights(mask[i, j], "token_mean"))
            assert alone.shape == ()
            close(both[i, j], alone)
            close(grads[i, j], gradient(alone, one)[0])


@pytest.mark.parametrize("name", [name for name in WEIGHTED if name != "mismatch"])
def test_without_weights_every_sequence_counts_once(name):
    """A token's loss weighs 1/N, a sequence's one objective 1/N however long it is; a value's the mean over tokens."""
    x, old = batch(0), batch(0) + batch(1, scale=0.4)
    plain, weighted = leaf(x), leaf(x)
    aggregation = {"sequence": "sequence_mean", "sequence_mean": "sequence_mean", "value": "token_mean"}.get(name)
    w = token_weights(BATCH_MASK, aggregation or "sequence_sum")
    a, b = (WEIGHTED[name](at, old, BATCH_A, BATCH_MASK, v) for at, v in ((plain, None), (weighted, w)))
    close(a, b)
    close(gradient(a, plain)[0], gradient(b, weighted)[0], rtol=1e-13)


# ---- clipped_surrogate along its axes ----

BOUNDS = {
    "symmetric": ({"clip": 0.2}, {"low": 0.2, "high": 0.2}),
    "clip higher": ({"clip": (0.2, 0.28)}, {"low": 0.2, "high": 0.28}),
    "wide": ({"clip": (0.9, 3.0)}, {"low": 0.9, "high": 3.0}),
    "no lower": ({"clip": (1.0, 0.3)}, {"low": 1.0, "high": 0.3}),
    "tiny": ({"clip": (3e-4, 4e-4)}, {"low": 3e-4, "high": 4e-4}),
    "dual": ({"clip": (0.2, 0.3), "dual_clip": 1.6}, {"low": 0.2, "high": 0.3, "dual": 1.6}),
    "dual below high": ({"clip": (0.5, 2.0), "dual_clip": 1.3}, {"low": 0.5, "high": 2.0, "dual": 1.3}),
    "limit": ({"clip": (0.5, 0.7), "log_ratio_limit": 0.6}, {"low": 0.5, "high": 0.7, "limit": 0.6}),
}


@pytest.mark.parametrize("aggregation", [None, *AGGREGATIONS])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean", "per-token A"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_clipped_surrogate_equals_its_words_on_every_axis(bounds, level, aggregation):
    logprobs, old = leaf(batch(0)), batch(0) + batch(6, scale=1.2)
    settings, words = BOUNDS[bounds]
    a = batch(7) if level == "per-token A" else BATCH_A
    level = "token" if level == "per-token A" else level
    w = None if aggregation is None else weights_of(BATCH_MASK, aggregation)
    surrogate = clipped_surrogate(logprobs, old, a, BATCH_MASK, **settings, ratio_level=level, weights=w)
    counted = aggregation or ("sequence_sum" if level == "token" else "sequence_mean")
    loss, slopes, clip_frac, ratios = oracles.clipped_surrogate(
        logprobs.tolist(),
        old.tolist(),
        a.tolist(),
        MASKED,
        oracles.token_weight(MASKED, counted, 7),
        level,
        **words,
    )
    close(surrogate.loss, loss)
    close(gradient(surrogate.loss, logprobs)[0], slopes)
    close(surrogate.metrics["clip_frac"], clip_frac)
    limit = words.get("limit", 99.0)
    close(surrogate.metrics["ratio_min"], max(min(ratios), math.exp(-limit)))
    close(surrogate.metrics["ratio_max"], min(max(ratios), math.exp(limit)))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_every_bound_is_met_and_passed_by_the_batch(bounds):
    """Or the test above would say nothing: some of the 29 tokens are clipped, and some are not."""
    settings, _ = BOUNDS[bounds]
    old = batch(0) + batch(6, scale=1.2)
    surrogate = clipped_surrogate(batch(0), old, BATCH_A, BATCH_MASK, **settings)
    plain = clipped_surrogate(batch(0), old, BATCH_A, BATCH_MASK, clip=settings["clip"])
    assert 0 < surrogate.metrics["clip_frac"] < 1
    assert (surrogate.metrics["clip_frac"] > plain.metrics["clip_frac"]) == ("dual" in bounds)
    assert (surrogate.loss != plain.loss) == (len(settings) > 1)


def test_mean_ratio_is_the_geometric_mean_of_the_tokens_that_count():
    """public-faults C5 and C6: [.4, -.1, .3]: 1.2214, not 1.8221; [.1, -.1, .05]: 1.0168, not 3.0613."""
    for log_ratios, ratio in (([0.4, -0.1, 0.3], 1.2214), ([0.1, -0.1, 0.05], 1.0168)):
        exact = math.exp(sum(log_ratios) / 3)
        assert round(exact, 4) == ratio
        logprobs = leaf(torch.tensor([[[*log_ratios, 9.0]]]))
        mask = torch.tensor([[[True, True, True, False]]])
        surrogate = clipped_surrogate(
            logprobs, torch.zeros(1, 1, 4), torch.tensor([[-1.0]]), mask, ratio_level="sequence_mean"
        )
        close(surrogate.loss, exact)
        close(surrogate.metrics["ratio_max"], exact)
        close(gradient(surrogate.loss, logprobs)[0], [[[exact / 3, exact / 3, exact / 3, 0.0]]])


def test_mean_ratio_at_one_has_the_gradient_of_the_sequence_mean():
    """GSPO's first step: A / (|o| N) at each token, as ``policy_gradient_loss`` with those weights."""
    logprobs = leaf(batch(0))
    ours = clipped_surrogate(logprobs, logprobs, BATCH_A, BATCH_MASK, ratio_level="sequence_mean").loss
    w = token_weights(BATCH_MASK, "sequence_mean")
    plain = policy_gradient_loss(logprobs, BATCH_A, BATCH_MASK, weights=w)
    close(gradient(ours, logprobs)[0], gradient(plain, logprobs)[0], rtol=1e-15)


def test_old_log_probabilities_are_those_of_the_sampler_not_of_now():
    """public-faults C4: behaviour .5, current .8: 1.6; C1: A = [1, -1] at ratio 1: value 0, slopes -.5, .5."""
    logp, mask = leaf(torch.tensor([[[math.log(0.8)]]])), ones(1, 1, 1)
    for level in ("token", "sequence", "sequence_mean"):
        metrics = clipped_surrogate(
            logp, torch.tensor([[[math.log(0.5)]]]), torch.tensor([[1.0]]), mask, ratio_level=level
        ).metrics
        close(metrics["ratio_max"], 1.6)
        close(metrics["clip_frac"], 1.0)
        two = leaf(torch.full((1, 2, 1), -0.7))
        surrogate = clipped_surrogate(two, two, torch.tensor([[1.0, -1.0]]), ones(1, 2, 1), ratio_level=level)
        close(surrogate.loss, 0.0)
        close(surrogate.metrics["clip_frac"], 0.0)
        close(gradient(surrogate.loss, two)[0], [[[-0.5], [0.5]]])


SURROGATES = {
    "token": clipped_surrogate,
    "sequence": lambda *x: clipped_surrogate(*x, ratio_level="sequence"),
    "sequence_mean": lambda *x: clipped_surrogate(*x, ratio_level="sequence_mean"),
    "dual_clip": lambda *x: clipped_surrogate(*x, dual_clip=1.5),
    "cispo": lambda *x: cispo_surrogate(*x, low=0.8, high=1.2),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_metrics_of_replicas_are_their_own(name):
    x, old = batch(0, 2, 2), batch(0, 2, 2) + batch(1, 2, 2, scale=0.4)
    a = batch(3, 2, 2)[..., 0].nan_to_num(0.5)
    mask = BATCH_MASK.expand(2, 2, 4, 3, 5)
    metrics = SURROGATES[name](x, old, a, mask).metrics
    for i, j in itertools.product(range(2), range(2)):
        for key, alone in SURROGATES[name](x[i, j], old[i, j], a[i, j], mask[i, j]).metrics.items():
            close(metrics[key][i, j], alone)
    for value in metrics.values():
        assert value.shape == (2, 2) and len(value.unique()) > 1


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("shift", [-0.3, 0.3])
def test_the_ratio_of_one_at_masked_places_is_no_extreme(name, shift):
    x = batch(0)
    metrics = SURROGATES[name](x + shift, x, BATCH_A, BATCH_MASK).metrics
    assert (metrics["ratio_max"] < 1 or shift > 0) and (metrics["ratio_min"] > 1 or shift < 0)


def test_dual_clip_bounds_one_bad_token_alone():
    """public-faults C3: A = -1, ratio 100: -100; with c = 3 it is -3, without gradient. Ratio 5: loss 3, not 5."""
    mask = ones(1, 1, 1)
    for a, ratio, objective, slope, clipped in (
        (-1.0, 100.0, -3.0, 0.0, 1.0),
        (-1.0, 5.0, -3.0, 0.0, 1.0),
        (-1.0, 2.9, -2.9, -2.9, 0.0),
        (-1.0, 1.3, -1.3, -1.3, 0.0),
        (-1.0, 0.5, -0.8, 0.0, 1.0),
        (1.0, 5.0, 1.2, 0.0, 1.0),
        (1.0, 0.01, 0.01, 0.01, 0.0),
        (0.0, 5.0, 0.0, 0.0, 0.0),
    ):
        logprobs = leaf(torch.full((1, 1, 1), math.log(ratio)))
        surrogate = clipped_surrogate(logprobs, torch.zeros(1, 1, 1), torch.full((1, 1), a), mask, dual_clip=3.0)
        close(surrogate.loss, -objective)
        close(gradient(surrogate.loss, logprobs)[0], [[[-slope]]])
        close(surrogate.metrics["clip_frac"], clipped)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("a", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("setting", [{"dual_clip": 3.0}, {"log_ratio_limit": 20.0}])
def test_a_ratio_beyond_the_floats_has_no_gradient_under_dual_clip_or_limit(level, a, setting):
    logprobs = leaf(torch.full((1, 1, 1), 1000.0))
    surrogate = clipped_surrogate(
        logprobs, torch.zeros(1, 1, 1), torch.full((1, 1), a), ones(1, 1, 1), ratio_level=level, **setting
    )
    assert surrogate.loss.isfinite()
    same(gradient(surrogate.loss, logprobs)[0], torch.zeros(1, 1, 1))


def test_log_ratio_limit_stands_still_on_both_sides():
    """verl and OpenRLHF: log-ratios 25 and -25 are 20 and -20, A = -1 and 1 lose their gradient there."""
    for log_ratio, a, objective in ((25.0, -1.0, -math.exp(20)), (-25.0, 1.0, math.exp(-20))):
        logprobs = leaf(torch.full((1, 1, 1), log_ratio))
        loss = clipped_surrogate(
            logprobs, torch.zeros(1, 1, 1), torch.full((1, 1), a), ones(1, 1, 1), log_ratio_limit=20.0
        ).loss
        close(loss, -objective)
        same(gradient(loss, logprobs)[0], torch.zeros(1, 1, 1))


@pytest.mark.parametrize("aggregation", ["sequence_sum", "sequence_mean", "token_mean", "constant_length"])
def test_the_stop_gradient_form_of_the_mean_ratio_has_the_same_gradient(aggregation):
    """verl's s_t = sg[s] exp(logp - sg[logp]) at each token, under weights that are constant within a sequence."""
    x, old = batch(0), batch(0) + batch(6, scale=0.3)
    ours, theirs = leaf(x), leaf(x)
    w = weights_of(BATCH_MASK, aggregation)
    loss = clipped_surrogate(ours, old, BATCH_A, BATCH_MASK, ratio_level="sequence_mean", weights=w).loss
    total = 0.0
    for p, g in itertools.product(range(4), range(3)):
        kept = [t for t in range(5) if MASKED[p][g][t]]
        if kept:
            s = math.exp(sum(x[p, g, t].item() - old[p, g, t].item() for t in kept) / len(kept))
        for t in kept:
            ratio, a = s * (theirs[p, g, t] - theirs[p, g, t].item()).exp(), BATCH_A[p, g]
            total = total - w[p, g, t] * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    close(loss, total)
    close(gradient(loss, ours)[0], gradient(total, theirs)[0])


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_gradcheck_of_the_clipped_surrogate_away_from_its_kinks(level):
    """float64, eps 1e-6; every ratio is more than 1e-3 from every bound, or the difference would straddle a kink."""
    x, old = batch(0).nan_to_num(), batch(0).nan_to_num() + batch(6, scale=0.7).nan_to_num()
    settings, w = {"clip": (0.3, 0.5), "dual_clip": 1.9, "ratio_level": level}, weights_of(BATCH_MASK, "token_mean")
    _, _, clip_frac, ratios = oracles.clipped_surrogate(
        x.tolist(), old.tolist(), BATCH_A.tolist(), MASKED, w.tolist(), level, low=0.3, high=0.5, dual=1.9
    )
    assert 0 < clip_frac < 1 and min(abs(r - b) for r in ratios for b in (0.7, 1.5, 1.9)) > 1e-3
    for weights in (None, w):
        assert torch.autograd.gradcheck(
            lambda at, weights=weights: (
                clipped_surrogate(at, old, BATCH_A, BATCH_MASK, **settings, weights=weights).loss
            ),
            leaf(x),
            atol=1e-8,
            rtol=1e-6,
        )


# ---- cispo ----


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("low", "high"), [(None, 1.3), (0.8, 1.2), (None, 0.2), (0.0, 5.0)])
@pytest.mark.parametrize("aggregation", [None, "token_mean"])
def test_cispo_clips_the_weight_and_every_token_keeps_its_gradient(low, high, aggregation, per_token):
    logprobs, old = leaf(batch(0)), batch(0) + batch(6, scale=1.2)
    a = batch(7) if per_token else BATCH_A
    w = weights_of(BATCH_MASK, aggregation or "sequence_sum")
    surrogate = cispo_surrogate(
        logprobs, old, a, BATCH_MASK, low=low, high=high, weights=None if aggregation is None else w
    )
    loss, slopes, changed, ratios = 0.0, torch.zeros(4, 3, 5), 0, []
    for p, g, t in itertools.product(range(4), range(3), range(5)):
        if MASKED[p][g][t]:
            ratios.append(math.exp(logprobs[p, g, t].item() - old[p, g, t].item()))
            factor = max(min(ratios[-1], high), low or 0.0)
            changed += factor != ratios[-1]
            advantage = a[p, g, t].item() if per_token else a[p, g].item()
            slopes[p, g, t] = -w[p, g, t] * factor * advantage
            loss += slopes[p, g, t].item() * logprobs[p, g, t].item()
    close(surrogate.loss, loss)
    close(gradient(surrogate.loss, logprobs)[0], slopes)
    close(surrogate.metrics["clip_frac"], changed / len(ratios))
    close(surrogate.metrics["ratio_min"], min(ratios))
    close(surrogate.metrics["ratio_max"], max(ratios))
    assert not any(m.requires_grad for m in surrogate.metrics.values())


def test_cispo_at_ratio_one_is_the_policy_gradient_times_its_cap():
    """TRL's default cap of 0.2 makes every weight 0.2; a cap above 1 leaves the policy gradient."""
    logprobs = leaf(batch(0))
    (plain,) = gradient(policy_gradient_loss(logprobs, BATCH_A, BATCH_MASK), logprobs)
    for high, factor in ((5.0, 1.0), (0.2, 0.2)):
        loss = cispo_surrogate(logprobs, logprobs, BATCH_A, BATCH_MASK, low=None, high=high).loss
        close(gradient(loss, logprobs)[0], factor * plain)


def test_cispo_bounds_a_ratio_beyond_the_floats_and_takes_no_gradient_from_old():
    logprobs, old = leaf(torch.full((1, 1, 1), 1000.0)), leaf(torch.zeros(1, 1, 1))
    loss = cispo_surrogate(logprobs, old, torch.tensor([[-1.0]]), ones(1, 1, 1), low=None, high=2.0).loss
    close(gradient(loss, logprobs)[0], [[[2.0]]])
    assert torch.autograd.grad(loss, old, allow_unused=True) == (None,)


# ---- KL ----


def bernoulli(p, ref, estimator, sampler=None):
    """Expectation of the estimate, and of its gradient in the logit of action 0, over both actions."""
    logit = leaf(torch.tensor(math.log(p / (1 - p))))
    log_pi = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
    drawn = torch.tensor([p, 1 - p] if sampler is None else [sampler, 1 - sampler])
    log_ref = torch.tensor([math.log(ref), math.log(1 - ref)])
    shape = (1, 1, 2)
    kl = kl_estimate(log_pi.view(shape), log_ref.view(shape), estimator, drawn.log().view(shape))
    value = (drawn * kl.view(2)).sum()
    return value.item(), gradient(value, logit)[0].item()


def kl_between(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_kl_estimates_and_their_gradients_by_enumeration():
    """public-faults E1: pi = (.8, .2), ref = (.5, .5), one logit; each action is weighed by pi, without gradient."""
    kl, slope = kl_between(0.8, 0.5), 0.8 * 0.2 * math.log(0.8 / 0.2)  # p (1 - p) (logit - logit_ref)
    assert (round(kl, 4), round(slope, 4)) == (0.1927, 0.2218)
    for estimator, value, gradient_as_loss in (
        ("k1", 0.1927, 0.0),
        ("k2", 0.1723, 0.2218),
        ("k3", 0.1927, 0.3),
        ("k3_ratio", 0.1927, 0.2218),
    ):
        got = bernoulli(0.8, 0.5, estimator)
        assert (round(got[0], 4), abs(round(got[1], 4))) == (value, gradient_as_loss)


@pytest.mark.parametrize(("p", "ref"), [(0.8, 0.5), (0.5, 0.8), (0.3, 0.95), (0.07, 0.06)])
def test_kl_is_from_pi_to_ref_and_each_gradient_is_what_the_docstring_says(p, ref):
    """d KL(pi||ref) = p (1-p) (logit - logit_ref); d KL(ref||pi) = p - ref; k2's value is no KL."""
    kl = kl_between(p, ref)
    forward, backward = p * (1 - p) * (math.log(p / (1 - p)) - math.log(ref / (1 - ref))), p - ref
    second = (p * math.log(p / ref) ** 2 + (1 - p) * math.log((1 - p) / (1 - ref)) ** 2) / 2
    for estimator, value, slope in (
        ("k1", kl, 0.0),
        ("k2", second, forward),
        ("k3", kl, backward),
        ("k3_ratio", kl, forward),
    ):
        got = bernoulli(p, ref, estimator)
        assert got == pytest.approx((value, slope), rel=1e-12, abs=1e-15)


def test_k3_with_its_arguments_swapped_would_be_another_number():
    """public-faults E3: the swapped estimate is chi^2 - KL: .1673 for .1927, and .3394 for .2231; ours are the KLs."""
    for p, ref, wrong, right in ((0.8, 0.5, 0.1673, 0.1927), (0.5, 0.8, 0.3394, 0.2231)):
        assert round(bernoulli(p, ref, "k3")[0], 4) == right
        swapped = sum(q * (q / r - 1 - math.log(q / r)) for q, r in ((p, ref), (1 - p, 1 - ref)))
        assert round(swapped, 4) == wrong


def test_live_ratio_keeps_value_and_gradient_though_another_policy_sampled():
    """Tokens of (.35, .65): E_old[ratio k3] = KL(pi || ref), its gradient that of the KL; plain k3 has neither."""
    p, ref, old = 0.8, 0.5, 0.35
    slope = p * (1 - p) * math.log(4)
    assert bernoulli(p, ref, "k3_ratio", sampler=old) == pytest.approx((kl_between(p, ref), slope), rel=1e-12)
    value, grad = bernoulli(p, ref, "k3", sampler=old)
    assert abs(value - kl_between(p, ref)) > 0.01 and abs(grad - slope) > 0.01


def test_a_loss_of_kl_takes_the_visited_states_as_given():
    """Two tokens, the second's logit depends on the first: k2 as a loss has the gradient of the second state's KL, and
    not the part by which the first token leads there; k1 in the reward has both."""
    logits, ref = leaf(torch.tensor([0.4, -0.7, 1.1])), torch.tensor([-0.2, 0.3, 0.9])  # first; second after 0, after 1

    def log_prob(logits, a, b):
        signs = torch.tensor([1.0 - 2 * a, 1.0 - 2 * b])
        return torch.nn.functional.logsigmoid(signs * torch.stack([logits[0], logits[1 + a]]))

    loss, true, frozen, reward = 0.0, 0.0, 0.0, 0.0
    for a, b in itertools.product(range(2), range(2)):
        logp, log_ref = log_prob(logits, a, b), log_prob(ref, a, b)
        chance = logp.detach().sum().exp()
        shape = (1, 1, 2)
        loss = loss + chance * kl_penalty(logp.view(shape), log_ref.view(shape), ones(*shape), "k2")
        true = true + logp.sum().exp() * (logp - log_ref).sum()
        per_state = [
            logp[0].exp() * (logp[0] - log_ref[0]),
            logp[0].detach().exp() * logp[1].exp() * (logp - log_ref)[1],
        ]
        frozen = frozen + per_state[0] * logp[1].detach().exp() + per_state[1]
        k1 = kl_estimate(logp.view(shape), log_ref.view(shape), "k1").detach().sum(-1)
        reward = reward + chance * policy_gradient_loss(logp.view(shape), -k1, ones(*shape))
    close(gradient(loss, logits)[0], gradient(frozen, logits)[0])
    close(gradient(reward, logits)[0], gradient(true, logits)[0])
    assert (gradient(frozen, logits)[0] - gradient(true, logits)[0]).abs().max() > 0.01


def test_one_k1_may_be_negative_and_no_k3_is():
    """public-faults E4: logp -1.2, ref -.8: k1 = -.4, k3 = .0918."""
    logp, ref = torch.full((1, 1, 1), -1.2), torch.full((1, 1, 1), -0.8)
    close(kl_estimate(logp, ref, "k1"), [[[-0.4]]])
    close(kl_estimate(logp, ref, "k3"), [[[math.exp(0.4) - 1 - 0.4]]])
    assert round(kl_estimate(logp, ref, "k3").item(), 4) == 0.0918
    assert (kl_estimate(generic(0), generic(1), "k3") > 0).all()


@pytest.mark.parametrize("aggregation", [None, *AGGREGATIONS])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_kl_penalty_equals_its_words_on_the_generic_batch(estimator, aggregation):
    x, ref, old = leaf(batch(0)), batch(1), leaf(batch(2))
    w = oracles.token_weight(MASKED, aggregation or "sequence_sum", 7)
    loss = kl_penalty(
        x,
        ref,
        BATCH_MASK,
        estimator,
        old_logprobs=old,
        weights=None if aggregation is None else weights_of(BATCH_MASK, aggregation),
    )
    total, slopes = 0.0, torch.zeros(4, 3, 5)
    for p, g, t in itertools.product(range(4), range(3), range(5)):
        if MASKED[p][g][t]:
            kl, slope = oracles.kl_term(estimator, x[p, g, t].item(), ref[p, g, t].item(), old[p, g, t].item())
            total += w[p][g][t] * kl
            slopes[p, g, t] = w[p][g][t] * slope
    close(loss, total)
    close(gradient(loss, x)[0], slopes)
    assert torch.autograd.grad(loss, old, allow_unused=True) == (None,)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_the_slope_of_the_loss_in_beta_is_the_kl(estimator):
    """public-faults E5 and E2: beta is used, and with the sign that pulls towards the reference."""
    beta, x, ref = leaf(torch.tensor(0.05)), leaf(batch(0)), batch(1)
    kl = kl_penalty(x, ref, BATCH_MASK, estimator, old_logprobs=x)
    (slope,) = gradient(policy_gradient_loss(x, BATCH_A, BATCH_MASK) + beta * kl, beta)
    close(slope, kl)
    above = leaf(torch.zeros(1, 1, 1))
    for name in ("k2", "k3", "k3_ratio"):
        loss = kl_penalty(above, torch.full((1, 1, 1), -1.0), ones(1, 1, 1), name, old_logprobs=above)
        assert gradient(loss, above)[0] > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_no_gradient_reaches_the_reference_and_nothing_masked_gets_through(estimator):
    x, ref, old = batch(0), leaf(batch(1)), batch(2)
    clean, dirty = leaf(x.nan_to_num()), leaf(x)
    a = kl_penalty(clean, ref.nan_to_num(), BATCH_MASK, estimator, old_logprobs=old.nan_to_num())
    b = kl_penalty(dirty, ref, BATCH_MASK, estimator, old_logprobs=old)
    same(a, b)
    same(gradient(a, clean)[0], gradient(b, dirty)[0])
    assert not kl_estimate(x, ref, estimator, leaf(old)).requires_grad


def test_kl_limit_stands_still_beyond_it():
    """verl: k3 at log-ratio -5 is 142.4, capped at 10 without gradient; OpenRLHF caps k1 and k2 too, on both sides."""
    for estimator, log_ratio, value in (
        ("k3", -5.0, 10.0),
        ("k3", -1000.0, 10.0),
        ("k3", 25.0, 10.0),
        ("k1", 12.0, 10.0),
        ("k1", -12.0, -10.0),
        ("k2", -5.0, 10.0),
        ("k3_ratio", -1000.0, 10.0),
        ("k3_ratio", 1000.0, 10.0),
    ):
        x = leaf(torch.full((1, 1, 1), log_ratio))
        kl = kl_estimate(x, torch.zeros(1, 1, 1), estimator, x if log_ratio < 0 else -x, limit=10.0)
        close(kl, [[[value]]])
        same(gradient(kl, x)[0], torch.zeros(1, 1, 1))
    x = leaf(torch.full((1, 1, 1), -2.0))
    close(kl_estimate(x, torch.zeros(1, 1, 1), "k3", limit=10.0), kl_estimate(x, torch.zeros(1, 1, 1), "k3"))
    five = torch.full((1, 1, 1), -5.0)
    assert round(kl_estimate(five, torch.zeros(1, 1, 1), "k3").item(), 1) == 142.4
    close(kl_penalty(five, torch.zeros(1, 1, 1), ones(1, 1, 1), "k3", limit=10.0), 10.0)


def test_k3_is_exact_where_policy_and_reference_nearly_agree():
    """At l = 1e-6, exp(-l) - 1 would be right to 1e-16 and k3 = l^2 / 2 - l^3 / 6 to 2e-4; expm1 leaves 1e-9."""
    x = 1e-6
    kl = kl_estimate(torch.full((1, 1, 1), x), torch.zeros(1, 1, 1), "k3")
    close(kl, [[[x**2 / 2 - x**3 / 6]]], rtol=1e-9, atol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_gradcheck_of_kl_and_of_the_value_loss(estimator):
    ref, old, w = batch(1), batch(2), weights_of(BATCH_MASK, "prompt_token_mean")
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, ref, BATCH_MASK, estimator, weights=w, old_logprobs=old),
        leaf(batch(0).nan_to_num()),
        atol=1e-8,
        rtol=1e-6,
    )
    assert torch.autograd.gradcheck(
        lambda x: token_value_loss(x, ref, BATCH_MASK), leaf(batch(0).nan_to_num()), atol=1e-8, rtol=1e-6
    )


# ---- mismatch_weights ----


@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mismatch_weights_equal_their_words_with_any_leading_axes(level, mode, floor):
    old, sampler = leaf(batch(0, 2, 2)), leaf(batch(0, 2, 2) + batch(1, 2, 2, scale=0.7))
    settings = {"level": level, "mode": mode, "cap": 1.5, "floor": floor}
    mask = BATCH_MASK.expand(2, 2, 4, 3, 5)
    expected = torch.zeros(2, 2, 4, 3, 5)
    for i, j, p, g in itertools.product(range(2), range(2), range(4), range(3)):
        expected[i, j, p, g] = torch.tensor(
            oracles.mismatch_weight(old[i, j, p, g].tolist(), sampler[i, j, p, g].tolist(), MASKED[p][g], **settings)
        )
    w = mismatch_weights(old, sampler, mask, **settings)
    close(w, expected)
    assert not w.requires_grad
    close(mismatch_weights(old[0], sampler[0], mask[0], **settings), expected[0])
    close(mismatch_weights(old[0, 1], sampler[0, 1], mask[0, 1], **settings), expected[0, 1])
    kept = expected[mask]
    assert (kept != (0.0 if mode == "mask" else 1.5)).any() and (kept == (0.0 if mode == "mask" else 1.5)).any()


def test_mismatch_weights_of_one_sampler_are_one_and_beyond_the_floats_they_are_bounded():
    """public-faults F2: nothing changed, so every weight is 1; and a ratio of e^1000 is the cap, or dropped."""
    x = batch(0)
    for level, mode in itertools.product(("token", "sequence"), ("truncate", "mask")):
        w = mismatch_weights(x, x, BATCH_MASK, level=level, mode=mode, cap=2.0, floor=0.5)
        same(w, BATCH_MASK.to(torch.float64))
        far = mismatch_weights(
            torch.full((1, 1, 1), 1000.0), torch.zeros(1, 1, 1), ones(1, 1, 1), level=level, mode=mode, cap=2.0
        )
        same(far, torch.full((1, 1, 1), 2.0 if mode == "truncate" else 0.0))


def test_mismatch_weights_undo_another_sampler_exactly_while_no_bound_acts():
    """E_mu[w grad loss] = grad of the policy's own: enumeration of two tokens that are drawn by a sampler mu."""
    logits, mu = leaf(torch.tensor([0.4, -0.7])), torch.tensor([0.3, 0.2])
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.95, (1, 1): -0.4}
    true, estimate = 0.0, 0.0
    for (a, b), r in rewards.items():
        signs = torch.tensor([1.0 - 2 * a, 1.0 - 2 * b])
        logp, log_mu = (torch.nn.functional.logsigmoid(signs * x).view(1, 1, 2) for x in (logits, mu))
        true = true - logp.sum().exp() * r
        w = mismatch_weights(logp, log_mu, ones(1, 1, 2), level="sequence", mode="truncate", cap=50.0)
        w = token_weights(ones(1, 1, 2), "sequence_sum") * w
        loss = policy_gradient_loss(logp, torch.tensor([[r]]), ones(1, 1, 2), weights=w)
        estimate = estimate + log_mu.sum().exp() * loss
    close(gradient(estimate, logits)[0], gradient(true, logits)[0])


# ---- token_value_loss ----


def test_token_value_loss_is_the_mean_square_over_the_tokens_that_count():
    """d/dV mean (R - V)^2 = 2 (V - R) / tokens; NaN at masked places on either side."""
    values, returns = leaf(batch(0, 2)), leaf(batch(1, 2))
    mask = torch.stack([BATCH_MASK, BATCH_MASK.clone()])
    mask[1, 0] = False
    loss = token_value_loss(values, returns, mask)
    (grad,) = gradient(loss, values)
    for k in range(2):
        kept = [i for i in itertools.product(range(4), range(3), range(5)) if mask[k][i]]
        squares = [(returns[k][i].item() - values[k][i].item()) ** 2 for i in kept]
        close(loss[k], sum(squares) / len(kept))
        expected = torch.zeros(4, 3, 5)
        for i in kept:
            expected[i] = 2 * (values[k][i].item() - returns[k][i].item()) / len(kept)
        close(grad[k], expected)
    assert torch.autograd.grad(loss.sum(), returns, allow_unused=True) == (None,)
    nothing = token_value_loss(values, returns, torch.zeros_like(mask))
    same(nothing, torch.zeros(2))
    same(gradient(nothing, values)[0], torch.zeros(2, 4, 3, 5))


# ---- what the axes refuse ----


def test_an_unknown_aggregation_or_a_length_out_of_place_is_refused():
    with oracles.as_users_run_it():
        for length in (None, 7):
            with pytest.raises(ValueError, match=r"'dapo' is unknown: choose one of sequence_sum, .*constant_length"):
                token_weights(MASK, "dapo", length=length)
        for aggregation in AGGREGATIONS[:-1]:
            with pytest.raises(ValueError, match=f"length 7 with aggregation '{aggregation}'"):
                token_weights(MASK, aggregation, length=7)
        with pytest.raises(ValueError, match="length None with aggregation 'constant_length'"):
            token_weights(MASK, "constant_length")
        for length in (0, -3, NAN, math.inf):
            with pytest.raises(ValueError, match=r"length .* is out of range"):
                token_weights(MASK, "constant_length", length=length)
        with pytest.raises(ValueError, match=r"both must be \(..., P, G, T\)"):
            token_weights(MASK[0], "token_mean")


def test_weights_of_another_shape_or_with_a_gradient_are_refused():
    w = token_weights(MASK, "token_mean")
    losses = {
        **{name: f for name, f in WEIGHTED.items() if name != "mismatch"},
        "aggregate": lambda x, old, a, mask, w: aggregate(x, w),
    }
    with oracles.as_users_run_it():
        for loss in losses.values():
            for wrong in (w[..., :1], w[0], w[None], w[:, :1]):
                with pytest.raises(ValueError, match=r"values \(2, 3, 4\) and weights"):
                    loss(generic(0), generic(1), A, MASK, wrong)
            with pytest.raises(ValueError, match="the weights carry a gradient"):
                loss(generic(0), generic(1), A, MASK, leaf(w))


@pytest.mark.parametrize(
    "clip", [(0.0, 0.2), (1.1, 0.2), (0.2, 0.0), (0.2, -1.0), (0.2, math.inf), (NAN, 0.2), (0.2, NAN)]
)
def test_a_pair_of_clips_out_of_range_is_refused(clip):
    with pytest.raises(ValueError, match=r"give 0 < low <= 1, high > 0"):
        clipped_surrogate(generic(0), generic(1), A, MASK, clip=clip)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, NAN, math.inf])
def test_a_dual_clip_out_of_range_is_refused(dual_clip):
    with pytest.raises(ValueError, match=r"dual_clip .* is out of range"):
        clipped_surrogate(generic(0), generic(1), A, MASK, dual_clip=dual_clip)


@pytest.mark.parametrize("limit", [0.0, -1.0, NAN, math.inf])
def test_a_limit_out_of_range_is_refused(limit):
    with pytest.raises(ValueError, match=r"log_ratio_limit .* is out of range"):
        clipped_surrogate(generic(0), generic(1), A, MASK, log_ratio_limit=limit)
    with pytest.raises(ValueError, match=r"limit .* is out of range"):
        kl_penalty(generic(0), generic(1), MASK, "k1", limit=limit)


@pytest.mark.parametrize(
    ("low", "high"), [(None, 0.0), (None, -1.0), (None, NAN), (None, math.inf), (1.2, 1.2), (-0.1, 1.2), (NAN, 1.2)]
)
def test_bounds_of_a_ratio_out_of_range_are_refused(low, high):
    with pytest.raises(ValueError, match="is out of range"):
        cispo_surrogate(generic(0), generic(1), A, MASK, low=low, high=high)
    with pytest.raises(ValueError, match="is out of range"):
        mismatch_weights(generic(0), generic(1), MASK, level="token", mode="mask", cap=high, floor=low)


def test_unknown_estimators_levels_and_modes_are_refused():
    x, y = generic(0), generic(1)
    with oracles.as_users_run_it():
        with pytest.raises(ValueError, match="estimator 'k4' is unknown: choose k1, k2, k3 or k3_ratio"):
            kl_estimate(x, y, "k4")
        with pytest.raises(ValueError, match="'k3_ratio' takes old_logprobs"):
            kl_penalty(x, y, MASK, "k3_ratio")
        with pytest.raises(ValueError, match="level 'group' is unknown"):
            mismatch_weights(x, y, MASK, level="group", mode="mask", cap=2.0)
        with pytest.raises(ValueError, match="mode 'clip' is unknown"):
            mismatch_weights(x, y, MASK, level="token", mode="clip", cap=2.0)


def test_shapes_that_would_broadcast_are_refused():
    x, y = generic(0), generic(1)
    with oracles.as_users_run_it():
        for wrong in (y[..., :1], y[0], y[:, :1]):
            with pytest.raises(ValueError, match="ref_logprobs have shape"):
                kl_estimate(x, wrong, "k1")
            with pytest.raises(ValueError, match="ref_logprobs have shape"):
                kl_penalty(x, wrong, MASK, "k1")
            with pytest.raises(ValueError, match="old_logprobs have shape"):
                kl_estimate(x, y, "k3_ratio", wrong)
            with pytest.raises(ValueError, match="old_logprobs have shape"):
                kl_penalty(x, y, MASK, "k3_ratio", old_logprobs=wrong)
            with pytest.raises(ValueError, match="sampler_logprobs have shape"):
                mismatch_weights(x, wrong, MASK, level="token", mode="mask", cap=2.0)
            with pytest.raises(ValueError, match="returns have shape"):
                token_value_loss(x, wrong, MASK)
        for call in (
            lambda: kl_penalty(x, y, MASK[..., :1], "k1"),
            lambda: mismatch_weights(x, y, MASK[..., :1], level="token", mode="mask", cap=2.0),
            lambda: token_value_loss(x, y, MASK[..., :1]),
        ):
            with pytest.raises(ValueError, match=r"both must be \(..., P, G, T\)"):
                call()
