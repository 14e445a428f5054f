"""Advantages per token against plain Python, and by enumeration: what is unbiased, and what the others weigh."""

import itertools
import math

import pytest
import torch

import axes_oracles_advantages as more
import exact_oracles
import oracles
from oracles import close, same
from pgprog.algorithms.advantages import (
    at_last_token,
    batch_scaled,
    gae,
    group_mean,
    group_z_score,
    optimal_constant,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reward_to_go,
    whiten,
)
from pgprog.env import DigitSum
from pgprog.exact.blackbox import black_box_moments, weighted_scores
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

NAN, INF = math.nan, math.inf

# Three prompts, two completions, four tokens: unequal lengths, a hole (a tool's token), a fully masked row.
MASK = [
    [[True, True, True, True], [True, False, False, False]],
    [[True, True, False, True], [False, False, False, False]],
    [[True, True, True, False], [True, True, False, False]],
]
TOKENS = [
    [[0.1, -0.3, 0.0, 0.95], [0.95, NAN, 7.0, NAN]],
    [[0.2, 0.4, INF, -2.0], [NAN, 1.0, 2.0, 3.0]],
    [[0.0, 0.0, 1.0, 9.0], [5.5, 0.95, 0.3, -INF]],
]
VALUES = [
    [[0.5, 0.2, -0.4, 0.9], [0.6, NAN, 0.8, 0.7]],
    [[0.1, 0.3, 9.0, -0.4], [1.0, 1.0, NAN, 1.0]],
    [[0.95, 0.95, 0.95, 0.95], [0.0, 0.4, 3.0, 3.0]],
]
BOOTSTRAP = [[0.25, -0.5], [10.0, 3.0], [0.0, 0.95]]
REWARDS = [[1.0, 0.3], [0.95, 0.95], [-2.0, 5.5]]

FORMS = {
    "verl": {"ddof": 1, "eps": 1e-8, "floor": False},
    "openrlhf": {"ddof": 0, "eps": 1e-8, "floor": True},
    "large eps": {"ddof": 0, "eps": 0.5, "floor": False},
    "floored": {"ddof": 1, "eps": 50.0, "floor": True},
}


def t(x):
    return torch.tensor(x)


def rows(function, *tables):
    """A function of one completion, on each of a batch."""
    return [[function(*row) for row in zip(*group, strict=True)] for group in zip(*tables, strict=True)]


def replicas(function, *tables):
    """The function of three replicas: the batch, the same backwards, and the same with rewards of another size."""
    first, *rest = (t(x) for x in tables)
    stacked = torch.stack([first, first.flip(0), 3 * first - 0.7])
    others = [torch.stack([x, x.flip(0), x]) for x in rest]
    close(function(stacked, *others)[0], function(first, *rest))
    close(function(stacked, *others)[1], function(first.flip(0), *(x.flip(0) for x in rest)))
    close(function(stacked, *others)[2], function(3 * first - 0.7, *rest))


# ---- return to go ----


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reward_to_go_equals_the_oracle(gamma):
    close(
        reward_to_go(t(TOKENS), t(MASK), gamma=gamma), rows(lambda r, m: more.reward_to_go(r, m, gamma), TOKENS, MASK)
    )
    replicas(lambda r, m: reward_to_go(r, m, gamma=gamma), TOKENS, MASK)


def test_reward_to_go_by_hand():
    """gamma = 1/2: 4, 0 + 2, 1 + 1; a hole is neither paid nor discounted."""
    r, whole = t([[[1.0, 0.0, 4.0]]]), torch.ones(1, 1, 3, dtype=torch.bool)
    close(reward_to_go(r, whole, gamma=0.5), [[[2.0, 2.0, 4.0]]])
    close(reward_to_go(r, t([[[True, False, True]]]), gamma=0.5), [[[3.0, 0.0, 4.0]]])


def test_an_outcome_stands_at_the_last_token_that_counts():
    expected = rows(more.at_last_token, REWARDS, MASK)
    assert expected[1] == [[0, 0, 0, 0.95], [0, 0, 0, 0]] and expected[0][1][0] == 0.3
    same(at_last_token(t(REWARDS), t(MASK)), t(expected))
    replicas(at_last_token, REWARDS, MASK)
    filled = t(REWARDS)
    filled[1, 1] = NAN  # of a fully masked row
    same(at_last_token(filled, t(MASK)), t(expected))


def test_an_outcome_comes_back_to_every_token_of_its_completion():
    found = reward_to_go(at_last_token(t(REWARDS), t(MASK)), t(MASK))
    close(found, t(REWARDS).unsqueeze(-1) * t(MASK))


# ---- GAE ----


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.0, 1.0), (0.95, 1.0)])
@pytest.mark.parametrize("cut_off", [False, True])
def test_gae_equals_the_double_sum(gamma, lam, cut_off):
    found = gae(t(TOKENS), t(VALUES), t(MASK), gamma, lam, t(BOOTSTRAP) if cut_off else None)
    ends = BOOTSTRAP if cut_off else [[0.0, 0.0]] * 3
    close(found, rows(lambda r, v, m, b: more.gae(r, v, m, gamma, lam, b), TOKENS, VALUES, MASK, ends))
    replicas(lambda r, v, m, b: gae(r, v, m, gamma, lam, b), TOKENS, VALUES, MASK, ends)


def test_gae_skips_a_token_that_is_not_the_policys():
    """The hole that libraries disagree about: verl 0.6599, slime 0.5587, OpenRLHF 0.5497 at the first token."""
    A = gae(t([0.0, 0.0, 0.0, 1.0]), t([0.1, 0.2, 0.3, 0.4]), t([True, False, True, True]), 0.9, 0.95)
    assert round(A[0].item(), 4) == 0.6599 and A[1] == 0


def test_a_time_limit_is_not_an_end():
    """public-faults G1: r = 1, V = 10, V_next = 10, gamma = .99: 0.9 where cut off, -9 where it has ended."""
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    for lam in (0.0, 0.5, 1.0):
        close(gae(t([[[1.0]]]), t([[[10.0]]]), one, 0.99, lam, t([[10.0]])), [[[0.9]]], rtol=1e-13)
        close(gae(t([[[1.0]]]), t([[[10.0]]]), one, 0.99, lam), [[[-9.0]]])


def test_the_bootstrap_stands_after_the_last_token_that_counts():
    """One step late, at the end of the padding, it would be lost or discounted twice."""
    mask = t([[[True, True, False, False]]])
    A = gae(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), mask, 0.5, 1.0, t([[8.0]]))
    close(A, [[[2.0, 4.0, 0.0, 0.0]]])


def test_gae_is_of_the_return_not_of_the_reward():
    """public-faults G2: r = [0, 0, 1], V = .5: [.5, .5, .5], not [-.5, -.5, .5]."""
    close(gae(t([0.0, 0.0, 1.0]), torch.full((3,), 0.5), torch.ones(3, dtype=torch.bool), 1.0, 1.0), [0.5, 0.5, 0.5])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_at_lambda_one_is_the_return_less_the_value(gamma):
    """public-faults G4."""
    V = torch.where(t(MASK), t(VALUES), 0)
    expected = torch.where(t(MASK), reward_to_go(t(TOKENS), t(MASK), gamma=gamma) - V, 0)
    close(gae(t(TOKENS), t(VALUES), t(MASK), gamma, 1.0), expected)


def test_no_gradient_reaches_the_critic_through_gae():
    """public-faults G3."""
    values, bootstrap = t(VALUES).requires_grad_(), t(BOOTSTRAP).requires_grad_()
    assert not gae(t(TOKENS), values, t(MASK), 0.9, 0.8, bootstrap).requires_grad


def test_a_critic_that_has_diverged_stays_with_its_own_replica():
    values = torch.stack([torch.full((3, 2, 4), NAN), t(VALUES)])
    A = gae(t([TOKENS, TOKENS]), values, t([MASK, MASK]), 0.9, 0.8)
    assert A[0][t(MASK)].isnan().all()
    close(A[1], gae(t(TOKENS), t(VALUES), t(MASK), 0.9, 0.8))


# ---- whitening ----


@pytest.mark.parametrize("form", FORMS)
def test_whitening_equals_the_oracle(form):
    close(whiten(t(TOKENS), t(MASK), **FORMS[form]), more.whiten(TOKENS, MASK, **FORMS[form]))
    replicas(lambda a, m: whiten(a, m, **FORMS[form]), TOKENS, MASK)


def test_eps_of_whitening_is_under_the_root_and_long_completions_weigh_more():
    """Tokens [1 | 0, 0, 0]: mean 1/4, variance 1/4, not 1/2 of completions; eps 0.11: root 0.6, floored at 0.36 too."""
    A, mask = t([[[1.0, 9, 9], [0, 0, 0]]]), t([[[True, False, False], [True] * 3]])
    expected = t([[[0.75, 0, 0], [-0.25] * 3]])
    close(whiten(A, mask, eps=0.11), expected / 0.6)
    close(whiten(A, mask, eps=0.36, floor=True), expected / 0.6)
    close(whiten(A, mask, eps=0.2, floor=True), expected / 0.5)
    close(whiten(A, mask, ddof=0, eps=0.0), expected / (3 / 16) ** 0.5)


def test_defaults_of_whitening_are_those_of_verl():
    A, mask = t([[[1.0], [0.0]]]), torch.ones(1, 2, 1, dtype=torch.bool)
    close(whiten(A, mask)[0, 0, 0], 0.5 / (0.5 + 1e-8) ** 0.5, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("floor", [False, True])
def test_equal_advantages_are_whitened_to_exactly_zero(dtype, floor):
    A = torch.tensor([0.95, 0.1, 1 / 3, -12345.678], dtype=dtype).view(-1, 1, 1, 1).expand(-1, 3, 2, 4)
    mask = t(MASK).expand(4, -1, -1, -1)
    for eps in (0.0, 1e-8):
        assert (whiten(A, mask, eps=eps, floor=floor) == 0).all()


@pytest.mark.parametrize("floor", [False, True])
def test_no_token_and_one_token_give_zero(floor):
    A, mask = t([TOKENS, TOKENS, TOKENS]), t([MASK, MASK, MASK])
    mask[0] = False
    mask[1] = False
    mask[1, 2, 0, 2] = True
    found = whiten(A, mask, floor=floor)
    assert (found[:2] == 0).all()
    close(found[2], whiten(t(TOKENS), t(MASK), floor=floor))


def test_a_diverged_advantage_stays_with_its_own_replica():
    A = t([TOKENS, TOKENS])
    A[0, 0, 0, 0] = NAN
    found = whiten(A, t([MASK, MASK]))
    assert found[0][t(MASK)].isnan().all()
    close(found[1], whiten(t(TOKENS), t(MASK)))


def test_replicas_are_whitened_alike_bit_for_bit_whatever_stands_beside():
    torch.manual_seed(0)
    A, mask = torch.randn(5, 7, 8, 5, dtype=torch.float32), torch.rand(5, 7, 8, 5) < 0.8
    for ours in (whiten, reward_to_go, lambda a, m: gae(a, a.flip(-1), m, 0.9, 0.8)):
        found = ours(A, mask)
        for k in range(5):
            same(ours(A[k : k + 1], mask[k : k + 1])[0], found[k])


# ---- REINFORCE++ ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_the_whitened_return(gamma, form):
    G = rows(lambda r, m: more.reward_to_go(r, m, gamma), TOKENS, MASK)
    expected = more.whiten(G, MASK, **FORMS[form])
    close(reinforce_plus_plus(t(TOKENS), t(MASK), gamma=gamma, **FORMS[form]), expected)


@pytest.mark.parametrize("form", FORMS)
def test_reinforce_plus_plus_with_a_baseline_is_the_whitened_group_mean(form):
    A = more.over_tokens([oracles.centred(row) for row in REWARDS], MASK)
    found = reinforce_plus_plus_baseline(t(REWARDS), t(MASK), **FORMS[form])
    close(found, more.whiten(A, MASK, **FORMS[form]))
    replicas(lambda r, m: reinforce_plus_plus_baseline(r, m, **FORMS[form]), REWARDS, MASK)


def test_what_is_not_valid_or_alone_is_not_counted_in_whitening():
    """As if its tokens were masked: [[1, 0.3], [0.95, -], [-2, 5.5]] is whitened over two groups."""
    valid = t([[True, True], [True, False], [True, True]])
    r = torch.where(valid, t(REWARDS), NAN)
    mask = torch.ones(3, 2, 4, dtype=torch.bool)
    found = reinforce_plus_plus_baseline(r, mask, valid)
    assert (found[1] == 0).all()
    kept = [0, 2]
    close(found[kept], reinforce_plus_plus_baseline(t(REWARDS)[kept], mask[kept]))


def test_a_group_of_equal_rewards_is_zero_only_where_the_mean_over_tokens_is():
    r = t([[0.95, 0.95], [1.0, 0.0]])
    even = torch.ones(2, 2, 3, dtype=torch.bool)
    close(reinforce_plus_plus_baseline(r, even)[0], torch.zeros(2, 3))
    uneven = even.clone()
    uneven[1, 0, 1:] = False  # tokens of the second group: 0.5, and -0.5 three times; of the first: 0 six times
    found = reinforce_plus_plus_baseline(r, uneven, eps=0.0)
    mean = -1 / 10
    std = (((0.5 - mean) ** 2 + 3 * (0.5 + mean) ** 2 + 6 * mean**2) / 9) ** 0.5
    close(found[0], torch.full((2, 3), -mean / std))
    same(reinforce_plus_plus_baseline(r[:1].expand(2, -1), uneven), torch.zeros(2, 2, 3))


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(ValueError, match="group size G = 1"):
        reinforce_plus_plus_baseline(torch.ones(3, 1), torch.ones(3, 1, 4, dtype=torch.bool))
    same(reinforce_plus_plus(torch.ones(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool)), torch.zeros(1, 1, 1))


# ---- shapes and refusals ----

PER_TOKEN = {
    "reward_to_go": reward_to_go,
    "gae": lambda r, m: gae(r, torch.zeros_like(r), m, 0.9, 0.8),
    "whiten": whiten,
    "reinforce_plus_plus": reinforce_plus_plus,
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_numbers_per_token_and_mask_must_agree(name):
    ours, r = PER_TOKEN[name], torch.zeros(3, 2, 4)
    with oracles.as_users_run_it():
        for mask in (torch.ones(3, 2, dtype=torch.bool), torch.ones(1, 2, 4, dtype=torch.bool), torch.ones(3, 2, 4)):
            with pytest.raises(ValueError, match=r"mask is .*: bool \(3, 2, 4\) wanted"):
                ours(r, mask)
        with pytest.raises(ValueError, match=r"torch.int64: floats wanted"):
            ours(r.long(), torch.ones(3, 2, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"shape \(3, 2, 0\): .* at least one token"):
            ours(r[..., :0], torch.ones(3, 2, 0, dtype=torch.bool))


@pytest.mark.parametrize("name", ["reward_to_go", "whiten", "reinforce_plus_plus"])
def test_tokens_have_prompts_and_completions(name):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=r"shape \(2, 4\): \(\.\.\., P, G, T\) wanted"):
        PER_TOKEN[name](torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("name", ["reward_to_go", "gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_reward_that_is_no_number_is_refused_at_a_token_that_counts(name, bad):
    r = t(TOKENS)
    r[0, 0, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinite at an unmasked token"):
        PER_TOKEN[name](r, t(MASK))


def test_values_and_bootstrap_must_have_their_shapes():
    r, mask = torch.zeros(3, 2, 4), torch.ones(3, 2, 4, dtype=torch.bool)
    with oracles.as_users_run_it():
        with pytest.raises(ValueError, match=r"values have shape \(3, 2\): one per token"):
            gae(r, torch.zeros(3, 2), mask, 1.0, 1.0)
        with pytest.raises(ValueError, match=r"bootstrap has shape \(3, 1\): one per row"):
            gae(r, r, mask, 1.0, 1.0, torch.zeros(3, 1))


@pytest.mark.parametrize("ours", [at_last_token, reinforce_plus_plus_baseline])
def test_an_outcome_needs_a_mask_of_its_tokens(ours):
    with oracles.as_users_run_it():
        for mask in (torch.ones(3, 1, 4, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2, 4)):
            with pytest.raises(ValueError, match=r"rewards are \(3, 2\), mask is"):
                ours(torch.rand(3, 2), mask)


@pytest.mark.parametrize(
    ("gamma", "lam", "named"), [(1.1, 0.5, "gamma 1.1"), (0.9, -0.1, "lam -0.1"), (NAN, 1, "gamma nan")]
)
def test_discounts_lie_between_zero_and_one(gamma, lam, named):
    with pytest.raises(ValueError, match=f"{named} is out of range"):
        gae(t(TOKENS), t(VALUES), t(MASK), gamma, float(lam))


@pytest.mark.parametrize(("ddof", "eps"), [(2, 0.0), (1, -1.0), (0, NAN), (0, INF)])
def test_ddof_and_eps_are_refused_where_they_mean_nothing(ddof, eps):
    with pytest.raises(ValueError, match=f"ddof {ddof} and eps {eps}"):
        whiten(t(TOKENS), t(MASK), ddof=ddof, eps=eps)
    with pytest.raises(ValueError, match=f"ddof {ddof} and eps {eps}"):
        batch_scaled(t(REWARDS), ddof=ddof, eps=eps)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_inputs_stay_as_they_are_and_dtypes_too(name):
    r, mask = t(TOKENS).float(), t(MASK)
    before = r.clone()
    found = PER_TOKEN[name](r, mask)
    same(r, before)
    assert found.dtype == torch.float32 and found.shape == r.shape and (found[~mask] == 0).all()


# ---- exact truth ----

TASKS = {
    "halfway": DigitSum(seq_len=2, digits=2, variable_length=True, reward_form="halfway"),
    "outcome": DigitSum(seq_len=2, digits=3, variable_length=True, prompt_form="tokens"),
    "potential": DigitSum(seq_len=3, digits=2, reward_form="potential"),
}


class Enumerated:
    """Every completion of one target: pi, what each token is paid, the scores of each token, and grad J."""

    def __init__(self, task, target, seed=4):
        self.w = oracles.weights(Policy(task, ReplicaGenerator([seed], "init"), hidden=2, dtype=torch.float64))
        self.completions = oracles.completions(task)
        self.pi = t(oracles.probabilities(self.w, task, target))
        self.token_rewards = t([oracles.token_rewards(task, target, y) for y in self.completions])
        self.rewards = self.token_rewards.sum(-1)
        lengths = t([oracles.length(task, y) for y in self.completions])
        self.mask = torch.arange(task.seq_len) < lengths.unsqueeze(1)
        self.token_scores = torch.stack([self.scores_of(task, target, y) for y in self.completions])
        self.scores = self.token_scores.sum(1)
        self.truth = oracles.gradient(oracles.expected_reward(self.w, task, target), self.w)

    def scores_of(self, task, target, tokens):
        logprobs = oracles.score(self.w, task, target, tokens)[0]
        D = sum(p.numel() for p in self.w.values())
        found = torch.zeros(task.seq_len, D)
        for i in range(len(logprobs)):
            found[i] = oracles.gradient(oracles.score(self.w, task, target, tokens)[0][i], self.w)
        return found

    def expected(self, A):
        """E[sum_t A_t s_t]."""
        return torch.einsum("y,yt,ytd->d", self.pi, A, self.token_scores)


@pytest.fixture(scope="module", params=TASKS)
def problem(request):
    torch.set_default_dtype(torch.float64)
    return Enumerated(TASKS[request.param], 2)


def test_reward_to_go_is_unbiased_at_gamma_one_with_process_rewards(problem):
    to_go = lambda gamma: reward_to_go(problem.token_rewards[None], problem.mask[None], gamma=gamma)[0]  # noqa: E731
    close(problem.expected(to_go(1.0)), problem.truth, rtol=1e-10, atol=1e-13)
    assert (problem.expected(to_go(0.5)) - problem.truth).norm() > 1e-3


def test_gae_is_unbiased_at_lambda_one_whatever_v_is_and_biased_below(problem):
    """V of each prefix off by numbers of order 1; alike for completions that share the prefix."""
    torch.manual_seed(1)
    V, known = torch.zeros(problem.mask.shape), {}
    for i, y in enumerate(problem.completions):
        for j in range(len(y)):
            V[i, j] = known.setdefault(y[:j], torch.randn(()))
    close(
        problem.expected(gae(problem.token_rewards, V, problem.mask, 1.0, 1.0)), problem.truth, rtol=1e-10, atol=1e-13
    )
    assert (problem.expected(gae(problem.token_rewards, V, problem.mask, 1.0, 0.5)) - problem.truth).norm() > 1e-3


def test_a_completion_cut_off_is_worth_what_it_would_still_earn():
    """Cut after the first token, with the exact V there as bootstrap: still grad of J's first token, without bias."""
    task = DigitSum(seq_len=2, digits=3)
    problem = Enumerated(task, 2)
    V = {y[:1]: exact_oracles.value_of(problem.w, task, 2, y[:1], 1.0) for y in problem.completions}
    bootstrap = t([V[y[:1]] for y in problem.completions])
    first = problem.mask & (torch.arange(2) == 0)
    whole = problem.expected(torch.where(first, problem.rewards.unsqueeze(-1), 0))
    close(
        problem.expected(gae(problem.token_rewards, torch.zeros(9, 2), first, 1.0, 1.0, bootstrap)), whole, rtol=1e-11
    )
    assert problem.expected(gae(problem.token_rewards, torch.zeros(9, 2), first, 1.0, 1.0)).norm() == 0


@pytest.mark.parametrize("G", [2, 3])
def test_group_mean_is_grad_j_times_one_less_one_over_g(problem, G):
    found = black_box_moments(weighted_scores(group_mean, problem.rewards, problem.scores), problem.pi.expand(G, -1))
    close(found.mean, (1 - 1 / G) * problem.truth, rtol=1e-10, atol=1e-13)


def squared_norms(problem):
    return problem.scores.square().sum(-1)


def test_the_optimal_constant_minimises_the_trace(problem):
    """With expectations for the sums: weights pi |s|^2. tr Cov(b) = tr Cov(b*) + (b - b*)^2 E|s|^2 / G at every b."""
    norms, r = squared_norms(problem), problem.rewards
    b = (r - optimal_constant(r[None], (problem.pi * norms)[None])[0]).unique()
    assert (b - b[0]).abs().max() < 1e-14, "one constant"
    close(b[0], (problem.pi * r * norms).sum() / (problem.pi * norms).sum())

    def trace(constant):
        moments = black_box_moments(
            weighted_scores(lambda r: r - constant, problem.rewards, problem.scores), problem.pi.expand(2, -1)
        )
        close(moments.mean, problem.truth, rtol=1e-9, atol=1e-12)
        return moments.trace

    least, curvature = trace(b[0]), (problem.pi * norms).sum() / 2
    mean = (problem.pi * r).sum()
    for other in (0.0, mean, b[0] - 0.3, b[0] + 1e-3, b[0] + 2.0):
        close(trace(other), least + (other - b[0]) ** 2 * curvature, rtol=1e-10)
    assert trace(mean) > least, "the mean is another constant, and not the best"


def constant_estimator(problem, leave_own_out):
    norms = squared_norms(problem)

    def estimator(outcomes):
        r, w = problem.rewards[outcomes].unsqueeze(1), norms[outcomes].unsqueeze(1)
        A = optimal_constant(r, w, leave_own_out=leave_own_out).squeeze(1)
        return torch.einsum("bg,bgd->bd", A, problem.scores[outcomes]) / outcomes.shape[1]

    return estimator


@pytest.mark.parametrize("N", [2, 3])
def test_the_optimal_constant_of_the_others_is_unbiased(problem, N):
    found = black_box_moments(constant_estimator(problem, True), problem.pi.expand(N, -1))
    close(found.mean, problem.truth, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("N", [2, 3])
def test_the_optimal_constant_with_its_own_sample_lacks_e_of_b_s(problem, N):
    """E[A s] = grad J - E[b s], by every batch in plain Python."""
    found = black_box_moments(constant_estimator(problem, False), problem.pi.expand(N, -1))
    norms, r = squared_norms(problem).tolist(), problem.rewards.tolist()
    lacking = torch.zeros_like(problem.truth)
    for batch, chance in exact_oracles.groups(problem.pi.tolist(), N):
        weight = math.fsum(norms[i] for i in batch)
        b = math.fsum(norms[i] * r[i] for i in batch) / weight
        lacking += chance * b * problem.scores[list(batch)].mean(0)
    close(found.mean, problem.truth - lacking, rtol=1e-10, atol=1e-13)
    assert lacking.norm() > 0.05 * problem.truth.norm()


# w of two prompts with p = 0.5 and 0.1, from all 2^(2 G) batches, eps 0; to nine decimals.
PRINTED = {
    ("batch_scaled", 2): [0.975884573, 0.933012702],
    ("batch_scaled", 4): [1.623639047, 1.509960941],
    ("rf++", 2): [1.282622128, 1.155716754],
    ("rf++", 4): [2.023906874, 1.710815362],
}


@pytest.mark.parametrize(("name", "G"), PRINTED)
def test_weight_of_each_prompt_in_a_batch_of_two(name, G):
    """w = E[A | r = 1] - E[A | r = 0], the gradient of a prompt being w grad p: no objective of one prompt alone."""
    ps, T = [0.5, 0.1], 3
    mask = [[[True] * T] * G] * 2
    ours = {
        "batch_scaled": lambda r: batch_scaled(r, eps=0.0),
        "rf++": lambda r: reinforce_plus_plus_baseline(r, torch.ones(*r.shape, T, dtype=torch.bool), eps=0.0)[..., 0],
    }[name]
    oracle = {
        "batch_scaled": lambda rows: more.batch_scaled(rows, eps=0.0),
        "rf++": lambda rows: [
            [a[0] for a in group]
            for group in more.whiten(more.over_tokens([oracles.centred(x) for x in rows], mask), mask, eps=0.0)
        ],
    }[name]
    r = t(list(itertools.product([0.0, 1.0], repeat=2 * G))).view(-1, 2, G)
    p = t(ps).view(1, 2, 1)
    chance = torch.where(r == 1, p, 1 - p).prod(-1).prod(-1)
    A_times_score = (ours(r) * (r - p)).mean(-1)  # of a logit: s = r - p, grad p = p (1 - p)
    w = (chance @ A_times_score) / (p * (1 - p)).flatten()
    close(w, more.prompt_weights(ps, G, oracle), rtol=1e-11)
    close(w, PRINTED[name, G], rtol=0, atol=5.1e-10)


def weights_among_many(ps, G):
    """w of the first prompt, by counts of successes: r of the one, m of the rest of its group, n of other groups."""
    P, others = len(ps), [1.0]
    for q in ps[1:] * G:
        others = [
            (others[n] * (1 - q) if n < len(others) else 0) + (others[n - 1] * q if n else 0)
            for n in range(len(others) + 1)
        ]
    cases = list(itertools.product([0, 1], range(G), range(len(others))))
    r = torch.zeros(len(cases), P, G)
    for batch, (one, m, n) in zip(r, cases, strict=True):
        batch[0, 0], batch[0, 1 : m + 1] = one, 1
        batch[1:].flatten()[:n] = 1
    A = batch_scaled(r, eps=0.0)[:, 0, 0].tolist()
    p = ps[0]
    return math.fsum(
        (1 if one else -1) * math.comb(G - 1, m) * p**m * (1 - p) ** (G - 1 - m) * others[n] * a
        for (one, m, n), a in zip(cases, A, strict=True)
    )


@pytest.mark.parametrize("G", [2, 4])
def test_scaled_by_the_batch_all_prompts_come_to_weigh_alike(G):
    """w -> (1 - 1/G) / std(r), of every prompt, and as 1/P (z-scored in groups of 8 they stay 1.74 and 2.18)."""
    close(t(weights_among_many([0.5, 0.1], G)), PRINTED["batch_scaled", G][0], rtol=0, atol=5.1e-10)
    limit = (1 - 1 / G) / (0.3 * 0.7) ** 0.5
    for ps in ([0.5, 0.1], [0.1, 0.5]):
        off = [abs(weights_among_many(ps * n, G) / limit - 1) for n in (8, 32)]
        assert 0.2 < off[1] / off[0] < 0.3 and off[1] < 0.02


def test_alone_a_group_scaled_by_the_batch_is_z_scored():
    r = t([[0.95, 0.1, 1.0]])
    close(batch_scaled(r, eps=0.1), group_z_score(r, eps=0.1))


def test_with_unequal_lengths_reinforce_plus_plus_pays_for_length():
    """Two groups of two. Success takes 1 token, failure 3, so the mean over tokens is below 0 and lifts everything."""
    ps, G, T = [0.5, 0.1], 2, 3
    r = t(list(itertools.product([0.0, 1.0], repeat=4))).view(-1, 2, G)
    length = torch.where(r == 1, 1, T)
    mask = torch.arange(T) < length.unsqueeze(-1)
    A = reinforce_plus_plus_baseline(r, mask, eps=0.0)[..., 0]
    p = t(ps).view(1, 2, 1)
    chance = torch.where(r == 1, p, 1 - p).flatten(1).prod(-1)
    w = chance @ (A * (r - p)).mean(-1) / (p * (1 - p)).flatten()

    def oracle(rows):
        lengths = [[[j < (1 if x else T) for j in range(T)] for x in row] for row in rows]
        spread = more.over_tokens([oracles.centred(row) for row in rows], lengths)
        return [[a[0] for a in group] for group in more.whiten(spread, lengths, eps=0.0)]

    close(w, more.prompt_weights(ps, G, oracle), rtol=1e-11)
    even = t(PRINTED["rf++", 2])
    assert ((w - even).abs() > 0.02).all(), "the same rewards and policies, other lengths"
