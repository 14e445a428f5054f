"""Enumeration against plain loops over completions: p, J, their gradients, V, Q, A, entropy, KL."""

import itertools

import pytest
import torch

import exact_oracles
import oracles
from oracles import close
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.enumeration import (
    completions,
    count_prefixes,
    every_target,
    prefix_levels,
    refuse_what_is_too_large,
    success_gradients,
    success_probabilities,
)
from pgprog.exact.values import entropy, expected_return, kl, objective_gradient, prefix_values
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

TASKS = [
    DigitSum(seq_len=2, digits=3),
    DigitSum(seq_len=3, digits=2, prompt_form="tokens", targets="sum"),
    DigitSum(seq_len=2, digits=3, variable_length=True, reward_form="halfway", targets="sum"),
    DigitSum(seq_len=3, digits=2, variable_length=True, prompt_form="tokens"),
    DigitSum(seq_len=2, digits=2, variable_length=True, reward_form="potential"),
    DigitSum(seq_len=1, digits=3, reward_form="halfway"),
]
SEEDS = [3, 9]


def make(task, seeds=SEEDS, hidden=3):
    return Policy(task, ReplicaGenerator(seeds, "init"), hidden=hidden, dtype=torch.float64)


@pytest.fixture(
    params=TASKS, ids=lambda t: f"{t.seq_len}x{t.digits}{'v' * t.variable_length}-{t.prompt_form}-{t.reward_form}"
)
def task(request):
    return request.param


def replicas(policy):
    return [oracles.weights(policy, k) for k in range(policy.replicas)]


def test_every_completion_and_its_probability(task):
    policy, targets = make(task), every_target(task)
    found = completions(policy, targets)
    rows = [tuple(row) for row in found.tokens.tolist()]
    assert sorted(rows) == sorted(oracles.completions(task)) and len(set(rows)) == len(rows)
    close(found.logprobs.exp().sum(-1), torch.ones(len(SEEDS), len(targets)))
    assert found.mask.sum(-1).tolist() == [oracles.length(task, row) for row in rows]
    for k, w in enumerate(replicas(policy)):
        for target in targets.tolist():
            expected = [oracles.log_pi(w, task, target, row).item() for row in rows]
            close(found.logprobs[k, target], expected)


def test_success_probabilities_and_their_gradients(task):
    """The gradient from the oracle's own graph; the oracle's gradients are held against finite differences."""
    policy, targets = make(task), every_target(task)
    p, gradients = success_gradients(policy, targets)
    for k, w in enumerate(replicas(policy)):
        for target in targets.tolist():
            truth = oracles.success_probability(w, task, target)
            close(p[k, target], truth)
            close(gradients[k, target], oracles.gradient(truth, w), rtol=1e-10)


def test_objective_and_its_gradient_over_the_drawn_targets(task):
    policy = make(task)
    J, gradient = objective_gradient(policy)
    weights = draw_weights(task)
    for k, w in enumerate(replicas(policy)):
        truth = sum(c * oracles.expected_reward(w, task, T) for T, c in enumerate(weights))
        close(J[k], truth)
        close(gradient[k], oracles.gradient(truth, w), rtol=1e-10)


def draw_weights(task):
    """By counting digit strings."""
    n = oracles.largest_target(task) + 1
    if task.targets == "uniform":
        return [1 / n] * n
    sums = [sum(s) for s in itertools.product(range(task.digits), repeat=task.seq_len)]
    return [sums.count(T) / len(sums) for T in range(n)]


def test_gradient_equals_central_differences():
    """At h = 1e-5 the truncation is about 1e-10 of the third derivative, the rounding 1e-11."""
    task = DigitSum(seq_len=3, digits=3, variable_length=True)
    policy = make(task, seeds=[4])
    gradient = objective_gradient(policy).gradient[0]
    place, h = 0, 1e-5
    for parameter in policy.parameters():
        flat = parameter.data.view(-1)
        for i in range(0, flat.numel(), 5):
            start = flat[i].item()
            values = []
            for step in (h, -h):
                flat[i] = start + step
                values.append(objective_gradient(policy).value.item())
            flat[i] = start
            assert gradient[place + i].item() == pytest.approx((values[0] - values[1]) / (2 * h), abs=1e-9)
        place += flat.numel()


def test_success_is_the_return_where_only_the_outcome_pays():
    for task in (DigitSum(seq_len=3, digits=3), DigitSum(seq_len=3, digits=3, variable_length=True)):
        policy, targets = make(task), every_target(task)
        close(expected_return(policy, targets), success_probabilities(policy, targets))
        close(objective_gradient(policy).value, success_probabilities(policy, targets) @ task.target_weights())


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_values_are_means_of_the_return_over_all_that_may_follow(task, gamma):
    policy, targets = make(task, seeds=[3]), every_target(task)
    w = oracles.weights(policy)
    for t, level in enumerate(prefix_values(policy, targets, gamma)):
        prefixes = list(itertools.product(range(task.digits), repeat=t))
        for T in targets.tolist():
            for n, prefix in enumerate(prefixes):
                close(level.logprob[0, T, n], torch.as_tensor(exact_oracles.prefix_logprob(w, task, T, prefix)))
                V = exact_oracles.value_of(w, task, T, prefix, gamma)
                close(level.V[0, T, n], V)
                for a in range(oracles.tokens_to_choose_from(task)):
                    if a == task.digits or t == task.seq_len - 1:
                        end = (*prefix, a) + (task.digits,) * (task.seq_len - t - 1)
                        Q = exact_oracles.discounted_return(task, T, end, t, gamma)
                    else:
                        example = exact_oracles.starts(task, (*prefix, a))[0]
                        r = oracles.token_rewards(task, T, example)[t]
                        Q = r + gamma * exact_oracles.value_of(w, task, T, (*prefix, a), gamma)
                    close(level.Q[0, T, n, a], Q)
                    close(level.A[0, T, n, a], Q - V, atol=1e-13)


def test_values_obey_the_bellman_equations(task):
    levels = prefix_values(make(task), every_target(task), 0.9)
    for level, after in zip(levels, [*levels[1:], None], strict=True):
        pi = level.log_pi.exp()
        close((pi * level.A).sum(-1), torch.zeros_like(level.V), atol=1e-15)
        close((pi * level.Q).sum(-1), level.V)
        follows = torch.zeros_like(level.Q)
        if after is not None:
            follows[..., : task.digits] = after.V.detach().unflatten(2, (-1, task.digits))
        close(level.Q, level.rewards.expand_as(level.Q) + 0.9 * follows)


def test_the_policy_gradient_theorem_holds_at_every_prefix(task):
    """grad J = E[sum_t A(s_t, a_t) grad log pi(a_t | s_t)]: one gradient through V, one through log pi alone."""
    policy, targets = make(task), every_target(task)
    levels = prefix_values(policy, targets)
    parameters = list(policy.parameters())
    direct = torch.autograd.grad(levels[0].V.sum(), parameters, retain_graph=True)
    weight = [(x.logprob.unsqueeze(-1) + x.log_pi).exp().detach() * x.A.detach() for x in levels]
    surrogate = sum((c * x.log_pi).sum() for c, x in zip(weight, levels, strict=True))
    for a, b in zip(torch.autograd.grad(surrogate, parameters), direct, strict=True):
        close(a, b, rtol=1e-10, atol=1e-13)


def test_entropy_of_completions(task):
    policy, targets = make(task), every_target(task)
    found = entropy(policy, targets)
    close(found.per_token.sum(-1), found.whole)
    for k, w in enumerate(replicas(policy)):
        for T in targets.tolist():
            close(found.whole[k, T], exact_oracles.entropy_of(w, task, T))
            rows = [
                (oracles.log_pi(w, task, T, y).exp(), oracles.score(w, task, T, y)[1])
                for y in oracles.completions(task)
            ]
            for t in range(task.seq_len):
                close(found.per_token[k, T, t], sum(p * H[t] for p, H in rows if t < len(H)))


def test_kl_of_completions_and_its_gradients():
    for task in TASKS[2:3] + TASKS[4:]:
        policy, other, targets = make(task), make(task, [8, 2]), every_target(task)
        found = kl(policy, other, targets)
        close(found.per_token.sum(-1), found.whole)
        own = torch.autograd.grad(found.whole.sum(), list(policy.parameters()), retain_graph=True)
        others = torch.autograd.grad(found.whole.sum(), list(other.parameters()))
        for k, (w, v) in enumerate(zip(replicas(policy), replicas(other), strict=True)):
            truths = [exact_oracles.kl_of(w, v, task, T) for T in targets.tolist()]
            close(found.whole[k], torch.stack(truths), rtol=1e-11)
            for grads, leaves in ((own, w), (others, v)):
                truth = torch.autograd.grad(sum(truths), list(leaves.values()), retain_graph=True)
                close(flat(g[k] for g in grads), flat(truth), rtol=1e-9, atol=1e-12)


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def test_kl_between_policies_of_different_tasks_is_refused():
    a, b = make(TASKS[0]), make(DigitSum(seq_len=3, digits=3))
    with pytest.raises(ValueError, match="both must be the same"):
        kl(a, b, torch.tensor([1]))
    with pytest.raises(ValueError, match="2 and 1 replicas"):
        kl(a, make(TASKS[0], [1]), torch.tensor([1]))


@pytest.mark.parametrize("prune", [True, False])
def test_prefixes_are_counted_before_they_are_made(prune):
    for task in (*TASKS, DigitSum(seq_len=4, digits=4)):
        built = sum(len(level.token) for level in prefix_levels(task, every_target(task), prune))
        assert count_prefixes(task, range(task.max_target + 1), prune) == built


def test_pruning_leaves_out_what_cannot_succeed_and_nothing_else():
    task = DigitSum(seq_len=3, digits=3, variable_length=True)
    levels = prefix_levels(task, every_target(task), prune=True)
    kept = {(T, p) for T in range(7) for t in range(3) for p in prefixes_of(levels, t, T)}
    truth = {
        (T, tuple(y[:t]))
        for T in range(7)
        for y in oracles.completions(task)
        for t in range(min(3, len(oracles.content(task, y)) + 1))
        if oracles.success(task, T, y)
    }
    assert kept == truth
    # 46 + 370 + 2,800 + 19,000 + 100,000: digits^t (9 (5 - t) + 1) of level t.
    assert count_prefixes(DigitSum(), range(46), True) == 122_216
    assert count_prefixes(DigitSum(), range(46), False) == 46 * 11_111


def prefixes_of(levels, t, target):
    for n in (levels[t].prompt == target).nonzero()[:, 0].tolist():
        prefix = []
        for level in reversed(levels[1 : t + 1]):
            prefix.insert(0, int(level.token[n]))
            n = int(level.parent[n])
        yield tuple(prefix)


@pytest.mark.parametrize("call", [success_probabilities, success_gradients, prefix_values, completions, entropy])
def test_what_is_too_large_is_refused_before_it_is_tried(call, monkeypatch):
    """At a small size under a smaller limit: a guard that is gone must not fill the machine's memory."""
    policy = make(DigitSum(seq_len=3, digits=3))
    call(policy, torch.tensor([4]))
    monkeypatch.setattr("pgprog.exact.enumeration.MEMORY_LIMIT", 10_000)
    with pytest.raises(
        UsageError, match=r"seq_len 3, 3 digits, needs \d+ prefixes x 2 replicas x 3 hidden units at once"
    ):
        call(policy, torch.tensor([4]))


def test_a_refusal_names_the_size_and_the_memory():
    refuse_what_is_too_large(make(DigitSum(seq_len=5), hidden=64), [22], prune=False)
    said = r"needs 1,111,111 prefixes x 2 replicas x 64 hidden units at once, about 24\.1 GiB, over the limit of 2\.0"
    with pytest.raises(UsageError, match=said + " GiB: give a shorter --seq-len"):
        refuse_what_is_too_large(make(DigitSum(seq_len=7), hidden=64), [40], prune=False)
    with pytest.raises(UsageError, match=r"seq_len 200, 10 digits, needs [\d,]{15,} prefixes"):
        refuse_what_is_too_large(make(DigitSum(seq_len=200)), [900], prune=True)
    # 66,666 prefixes of (22 x 64 + 50) doubles are 0.72 GiB: one replica passes, three do not.
    task = DigitSum(seq_len=5)
    refuse_what_is_too_large(make(task, [1], hidden=64), list(range(6)), prune=False)
    with pytest.raises(UsageError, match="3 replicas"):
        refuse_what_is_too_large(make(task, [1, 2, 3], hidden=64), list(range(6)), prune=False)
    with pytest.raises(UsageError, match="prefixes"):
        refuse_what_is_too_large(make(task, [1], hidden=64), list(range(6)), prune=False, copies=3)
