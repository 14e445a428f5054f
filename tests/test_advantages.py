"""Every advantage against a plain-Python oracle, and the conventions that the module states."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import axes_oracles_advantages as more
import oracles
from oracles import close, same
from pgprog.algorithms.advantages import (
    batch_mean,
    batch_scaled,
    group_mean,
    group_rows,
    group_z_score,
    leave_one_out,
    optimal_constant,
    standardize,
    total_return,
    value_baseline,
)

NAN, INF = math.nan, math.inf

# Four prompts, three completions: generic, with equal rewards that 1/8 cannot write, with a zero, with negatives.
REWARDS = [[1.0, 0.0, 0.3], [0.95, 0.95, 0.95], [0.0, 0.0, 1.0], [-2.0, 0.1, 5.5]]
VALUES = [0.4, -0.2, 0.95, 1.5]

flatten = itertools.chain.from_iterable


def per_group(advantage):
    return lambda rewards: [advantage(row) for row in rewards]


def over_the_batch(advantage):
    def spread(rewards):
        A = iter(advantage(list(flatten(rewards))))
        return [[next(A) for _ in row] for row in rewards]

    return spread


def values_for(rewards):
    """VALUES, as many as there are prompts, on every leading axis."""
    return torch.tensor(VALUES).expand(*rewards.shape[:-2], -1)[..., : rewards.shape[-2]].contiguous()


def squares(rewards):
    """Norms for ``optimal_constant``: unequal, some of them 0."""
    return [[r * r for r in row] for row in rewards]


# name: (ours, the oracle on nested lists, is the group the unit that is centred)
ADVANTAGES = {
    "total_return": (total_return, lambda rewards: rewards, False),
    "batch_mean": (batch_mean, over_the_batch(oracles.centred), False),
    "value_baseline": (
        lambda r, valid=None: value_baseline(r, values_for(r), valid),
        lambda rewards: [[r - v for r in row] for row, v in zip(rewards, VALUES, strict=False)],
        False,
    ),
    "leave_one_out": (leave_one_out, per_group(oracles.leave_one_out), True),
    "group_mean": (group_mean, per_group(oracles.centred), True),
    "batch_scaled": (batch_scaled, more.batch_scaled, False),
    "optimal_constant": (
        lambda r, valid=None: optimal_constant(r, r.square().to(r.dtype), valid),
        lambda rewards: more.optimal_constant(rewards, squares(rewards)),
        False,
    ),
    "optimal_constant of the others": (
        lambda r, valid=None: optimal_constant(r, r.square().to(r.dtype), valid, leave_own_out=True),
        lambda rewards: more.optimal_constant(rewards, squares(rewards), leave_own_out=True),
        False,
    ),
    "group_z_score": (group_z_score, per_group(lambda r: oracles.z_score(r, 1, 1e-6)), True),
    "standardize": (standardize, over_the_batch(lambda r: oracles.z_score(r, 1, 1e-8)), False),
}
CENTRED = ("batch_mean", "leave_one_out", "group_mean", "batch_scaled", "group_z_score", "standardize")
CONSTANTS = ("optimal_constant", "optimal_constant of the others")
GROUPED = ("leave_one_out", "group_mean", "group_z_score")
COMPARED = (*GROUPED, "batch_scaled")  # with others of the group


@pytest.fixture(params=ADVANTAGES)
def name(request):
    return request.param


# ---- the formulas ----


def test_advantage_equals_its_oracle(name):
    ours, oracle, _ = ADVANTAGES[name]
    close(ours(torch.tensor(REWARDS)), oracle(REWARDS))


def test_leading_axes_are_independent_replicas(name):
    ours, oracle, _ = ADVANTAGES[name]
    replicas = [REWARDS, [[r * 2 - 0.7 for r in row] for row in REWARDS[::-1]], [row[::-1] for row in REWARDS]]
    close(ours(torch.tensor(replicas)), [oracle(rewards) for rewards in replicas])
    close(
        ours(torch.tensor([replicas, replicas[::-1]])), [[oracle(r) for r in rs] for rs in (replicas, replicas[::-1])]
    )


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-4, 0.5])
def test_z_scores_equal_the_oracle_for_every_ddof_and_eps(ddof, eps):
    close(
        group_z_score(torch.tensor(REWARDS), ddof=ddof, eps=eps), [oracles.z_score(row, ddof, eps) for row in REWARDS]
    )
    expected = over_the_batch(lambda r: oracles.z_score(r, ddof, eps))(REWARDS)
    close(standardize(torch.tensor(REWARDS), ddof=ddof, eps=eps), expected)
    close(batch_scaled(torch.tensor(REWARDS), ddof=ddof, eps=eps), more.batch_scaled(REWARDS, ddof, eps))


def test_eps_is_added_to_the_std_not_to_the_variance():
    """std of [1, 0] is sqrt(1/2): A = 0.5 / (0.7071 + 0.1) = 0.6195; inside the root it would be 0.6455."""
    close(group_z_score(torch.tensor([[1.0, 0.0]]), eps=0.1), [[0.5 / (0.5**0.5 + 0.1), -0.5 / (0.5**0.5 + 0.1)]])


def test_defaults_are_those_that_the_docstrings_state():
    """GRPO: ddof 1 and eps 1e-6, as verl; PPO: ddof 1 and eps 1e-8; batch_scaled: ddof 1 and eps 1e-4, as TRL."""
    r = torch.tensor([[1.0, 0.0]])
    close(group_z_score(r)[0, 0], 0.5 / (0.5**0.5 + 1e-6), rtol=1e-15, atol=0)
    close(standardize(r)[0, 0], 0.5 / (0.5**0.5 + 1e-8), rtol=1e-15, atol=0)
    close(batch_scaled(r)[0, 0], 0.5 / (0.5**0.5 + 1e-4), rtol=1e-15, atol=0)


def test_group_statistics_are_not_those_of_the_batch():
    """public-faults B4: [[1,0,0,0],[1,1,1,0]], group std 1/2; the batch of 4 of 8 has std sqrt(2/7), A = sqrt(7/8)."""
    r = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])
    close(group_z_score(r, eps=0.0), [[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]])
    a = (7 / 8) ** 0.5
    assert round(a, 3) == 0.935
    close(standardize(r, eps=0.0), [[a, -a, -a, -a], [a, a, a, -a]])


def test_grpo_and_rloo_of_three_right_in_eight():
    """public-faults B9: mean 3/8, variance 8 * 15/64 / 7 = 15/56."""
    r = torch.tensor([[1.0, 1, 1, 0, 0, 0, 0, 0]])
    std = (15 / 56) ** 0.5
    right, wrong = (5 / 8) / std, (-3 / 8) / std
    assert (round(right, 4), round(wrong, 4)) == (1.2076, -0.7246)
    close(group_z_score(r, eps=0.0), [[right] * 3 + [wrong] * 5])
    right, wrong = 1 - 2 / 7, 0 - 3 / 7
    assert (round(right, 4), round(wrong, 4)) == (0.7143, -0.4286)
    close(leave_one_out(r), [[right] * 3 + [wrong] * 5])
    close(batch_mean(r), [[5 / 8] * 3 + [-3 / 8] * 5])
    close(group_mean(r), [[5 / 8] * 3 + [-3 / 8] * 5])


@pytest.mark.parametrize("G", [2, 4, 8])
@pytest.mark.parametrize("p", [0.5, 0.2])
def test_expected_gradient_of_a_bernoulli_logit(p, G):
    """public-faults B9, by enumeration of all 2^G groups: true p (1 - p); its numbers are printed to four digits."""
    groups = list(itertools.product([0.0, 1.0], repeat=G))
    r = torch.tensor(groups).unsqueeze(1)  # replicas: one group each
    chance = torch.tensor([math.prod(p if x else 1 - p for x in group) for group in groups])

    def expected(advantage):
        return (chance * (advantage(r) * (r - p)).mean((-2, -1))).sum()

    true = p * (1 - p)
    close(expected(total_return), true)
    close(expected(batch_mean), (1 - 1 / G) * true)
    close(expected(leave_one_out), true)
    close(expected(group_mean), (1 - 1 / G) * true)
    grpo = expected(lambda r: group_z_score(r, eps=0.0))
    close(grpo, oracles.binary_weight(p, G, oracles.z_score) * true)
    printed = {0.5: {2: 0.1768, 4: 0.3499, 8: 0.4340}, 0.2: {2: 0.1131, 4: 0.2297, 8: 0.3153}}[p][G]
    assert abs(grpo - printed) < 5.1e-5


@pytest.mark.parametrize(
    ("p", "ddof", "w"),
    [
        (0.01, 1, 2.440367171),
        (0.02, 1, 2.406987626),
        (0.1, 1, 2.177353734),
        (0.3, 1, 1.835957934),
        (0.5, 1, 1.735807198),
        (0.5, 0, 1.855655950),
    ],
)
def test_grpo_weight_of_a_prompt_at_eight_completions(p, ddof, w):
    """w(p) = E[A | r = 1] - E[A | r = 0], the other seven Bernoulli(p); known to ten digits, hence rtol 5e-10."""
    total = 0.0
    for n in range(8):
        others = [1.0] * n + [0.0] * (7 - n)
        A = group_z_score(torch.tensor([[1.0, *others], [0.0, *others]]), ddof=ddof, eps=0.0)
        total += math.comb(7, n) * p**n * (1 - p) ** (7 - n) * (A[0, 0] - A[1, 0])
    close(total, w, rtol=5e-10, atol=0)
    close(total, oracles.binary_weight(p, 8, lambda r: oracles.z_score(r, ddof)))


@pytest.mark.parametrize("G", [2, 3, 8, 64])
def test_a_z_score_is_bounded_as_stated(G):
    """|A| <= (n - 1) / sqrt(n), met by a single success."""
    r = torch.zeros(1, G)
    r[0, 0] = 1
    close(group_z_score(r, eps=0.0)[0, 0], (G - 1) / G**0.5)


def test_rloo_is_the_centred_reward_times_g_over_g_less_one():
    r = torch.tensor(REWARDS)
    close(leave_one_out(r), (r - r.mean(-1, keepdim=True)) * 3 / 2)


def test_total_return_is_the_reward_itself():
    same(total_return(torch.tensor(REWARDS)), torch.tensor(REWARDS))


def test_group_mean_is_leave_one_out_times_one_less_one_over_g():
    r = torch.tensor(REWARDS)
    close(group_mean(r), leave_one_out(r) * 2 / 3)


def test_the_batch_std_is_not_that_of_a_group():
    """public-faults B7: groups of 8, all +2 or all -8: every group std is 0, the batch's 5.08, every advantage 0."""
    r = torch.tensor([[2.0] * 8, [2.0] * 8, [-8.0] * 8, [-8.0] * 8])
    assert round(r.std().item(), 2) == 5.08
    for ours in (group_mean, group_z_score, batch_scaled):
        assert (ours(r) == 0).all()
    mixed = torch.cat([r, torch.tensor([[1.0] + [0.0] * 7])])  # among them, one success is 7/8 over the batch's std
    close(batch_scaled(mixed, eps=0.0)[4, 0], 7 / 8 / mixed.flatten().std())


@pytest.mark.parametrize(("G", "share"), [(2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)])
def test_share_of_groups_that_carry_nothing(G, share):
    """public-faults B8: p^G + (1 - p)^G, by counts of successes."""
    p = 0.1819
    counts = torch.arange(G + 1)
    r = (torch.arange(G) < counts[:, None]).double().unsqueeze(1)  # replicas: one group of each count
    chance = torch.tensor([math.comb(G, n) * p**n * (1 - p) ** (G - n) for n in range(G + 1)])
    for ours in (group_mean, leave_one_out, group_z_score):
        nothing = (ours(r) == 0).all(-1).flatten()
        assert round(chance[nothing].sum().item(), 3) == share
        close(chance[nothing].sum(), p**G + (1 - p) ** G)


BASELINES_OF_OTHERS = {
    "leave_one_out": leave_one_out,
    "value_baseline": lambda r: value_baseline(r, values_for(r)),
    "optimal_constant": lambda r: optimal_constant(r, torch.tensor(NORMS), leave_own_out=True),
}
NORMS = [[1.0, 2.0, 0.5], [3.0, 0.0, 1.0], [0.1, 0.2, 4.0], [1.5, 2.5, 1e-9]]


@pytest.mark.parametrize("name", BASELINES_OF_OTHERS)
def test_an_unbiased_baseline_does_not_move_with_its_own_sample(name):
    """public-faults B11: r_i goes up by 0.7, and A_i by as much."""
    ours, r = BASELINES_OF_OTHERS[name], torch.tensor(REWARDS)
    for p, g in itertools.product(range(4), range(3)):
        moved = r.clone()
        moved[p, g] += 0.7
        close(ours(moved)[p, g] - ours(r)[p, g], 0.7, rtol=1e-11)


def test_the_biased_baselines_move_with_their_own_sample():
    """A_i goes up by 1 - 1/G, 1 - 1/N, and 1 - |s_i|^2 / sum |s|^2."""
    r, norms = torch.tensor(REWARDS), torch.tensor(NORMS)
    moved = r.clone()
    moved[2, 1] += 0.7
    for ours, share in (
        (group_mean, 1 / 3),
        (batch_mean, 1 / 12),
        (lambda r: optimal_constant(r, norms), 0.2 / sum(map(sum, NORMS))),
    ):
        close(ours(moved)[2, 1] - ours(r)[2, 1], 0.7 * (1 - share), rtol=1e-11)


# ---- the optimal constant ----


def test_optimal_constant_by_hand():
    """b* = (1 * 1 + 0 * 2 + 0.95 * 5) / 8 = 0.71875; of the others 4.75 / 7, 5.75 / 6, 1 / 3."""
    r, norms = torch.tensor([[1.0, 0.0, 0.95]]), torch.tensor([[1.0, 2.0, 5.0]])
    close(optimal_constant(r, norms), [[1 - 0.71875, -0.71875, 0.95 - 0.71875]])
    close(optimal_constant(r, norms, leave_own_out=True), [[1 - 4.75 / 7, -5.75 / 6, 0.95 - 1 / 3]])


@pytest.mark.parametrize("norm", [0.0, 1e-300, 3.0])
def test_equal_norms_give_the_mean(norm):
    r = torch.tensor(REWARDS)
    close(optimal_constant(r, torch.full_like(r, norm)), batch_mean(r))
    close(optimal_constant(r, torch.full_like(r, norm), leave_own_out=True), batch_mean(r) * 12 / 11)


def test_norms_of_very_unequal_size_leave_the_others_exact():
    """sum - own would leave 0 of the others' 1 + 3 beside 1e20."""
    r, norms = torch.tensor([[1.0, 0.5, 0.25]]), torch.tensor([[1e20, 1.0, 3.0]])
    close(optimal_constant(r, norms, leave_own_out=True)[0, 0], 1 - (0.5 + 3 * 0.25) / 4)


def test_norms_are_one_per_completion_finite_and_not_negative():
    r = torch.tensor(REWARDS)
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"squared_norms have shape \(4,\): \(4, 3\)"):
        optimal_constant(r, torch.ones(4))
    for bad in (-1.0, NAN, INF):
        norms = torch.tensor(NORMS)
        norms[1, 1] = bad
        with pytest.raises(ValueError, match="a squared norm is negative, NaN or infinite"):
            optimal_constant(r, norms)
        valid = torch.ones_like(r, dtype=torch.bool)
        valid[1, 1] = False
        assert optimal_constant(r, norms, valid).isfinite().all()


def test_a_batch_of_one_has_no_others():
    with pytest.raises(ValueError, match="leave_own_out with a batch of one"):
        optimal_constant(torch.ones(3, 1, 1), torch.ones(3, 1, 1), leave_own_out=True)
    valid = torch.tensor([[True, False]])
    same(optimal_constant(torch.ones(1, 2), torch.ones(1, 2), valid, leave_own_out=True), torch.zeros(1, 2))


def test_no_gradient_reaches_the_norms():
    norms = torch.tensor(NORMS, requires_grad=True)
    assert not optimal_constant(torch.tensor(REWARDS), norms).requires_grad


# ---- equal rewards ----

INEXACT = [0.95, 0.1, 1 / 3, 0.7, 1.3, -0.95, 1e-8, 12345.678, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("centred", [*CENTRED, *CONSTANTS])
def test_equal_rewards_give_exactly_zero(centred, dtype):
    """A mean of equal numbers is not always that number: 0.95 in float32 at G = 8 leaves 6e-8."""
    ours = ADVANTAGES[centred][0]
    for G in range(2, 65):
        r = torch.tensor(INEXACT, dtype=dtype)
        rows = r.view(-1, 1, 1).expand(-1, 1, G)  # a replica each: one prompt, so that the batch is equal too
        assert (ours(rows) == 0).all()
        assert (ours(rows.expand(-1, 3, -1)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero_without_eps(dtype):
    for G in range(2, 65):
        r = torch.tensor(INEXACT, dtype=dtype).view(-1, 1, 1).expand(-1, 2, G)
        for z_score in (group_z_score, standardize, batch_scaled):
            for ddof in (0, 1):
                assert (z_score(r, ddof=ddof, eps=0.0) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_valid_rewards_give_exactly_zero_beside_others_that_do_not_count(dtype):
    r = torch.tensor([[0.95] * 7 + [3.0], [0.1] * 8], dtype=dtype)
    valid = torch.tensor([[True] * 7 + [False], [True] * 5 + [False] * 3])
    for name in GROUPED:
        assert (ADVANTAGES[name][0](r, valid) == 0).all()


def test_almost_equal_rewards_in_float32_are_those_of_float64():
    """public-faults B5: [0, 0.95 x 7], where E[x^2] - E[x]^2 leaves a residue; float32 rounds at 6e-8: rtol 1e-6."""
    row = [0.0] + [0.95] * 7
    r = torch.tensor([row], dtype=torch.float32)
    close(group_z_score(r).double(), [oracles.z_score(row, 1, 1e-6)], rtol=1e-6)
    close(leave_one_out(r).double(), [oracles.leave_one_out(row)], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("G", [2, 3, 7])
def test_leave_one_out_of_a_single_success_is_one_and_minus_one_over_the_others(G):
    r = torch.zeros(1, G)
    r[0, 1] = 1
    expected = torch.full((1, G), -1 / (G - 1))
    expected[0, 1] = 1
    close(leave_one_out(r), expected)


# ---- valid ----

VALID = [[True, True, False], [True, True, True], [False, True, False], [True, False, True]]


def with_garbage(garbage):
    r = torch.tensor(REWARDS)
    return torch.where(torch.tensor(VALID), r, garbage)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -1e30, 0.0])
def test_what_is_not_valid_gets_zero_and_enters_nothing(name, garbage):
    """The rest equals the oracle on what remains, row by row; a group of one valid is 0."""
    ours, oracle, grouped = ADVANTAGES[name]
    valid = torch.tensor(VALID)
    A = ours(with_garbage(garbage), valid)
    assert (A[~valid] == 0).all()
    kept = [[r for r, v in zip(row, flags, strict=True) if v] for row, flags in zip(REWARDS, VALID, strict=True)]
    expected = [oracle([row])[0] if len(row) > 1 else [0.0] for row in kept] if grouped else oracle(kept)
    close(A[valid], list(flatten(expected)))


def test_valid_everywhere_changes_nothing(name):
    ours = ADVANTAGES[name][0]
    r = torch.tensor(REWARDS)
    same(ours(r, torch.ones_like(r, dtype=torch.bool)), ours(r))


def test_nothing_valid_gives_zero(name):
    r = torch.full((2, 3), NAN)
    same(ADVANTAGES[name][0](r, torch.zeros(2, 3, dtype=torch.bool)), torch.zeros(2, 3))


def test_one_replica_without_valid_rewards_leaves_the_other_alone(name):
    ours = ADVANTAGES[name][0]
    r = torch.tensor([REWARDS, REWARDS])
    valid = torch.ones_like(r, dtype=torch.bool)
    valid[0] = False
    A = ours(r, valid)
    assert (A[0] == 0).all()
    close(A[1], ours(r[1]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_an_unmarked_nan_or_infinity_is_refused(name, bad):
    r = torch.tensor(REWARDS)
    r[1, 2] = bad
    if name == "standardize":  # its input is an advantage: one that has diverged stays with its own replica
        A = standardize(torch.stack([r, torch.tensor(REWARDS)]))
        close(A[1], standardize(torch.tensor(REWARDS)))
        assert A[0].isnan().all(), "a divergence must show"
        return
    with pytest.raises(ValueError, match=r"NaN or infinite: mark it with valid"):
        ADVANTAGES[name][0](r)


@pytest.mark.parametrize("name", COMPARED)
def test_a_group_of_one_is_refused(name):
    for shape in ((4, 1), (2, 4, 1)):
        with pytest.raises(ValueError, match="group size G = 1"):
            ADVANTAGES[name][0](torch.zeros(shape))


@pytest.mark.parametrize("name", COMPARED)
def test_one_valid_in_a_group_gives_zero(name):
    A = ADVANTAGES[name][0](torch.tensor([[0.7, NAN], [0.7, 0.1]]), torch.tensor([[True, False], [True, True]]))
    assert (A[0] == 0).all() and (A[1] != 0).all()


@pytest.mark.parametrize("name", ["batch_mean", "standardize", "optimal_constant"])
def test_a_batch_of_one_gives_zero(name):
    same(ADVANTAGES[name][0](torch.tensor([[0.7]])), torch.zeros(1, 1))


@pytest.mark.parametrize("name", ["total_return", "batch_mean", "value_baseline", "standardize", *CONSTANTS])
def test_groups_of_one_are_fine_where_the_batch_is_the_unit(name):
    ours, oracle, _ = ADVANTAGES[name]
    rows = [[1.0], [0.95], [0.0]]
    close(ours(torch.tensor(rows)), oracle(rows))


# ---- shapes ----


def test_values_must_be_one_per_prompt():
    """public-faults B10: returns (2,) less values (2, 1) would be 2 x 2."""
    r = torch.tensor([[1.0], [0.0]])
    with oracles.as_users_run_it():
        for values in (torch.tensor([[0.9], [0.1]]), torch.tensor([0.9]), torch.tensor(0.9), torch.zeros(1, 2)):
            with pytest.raises(ValueError, match=r"values have shape .*: one per prompt wanted, \(2,\)"):
                value_baseline(r, values)


def test_rewards_must_have_prompts_and_completions(name):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"\(3,\): \(..., P, G\) wanted"):
        ADVANTAGES[name][0](torch.zeros(3)) if name != "value_baseline" else value_baseline(
            torch.zeros(3), torch.tensor(0.0)
        )


def test_rewards_must_be_floats(name):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"torch.int64: floats wanted"):
        ADVANTAGES[name][0](torch.zeros(4, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "valid", [torch.ones(4, 1, dtype=torch.bool), torch.ones(3, dtype=torch.bool), torch.ones(4, 3)]
)
def test_valid_must_be_bool_and_shaped_as_the_rewards(name, valid):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"valid is .*: bool \(4, 3\) wanted"):
        ADVANTAGES[name][0](torch.zeros(4, 3), valid)


def test_advantages_keep_the_dtype_of_the_rewards(name):
    r = torch.tensor(REWARDS, dtype=torch.float32)
    A = value_baseline(r, values_for(r).float()) if name == "value_baseline" else ADVANTAGES[name][0](r)
    assert A.dtype == torch.float32 and A.shape == r.shape and not A.requires_grad


def test_no_gradient_reaches_the_values_through_the_advantage():
    values = torch.tensor(VALUES, requires_grad=True)
    A = value_baseline(torch.tensor(REWARDS), values)
    assert not A.requires_grad
    close(A, [[r - v for r in row] for row, v in zip(REWARDS, VALUES, strict=True)])


def test_advantages_leave_their_inputs_as_they_are(name):
    r, valid = with_garbage(NAN), torch.tensor(VALID)
    before = r.clone()
    ADVANTAGES[name][0](r, valid)
    same(r, before)


# ---- group_rows ----


def test_interleaved_rows_find_their_groups():
    """public-faults B1: rows [p1, p2, p1, p2] with rewards [1, 1, 0, 1]: centred [0.5, 0, -0.5, 0] by row."""
    r, valid = group_rows([1.0, 1.0, 0.0, 1.0], ["p1", "p2", "p1", "p2"])
    same(r, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert valid.all()
    close(leave_one_out(r, valid) / 2, [[0.5, -0.5], [0, 0]])


def test_uneven_groups_are_centred_each_by_itself():
    """public-faults B2: [1, 2, 3, 4 | 10, 12 | 5, 6, 7]."""
    r, valid = group_rows([1.0, 2.0, 3.0, 4.0, 10.0, 12.0, 5.0, 6.0, 7.0], [0, 0, 0, 0, 1, 1, 2, 2, 2])
    assert r.shape == (3, 4) and valid.sum(-1).tolist() == [4, 2, 3]
    close(leave_one_out(r, valid), [[-2, -2 / 3, 2 / 3, 2], [-2, 2, 0, 0], [-1.5, 0, 1.5, 0]])
    for ours in (leave_one_out, group_z_score):
        close(ours(r, valid).sum(-1), [0.0, 0, 0])


def test_rows_of_one_prompt_are_one_group():
    """public-faults B3: [1, 0, 1, 1] on one prompt: centred [0.25, -0.75, 0.25, 0.25]."""
    r, valid = group_rows([1.0, 0.0, 1.0, 1.0], [("a", 1)] * 4)
    close(leave_one_out(r, valid) * 3 / 4, [[0.25, -0.75, 0.25, 0.25]])


def test_groups_stand_in_order_of_first_appearance_and_unscorable_rows_do_not_count():
    r, valid = group_rows([0.95, None, 0.2, NAN, 0.3, 1.0], ["b", "a", "b", "c", "a", "b"])
    same(r, torch.tensor([[0.95, 0.2, 1.0], [0.0, 0.3, 0.0], [0.0, 0.0, 0.0]]))
    same(valid, torch.tensor([[True, True, True], [False, True, False], [False, False, False]]))
    assert r.dtype == torch.float64


def test_group_rows_is_in_float64_whatever_the_default():
    torch.set_default_dtype(torch.float32)
    r, _ = group_rows([0.95, 0.1], [0, 0])
    assert r.tolist() == [[0.95, 0.1]]


def test_an_infinite_reward_is_not_taken_for_unscorable():
    r, valid = group_rows([INF, 1.0], [0, 0])
    assert valid.all()
    with pytest.raises(ValueError, match="NaN or infinite"):
        leave_one_out(r, valid)


@pytest.mark.parametrize(("rewards", "ids"), [([1.0], []), ([1.0, 2.0], [0]), ([], [0]), ([], [])])
def test_one_id_per_reward_and_at_least_one_row(rewards, ids):
    with pytest.raises(ValueError, match=f"{len(rewards)} rewards and {len(ids)} ids"):
        group_rows(rewards, ids)


# ---- properties ----

examples = settings(max_examples=50, deadline=None, derandomize=True, database=None)
# Quarters within +-16: sums and shifts of them by whole numbers are exact in float64.
quarters = st.integers(-64, 64).map(lambda n: n / 4)
batches = st.tuples(st.integers(1, 4), st.integers(2, 7)).flatmap(
    lambda size: st.lists(st.lists(quarters, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0])
)
centred_names = st.sampled_from(CENTRED)


@examples
@given(batches, st.integers(-8, 8), centred_names)
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift, name):
    ours, r = ADVANTAGES[name][0], torch.tensor(rewards)
    same(ours(r + shift), ours(r))


@examples
@given(batches, st.sampled_from([0.25, 2.0, 8.0, -1.0, -4.0]))
def test_advantages_scale_with_the_rewards_and_z_scores_only_turn_with_their_sign(rewards, scale):
    r = torch.tensor(rewards)
    for linear in (total_return, batch_mean, leave_one_out, group_mean):
        close(linear(scale * r), scale * linear(r))
    for z_score in (group_z_score, standardize, batch_scaled):
        close(z_score(scale * r, eps=0.0), math.copysign(1, scale) * z_score(r, eps=0.0))


@examples
@given(batches, st.randoms(use_true_random=False), st.sampled_from(sorted(ADVANTAGES)))
def test_completions_of_a_prompt_may_stand_in_any_order(rewards, random, name):
    ours, r = ADVANTAGES[name][0], torch.tensor(rewards)
    order = list(range(r.shape[-1]))
    random.shuffle(order)
    close(ours(r[:, order]), ours(r)[:, order])


@examples
@given(batches, st.randoms(use_true_random=False), st.sampled_from(GROUPED))
def test_a_group_does_not_see_the_others(rewards, random, name):
    ours, r = ADVANTAGES[name][0], torch.tensor(rewards)
    p = random.randrange(len(rewards))
    close(ours(r)[p], ours(r[p : p + 1])[0])


@examples
@given(batches, centred_names)
def test_centred_advantages_sum_to_zero(rewards, name):
    A = ADVANTAGES[name][0](torch.tensor(rewards))
    sums = A.sum(-1) if name in GROUPED else A.sum()
    close(sums, torch.zeros_like(sums), atol=1e-12)  # sums of up to 28 numbers up to 32


@examples
@given(batches, st.data(), st.sampled_from(sorted(ADVANTAGES)))
def test_leaving_rewards_out_equals_never_having_had_them(rewards, data, name):
    ours, oracle, grouped = ADVANTAGES[name]
    flags = data.draw(st.lists(st.lists(st.booleans(), min_size=len(rewards[0]), max_size=len(rewards[0])),
                               min_size=len(rewards), max_size=len(rewards)))  # fmt: skip
    valid = torch.tensor(flags)
    A = ours(torch.where(valid, torch.tensor(rewards), NAN), valid)
    kept = [[r for r, v in zip(row, keep, strict=True) if v] for row, keep in zip(rewards, flags, strict=True)]
    n = sum(map(len, kept))
    if grouped:
        expected = [oracle([row])[0] if len(row) > 1 else [0.0] * len(row) for row in kept]
    elif n == 0 or (n == 1 and name in CENTRED):
        expected = [[0.0] * len(row) for row in kept]
    else:
        expected = oracle(kept)
    close(A[valid], torch.tensor(list(flatten(expected)), dtype=torch.float64))
    assert (A[~valid] == 0).all()
