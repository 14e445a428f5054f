"""The policy and the critic against an oracle that enumerates, and the sampler against both."""

import math

import pytest
import torch

import oracles
from oracles import close, same
from pgprog.env import DigitSum
from pgprog.noise import ReplicaGenerator
from pgprog.policy import (
    PROMPT_FAN_IN,
    PROMPT_WIDTH,
    UPDATE_GATE_BIAS,
    Critic,
    Policy,
    radial_basis,
    rollout,
    uniform_parameter,
)

TASKS = [
    DigitSum(seq_len=2, digits=3),
    DigitSum(seq_len=3, digits=2, prompt_form="tokens"),
    DigitSum(seq_len=2, digits=3, variable_length=True, reward_form="halfway"),
    DigitSum(seq_len=3, digits=2, variable_length=True, prompt_form="tokens"),
    DigitSum(seq_len=1, digits=4, variable_length=True, reward_form="potential"),
]
SEEDS = [5, 0, 8]


def make(task, seeds=SEEDS, hidden=4):
    return Policy(task, ReplicaGenerator(seeds, "init"), hidden=hidden, dtype=torch.float64)


def everything(task, K):
    """Every target of the task with every completion, for K replicas: (K, P) and (K, P, G, T)."""
    targets = torch.arange(oracles.largest_target(task) + 1)
    tokens = torch.tensor(oracles.completions(task))
    return targets.expand(K, -1).contiguous(), tokens.expand(K, len(targets), -1, -1).contiguous()


def short(task):
    return f"{task.seq_len}x{task.digits}{'-variable' * task.variable_length}-{task.prompt_form}"


@pytest.fixture(params=TASKS, ids=short)
def task(request):
    return request.param


# ---- score ----


def test_logprobs_and_entropies_of_every_completion_equal_the_oracle(task):
    """torch.nn.GRUCell with each replica's weights, one prompt and one completion at a time."""
    policy = make(task)
    targets, tokens = everything(task, len(SEEDS))
    logprobs, entropies = policy.score(targets, tokens)
    for k in range(len(SEEDS)):
        w = oracles.weights(policy, k)
        for target in targets[k].tolist():
            for i, completion in enumerate(oracles.completions(task)):
                expected_logprobs, expected_entropies = oracles.score(w, task, target, completion)
                n = len(expected_logprobs)
                close(logprobs[k, target, i, :n], torch.stack(expected_logprobs))
                close(entropies[k, target, i, :n], torch.stack(expected_entropies))
                assert (logprobs[k, target, i, n:] == 0).all() and (entropies[k, target, i, n:] == 0).all()


def test_replicas_differ(task):
    logprobs, _ = make(task).score(*everything(task, len(SEEDS)))
    assert (logprobs[0] - logprobs[1]).abs().max() > 1e-3 < (logprobs[1] - logprobs[2]).abs().max()


def test_probabilities_of_all_completions_sum_to_one(task):
    policy = make(task)
    logprobs, _ = policy.score(*everything(task, len(SEEDS)))
    totals = logprobs.sum(-1).exp().sum(-1)
    close(totals, torch.ones_like(totals))


def test_entropy_of_the_policy_equals_minus_the_mean_of_its_log_probability(task):
    """H of the whole completion, - sum pi log pi by enumeration, equals E[sum_t H_t] (chain rule)."""
    logprobs, entropies = make(task).score(*everything(task, len(SEEDS)))
    log_pi = logprobs.sum(-1)
    close((log_pi.exp() * entropies.sum(-1)).sum(-1), -(log_pi.exp() * log_pi).sum(-1))


def test_a_logprob_is_read_before_its_own_token_and_after_the_one_before():
    """Shift by one: position t depends on tokens < t, and at t the probabilities of all tokens sum to 1."""
    task = DigitSum(seq_len=3, digits=3)
    policy = make(task, [1])
    targets, tokens = everything(task, 1)
    # Axes: target, token 0, token 1, token 2, position.
    logprobs, entropies = (x.view(7, 3, 3, 3, 3) for x in policy.score(targets, tokens))
    # The log-probability at t is the same whatever comes after t; the entropy also whatever stands at t.
    close(logprobs[..., 0], logprobs[:, :, :1, :1, 0].expand(7, 3, 3, 3))
    close(logprobs[..., 1], logprobs[:, :, :, :1, 1].expand(7, 3, 3, 3))
    close(entropies[..., 0], entropies[:, :1, :1, :1, 0].expand(7, 3, 3, 3))
    close(entropies[..., 1], entropies[:, :, :1, :1, 1].expand(7, 3, 3, 3))
    close(entropies[..., 2], entropies[:, :, :, :1, 2].expand(7, 3, 3, 3))
    close(logprobs[:, :, 0, 0, 0].exp().sum(1), torch.ones(7))
    close(logprobs[:, :, :, 0, 1].exp().sum(2), torch.ones(7, 3))
    close(logprobs[..., 2].exp().sum(3), torch.ones(7, 3, 3))
    # ... and the token before does matter.
    assert (logprobs[:, 0, :, :, 1] - logprobs[:, 1, :, :, 1]).abs().min() > 1e-6
    assert (logprobs[:, :, 0, :, 2] - logprobs[:, :, 1, :, 2]).abs().min() > 1e-6


def test_what_stands_after_eos_does_not_reach_the_score():
    task = DigitSum(seq_len=3, digits=2, variable_length=True)
    policy = make(task, [1])
    targets = torch.tensor([[2, 3]])
    tokens = torch.tensor([[[[0, 2, 2], [2, 2, 2]], [[1, 2, 2], [2, 2, 2]]]])
    other = torch.tensor([[[[0, 2, 1], [2, 0, 1]], [[1, 2, 0], [2, 2, 0]]]])
    for a, b in zip(policy.score(targets, tokens), policy.score(targets, other), strict=True):
        same(a, b)


def test_gradient_of_the_score_equals_the_finite_difference(task):
    """Fourth order, h = 1e-3: truncation ~h^4 / 30 = 3e-14, rounding ~1e-13 of a function of order 1."""
    policy = make(task, [4, 6])
    targets, tokens = everything(task, 2)
    torch.manual_seed(0)
    a, b = torch.randn(2, *tokens.shape) / tokens[0].numel() ** 0.5

    def f():
        logprobs, entropies = policy.score(targets, tokens)
        return (a * logprobs + b * entropies).sum()

    parameters = list(policy.parameters())
    grads = torch.autograd.grad(f(), parameters)
    for p, g in zip(parameters, grads, strict=True):
        direction = torch.randn_like(p)
        direction /= direction.norm()
        start = p.detach().clone()

        def at(h, p=p, start=start, direction=direction):
            with torch.no_grad():
                p.copy_(start + h * direction)
                return f().item()

        h = 1e-3
        slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        at(0)
        assert slope == pytest.approx((g * direction).sum().item(), rel=1e-9, abs=1e-11)


def test_gradient_of_the_score_equals_the_oracle_for_every_replica(task):
    policy = make(task)
    targets, tokens = everything(task, len(SEEDS))
    logprobs, entropies = policy.score(targets, tokens)
    weight = torch.linspace(-1, 1, tokens.shape[2])
    (weight * (logprobs + 0.3 * entropies).sum(-1)).sum().backward()
    k = 1
    w, total = oracles.weights(policy, k), 0.0
    for target in targets[k].tolist():
        for a, completion in zip(weight.tolist(), oracles.completions(task), strict=True):
            expected_logprobs, expected_entropies = oracles.score(w, task, target, completion)
            total = total + a * (sum(expected_logprobs) + 0.3 * sum(expected_entropies))
    actual = torch.cat([p.grad[k].flatten() for p in policy.parameters()])
    close(actual, oracles.gradient(total, w), rtol=1e-11, atol=1e-13)  # sums of some hundred terms of order 1


# ---- sample ----


@pytest.mark.parametrize("step", [0, 1])
def test_each_token_inverts_the_cumulative_distribution_at_its_own_uniform_number(task, step):
    """The noise of (prompt, completion, token), drawn again, through the oracle's probabilities."""
    policy = make(task)
    P, G, T = 3, 7, task.seq_len
    targets = torch.tensor([[0, 1, 2], [2, 1, 3], [1, 1, 0]])
    tokens = policy.sample(targets, G, ReplicaGenerator([3, 1, 2], step=step))
    noise = ReplicaGenerator([3, 1, 2], step=step).uniform(P, G, T)
    assert tokens.shape == (3, P, G, T)
    with torch.no_grad():
        for k in range(3):
            w = oracles.weights(policy, k)
            for p in range(P):
                for g in range(G):
                    hidden, expected = oracles.first_state(w, task, int(targets[k, p])), []
                    for t in range(T):
                        if task.variable_length and task.digits in expected:
                            expected.append(task.digits)
                            continue
                        pi = oracles.next_token(w, hidden).exp().tolist()
                        u = noise[k, p, g, t].item()
                        token = next(v for v in range(len(pi)) if u < math.fsum(pi[: v + 1]) or v == len(pi) - 1)
                        expected.append(token)
                        hidden = oracles.read(w, token, hidden)
                    assert tokens[k, p, g].tolist() == expected


def test_sampled_frequencies_equal_the_enumerated_probabilities(task):
    """z = 5 for each completion of two prompts; n so that a shift of 0.01 is 5 standard errors at pi = 1/2."""
    n, z = 62500, 5
    policy = make(task, [2])
    targets = torch.tensor([[1, 3]])
    tokens = policy.sample(targets, n, ReplicaGenerator([0], "evaluate"))
    w = oracles.weights(policy)
    base = oracles.tokens_to_choose_from(task) ** torch.arange(task.seq_len)
    for p, target in enumerate(targets[0].tolist()):
        codes = (tokens[0, p] * base).sum(-1)
        total = 0
        for completion, pi in zip(oracles.completions(task), oracles.probabilities(w, task, target), strict=True):
            count = int((codes == (torch.tensor(completion) * base).sum()).sum())
            assert abs(count / n - pi) < z * (pi * (1 - pi) / n) ** 0.5
            total += count
        assert total == n  # nothing but completions, padded with EOS


class Given:
    """A generator whose draws are one number."""

    def __init__(self, number):
        self.number = number
        self.seeds = (0,)

    def uniform(self, *shape, dtype=torch.float64):
        return torch.full((1, *shape), self.number, dtype=dtype)


def test_the_ends_of_the_noise_give_tokens_of_positive_probability():
    """Noise 0 where token 0 has probability 0 (exp underflows), and the largest number below 1 where the last has."""
    task = DigitSum(seq_len=2, digits=3)
    for dtype in (torch.float32, torch.float64):
        policy = Policy(task, ReplicaGenerator([0], "init"), hidden=2, dtype=dtype)
        with torch.no_grad():
            policy.head_weight.zero_()
            policy.head_bias.copy_(torch.tensor([[[-1e4, 0.0, -1e4]]]))
        for number in (0.0, 1 - torch.finfo(dtype).eps / 2):
            # The real sampler, undecorated: the stand-in is no ReplicaGenerator.
            with oracles.as_users_run_it():
                tokens = policy.sample(torch.tensor([[0]]), 1, Given(number))
            assert tokens.tolist() == [[[[1, 1]]]]


def test_sample_carries_no_gradient_and_score_does(task):
    policy = make(task)
    targets = torch.tensor([[0, 1]] * 3)
    tokens = policy.sample(targets, 2, ReplicaGenerator([0, 1, 2]))
    assert not tokens.requires_grad and all(p.grad is None for p in policy.parameters())
    logprobs, entropies = policy.score(targets, tokens)
    assert logprobs.requires_grad and entropies.requires_grad


def test_a_rollout_is_scored_by_the_policy_that_made_it(task):
    """So the ratio of new to old probabilities starts at exactly 1, bit for bit."""
    policy = make(task)
    batch = rollout(policy, ReplicaGenerator([0, 1, 2], step=3), prompts=5, group_size=4)
    assert batch.tokens.shape == (3, 5, 4, task.seq_len) and batch.values is None
    again = ReplicaGenerator([0, 1, 2], step=3)
    same(batch.targets, task.sample_targets(again, 5))
    same(batch.tokens, policy.sample(batch.targets, 4, again))
    logprobs, entropies = policy.score(batch.targets, batch.tokens)
    same(batch.logprobs, logprobs)
    same(batch.entropies, entropies)
    for k in range(3):
        for p in range(5):
            target = int(batch.targets[k, p])
            for g in range(4):
                completion = tuple(batch.tokens[k, p, g].tolist())
                assert batch.rewards[k, p, g] == oracles.reward(task, target, completion)
                assert batch.success[k, p, g] == oracles.success(task, target, completion)
                assert batch.mask[k, p, g].sum() == oracles.length(task, completion)
    assert batch.rewards.dtype == torch.float64


def test_the_mean_sampled_reward_equals_the_enumerated_J(task):
    """z = 5 over n = 20000 completions of one prompt; sigma^2 = sum pi r^2 - J^2, of order 1/4."""
    n, z = 20000, 5
    policy = make(task, [2])
    targets = torch.tensor([[2]])
    tokens = policy.sample(targets, n, ReplicaGenerator([1], "evaluate"))
    pi = oracles.probabilities(oracles.weights(policy), task, 2)
    rewards = [oracles.reward(task, 2, completion) for completion in oracles.completions(task)]
    J = sum(p * r for p, r in zip(pi, rewards, strict=True))
    variance = sum(p * (r - J) ** 2 for p, r in zip(pi, rewards, strict=True))
    assert variance > 0.01
    assert abs(task.reward(targets, tokens, torch.float64).mean() - J) < z * (variance / n) ** 0.5


# ---- the start ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_parameters_of_a_replica_do_not_depend_on_its_neighbours(task, dtype):
    for module in (Policy, Critic):
        alone = module(task, ReplicaGenerator([3], "init"), hidden=4, dtype=dtype)
        beside = module(task, ReplicaGenerator([0, 1, 2, 3, 4], "init"), hidden=4, dtype=dtype)
        turned = module(task, ReplicaGenerator([3, 0], "init"), hidden=4, dtype=dtype)
        for a, b, c in zip(alone.parameters(), beside.parameters(), turned.parameters(), strict=True):
            assert a.dtype == dtype and b.shape[0] == 5
            same(a[0], b[3])
            same(a[0], c[0])
            assert (b[3] != b[4]).any()


def test_initial_parameters_are_uniform_within_one_over_the_root_of_fan_in():
    """n = 20000 numbers in +-1/2 (fan-in 4), z = 5: variance 1/12 of the mean, 1/180 of the square."""
    p, n, z = uniform_parameter(ReplicaGenerator([0]), 100, 200, dtype=torch.float64, fan_in=4), 20000, 5
    assert p.shape == (1, 100, 200) and p.requires_grad
    assert p.min() >= -0.5 and p.max() < 0.5
    assert abs(p.detach().mean()) < z * (1 / 12 / n) ** 0.5
    assert abs(p.detach().square().mean() - 1 / 12) < z * (1 / 180 / n) ** 0.5


def test_a_policy_starts_within_its_bounds_and_keeps_its_state():
    """All within 1/sqrt(H) of 0 (of the prompt: 1/sqrt(PROMPT_FAN_IN)), but the update gate's bias, shifted up."""
    H = 16
    policy = Policy(DigitSum(), ReplicaGenerator([0, 1], "init"), hidden=H, dtype=torch.float64)
    for name, p in policy.named_parameters():
        centre, bound = torch.zeros_like(p), (PROMPT_FAN_IN if name == "prompt_weight" else H) ** -0.5
        if name == "recurrent_bias":
            centre[..., H : 2 * H] = UPDATE_GATE_BIAS
        from_centre = (p.detach() - centre).abs()
        assert from_centre.max() <= bound
        assert from_centre.mean() > bound / 4  # uniform: bound / 2


def test_score_does_not_depend_on_the_neighbours_of_a_replica(task):
    """To rounding only: one batched product may be blocked differently from five."""
    targets, tokens = everything(task, 1)
    alone = make(task, [8]).score(targets, tokens)
    beside = make(task).score(targets.expand(3, -1).contiguous(), tokens.expand(3, -1, -1, -1).contiguous())
    for a, b in zip(alone, beside, strict=True):
        close(a[0], b[2])


def test_replicas_of_one_policy_get_no_gradient_from_each_other(task):
    policy = make(task)
    logprobs, entropies = policy.score(*everything(task, 3))
    (logprobs[1] + entropies[1]).sum().backward()
    for p in policy.parameters():
        assert (p.grad[0] == 0).all() and (p.grad[2] == 0).all()
    assert policy.replicas == 3


# ---- the critic ----


@pytest.mark.parametrize("task", TASKS[2:4], ids=short)
def test_values_and_their_gradient_equal_the_oracle(task):
    critic = Critic(task, ReplicaGenerator(SEEDS, "critic"), hidden=3, dtype=torch.float64)
    targets = torch.tensor([[0, 3, 3], [2, 1, 0], [1, 2, 3]])
    values = critic(targets)
    a = torch.tensor([0.5, -1.0, 2.0])
    (values * a).sum().backward()
    for k in range(3):
        w = oracles.weights(critic, k)
        expected = [oracles.value(w, task, t) for t in targets[k].tolist()]
        close(values[k], torch.stack(expected))
        actual = torch.cat([p.grad[k].flatten() for p in critic.parameters()])
        close(actual, oracles.gradient((torch.stack(expected) * a).sum(), w))


def test_features_of_near_targets_overlap_by_hand():
    """exp(-d^2 / (2 width^2)) at distance d."""
    encoded = radial_basis(3, torch.float64)
    e = [math.exp(-((d / PROMPT_WIDTH) ** 2) / 2) for d in range(4)]
    close(encoded, [[e[abs(t - c)] for c in range(4)] for t in range(4)])
