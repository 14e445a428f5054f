"""The black box against plain loops, and the rungs' own train steps, enumerated, against the moments by counting."""

import math

import pytest
import torch

import exact_oracles
import oracles
from oracles import close
from pgprog.algorithms.advantages import leave_one_out
from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.blackbox import black_box_moments, first_gradient, one_at_a_time, replicated, weighted_scores
from pgprog.exact.enumeration import completions, every_target
from pgprog.exact.moments import fixed_prompts, fixed_prompts_of_one_batch, group_moments
from pgprog.exact.scores import ScoreMoments, score_moments
from pgprog.exact.weight import group_advantage
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy

TASK = DigitSum(seq_len=1, digits=3, variable_length=True)
LONG = DigitSum(seq_len=2, digits=2, variable_length=True, reward_form="halfway")


def make(task, seeds=(3, 9), hidden=2):
    return Policy(task, ReplicaGenerator(list(seeds), "init"), hidden=hidden, dtype=torch.float64)


def bandit(theta, rewards):
    pi = torch.tensor(theta).softmax(0)
    return pi, torch.eye(len(theta)) - pi, torch.tensor(rewards)


def test_any_rewards_by_every_group():
    pi, s, rewards = bandit([0.3, -1.0, 0.2], [0.95, -2.0, 0.1])
    found = black_box_moments(weighted_scores(leave_one_out, rewards, s), pi.expand(3, -1))
    truth = [
        (p, sum(a * s[i] for a, i in zip(oracles.leave_one_out([float(rewards[i]) for i in g]), g, strict=True)) / 3)
        for g, p in exact_oracles.groups(pi.tolist(), 3)
    ]
    mean, covariance = exact_oracles.moments(truth)
    close(found.mean, mean)
    close(found.covariance, covariance)
    close(found.trace, covariance.trace())
    close(found.second, covariance.trace() + mean @ mean)
    close(found.mean, pi * (rewards - pi @ rewards), rtol=1e-11)  # unbiased, whatever the rewards


def test_a_function_of_one_batch_and_slots_of_unequal_probability(monkeypatch):
    monkeypatch.setattr("pgprog.exact.blackbox.BATCHES_AT_ONCE", 4)
    pi = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]])
    found = black_box_moments(one_at_a_time(lambda y: torch.stack([y[0] * 10.0 + y[1], y[0] - 1e6])), pi)
    values = [(pi[0, a] * pi[1, b], torch.tensor([10.0 * a + b, a - 1e6])) for a in range(3) for b in range(3)]
    mean = sum(p * v for p, v in values)
    close(found.mean, mean)
    close(found.covariance, sum(p * torch.outer(v - mean, v - mean) for p, v in values), rtol=1e-9)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda y: y[:, :1].double()[:-1],
            r"mine returned shape \(\d+, 1\): a detached, finite .* \(4, D\) was",
        ),
        (lambda y: y * math.inf, "mine returned NaN or infinity"),
        (lambda y: y * torch.ones(1, requires_grad=True), "mine returned a tensor with a live gradient"),
        (lambda y: 0.0, "mine returned float"),
        (lambda y: y @ y, r"mine raised RuntimeError: .* on outcomes of shape \(4, 2\)|mine raised"),
    ],
)
def test_a_wrong_estimator_is_named(function, said):
    with oracles.as_users_run_it(), pytest.raises(UsageError, match=said):
        black_box_moments(function, torch.full((2, 2), 0.5), "mine")


def test_too_many_batches_are_refused_before_they_are_tried():
    with pytest.raises(UsageError, match="10 outcomes in 7 slots make 10,000,000 batches, over the limit"):
        black_box_moments(lambda y: pytest.fail("was tried"), torch.full((7, 10), 0.1))


def test_sizes_that_change_are_refused(monkeypatch):
    monkeypatch.setattr("pgprog.exact.blackbox.BATCHES_AT_ONCE", 4)
    sizes = iter([2, 3])
    with pytest.raises(UsageError, match="gradients of 3 and of 2 numbers"):
        black_box_moments(lambda y: torch.zeros(len(y), next(sizes)), torch.full((3, 2), 0.5))


# ---- the rungs ----


def slots(policy, targets, group_size, k=0):
    found = completions(policy, every_target(policy.task))
    return found.tokens, found.logprobs[k, targets].exp().detach().repeat_interleave(group_size, 0)


@pytest.mark.parametrize(("algo", "G"), [("rloo", 2), ("grpo", 2), ("reinforce", 1)])
@pytest.mark.parametrize("replica", [0, 1])
def test_the_train_step_of_a_rung_has_the_moments_that_counting_gives(algo, G, replica):
    from pgprog.algorithms.advantages import batch_mean, group_z_score

    policy, targets = make(TASK), torch.tensor([2, 0])
    tokens, pi = slots(policy, targets, G, replica)
    found = black_box_moments(first_gradient(TRAIN_STEPS[algo], policy, targets, G, tokens, replica=replica), pi)
    scores = ScoreMoments(*(part[replica] for part in score_moments(policy, every_target(TASK))))
    if algo == "reinforce":
        counted = fixed_prompts_of_one_batch(group_advantage(batch_mean, 2), scores, targets)
    else:
        advantage = leave_one_out if algo == "rloo" else group_z_score
        counted = fixed_prompts(group_moments(group_advantage(advantage, G), scores), targets)
    close(found.mean, counted.mean, rtol=1e-9, atol=1e-13)
    close(found.trace, counted.trace, rtol=1e-9)
    close(found.second, counted.second, rtol=1e-9)


def brute(policy, targets, advantage):
    """g of every batch with one completion per prompt, from rewards (any) by the oracle."""
    w, task = oracles.weights(policy), policy.task
    ys = oracles.completions(task)
    rewards = {T: [oracles.reward(task, T, y) for y in ys] for T in targets}
    parts = [(oracles.probabilities(w, task, T), rewards[T], exact_oracles.scores(w, task, T)) for T in targets]
    Y = len(parts[0][0])
    for a in range(Y):
        for b in range(Y):
            ys = (a, b)
            A = advantage([r[y] for y, (_, r, _) in zip(ys, parts, strict=True)])
            chance = math.prod(pi[y] for y, (pi, _, _) in zip(ys, parts, strict=True))
            yield chance, sum(x * s[y] for x, y, (_, _, s) in zip(A, ys, parts, strict=True)) / 2


@pytest.mark.parametrize("algo", ["actor_critic", "ppo", "reinforce"])
def test_rungs_with_a_critic_and_process_rewards_by_every_batch(algo):
    """PPO in its first epoch; rewards 0, 0.3, 1, 1.3."""
    policy, targets = make(LONG, [3]), [2, 1]
    critic = Critic(LONG, ReplicaGenerator([5], "critic"), hidden=3, dtype=torch.float64)
    V = [oracles.value(oracles.weights(critic), LONG, T).item() for T in targets]
    with_critic = {} if algo == "reinforce" else {"critic": critic}
    with_critic |= {"epochs": 1} if algo == "ppo" else {}
    advantages = {
        "reinforce": oracles.centred,
        "actor_critic": lambda r: [x - v for x, v in zip(r, V, strict=True)],
        "ppo": lambda r: oracles.z_score([x - v for x, v in zip(r, V, strict=True)], eps=1e-8),
    }
    tokens, pi = slots(policy, torch.tensor(targets), 1)
    estimator = first_gradient(TRAIN_STEPS[algo], policy, torch.tensor(targets), 1, tokens, **with_critic)
    found = black_box_moments(estimator, pi)
    mean, covariance = exact_oracles.moments(brute(policy, targets, advantages[algo]))
    close(found.mean, mean, rtol=1e-9, atol=1e-12)
    close(found.covariance, covariance, rtol=1e-9, atol=1e-12)


def test_replicas_are_copies_of_one():
    policy = make(TASK)
    clone = replicated(policy, 1, 3)
    assert clone.replicas == 3 and policy.replicas == 2
    for a, b in zip(clone.parameters(), policy.parameters(), strict=True):
        close(a, b[1:].expand_as(a), rtol=0, atol=0)
