"""The shared update: gradients clipped per replica, what it reports, and what it does not touch."""

import itertools
import math

import pytest
import torch
from torch import nn

import oracles
from oracles import close, same
from pgprog.algorithms.advantages import leave_one_out
from pgprog.algorithms.diagnostics import rollout_metrics
from pgprog.algorithms.objectives import Surrogate, policy_gradient_loss
from pgprog.algorithms.update import clip_grad_norm, update
from pgprog.env import DigitSum
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy, Rollout

TASK = DigitSum(seq_len=3, digits=3, variable_length=True)
K = 3


def fresh(seeds=(0, 1, 2), dtype=torch.float64):
    policy = Policy(TASK, ReplicaGenerator(seeds, "init"), hidden=4, dtype=dtype)
    return policy, torch.optim.Adam(policy.parameters(), lr=0.01), ReplicaGenerator(seeds)


def rloo_advantage(batch):
    return leave_one_out(batch.rewards)


def parameters(*shapes, replicas=K):
    """Parameters with gradients of generic size."""
    torch.manual_seed(0)
    made = []
    for i, shape in enumerate(shapes):
        p = nn.Parameter(torch.zeros(replicas, *shape))
        p.grad = torch.randn(replicas, *shape) * (i + 1)
        made.append(p)
    return made


# ---- clip_grad_norm ----


def test_norms_are_over_all_parameters_of_each_replica():
    ps = parameters((2, 3), (1, 4))
    norms = clip_grad_norm(ps, math.inf)
    for k in range(K):
        close(norms[k], math.sqrt(sum(x * x for p in ps for x in p.grad[k].flatten().tolist())))


def test_an_infinite_bound_leaves_gradients_as_they_are():
    ps = parameters((2, 3), (1, 4))
    before = [p.grad.clone() for p in ps]
    clip_grad_norm(ps, math.inf)
    for p, grad in zip(ps, before, strict=True):
        same(p.grad, grad)


def test_only_a_replica_above_the_bound_is_scaled_and_exactly_to_it():
    ps = parameters((2, 3), (1, 4))
    for p in ps:
        p.grad[0] *= 1e-3
        p.grad[2] *= 1e6
    before = [p.grad.clone() for p in ps]
    norms = clip_grad_norm(ps, 1.0)
    close(norms, torch.stack([g.flatten(1).square().sum(1) for g in before]).sum(0).sqrt())
    assert norms[0] < 1 < norms[1] < norms[2]
    after = torch.stack([p.grad.flatten(1).square().sum(1) for p in ps]).sum(0).sqrt()
    close(after[1:], [1.0, 1.0])
    for p, grad in zip(ps, before, strict=True):
        same(p.grad[0], grad[0])
        close(p.grad[1:], grad[1:] / norms[1:, None, None])


@pytest.mark.parametrize("sick", [math.nan, math.inf, 1e200, -1e300])
def test_a_sick_gradient_in_one_replica_leaves_the_others_bit_for_bit(sick):
    sound, beside = parameters((2, 3), (1, 4)), parameters((2, 3), (1, 4))
    beside[0].grad[1, 0, 0] = sick
    norms = clip_grad_norm(sound, 1.0), clip_grad_norm(beside, 1.0)
    for k in (0, 2):
        same(norms[0][k], norms[1][k])
        for p, q in zip(sound, beside, strict=True):
            same(p.grad[k], q.grad[k])
    assert not norms[1][1] < 1e200  # and the norm that is reported tells of it


def test_a_gradient_of_zero_stays_zero():
    ps = parameters((2, 3))
    ps[0].grad.zero_()
    same(clip_grad_norm(ps, 1.0), torch.zeros(K))
    same(ps[0].grad, torch.zeros(K, 2, 3))


def test_parameters_without_gradient_are_passed_over():
    ps = parameters((2, 3))
    close(clip_grad_norm([nn.Parameter(torch.zeros(K, 5, 5)), *ps], math.inf), clip_grad_norm(ps, math.inf))


# ---- update ----


@pytest.mark.parametrize("scale", [1e15, 1e160])
def test_a_huge_gradient_in_one_replica_leaves_the_others_bit_for_bit(scale):
    """Clipping all replicas together would shrink the others to nothing."""
    results = []
    for factor in (1.0, scale):
        policy, optimizer, generator = fresh()
        weight = torch.tensor([1.0, factor, 1.0]).view(K, 1, 1)
        metrics = update(
            policy, optimizer, generator, lambda b, w=weight: rloo_advantage(b) * w, prompts=4, group_size=4
        )
        results.append((policy, metrics))
    (sound, a), (beside, b) = results
    for p, q in zip(sound.parameters(), beside.parameters(), strict=True):
        same(p[[0, 2]], q[[0, 2]])
        same(p.grad[[0, 2]], q.grad[[0, 2]])
    assert b["grad_norm"][1] > 1e10 and a["grad_norm"][0] > 0
    for name in a:
        same(a[name][[0, 2]], b[name][[0, 2]])


def test_each_replica_takes_the_step_that_it_takes_alone():
    """The loss is summed over replicas: a mean would divide each gradient by K. SGD, for Adam hides a scale."""
    seeds = (4, 9, 2)
    policy, _, generator = fresh(seeds)
    update(
        policy, torch.optim.SGD(policy.parameters(), lr=0.5), generator, rloo_advantage, prompts=3, group_size=4,
        max_grad_norm=math.inf,
    )  # fmt: skip
    for k, seed in enumerate(seeds):
        alone, _, generator = fresh((seed,))
        update(
            alone, torch.optim.SGD(alone.parameters(), lr=0.5), generator, rloo_advantage, prompts=3, group_size=4,
            max_grad_norm=math.inf,
        )  # fmt: skip
        for p, q in zip(policy.parameters(), alone.parameters(), strict=True):
            close(p[k], q[0])


def test_update_follows_its_formula_with_per_token_advantages():
    """loss = - mean_i sum_t logp A_t - c mean_i sum_t H, by an oracle of plain loops; generic A, SGD."""
    c, lr, P, G = 0.2, 0.3, 3, 2
    policy, _, generator = fresh((4, 9))
    w = [oracles.weights(policy, k) for k in range(2)]
    seen = []

    def advantage(batch):
        seen.append(batch)
        return torch.sin(torch.arange(batch.tokens.numel(), dtype=torch.float64)).view(batch.tokens.shape)

    metrics = update(
        policy, torch.optim.SGD(policy.parameters(), lr=lr), generator, advantage, prompts=P, group_size=G,
        entropy_coef=c, max_grad_norm=math.inf,
    )  # fmt: skip
    (batch,) = seen
    A = advantage(batch)
    for k in range(2):
        loss = 0.0
        for p, g in itertools.product(range(P), range(G)):
            tokens = tuple(batch.tokens[k, p, g].tolist())
            logprobs, entropies = oracles.score(w[k], TASK, int(batch.targets[k, p]), tokens)
            loss = loss - sum(x * a for x, a in zip(logprobs, A[k, p, g].tolist(), strict=False)) / (P * G)
            loss = loss - c * sum(entropies) / (P * G)
        close(metrics["loss"][k], loss)
        grads = torch.autograd.grad(loss, list(w[k].values()))
        for (name, p), grad in zip(policy.named_parameters(), grads, strict=True):
            close(p[k], w[k][name] - lr * grad)
        close(metrics["grad_norm"][k], math.sqrt(sum(float(g.square().sum()) for g in grads)))


def test_an_advantage_with_a_gradient_is_detached():
    policy, optimizer, generator = fresh()
    reference, optimizer2, generator2 = fresh()
    update(
        policy, optimizer, generator, lambda b: rloo_advantage(b) * b.logprobs.sum(-1).exp(), group_size=2, prompts=4
    )
    update(
        reference, optimizer2, generator2, lambda b: rloo_advantage(b) * b.logprobs.detach().sum(-1).exp(),
        group_size=2, prompts=4,
    )  # fmt: skip
    for p, q in zip(policy.parameters(), reference.parameters(), strict=True):
        same(p, q)


def test_an_objective_gets_old_logprobs_that_stay_those_of_the_first_epoch():
    policy, optimizer, generator = fresh()
    calls = []

    def objective(logprobs, batch, A, weights):
        assert weights is None
        old = batch.old_logprobs
        calls.append((logprobs.detach().clone(), old.clone(), A.clone(), old.requires_grad))
        return Surrogate(
            policy_gradient_loss(logprobs, A, batch.mask), lambda: {"calls": torch.full((K,), float(len(calls)))}
        )

    metrics = update(
        policy, optimizer, generator, rloo_advantage, prompts=4, group_size=2, objective=objective, epochs=3
    )
    assert len(calls) == 3
    first = calls[0][0]
    for logprobs, old, A, has_gradient in calls:
        same(old, first)
        same(A, calls[0][2])
        assert not has_gradient
        assert logprobs is calls[0][0] or (logprobs != first).any()
    same(metrics["calls"], torch.full((K,), 3.0))


def test_steps_start_from_fresh_gradients():
    """A gradient left behind by someone else enters no step."""
    policies = []
    for stale in (0.0, 1e3):
        policy, optimizer, generator = fresh()
        for p in policy.parameters():
            p.grad = torch.full_like(p, stale)
        for step in range(2):
            generator.seek(step)
            update(policy, optimizer, generator, rloo_advantage, prompts=4, group_size=2)
        policies.append(policy)
    for p, q in zip(*(policy.parameters() for policy in policies), strict=True):
        same(p, q)


def test_values_are_the_critics_before_the_update_and_carry_no_gradient():
    policy, _, generator = fresh()
    critic = Critic(TASK, ReplicaGenerator([0, 1, 2], "critic"), hidden=3, dtype=torch.float64)
    before, seen = [p.detach().clone() for p in critic.parameters()], []
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    update(policy, optimizer, generator, lambda b: seen.append(b) or b.rewards, prompts=4, critic=critic)
    (batch,) = seen
    assert not batch.values.requires_grad
    assert all((p != q).any() for p, q in zip(critic.parameters(), before, strict=True))
    with torch.no_grad():
        for p, q in zip(critic.parameters(), before, strict=True):
            p.copy_(q)
    same(batch.values, critic(batch.targets))


def test_an_advantage_that_works_in_place_does_not_change_what_the_critic_learns():
    def metrics(advantage):
        policy, _, generator = fresh()
        critic = Critic(TASK, ReplicaGenerator([0, 1, 2], "critic"), hidden=3, dtype=torch.float64)
        optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
        return update(policy, optimizer, generator, advantage, prompts=4, critic=critic)

    same(
        metrics(lambda b: b.rewards - b.values.fill_(7).unsqueeze(-1))["value_loss"],
        metrics(lambda b: b.rewards)["value_loss"],
    )


def test_the_critics_gradient_is_not_clipped_and_not_in_the_norm():
    """V = 1000 has a regression gradient of some 2000; the policy's norm and step are those without a critic."""
    policy, _, generator = fresh()
    critic = Critic(TASK, ReplicaGenerator([0, 1, 2], "critic"), hidden=3, dtype=torch.float64)
    with torch.no_grad():
        critic.value_bias.fill_(1000.0)
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    metrics = update(
        policy, optimizer, generator, rloo_advantage, prompts=4, group_size=2, critic=critic, max_grad_norm=0.1
    )
    alone, _, generator = fresh()
    expected = update(
        alone, torch.optim.SGD(alone.parameters(), lr=0.1), generator, rloo_advantage, prompts=4, group_size=2,
        max_grad_norm=0.1,
    )  # fmt: skip
    same(metrics["grad_norm"], expected["grad_norm"])
    for p, q in zip(policy.parameters(), alone.parameters(), strict=True):
        same(p, q)
    assert (critic.value_bias.grad > 1900).all()


def test_metrics_are_one_per_replica_and_carry_no_gradient():
    policy, optimizer, generator = fresh()
    metrics = update(policy, optimizer, generator, rloo_advantage, prompts=4, group_size=2)
    assert set(metrics) == {
        "success", "reward", "entropy", "length", "advantage_mean", "advantage_std", "frac_zero_advantage",
        "frac_reward_zero_std", "frac_all_wrong", "frac_all_right", "loss", "grad_norm", "length_right", "length_wrong",
        *SPREAD,
    }  # fmt: skip
    for metric in metrics.values():
        assert metric.shape == (K,) and not metric.requires_grad and metric.dtype == torch.float64


def test_metrics_are_float32_for_a_float32_policy():
    torch.set_default_dtype(torch.float32)
    policy, optimizer, generator = fresh(dtype=torch.float32)
    metrics = update(policy, optimizer, generator, rloo_advantage, prompts=4, group_size=2)
    assert {m.dtype for m in metrics.values()} == {torch.float32}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


# ---- rollout_metrics ----

SPREAD = {f"group_{what}_q{q}" for what in ("mean", "std") for q in (10, 50, 90)}

# One replica, three prompts of two completions, T = 3; the second replica has all of them right.
LENGTHS = [[1, 3], [2, 2], [3, 1]]
REWARDS = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
ADVANTAGES = [[0.5, -0.5], [0.0, 0.0], [0.25, 0.0]]
ENTROPY = [[[0.5, 9, 9], [1.0, 2.0, 0.25]], [[0.75, 0.5, 9], [1.5, 0.25, 9]], [[0.1, 0.2, 0.3], [2.0, 9, 9]]]


def handmade(success=None, rewards=None):
    mask = torch.tensor([[[t < n for t in range(3)] for n in row] for row in LENGTHS])
    rewards = torch.tensor(REWARDS if rewards is None else rewards)
    success = rewards == 1 if success is None else torch.tensor(success)
    return Rollout(
        targets=torch.zeros(2, 3, dtype=torch.long),
        tokens=torch.zeros(2, 3, 2, 3, dtype=torch.long),
        mask=torch.stack([mask, torch.ones_like(mask)]),
        logprobs=torch.zeros(2, 3, 2, 3),
        entropies=torch.stack([torch.tensor(ENTROPY), torch.full((3, 2, 3), 0.7)]),
        rewards=torch.stack([rewards, torch.ones(3, 2)]),
        success=torch.stack([success, torch.ones(3, 2, dtype=torch.bool)]),
    )


def test_metrics_of_a_handmade_batch():
    A = torch.stack([torch.tensor(ADVANTAGES), torch.zeros(3, 2)])
    metrics = rollout_metrics(handmade(), A)
    counted = 0.5 + 1.0 + 2.0 + 0.25 + 0.75 + 0.5 + 1.5 + 0.25 + 0.1 + 0.2 + 0.3 + 2.0  # 12 tokens
    mean = 0.25 / 6
    expected = {
        "success": [3 / 6, 1],
        "reward": [3 / 6, 1],
        "entropy": [counted / 12, 0.7],
        "length": [12 / 6, 3],
        "advantage_mean": [mean, 0],
        "advantage_std": [math.sqrt((0.25 + 0.25 + 0.0625) / 6 - mean**2), 0],
        "frac_zero_advantage": [3 / 6, 1],
        "frac_reward_zero_std": [2 / 3, 1],
        "frac_all_wrong": [1 / 3, 0],
        "frac_all_right": [1 / 3, 1],
    }
    assert set(metrics) == set(expected) | SPREAD | {"length_right", "length_wrong"}
    for name, value in expected.items():
        close(metrics[name], value)


def test_groups_of_equal_rewards_split_by_success_not_by_the_size_of_the_reward():
    """Halfway rewards: equal 0.3 is all wrong, [0.3, 0] is wrong but not equal, equal but mixed is neither kind."""
    batch = handmade(
        rewards=[[0.3, 0.3], [0.3, 0.0], [1.0, 1.0]], success=[[False, False], [False, False], [True, False]]
    )
    metrics = rollout_metrics(batch, torch.zeros(2, 3, 2))
    close(metrics["frac_reward_zero_std"], [2 / 3, 1])
    close(metrics["frac_all_wrong"], [1 / 3, 0])
    close(metrics["frac_all_right"], [0.0, 1])
    close(metrics["reward"], [2.9 / 6, 1])
    close(metrics["success"], [1 / 6, 1])


def test_batch_std_is_not_what_tells_that_groups_are_equal():
    """public-faults B7: groups of eight, two all +2 and two all -8: every group std is 0 though the batch's is 5.08."""
    rewards = torch.tensor([2.0, -8.0, 2.0, -8.0]).view(1, 4, 1).expand(1, 4, 8)
    batch = Rollout(
        targets=torch.zeros(1, 4, dtype=torch.long),
        tokens=torch.zeros(1, 4, 8, 1, dtype=torch.long),
        mask=torch.ones(1, 4, 8, 1, dtype=torch.bool),
        logprobs=torch.zeros(1, 4, 8, 1),
        entropies=torch.zeros(1, 4, 8, 1),
        rewards=rewards,
        success=torch.zeros(1, 4, 8, dtype=torch.bool),
    )
    metrics = rollout_metrics(batch, leave_one_out(rewards))
    same(metrics["frac_reward_zero_std"], torch.ones(1))
    same(metrics["frac_zero_advantage"], torch.ones(1))


@pytest.mark.parametrize(("G", "printed"), [(2, 0.702), (4, 0.449), (8, 0.201)])
def test_expected_share_of_silent_groups(G, printed):
    """public-faults B8: p^G + (1 - p)^G at p = 0.1819, by enumeration of all groups."""
    p = 0.1819
    groups = list(itertools.product([0.0, 1.0], repeat=G))
    R = len(groups)
    rewards = torch.tensor(groups).unsqueeze(1)
    chance = torch.tensor([math.prod(p if x else 1 - p for x in group) for group in groups])
    batch = Rollout(
        targets=torch.zeros(R, 1, dtype=torch.long),
        tokens=torch.zeros(R, 1, G, 1, dtype=torch.long),
        mask=torch.ones(R, 1, G, 1, dtype=torch.bool),
        logprobs=torch.zeros(R, 1, G, 1),
        entropies=torch.zeros(R, 1, G, 1),
        rewards=rewards,
        success=rewards == 1,
    )
    metrics = rollout_metrics(batch, leave_one_out(rewards))
    close((chance * metrics["frac_reward_zero_std"]).sum(), p**G + (1 - p) ** G)
    close((chance * metrics["frac_all_wrong"]).sum(), (1 - p) ** G)
    close((chance * metrics["frac_all_right"]).sum(), p**G)
    assert round(p**G + (1 - p) ** G, 3) == printed


def test_groups_of_one_have_no_share_of_equal_rewards():
    whole = handmade()
    batch = Rollout(*(None if x is None else x if x.dim() == 2 else x[:, :, :1] for x in whole))
    metrics = rollout_metrics(batch, torch.zeros(2, 3, 1))
    assert not set(metrics) & {"frac_reward_zero_std", "frac_all_wrong", "frac_all_right"}
    close(metrics["success"], [2 / 3, 1])


def test_metrics_of_per_token_advantages_average_over_the_tokens_of_each_completion():
    """A completion moves nothing only if all of its own tokens have A = 0; what is masked does not count."""
    A = torch.zeros(2, 3, 2, 3)
    A[0, 0, 0] = torch.tensor([0.5, 7, 7])  # length 1
    A[0, 0, 1] = torch.tensor([0.25, -0.25, 0.75])  # length 3: mean 0.25
    A[0, 1, 0] = torch.tensor([0.0, 0.0, 5.0])  # length 2: nothing counts
    A[0, 2, 0] = torch.tensor([0.5, -0.5, 0.0])  # mean 0, but moves
    metrics = rollout_metrics(handmade(), A)
    per_sequence = [0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    close(metrics["advantage_mean"], [0.75 / 6, 0])
    close(metrics["advantage_std"], [math.sqrt(sum(a * a for a in per_sequence) / 6 - (0.75 / 6) ** 2), 0])
    close(metrics["frac_zero_advantage"], [3 / 6, 1])


def test_masked_per_token_advantages_may_be_nan():
    A = torch.zeros(2, 3, 2, 3)
    A[0, 0, 0, 2] = math.nan  # after the end of a completion of length 1
    close(rollout_metrics(handmade(), A)["frac_zero_advantage"], [1.0, 1.0])


@pytest.mark.parametrize(
    "bad", [{"prompts": 0}, {"group_size": 0}, {"epochs": 0}, {"max_grad_norm": -1.0}, {"max_grad_norm": 0.0}]
)
def test_an_argument_that_has_no_meaning_is_named(bad):
    task = DigitSum(seq_len=2, digits=3)
    policy = Policy(task, ReplicaGenerator([0], "init"), 4, torch.float64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=next(iter(bad))):
        update(policy, optimizer, ReplicaGenerator([0]), lambda batch: batch.rewards, **bad)
