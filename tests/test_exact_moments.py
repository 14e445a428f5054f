"""The effective weight, the moments of scores and of estimators: known values, and every group by brute force."""

import itertools
import math

import numpy
import pytest
import torch

import exact_oracles
import oracles
from oracles import close
from pgprog.algorithms.advantages import batch_mean, group_z_score, leave_one_out, total_return
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.enumeration import completions, every_target, prefix_levels, success_gradients
from pgprog.exact.moments import (
    fixed_prompts,
    fixed_prompts_of_one_batch,
    group_covariance,
    group_moments,
    poisson_binomial,
    pooled,
    random_prompts,
    sampled_rewards,
)
from pgprog.exact.scores import ScoreMoments, score_moments, squared_norms, walk
from pgprog.exact.weight import (
    GroupAdvantage,
    binomial,
    effective_weight,
    group_advantage,
    implied_objective,
)
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

P = torch.tensor([0.01, 0.02, 0.1, 0.3, 0.5], dtype=torch.float64)
TASKS = [
    DigitSum(seq_len=2, digits=2),
    DigitSum(seq_len=2, digits=2, variable_length=True, prompt_form="tokens"),
    DigitSum(seq_len=1, digits=3, targets="sum"),
]


def grpo(rewards, ddof=1):
    return group_z_score(rewards, ddof=ddof, eps=0.0)


def table_of(rows):
    return lambda rewards: torch.stack([torch.tensor(rows(group.tolist())) for group in rewards])


def make(task, seeds=(3, 9), hidden=2):
    return Policy(task, ReplicaGenerator(list(seeds), "init"), hidden=hidden, dtype=torch.float64)


@pytest.fixture(params=TASKS, ids=lambda t: f"{t.seq_len}x{t.digits}{'v' * t.variable_length}")
def task(request):
    return request.param


# ---- the effective weight ----


def test_weights_that_are_known():
    one = torch.ones_like(P)
    for G in (2, 5, 8):
        close(effective_weight(group_advantage(leave_one_out, G), P), one, rtol=1e-13)
        close(effective_weight(group_advantage(total_return, G), P), one, rtol=1e-13)
        close(effective_weight(group_advantage(batch_mean, G), P), (1 - 1 / G) * one, rtol=1e-13)
    close(effective_weight(group_advantage(batch_mean, 64), P), 63 / 64 * one, rtol=1e-13)


def test_weight_of_grpo_at_eight():
    w = effective_weight(group_advantage(grpo, 8), P)
    known = [2.440367171, 2.406987626, 2.177353734, 1.835957934, 1.735807198]
    assert w.tolist() == pytest.approx(known, abs=5e-10)
    close(effective_weight(group_advantage(grpo, 8), 1 - P), w, rtol=1e-12)
    half = effective_weight(group_advantage(lambda r: grpo(r, ddof=0), 8), P[-1])
    assert half.item() == pytest.approx(1.855655950, abs=5e-10)


def test_weight_of_grpo_at_rare_success_is_its_largest_advantage():
    for G in (2, 8, 64):
        w = effective_weight(group_advantage(grpo, G), torch.zeros(1, dtype=torch.float64))
        close(w, [(G - 1) / math.sqrt(G)], rtol=1e-13)


def test_weight_equals_an_oracle_that_counts():
    for G in (2, 3, 7):
        for p in P.tolist():
            truth = oracles.binary_weight(p, G, oracles.z_score)
            close(effective_weight(group_advantage(grpo, G), torch.tensor(p)), truth)


def test_weight_of_grpo_tends_to_the_inverse_root():
    """Slowly: at p = 1/2 the distance from 2 = 1 / sqrt(p (1 - p)) falls as 2 / G."""
    for G, within in ((8, 0.12), (64, 0.01), (1000, 0.006)):
        distance = 2 - effective_weight(group_advantage(grpo, G), P[-1]).item()
        assert distance * G == pytest.approx(2, abs=within)


def test_objective_is_the_integral_of_the_weight():
    """Gauss-Legendre with 8 nodes integrates a polynomial of degree 7 exactly."""
    nodes, weights = (torch.from_numpy(x) for x in numpy.polynomial.legendre.leggauss(8))
    for advantage in (grpo, batch_mean, leave_one_out, lambda r: r**2 + r.mean(-1, keepdim=True) ** 3 * r):
        table = group_advantage(advantage, 8)
        for p in (0.0, 0.2, 0.9, 1.0):
            integral = p / 2 * (weights * effective_weight(table, p / 2 * (nodes + 1))).sum()
            close(implied_objective(table, torch.tensor(p)), integral, rtol=1e-12, atol=1e-15)


def test_objective_of_grpo_tends_to_the_arcsine():
    p = torch.tensor([0.2, 0.5, 1.0])
    far, near = (implied_objective(group_advantage(grpo, G), p) - 2 * p.sqrt().arcsin() for G in (50, 1000))
    assert (near.abs() < far.abs() / 3).all() and near.abs().max() < 0.1


def test_the_gradient_of_the_objective_is_what_grpo_expects():
    p = P.clone().requires_grad_()
    table = group_advantage(grpo, 8)
    (w,) = torch.autograd.grad(implied_objective(table, p).sum(), p)
    close(w, effective_weight(table, P), rtol=1e-11)


def test_an_advantage_that_no_count_decides_is_refused():
    ranked = lambda r: r * torch.arange(1.0, r.shape[-1] + 1)  # noqa: E731
    with pytest.raises(UsageError, match=r"mine gives equal rewards of one group unequal .* pgprog\.exact\.blackbox"):
        group_advantage(ranked, 4, "mine")
    state = torch.Generator().manual_seed(1)
    with pytest.raises(UsageError, match="or at random"):
        group_advantage(lambda r: r + torch.rand(r.shape, generator=state), 4, "mine")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda r: r[..., :1],
            r"mine returned shape \(1, 1\): a detached, finite tensor of shape \(1, 4\) was expected",
        ),
        (lambda r: r * math.nan, r"mine returned NaN or infinity: a detached, finite .* \(1, 4\)"),
        (lambda r: r * torch.ones(1, requires_grad=True), "mine returned a tensor with a live gradient: a detached"),
        (lambda r: r.tolist(), "mine returned list: a detached, finite tensor"),
        (lambda r: r / [], r"mine raised TypeError: .* on rewards of shape \(1, 4\): a detached, finite tensor"),
    ],
)
def test_a_wrong_function_is_named_with_what_it_gave_and_what_was_expected(function, said):
    with pytest.raises(UsageError, match=said):
        group_advantage(function, 4, "mine")


def test_group_sizes_and_rewards_out_of_range_are_refused():
    for G in (0, 1001):
        with pytest.raises(UsageError, match=f"a group of {G}"):
            group_advantage(total_return, G)
    table, half = group_advantage(total_return, 2), torch.full((2,), 0.5)
    with pytest.raises(UsageError, match=r"a reward of 0\.3: .* pgprog\.exact\.blackbox"):
        group_covariance(table, half, torch.tensor([0.0, 0.3]), torch.zeros(2, 1))
    paid = DigitSum(seq_len=1, digits=2, reward_form="halfway")
    with pytest.raises(UsageError, match=r"reward_form halfway: .* pgprog\.exact\.blackbox"):
        score_moments(make(paid), every_target(paid))


def test_binomial_at_the_ends_and_against_scipy():
    from scipy import stats

    close(binomial(3, torch.tensor([0.0, 1.0])), [[1, 0, 0, 0], [0, 0, 0, 1.0]])
    close(binomial(40, torch.tensor(0.3)), torch.from_numpy(stats.binom.pmf(range(41), 40, 0.3)), rtol=1e-11)


def test_poisson_binomial_by_all_outcomes():
    p = [0.2, 0.9, 0.5, 0.01]
    truth = [0.0] * 5
    for r in itertools.product((0, 1), repeat=4):
        truth[sum(r)] += math.prod(q if x else 1 - q for q, x in zip(p, r, strict=True))
    close(poisson_binomial(torch.tensor(p)), truth)
    close(poisson_binomial(torch.zeros(2, 0)), torch.ones(2, 1))


# ---- scores ----


@pytest.fixture(scope="module")
def oracle_scores():
    """(pi, success, s) by (task, k, target), from the oracle's own graph."""
    found = {}

    def get(task, w, k, T):
        if (task, k, T) not in found:
            pi = torch.tensor(oracles.probabilities(w, task, T))
            win = torch.tensor([oracles.success(task, T, y) for y in oracles.completions(task)])
            found[task, k, T] = pi, win, exact_oracles.scores(w, task, T)
        return found[task, k, T]

    return get


@pytest.mark.parametrize("subtree", [1, 2, 1000])
def test_second_moments_of_scores_by_every_completion(task, subtree, monkeypatch, oracle_scores):
    monkeypatch.setattr("pgprog.exact.scores.SUBTREE", subtree)
    policy = make(task)
    done = []
    found = score_moments(policy, every_target(task), done.append)
    assert done == list(range(1, task.max_target + 2))
    for k in range(2):
        w = oracles.weights(policy, k)
        for T in range(task.max_target + 1):
            pi, win, s = oracle_scores(task, w, k, T)
            close(found.second[k, T], pi @ s.square().sum(1), rtol=1e-11)
            close(found.second_success[k, T], (pi * win) @ s.square().sum(1), rtol=1e-11)
            close(found.gradient[k, T], pi[win] @ s[win], rtol=1e-10)


def test_many_rows_per_node_take_the_same_way_back():
    """A tree with more than 32 tokens below a node goes up by one matrix per node; against all completions."""
    task = DigitSum(seq_len=3, digits=6)
    policy, target = make(task, [1], hidden=3), torch.tensor([7])
    levels = prefix_levels(task, target, prune=False)
    tree = walk(policy, 0, target, levels)
    nodes, tokens = (x.flatten() for x in torch.meshgrid(torch.arange(36), torch.arange(6), indexing="ij"))
    pi = tree.probability[2][nodes] * tree.pi[2][nodes, tokens]
    close(score_moments(policy, target).second[0, 0], pi @ squared_norms(tree, levels, 2, nodes, tokens), rtol=1e-12)


def test_weighted_norms_by_each_completions_own_gradient(task):
    """|sum_t A_t grad log pi(a_t | s_t)|^2 with a generic A per token."""
    policy, target = make(task, [4]), torch.tensor([1])
    levels = prefix_levels(task, target, prune=False)
    tree, t, w = walk(policy, 0, target, levels), task.seq_len - 1, oracles.weights(policy)
    rows = [y for y in oracles.completions(task) if oracles.length(task, y) == task.seq_len and task.digits not in y]
    nodes = torch.tensor([sum(d * task.digits ** (t - 1 - i) for i, d in enumerate(y[:-1])) for y in rows])
    A = torch.randn(len(rows), task.seq_len, generator=torch.Generator().manual_seed(0))
    found = squared_norms(tree, levels, t, nodes, torch.tensor([y[-1] for y in rows]), A)
    for n, y in enumerate(rows):
        logprobs = oracles.score(w, task, 1, y)[0]
        g = oracles.gradient(sum(a * log for a, log in zip(A[n], logprobs, strict=True)), w)
        close(found[n], g.square().sum(), rtol=1e-11)


# ---- moments of an estimator, by every group ----


def brute_group(pi, win, s, G, advantage):
    """h of every group of one prompt."""
    for group, chance in exact_oracles.groups(pi.tolist(), G):
        A = advantage([float(win[i]) for i in group])
        yield chance, sum(a * s[i] for a, i in zip(A, group, strict=True)) / G


ADVANTAGES = {
    "rloo": (leave_one_out, oracles.leave_one_out),
    "grpo": (grpo, oracles.z_score),
    "mean": (batch_mean, oracles.centred),
    "odd": (
        table_of(lambda r: [x * (1 + sum(r) ** 2) - 0.7 for x in r]),
        lambda r: [x * (1 + sum(r) ** 2) - 0.7 for x in r],
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("G", [2, 3])
def test_moments_of_one_group_by_every_group(task, name, G, oracle_scores):
    ours, plain = ADVANTAGES[name]
    policy = make(task)
    table = group_advantage(ours, G)
    found = group_moments(table, score_moments(policy, every_target(task)))
    for k, T in itertools.product(range(2), range(task.max_target + 1)):
        pi, win, s = oracle_scores(task, oracles.weights(policy, k), k, T)
        mean, covariance = exact_oracles.moments(brute_group(pi, win, s, G, plain))
        close(found.mean[k, T], mean, rtol=1e-10, atol=1e-13)
        close(found.second[k, T], covariance.trace() + mean @ mean, rtol=1e-10)
        ours_mean, ours_covariance = group_covariance(table, pi, win.double(), s)
        close(ours_mean, mean, rtol=1e-10, atol=1e-13)
        close(ours_covariance, covariance, rtol=1e-9, atol=1e-12)
        squares = [
            (c, sum(a * a for a in plain([float(win[i]) for i in g])) / G)
            for g, c in exact_oracles.groups(pi.tolist(), G)
        ]
        close(found.squared_advantage[k, T], sum(c * x for c, x in squares), rtol=1e-11)


def test_random_and_fixed_prompts_by_every_batch(oracle_scores):
    """Two groups of two: every pair of targets, every pair of groups."""
    task = TASKS[0]
    policy = make(task, [3])
    w, draw = oracles.weights(policy), torch.tensor([0.2, 0.5, 0.3])
    groups = group_moments(group_advantage(grpo, 2), score_moments(policy, every_target(task)))
    one = {T: list(brute_group(*oracle_scores(task, w, 0, T), 2, oracles.z_score)) for T in range(3)}

    def batches(a, b, weight):
        return [(weight * p * q, (g + h) / 2) for p, g in one[a] for q, h in one[b]]

    everything = [x for a in range(3) for b in range(3) for x in batches(a, b, float(draw[a] * draw[b]))]
    for found, truth in (
        (random_prompts(groups, draw, 2), everything),
        (fixed_prompts(groups, torch.tensor([2, 1])), batches(2, 1, 1.0)),
        (fixed_prompts(groups, torch.tensor([1, 1])), batches(1, 1, 1.0)),
    ):
        mean, covariance = exact_oracles.moments(truth)
        close(found.mean[0], mean, rtol=1e-10, atol=1e-13)
        close(found.trace[0], covariance.trace(), rtol=1e-10)
        close(found.second[0], covariance.trace() + mean @ mean, rtol=1e-10)
        close(found.error[0], 0.0)


def brute_batch(parts, advantage):
    """g of every batch with one completion for each (pi, win, s)."""
    N = len(parts)
    for ys in itertools.product(*(range(len(pi)) for pi, _, _ in parts)):
        A = advantage([float(win[y]) for y, (_, win, _) in zip(ys, parts, strict=True)])
        chance = math.prod(float(pi[y]) for y, (pi, _, _) in zip(ys, parts, strict=True))
        yield chance, sum(a * s[y] for a, y, (_, _, s) in zip(A, ys, parts, strict=True)) / N


@pytest.mark.parametrize("name", ["mean", "grpo", "odd"])
def test_a_statistic_of_a_batch_of_different_prompts_by_every_batch(name, oracle_scores):
    task = TASKS[0]
    policy, (ours, plain) = make(task, [3]), ADVANTAGES[name]
    w = oracles.weights(policy)
    scores = score_moments(policy, every_target(task))
    parts = [oracle_scores(task, w, 0, T) for T in range(3)]
    for chosen in ([0, 1, 2], [1, 1, 2], [2, 1]):
        one = ScoreMoments(*(part[0] for part in scores))
        found = fixed_prompts_of_one_batch(group_advantage(ours, len(chosen)), one, torch.tensor(chosen))
        mean, covariance = exact_oracles.moments(brute_batch([parts[T] for T in chosen], plain))
        close(found.mean, mean, rtol=1e-10, atol=1e-13)
        close(found.trace, covariance.trace(), rtol=1e-10)
    # Random prompts: every list of targets, with its probability.
    draw = torch.tensor([0.2, 0.5, 0.3])
    found = random_prompts(group_moments(group_advantage(ours, 3), pooled(scores, draw)), torch.ones(1), 1)
    truth = [
        (float(draw[list(ts)].prod()) * p, g)
        for ts in itertools.product(range(3), repeat=3)
        for p, g in brute_batch([parts[T] for T in ts], plain)
    ]
    mean, covariance = exact_oracles.moments(truth)
    close(found.mean[0], mean, rtol=1e-10, atol=1e-13)
    close(found.trace[0], covariance.trace(), rtol=1e-10)


def test_a_table_by_prompt_is_a_baseline_that_knows_the_prompt(oracle_scores):
    """A = r - V(T) with a wrong V: unbiased, and its variance by every completion."""
    task = TASKS[1]
    policy, V = make(task, [3]), torch.tensor([0.4, -0.3, 0.9])
    scores = score_moments(policy, every_target(task))
    table = GroupAdvantage((1 - V).unsqueeze(1), -V.unsqueeze(1))
    found = group_moments(table, scores)
    close(found.mean, success_gradients(policy, every_target(task)).gradient, rtol=1e-11)
    for T in range(3):
        pi, win, s = oracle_scores(task, oracles.weights(policy), 0, T)
        close(found.second[0, T], pi @ ((win.double() - V[T]).square() * s.square().sum(1)), rtol=1e-11)


def test_sampled_rewards_agree_with_the_exact_moments():
    """z = 5; 20,000 batches, and twelve times 5,000 for what comes without an error of its own."""
    task = TASKS[1]
    scores = score_moments(make(task, [3]), every_target(task))
    draw, one = torch.tensor([0.2, 0.5, 0.3]), ScoreMoments(*(part[0] for part in scores))
    exact = random_prompts(group_moments(group_advantage(grpo, 4), scores), draw, 3)
    found = sampled_rewards(lambda r, targets: grpo(r), one, draw, prompts=3, group_size=4)
    assert abs(found.second - exact.second[0]) < 5 * found.error
    assert abs(found.trace - exact.trace[0]) < 5 * found.error
    assert 0 < found.error < 0.02 * found.second
    runs = [sampled_rewards(lambda r, targets: grpo(r), one, draw, 3, 4, 5_000, seed) for seed in range(1, 13)]
    for name in ("weight", "squared_advantage"):
        each = torch.stack([getattr(run, name) for run in runs])
        error = each.std(0) / len(runs) ** 0.5
        assert (error > 0).all()
        assert ((each.mean(0) - getattr(exact, name)[0]).abs() < 5 * error).all(), name


def test_moments_agree_with_samples_of_the_policy():
    """200,000 groups drawn from the enumerated distribution; each coordinate of the mean, and E|h|^2, at z = 5."""
    task = TASKS[1]
    policy, T, G, n = make(task, [3], hidden=3), 1, 3, 200_000
    found = completions(policy, every_target(task))
    s = torch.stack([flat_grad(x, policy) for x in found.logprobs[0, T]])
    win = task.success(torch.tensor([T]), found.tokens.unsqueeze(0))[0]
    y = torch.multinomial(found.logprobs[0, T].exp().detach(), n * G, True, generator=torch.Generator().manual_seed(0))
    h = (grpo(win[y].double().view(n, G)).unsqueeze(-1) * s[y].view(n, G, -1)).mean(1)
    exact = group_moments(group_advantage(grpo, G), score_moments(policy, every_target(task)))
    assert ((h.mean(0) - exact.mean[0, T]).abs() <= 5 * h.std(0) / n**0.5 + 1e-15).all()
    squares = h.square().sum(1)
    assert abs(squares.mean() - exact.second[0, T]) < 5 * squares.std() / n**0.5


def flat_grad(value, policy):
    grads = torch.autograd.grad(value, list(policy.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])
