"""Temperature, nucleus and the draws of ``sampling``, against plain loops; the draws bit for bit where they say so."""

import copy
import itertools
import math

import pytest
import torch

import oracles
from oracles import close, same
from pgprog.algorithms import sampling
from pgprog.algorithms.sampling import (
    Past,
    copy_of,
    dynamic,
    informative,
    informative_groups,
    sampled_by,
    score_squared_norms,
)
from pgprog.env import DigitSum
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, nucleus, rollout

TASKS = [
    DigitSum(seq_len=2, digits=3),
    DigitSum(seq_len=3, digits=2, prompt_form="tokens"),
    DigitSum(seq_len=2, digits=3, variable_length=True),
    DigitSum(seq_len=3, digits=2, variable_length=True, prompt_form="tokens"),
]
SEEDS = [5, 0, 8]
SHAPES = [(0.6, 1.0), (1.0, 0.7), (1.7, 0.55), (0.4, 0.05)]  # temperature, top_p


@pytest.fixture(params=TASKS, ids=lambda t: f"{t.seq_len}x{t.digits}{'v' * t.variable_length}-{t.prompt_form}")
def task(request):
    return request.param


def make(task, seeds=SEEDS, hidden=4, temperature=1.0, top_p=1.0):
    policy = Policy(task, ReplicaGenerator(seeds, "init"), hidden=hidden, dtype=torch.float64)
    with torch.no_grad():
        policy.head_weight.mul_(3)  # away from uniform
    policy.temperature, policy.top_p = temperature, top_p
    return policy


def everything(task, K):
    targets = torch.arange(oracles.largest_target(task) + 1)
    tokens = torch.tensor(oracles.completions(task))
    return targets.expand(K, -1).contiguous(), tokens.expand(K, len(targets), -1, -1).contiguous()


def shaped(log_pi, temperature, top_p):
    """Probabilities at a temperature, within the nucleus, as a list; token by token."""
    scaled = [math.exp(x / temperature) for x in log_pi.tolist()]
    pi = [x / math.fsum(scaled) for x in scaled]
    kept, mass = [], 0.0
    for token in sorted(range(len(pi)), key=lambda a: (-pi[a], a)):
        if mass >= top_p:
            break
        kept.append(token)
        mass += pi[token]
    return [pi[a] / mass if a in kept else 0.0 for a in range(len(pi))]


def shaped_score(w, task, target, tokens, temperature, top_p):
    hidden = oracles.first_state(w, task, target)
    logprobs, entropies = [], []
    for t in range(oracles.length(task, tokens)):
        pi = shaped(oracles.next_token(w, hidden), temperature, top_p)
        logprobs.append(math.log(pi[tokens[t]]) if pi[tokens[t]] else -math.inf)
        entropies.append(-math.fsum(p * math.log(p) for p in pi if p))
        hidden = oracles.read(w, tokens[t], hidden)
    return logprobs, entropies


def jolt(policy, seed):
    """An update: other parameters, a function of the seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.5 * torch.randn_like(p[:1])


def biased(logits, temperature=1.0):
    """A policy with the same logits everywhere."""
    policy = Policy(DigitSum(seq_len=1, digits=len(logits)), ReplicaGenerator([0], "init"), 2, torch.float64)
    with torch.no_grad():
        policy.head_weight.zero_()
        policy.head_bias.copy_(torch.tensor([[logits]]))
    policy.temperature = temperature
    return policy


# ---- temperature and nucleus ----


@pytest.mark.parametrize(("temperature", "top_p"), SHAPES)
def test_score_and_distributions_equal_the_oracle_at_any_temperature_and_nucleus(task, temperature, top_p):
    policy = make(task, temperature=temperature, top_p=top_p)
    targets, tokens = everything(task, len(SEEDS))
    logprobs, entropies = policy.score(targets, tokens)
    log_pi = policy.distributions(targets, tokens)
    outside = 0
    for k in range(len(SEEDS)):
        w = oracles.weights(policy, k)
        for target in targets[k].tolist():
            for i, completion in enumerate(oracles.completions(task)):
                expected, expected_entropies = shaped_score(w, task, target, completion, temperature, top_p)
                n = len(expected)
                close(logprobs[k, target, i, :n], expected)
                close(entropies[k, target, i, :n], expected_entropies)
                assert (logprobs[k, target, i, n:] == 0).all() and (entropies[k, target, i, n:] == 0).all()
                close(log_pi[k, target, i, range(n), completion[:n]], expected)
                outside += expected.count(-math.inf)
    assert (outside > 0) == (top_p < 1)
    close(log_pi.exp().sum(-1), torch.ones(tokens.shape))


@pytest.mark.parametrize(
    ("pi", "top_p", "kept"),
    [
        ([0.5, 0.25, 0.25], 0.5, [1, 0, 0]),  # reached exactly
        ([0.5, 0.25, 0.25], 0.51, [1, 1, 0]),  # of equals the first
        ([0.5, 0.25, 0.25], 0.75, [1, 1, 0]),
        ([0.5, 0.25, 0.25], 0.76, [1, 1, 1]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [1, 1, 0, 0]),
        ([0.1, 0.6, 0.3], 0.65, [0, 1, 1]),  # the most probable do not stand first
        ([0.1, 0.6, 0.3], 1e-9, [0, 1, 0]),  # never empty
        ([0.0, 1.0, 0.0], 0.999, [0, 1, 0]),
    ],
)
def test_nucleus_by_hand(pi, top_p, kept):
    found = nucleus(torch.tensor([[pi], [pi[::-1]]]).mT, top_p)[0, :, 0]
    assert found.tolist() == [bool(x) for x in kept]


@pytest.mark.parametrize(("temperature", "top_p"), SHAPES)
def test_gradient_of_the_score_equals_the_finite_difference(task, temperature, top_p):
    """Of what the policy itself sampled, which lies in its nucleus; as in test_policy."""
    policy = make(task, [4, 6], temperature=temperature, top_p=top_p)
    targets = torch.tensor([[0, 2], [1, 3]])
    tokens = policy.sample(targets, 6, ReplicaGenerator([1, 2]))
    torch.manual_seed(0)
    a, b = torch.randn(2, *tokens.shape) / tokens[0].numel() ** 0.5

    def f():
        logprobs, entropies = policy.score(targets, tokens)
        return (a * logprobs + b * entropies).sum()

    parameters = list(policy.parameters())
    grads = torch.autograd.grad(f(), parameters)
    start = [p.detach().clone() for p in parameters]
    direction = [torch.randn_like(p) for p in parameters]
    size = sum(d.square().sum() for d in direction) ** 0.5

    def at(h):
        with torch.no_grad():
            for p, s, d in zip(parameters, start, direction, strict=True):
                p.copy_(s + h * d / size)
            return f().item()

    h = 1e-3
    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    expected = sum((g * d).sum().item() for g, d in zip(grads, direction, strict=True)) / size.item()
    assert math.isfinite(expected)
    assert slope == pytest.approx(expected, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_nothing_is_nan_where_a_token_lies_outside_the_nucleus(top_p):
    """The entropy of certainty is 0, and the padding of a short completion may lie outside."""
    task = DigitSum(seq_len=3, digits=2, variable_length=True)
    policy = make(task, [1], top_p=top_p)
    targets, tokens = everything(task, 1)
    logprobs, entropies = policy.score(targets, tokens)
    (entropies.sum() + logprobs.clamp(min=-50).sum()).backward()
    assert entropies.isfinite().all()
    assert all(p.grad.isfinite().all() for p in policy.parameters())


@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 1.0), (1.7, 0.8)])
def test_sampled_frequencies_are_those_of_the_shaped_distribution(task, temperature, top_p):
    """z = 5 for each completion of two prompts; what lies outside the nucleus is never drawn."""
    n, z = 40000, 5
    policy = make(task, [2], temperature=temperature, top_p=top_p)
    targets = torch.tensor([[1, 2]])
    tokens = policy.sample(targets, n, ReplicaGenerator([0], "evaluate"))
    w = oracles.weights(policy)
    base = oracles.tokens_to_choose_from(task) ** torch.arange(task.seq_len)
    for p, target in enumerate(targets[0].tolist()):
        codes, total = (tokens[0, p] * base).sum(-1), 0
        for completion in oracles.completions(task):
            pi = math.exp(sum(shaped_score(w, task, target, completion, temperature, top_p)[0]))
            count = int((codes == (torch.tensor(completion) * base).sum()).sum())
            assert abs(count / n - pi) <= z * (pi * (1 - pi) / n) ** 0.5
            total += count
        assert total == n


def test_temperature_on_one_side_gives_the_published_wrong_ratios():
    """F1: logits [2, 1, 0] at 0.6; right is 1."""
    targets, tokens = torch.tensor([[0, 1, 2]]), torch.tensor([[[[0]], [[1]], [[2]]]])

    def ratio(trainer, sampler):
        return (trainer.score(targets, tokens)[0] - sampler.score(targets, tokens)[0]).exp().flatten().tolist()

    plain = biased([2.0, 1.0, 0.0])
    hot = copy_of(plain, temperature=0.6)
    assert ratio(hot, plain) == pytest.approx([1.228, 0.630, 0.324], abs=5e-4)
    assert ratio(plain, hot) == pytest.approx([0.815, 1.587, 3.090], abs=5e-4)
    assert ratio(hot, copy_of(hot)) == [1, 1, 1]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), *SHAPES])
def test_at_learning_rate_0_every_log_ratio_is_exactly_0(task, temperature, top_p):
    """F2, whatever the temperature: scored again, and scored by a sampler apart."""
    policy = make(task, temperature=temperature, top_p=top_p)
    batch = rollout(policy, ReplicaGenerator([0, 1, 2]), 4, 3)
    assert batch.logprobs.isfinite().all()
    same(batch.logprobs, policy.score(batch.targets, batch.tokens)[0])
    apart = sampled_by(copy_of(policy), policy, ReplicaGenerator([0, 1, 2]), 4, 3)
    same(apart.tokens, batch.tokens)
    same(apart.sampler_logprobs, apart.logprobs)
    same(apart.logprobs, batch.logprobs)
    stale = Past(policy, 2).draw(policy, ReplicaGenerator([0, 1, 2]), 4, 3)
    same(stale.old_logprobs, stale.logprobs)


# ---- distributions ----


def test_distributions_agree_with_the_score_and_its_gradient(task):
    policy = make(task, temperature=0.8)
    targets, tokens = everything(task, len(SEEDS))
    mask = task.mask(tokens)
    log_pi = policy.distributions(targets, tokens)
    assert log_pi.shape == (*tokens.shape, task.vocab_size)
    logprobs, entropies = policy.score(targets, tokens)
    mine = torch.where(mask, log_pi.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), 0)
    close(mine, logprobs)
    close(torch.where(mask, -(log_pi.exp() * log_pi).sum(-1), 0), entropies)
    weight = torch.linspace(-1, 1, tokens.shape[2])
    parameters = list(policy.parameters())
    expected = torch.autograd.grad((weight * logprobs.sum(-1)).sum(), parameters)
    for a, b in zip(torch.autograd.grad((weight * mine.sum(-1)).sum(), parameters), expected, strict=True):
        close(a, b, rtol=1e-10, atol=1e-12)


def test_distributions_are_differentiable_twice():
    """H v against the difference of gradients, fourth order in h."""
    task = TASKS[3]
    policy = make(task, [3])
    targets, tokens = everything(task, 1)
    torch.manual_seed(1)
    a = torch.randn(*tokens.shape, task.vocab_size)
    parameters = list(policy.parameters())
    v = [torch.randn_like(p) for p in parameters]
    start = [p.detach().clone() for p in parameters]

    def gradient(create_graph=False):
        return torch.autograd.grad(
            (a * policy.distributions(targets, tokens)).sum(), parameters, create_graph=create_graph
        )

    H_v = torch.autograd.grad(sum((g * x).sum() for g, x in zip(gradient(True), v, strict=True)), parameters)

    def at(h):
        with torch.no_grad():
            for p, s, x in zip(parameters, start, v, strict=True):
                p.copy_(s + h * x)
        return gradient()

    h = 1e-3
    for e, f, g, k, actual in zip(at(h), at(-h), at(2 * h), at(-2 * h), H_v, strict=True):
        close(actual, (8 * (e - f) - (g - k)) / (12 * h), rtol=1e-6, atol=1e-7)


# ---- another sampler ----


def test_a_copy_is_frozen_and_does_not_follow():
    policy = make(TASKS[0], temperature=0.7, top_p=0.9)
    rollout(policy, ReplicaGenerator(SEEDS), 2).logprobs.sum().backward()
    before = [p.detach().clone() for p in policy.parameters()]
    other = copy_of(policy)
    assert (other.temperature, other.top_p) == (0.7, 0.9)
    jolt(policy, 0)
    for p, q, b in zip(policy.parameters(), other.parameters(), before, strict=True):
        same(q, b)
        assert (p != q).any() and not q.requires_grad and q.grad is None
        assert p.requires_grad and p.grad is not None
    hotter = copy_of(policy, temperature=2.0, top_p=0.5)
    assert (hotter.temperature, hotter.top_p) == (2.0, 0.5)
    assert (policy.temperature, policy.top_p) == (0.7, 0.9)


def test_bfloat16_rounds_the_parameters_and_back():
    policy = make(TASKS[0])
    other = copy_of(policy, dtype=torch.bfloat16)
    for p, q in zip(policy.parameters(), other.parameters(), strict=True):
        same(q, p.detach().bfloat16().double())
        assert q.dtype == torch.float64 and (q != p).any()
        assert ((q - p).abs() <= p.abs() * 2**-8).all()  # half a unit of 8 significant bits


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.01}])
def test_a_copy_refuses_what_has_no_meaning(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"{name} {value} is out of range"):
        copy_of(make(TASKS[0]), **bad)


def test_tokens_of_the_sampler_scored_by_both(task):
    policy = make(task)
    sampler = copy_of(policy, dtype=torch.bfloat16, temperature=1.5)
    batch = sampled_by(sampler, policy, ReplicaGenerator([0, 1, 2], step=4), 5, 3)
    again = ReplicaGenerator([0, 1, 2], step=4)
    same(batch.targets, task.sample_targets(again, 5))
    same(batch.tokens, sampler.sample(batch.targets, 3, again))
    same(batch.logprobs, policy.score(batch.targets, batch.tokens)[0])
    same(batch.sampler_logprobs, sampler.score(batch.targets, batch.tokens)[0])
    assert batch.logprobs.requires_grad and not batch.sampler_logprobs.requires_grad
    assert batch.old_logprobs is None and (batch.logprobs != batch.sampler_logprobs).any()
    same(batch.rewards, task.reward(batch.targets, batch.tokens, torch.float64))
    same(batch.mask, task.mask(batch.tokens))


# ---- stale data ----


@pytest.mark.parametrize("age", [0, 1, 2])
def test_the_policy_of_d_updates_ago_samples(age):
    """Or the oldest there is; against a list of copies."""
    policy = make(TASKS[2])
    past, seen = Past(policy, age), []
    for step in range(5):
        past.remember(policy)
        seen.append(copy.deepcopy(policy))
        stale = seen[max(step - age, 0)]
        batch = past.draw(policy, ReplicaGenerator([0, 1, 2], step=step), 4, 3)
        expected = rollout(stale, ReplicaGenerator([0, 1, 2], step=step), 4, 3)
        same(batch.tokens, expected.tokens)
        same(batch.logprobs, policy.score(batch.targets, batch.tokens)[0])
        assert batch.logprobs.requires_grad
        if age:
            same(batch.old_logprobs, expected.logprobs)
            same(batch.sampler_logprobs, expected.logprobs)
            assert not batch.old_logprobs.requires_grad
            assert step == 0 or (batch.old_logprobs != batch.logprobs).any()
        else:
            assert batch.old_logprobs is None and batch.sampler_logprobs is None
        jolt(policy, step)


def test_the_denominator_of_stale_data_is_the_behaviour():
    """C4: behaviour 0.5, present 0.8, ratio 1.6 and not 1."""
    policy = biased([math.log(0.5), math.log(0.5)])
    past = Past(policy, 1)
    past.remember(policy)
    with torch.no_grad():
        policy.head_bias.copy_(torch.tensor([[[math.log(0.8), math.log(0.2)]]]))
    past.remember(policy)
    batch = past.draw(policy, ReplicaGenerator([0]), 30, 1)
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    close(ratio, torch.where(batch.tokens == 0, 1.6, 0.4))
    assert (batch.tokens == 0).any() and (batch.tokens == 1).any()


def test_a_past_comes_back_from_its_tensors():
    policy = make(TASKS[2], temperature=0.9)
    past = Past(policy, 2)
    names = list(past.named_tensors())
    for step in range(4):
        past.remember(policy)
        jolt(policy, step)
    saved = {name: tensor.clone() for name, tensor in past.named_tensors().items()}
    assert list(saved) == names and len(names) == 3 * len(list(policy.parameters()))
    assert all(tensor.shape[0] == policy.replicas for tensor in saved.values())
    other = Past(make(TASKS[2], temperature=0.9), 2)
    for name, tensor in other.named_tensors().items():
        tensor.copy_(saved[name])
    for step in range(4, 8):
        for each in (past, other):
            each.remember(policy)
        a, b = (each.draw(policy, ReplicaGenerator([0, 1, 2], step=step), 3, 2) for each in (past, other))
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                same(x, y)
        jolt(policy, step)
    assert Past(policy, 0).named_tensors() == {}


def test_a_past_of_the_future_is_refused():
    with pytest.raises(ValueError, match="age -1 is out of range"):
        Past(make(TASKS[0]), -1)


# ---- dynamic sampling ----


class Watched:
    """A draw that notes what it gave."""

    def __init__(self, draw=rollout):
        self.draw, self.batches, self.graded = draw, [], []

    def __call__(self, policy, generator, prompts, group_size):
        self.batches.append(self.draw(policy, generator, prompts, group_size))
        self.graded.append(torch.is_grad_enabled())
        return self.batches[-1]


def expected_choice(batches, k, P, G):
    """Place (batch, prompt) of each of the P groups, whether it informs, and the completions drawn; plain loops."""
    good, bad, drawn = [], [], 0
    for b, batch in enumerate(batches):
        if len(good) < P:
            drawn += P * G
        for p in range(P):
            informs = len(set(batch.rewards[k, p].tolist())) > 1
            (good if informs else bad).append((b, p))
    return (good + bad)[:P], [True] * min(len(good), P) + [False] * (P - min(len(good), P)), drawn


def rare(task, seeds):
    """A policy for which replica 0 finds informative groups easily, the others ever more rarely."""
    policy = make(task, seeds)
    with torch.no_grad():
        policy.head_bias[:, :, 0] += 6.0 * torch.arange(len(seeds)).view(-1, 1)
    return policy


@pytest.mark.parametrize("attempts", [1, 2, 6])
def test_dynamic_takes_the_first_informative_groups_in_the_order_of_drawing(attempts):
    task, P, G = DigitSum(seq_len=3, digits=3, variable_length=True), 6, 3
    policy, watched = rare(task, SEEDS), Watched()
    batch = dynamic(policy, ReplicaGenerator([0, 1, 2]), P, G, attempts=attempts, draw=watched)
    assert not any(watched.graded) and len(watched.batches) <= attempts
    assert batch.logprobs.requires_grad and batch.entropies.requires_grad
    shares = []
    for k in range(3):
        places, valid, drawn = expected_choice(watched.batches, k, P, G)
        if attempts == 1:
            places = [(0, p) for p in range(P)]
            valid = [len(set(batch.rewards[k, p].tolist())) > 1 for p in range(P)]
        assert batch.valid[k].tolist() == [[v] * G for v in valid]
        assert batch.sampled[k] == drawn
        for p, (b, place) in enumerate(places):
            for name in ("targets", "tokens", "mask", "rewards", "success"):
                same(getattr(batch, name)[k, p], getattr(watched.batches[b], name)[k, place])
        shares.append(sum(valid) / P)
    assert attempts < 6 or shares[0] == 1 > shares[2]  # generic: one that has all, one that lacks some
    logprobs, entropies = policy.score(batch.targets, batch.tokens)
    same(batch.logprobs, logprobs)
    same(batch.entropies, entropies)


def test_every_attempt_has_noise_of_its_own_and_the_generator_ends_where_one_draw_leaves_it():
    task = TASKS[0]
    policy, watched = make(task), Watched()
    noise, other = ReplicaGenerator([0, 1, 2], step=7), ReplicaGenerator([0, 1, 2], step=7)
    dynamic(policy, noise, 20, 1, attempts=4, draw=watched)  # groups of one never inform
    assert len(watched.batches) == 4
    first = rollout(policy, other, 20, 1)
    same(watched.batches[0].tokens, first.tokens)
    same(noise.uniform(5), other.uniform(5))
    for a, b in itertools.combinations(watched.batches, 2):
        for k in range(3):
            assert (a.targets[k] != b.targets[k]).any() and (a.tokens[k] != b.tokens[k]).any()


def test_a_replica_does_not_feel_how_long_others_search():
    """Bit for bit, what it chose, how it is scored and where its generator stands."""
    task = DigitSum(seq_len=3, digits=3)
    policy, noise = rare(task, SEEDS), ReplicaGenerator([0, 1, 2], step=1)
    among = dynamic(policy, noise, 5, 3, attempts=8)
    assert len(set(among.sampled.tolist())) > 1
    after = noise.uniform(4)
    for k in range(3):
        alone = make(task, [SEEDS[k]])
        with torch.no_grad():
            for p, q in zip(alone.parameters(), policy.parameters(), strict=True):
                p.copy_(q[k : k + 1])
        noise = ReplicaGenerator([k], step=1)
        mine = dynamic(alone, noise, 5, 3, attempts=8)
        same(noise.uniform(4)[0], after[k])
        for name, x, y in zip(among._fields, among, mine, strict=True):
            assert (x is None) == (y is None)
            if x is not None and name in ("logprobs", "entropies"):
                close(y[0], x[k])
            elif x is not None:
                same(y[0], x[k])


def test_dynamic_stale_data_keep_their_denominator():
    task = DigitSum(seq_len=3, digits=3)
    policy = make(task)
    stale = copy.deepcopy(policy)
    past = Past(policy, 1)
    jolt(policy, 3)
    past.remember(policy)
    batch = dynamic(policy, ReplicaGenerator([0, 1, 2]), 6, 3, attempts=5, draw=past.draw)
    close(batch.old_logprobs, stale.score(batch.targets, batch.tokens)[0])  # at other places of the batch
    same(batch.sampler_logprobs, batch.old_logprobs)
    assert not batch.old_logprobs.requires_grad and (batch.old_logprobs != batch.logprobs).any()


def test_accepted_prompts_are_those_of_the_task_reweighted_by_the_chance_to_inform():
    """z = 5 over the accepted prompts of 4 replicas of one policy; q(T) ~ P(T) (1 - p^G - (1 - p)^G), p enumerated."""
    task, P, G, z = DigitSum(seq_len=2, digits=3), 3000, 4, 5
    policy = make(task, [3] * 4)
    batch = dynamic(policy, ReplicaGenerator([0, 1, 2, 3]), P, G, attempts=20)
    assert batch.valid.all()
    w = oracles.weights(policy)
    chance = []
    for target in range(5):
        p = oracles.success_probability(w, task, target).item()
        chance.append(
            math.fsum(
                math.prod(p if r else 1 - p for r in group)
                for group in itertools.product([0, 1], repeat=G)
                if len(set(group)) > 1
            )
        )
    n, weights = 4 * P, [c / sum(chance) for c in chance]
    assert max(weights) > 1.2 / 5  # not the task's own
    for target, q in enumerate(weights):
        share = (batch.targets == target).double().mean().item()
        assert abs(share - q) < z * (q * (1 - q) / n) ** 0.5


def test_groups_of_one_never_inform_and_all_that_was_drawn_is_counted():
    batch = dynamic(make(TASKS[0]), ReplicaGenerator([0, 1, 2]), 4, 1, attempts=3)
    assert not batch.valid.any() and batch.sampled.tolist() == [12.0] * 3


def test_what_does_not_count_does_not_inform():
    batch = rollout(make(TASKS[0]), ReplicaGenerator([0, 1, 2]), 2, 3)
    rewards = torch.tensor([[[1.0, 0.0, 0.0], [0.95, 0.95, 0.95]]]).expand(3, -1, -1)
    batch = batch._replace(rewards=rewards)
    assert informative(batch).tolist() == [[True, False]] * 3
    valid = torch.ones(3, 2, 3, dtype=torch.bool)
    valid[0, 0, 0] = False  # leaves equal ones
    valid[1, 0, 1] = False  # leaves unequal ones
    valid[2] = False
    batch = batch._replace(valid=valid)
    assert informative(batch).tolist() == [[False, False], [True, False], [False, False]]
    chosen = dynamic(
        make(TASKS[0]), ReplicaGenerator([0, 1, 2]), 2, 3, attempts=1, draw=lambda policy, generator, P, G: batch
    )
    assert chosen.valid.tolist() == [[[False] * 3] * 2, [[True, False, True], [False] * 3], [[False] * 3] * 2]


@pytest.mark.parametrize("name", ["prompts", "group_size", "attempts"])
def test_a_batch_of_nothing_is_refused(name):
    sizes = {"prompts": 4, "group_size": 2, "attempts": 3} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} 0 is too small: give 1 or more"):
        dynamic(make(TASKS[0]), ReplicaGenerator([0, 1, 2]), **sizes)


def test_share_of_informative_groups():
    """B8's numbers, enumeration, and ends where 1 - (1 - p)^G would lose its digits."""
    for G, lost in ((2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)):
        assert 1 - informative_groups(torch.tensor(0.1819), G).item() == pytest.approx(lost, abs=5e-4)
    for G, p in itertools.product((1, 2, 5), (0.0, 0.1, 0.5, 0.95, 1.0)):
        truth = math.fsum(
            math.prod(p if r else 1 - p for r in group)
            for group in itertools.product([0, 1], repeat=G)
            if len(set(group)) > 1
        )
        close(informative_groups(torch.tensor([[p]]), G), [[truth]], atol=1e-15)
    close(informative_groups(torch.tensor([1e-20]), 8), [8e-20], atol=0)
    e = 2.0**-40
    close(informative_groups(torch.tensor([1 - e, e]), 4), [4 * e - 6 * e**2] * 2, atol=0)
    with pytest.raises(ValueError, match="group_size 0 is too small"):
        informative_groups(torch.tensor(0.5), 0)
    with pytest.raises(ValueError, match=r"p \[1.5\] is no probability"):
        informative_groups(torch.tensor([1.5]), 2)


# ---- norms of scores ----


@pytest.mark.parametrize("at_once", [256, 5])
def test_squared_norms_of_scores_one_by_one(task, at_once, monkeypatch):
    monkeypatch.setattr(sampling, "SCORES_AT_ONCE", at_once)
    policy = make(task, [4, 7])
    targets = torch.tensor([[0, 2], [3, 1]])
    tokens = policy.sample(targets, 3, ReplicaGenerator([0, 1]))
    norms = score_squared_norms(policy, targets, tokens)
    assert norms.shape == (2, 2, 3) and not norms.requires_grad
    for k, p, g in itertools.product(range(2), range(2), range(3)):
        w = oracles.weights(policy, k)
        s = oracles.gradient(oracles.log_pi(w, task, int(targets[k, p]), tuple(tokens[k, p, g].tolist())), w)
        close(norms[k, p, g], s.square().sum(), rtol=1e-10)
    assert all(p.grad is None for p in policy.parameters())


def test_squared_norms_are_of_the_shaped_policy_and_need_no_graph():
    policy = make(TASKS[0], [4], temperature=0.5)
    targets, tokens = torch.tensor([[1]]), torch.tensor([[[[0, 2]]]])
    grads = torch.autograd.grad(policy.score(targets, tokens)[0].sum(), list(policy.parameters()))
    with torch.no_grad():
        close(score_squared_norms(policy, targets, tokens)[0, 0, 0], sum(g.square().sum() for g in grads), rtol=1e-10)
