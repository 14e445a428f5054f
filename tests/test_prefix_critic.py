"""The critic of prefixes: its values by an oracle, what they depend on, replicas, and that it learns."""

import pytest
import torch

import oracles
from oracles import close, same
from pgprog.env import DigitSum
from pgprog.exact.enumeration import completions, every_target
from pgprog.exact.values import prefix_values
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, PrefixCritic, rollout

TASKS = {
    "fixed": DigitSum(seq_len=2, digits=3),
    "variable": DigitSum(seq_len=3, digits=2, variable_length=True),
    "tokens": DigitSum(seq_len=3, digits=2, variable_length=True, prompt_form="tokens"),
    "one token": DigitSum(seq_len=1, digits=4, variable_length=True),
}
SEEDS = [5, 0, 8]


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def make(task, seeds=SEEDS, hidden=4, dtype=torch.float64):
    return PrefixCritic(task, ReplicaGenerator(seeds, "critic"), hidden=hidden, dtype=dtype)


def everything(task, K):
    """Every target of the task with every completion, for K replicas: (K, P) and (K, P, G, T)."""
    targets = torch.arange(oracles.largest_target(task) + 1)
    tokens = torch.tensor(oracles.completions(task))
    return targets.expand(K, -1).contiguous(), tokens.expand(K, len(targets), -1, -1).contiguous()


def value_before_each_token(w, task, target, tokens):
    hidden, values = oracles.first_state(w, task, target), []
    for t in range(oracles.length(task, tokens)):
        values.append(hidden @ w["value_weight"].flatten() + w["value_bias"].flatten()[0])
        hidden = oracles.read(w, tokens[t], hidden)
    return values


def test_values_and_their_gradient_equal_the_oracle(task):
    """torch.nn.GRUCell with each replica's weights, one prompt and one completion at a time; 0 after the end."""
    critic = make(task)
    targets, tokens = everything(task, len(SEEDS))
    values = critic(targets, tokens)
    assert values.shape == tokens.shape
    torch.manual_seed(0)
    a = torch.randn(tokens.shape[1:])
    (values * a).sum().backward()
    for k in range(len(SEEDS)):
        w, total = oracles.weights(critic, k), 0.0
        for target in targets[k].tolist():
            for i, completion in enumerate(oracles.completions(task)):
                expected = value_before_each_token(w, task, target, completion)
                n = len(expected)
                close(values[k, target, i, :n], torch.stack(expected))
                assert (values[k, target, i, n:] == 0).all()
                total = total + sum(x * v for x, v in zip(a[target, i].tolist(), expected, strict=False))
        actual = torch.cat([p.grad[k].flatten() for p in critic.parameters()])
        close(actual, oracles.gradient(total, w), rtol=1e-10, atol=1e-12)  # sums of some hundred terms of order 1


@pytest.mark.parametrize("name", ["fixed", "variable", "tokens"])
def test_a_value_depends_on_the_prefix_before_it_and_on_nothing_else(name):
    """Token t changed: V at 0 .. t the same bit for bit, V at t + 1 another."""
    task, critic = TASKS[name], make(TASKS[name])
    T = task.seq_len
    targets, tokens = torch.tensor([[1, 2]] * 3), torch.zeros(3, 2, 2, T, dtype=torch.long)
    before = critic(targets, tokens)
    for t in range(T):
        changed = tokens.clone()
        changed[..., t] = 1
        after = critic(targets, changed)
        same(after[..., : t + 1], before[..., : t + 1])
        assert (after[..., t + 1 : t + 2] != before[..., t + 1 : t + 2]).all()
    assert (before[:, 0] != before[:, 1]).all(), "and on the prompt"
    same(before[:, :, 0], before[:, :, 1])


def test_what_stands_after_eos_does_not_reach_the_values():
    task = TASKS["variable"]
    critic, targets = make(task, [1]), torch.tensor([[2, 3]])
    tokens = torch.tensor([[[[0, 2, 2], [2, 2, 2]], [[1, 2, 2], [2, 2, 2]]]])
    other = torch.tensor([[[[0, 2, 1], [2, 0, 1]], [[1, 2, 0], [2, 2, 0]]]])
    same(critic(targets, tokens), critic(targets, other))


def train(critic, targets, tokens, wanted, mask, steps, lr=1e-2):
    """Regression on given values; Adam."""
    optimizer = torch.optim.Adam(critic.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.where(mask, critic(targets, tokens) - wanted, 0).square().sum((1, 2, 3)) / mask.sum((1, 2, 3))
        loss.sum().backward()
        optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("name", ["variable", "tokens"])
def test_a_replica_is_the_same_bit_for_bit_whatever_stands_beside_it(name):
    """In float32 at the default width: its first parameters, its values, and after steps of Adam."""
    task = TASKS[name]
    targets, tokens = everything(task, 3)
    wanted, mask = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float32).view(tokens.shape), task.mask(tokens)
    beside = make(task, hidden=64, dtype=torch.float32)
    first = beside(targets, tokens).detach()
    start = [p.detach().clone() for p in beside.parameters()]
    train(beside, targets, tokens, wanted, mask, 5)
    for k, seed in enumerate(SEEDS):
        one = slice(k, k + 1)
        alone = make(task, [seed], hidden=64, dtype=torch.float32)
        for p, q in zip(alone.parameters(), start, strict=True):
            assert p.dtype == torch.float32
            same(p[0], q[k])
        same(alone(targets[one], tokens[one])[0], first[k])
        train(alone, targets[one], tokens[one], wanted[one], mask[one], 5)
        for p, q in zip(alone.parameters(), beside.parameters(), strict=True):
            same(p[0], q[k])


def test_replicas_get_no_gradient_from_each_other(task):
    critic = make(task)
    critic(*everything(task, 3))[1].sum().backward()
    for p in critic.parameters():
        assert (p.grad[0] == 0).all() and (p.grad[2] == 0).all()
    assert critic.replicas == 3


def test_it_learns_the_exact_values_of_prefixes():
    """Two policies, each with its own critic; V of every prefix of every target by enumeration."""
    task, K = TASKS["variable"], 2
    policy = Policy(task, ReplicaGenerator([3, 4], "init"), hidden=4, dtype=torch.float64)
    targets = every_target(task)
    tokens, mask = completions(policy, targets).tokens, completions(policy, targets).mask
    levels = [level.V.detach() for level in prefix_values(policy, targets)]
    digits = torch.where(tokens < task.digits, tokens, 0)
    place, V = torch.zeros_like(tokens[:, 0]), []
    for t in range(task.seq_len):
        V.append(levels[t][:, :, place])
        place = place * task.digits + digits[:, t]
    wanted = torch.stack(V, -1) * mask
    spread = wanted[:, :, mask].std()
    everyone = tokens.expand(K, len(targets), -1, -1)
    critic = make(task, [0, 1], hidden=32)
    loss = train(critic, targets.expand(K, -1), everyone, wanted, mask.expand_as(everyone), 600, lr=2e-2)
    assert spread > 0.2 and (loss.sqrt() < 0.05 * spread).all(), (loss.sqrt() / spread).tolist()


def test_a_rollout_has_room_for_values_of_prefixes():
    task = TASKS["variable"]
    policy, critic = Policy(task, ReplicaGenerator([1], "init"), hidden=4), make(task, [1], dtype=torch.float32)
    batch = rollout(policy, ReplicaGenerator([1]), 3, 2)
    assert batch.prefix_values is None
    with torch.no_grad():
        batch = batch._replace(prefix_values=critic(batch.targets, batch.tokens))
    assert batch.prefix_values.shape == batch.mask.shape and (batch.prefix_values[~batch.mask] == 0).all()
    same(batch.prefix_values[..., 0], batch.prefix_values[..., :1, 0].expand(-1, -1, 2))
