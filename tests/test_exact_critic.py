"""GAE and critics: by hand, by limits, and bias and variance by every completion."""

import itertools

import pytest
import torch

import exact_oracles
import oracles
from oracles import close
from pgprog.algorithms.advantages import gae
from pgprog.env import DigitSum
from pgprog.exact.critic import critic_point, trajectories
from pgprog.exact.enumeration import every_target
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy

TASKS = [
    DigitSum(seq_len=2, digits=2, variable_length=True, reward_form="halfway"),
    DigitSum(seq_len=2, digits=3, targets="sum"),
    DigitSum(seq_len=2, digits=2, variable_length=True, prompt_form="tokens", reward_form="potential"),
]


def test_gae_by_hand():
    """delta = 1 + 0.5 * 3 - 2, 0 + 0.5 * 5 - 3, 4 - 5; A backwards with 0.5 * 0.4."""
    A = gae(torch.tensor([1.0, 0.0, 4.0]), torch.tensor([2.0, 3.0, 5.0]), torch.ones(3, dtype=torch.bool), 0.5, 0.4)
    close(A, [0.5 + 0.2 * (-0.5 + 0.2 * -1), -0.5 + 0.2 * -1, -1.0])


def test_gae_stops_at_the_end_of_a_completion_whatever_stands_after_it():
    mask = torch.tensor([True, True, False])
    A = gae(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([0.5, 0.25, 9.0]), mask, 0.9, 0.8)
    close(A, [1 + 0.9 * 0.25 - 0.5 + 0.72 * 1.75, 1.75, 0])


@pytest.mark.parametrize("task", TASKS, ids=["halfway", "fixed", "potential"])
@pytest.mark.parametrize(
    ("baseline", "gamma", "lam", "error"),
    [("prefix", 1.0, 0.0, 0.3), ("prefix", 0.9, 0.7, -0.2), ("prompt", 1.0, 1.0, 0.4), ("prefix", 1.0, 1.0, 0.4)],
)
def test_bias_and_variance_by_every_completion(task, baseline, gamma, lam, error):
    policy = Policy(task, ReplicaGenerator([1, 6], "init"), hidden=2, dtype=torch.float64)
    targets, k = every_target(task), 1
    found = critic_point(policy, trajectories(policy, targets, k), targets, baseline, gamma, lam, error, k)
    w, pairs, J = oracles.weights(policy, k), [], 0.0
    draw = draw_of(task)
    for T in targets.tolist():
        J = J + draw[T] * oracles.expected_reward(w, task, T)
        for y in oracles.completions(task):
            logprobs = oracles.score(w, task, T, y)[0]
            A = advantages(w, task, T, y, len(logprobs), baseline, gamma, lam, error)
            g = oracles.gradient(sum(a * log for a, log in zip(A, logprobs, strict=True)), w)
            pairs.append((draw[T] * sum(logprobs).exp().item(), g))
    truth = oracles.gradient(J, w)
    mean, covariance = exact_oracles.moments(pairs)
    assert found.bias == pytest.approx((mean - truth).norm().item(), rel=1e-9, abs=1e-13)
    assert found.relative_bias == pytest.approx(((mean - truth).norm() / truth.norm()).item(), rel=1e-9, abs=1e-12)
    assert found.trace == pytest.approx(covariance.trace().item(), rel=1e-9)


def draw_of(task):
    n = oracles.largest_target(task) + 1
    if task.targets == "uniform":
        return [1 / n] * n
    sums = [sum(s) for s in itertools.product(range(task.digits), repeat=task.seq_len)]
    return [sums.count(T) / len(sums) for T in range(n)]


def advantages(w, task, T, y, length, baseline, gamma, lam, error):
    """A of each token, as a double sum; V is off by +error, or -error after an odd digit."""
    r = oracles.token_rewards(task, T, y)[:length]
    V = []
    for t in range(length):
        off = -error if t > 0 and y[t - 1] % 2 else error
        V.append(exact_oracles.value_of(w, task, T, y[:t], 1.0) + off)
    if baseline == "prompt":
        return [sum(gamma**t * x for t, x in enumerate(r)) - V[0]] * length
    delta = [r[t] + gamma * (V[t + 1] if t + 1 < length else 0.0) - V[t] for t in range(length)]
    return [sum((gamma * lam) ** (i - t) * delta[i] for i in range(t, length)) for t in range(length)]


def test_what_is_known_of_critics():
    """An exact V leaves no bias at any lambda, a wrong one none at lambda = 1 or as a baseline; lambda 0 is worst."""
    task = DigitSum(seq_len=2, digits=3)
    policy = Policy(task, ReplicaGenerator([2], "init"), hidden=3, dtype=torch.float64)
    targets = every_target(task)
    paths = trajectories(policy, targets)

    def point(*choice):
        return critic_point(policy, paths, targets, *choice)

    for lam, error, baseline in (
        (0.0, 0.0, "prefix"),
        (0.6, 0.0, "prefix"),
        (1.0, 0.7, "prefix"),
        (1.0, 0.7, "prompt"),
    ):
        assert point(baseline, 1.0, lam, error).relative_bias < 1e-12
    biases = [point("prefix", 1.0, lam, 0.3).bias for lam in (0.0, 0.5, 0.9, 1.0)]
    assert biases == sorted(biases, reverse=True) and biases[0] > 0.01
    td, monte_carlo = (point("prefix", 1.0, lam, 0.0).trace for lam in (0.0, 1.0))
    prompt = point("prompt", 1.0, 1.0, 0.0).trace
    assert td < monte_carlo < prompt < point("prompt", 1.0, 1.0, 0.5).trace
