"""The five rungs, through their real ``train_step``, against exact truth.

Every possible batch of a tiny task is a replica: all replicas share one policy, ``sample`` is replaced by the
enumeration, and an optimiser with learning rate 0 leaves the gradient of each batch behind. Weighted with the
probability of the batch these are the exact mean of the estimator. Losses are minimised, so a gradient is minus the
one that is meant.
"""

import functools
import importlib
import inspect
import itertools
import math
import re
from typing import NamedTuple

import pytest
import torch

import oracles
from oracles import close
from pgprog.algorithms import actor_critic, grpo, ppo, reinforce, rloo
from pgprog.algorithms.advantages import group_z_score, total_return
from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.env import DigitSum
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy

RUNGS = {"reinforce": reinforce, "actor_critic": actor_critic, "ppo": ppo, "rloo": rloo, "grpo": grpo}
WITH_CRITIC = ("actor_critic", "ppo")

FIXED = DigitSum(seq_len=2, digits=2)  # 4 completions
VARIABLE = DigitSum(seq_len=2, digits=2, variable_length=True)  # 7 completions of 1 or 2 tokens
TOKENS = DigitSum(seq_len=2, digits=2, variable_length=True, prompt_form="tokens")
HALFWAY = DigitSum(seq_len=2, digits=2, variable_length=True, reward_form="halfway")
POTENTIAL = DigitSum(seq_len=2, digits=2, variable_length=True, reward_form="potential")


NAMES = {"FIXED": FIXED, "VARIABLE": VARIABLE, "TOKENS": TOKENS, "HALFWAY": HALFWAY, "POTENTIAL": POTENTIAL}


def short(value):
    """The name of a parameter in the names of tests."""
    return next((name.lower() for name, task in NAMES.items() if value is task), str(value))


class Truth(NamedTuple):
    """Of the policy of seed 7, per target: what the oracle says."""

    targets: list
    pi: dict
    """target: probabilities of the completions."""
    scores: dict
    """target: (completions, parameters), grad log pi of each."""
    entropy_grads: dict
    """target: (completions, parameters), grad sum_t H of each."""
    rewards: dict

    def grad_J(self, target):
        return sum(
            p * r * s for p, r, s in zip(self.pi[target], self.rewards[target], self.scores[target], strict=True)
        )

    def grad_p(self, target):
        """Of the probability of success, where rewards are 0 or 1."""
        return self.grad_J(target)


def policy_of(task, replicas):
    return Policy(task, ReplicaGenerator([7] * replicas, "init"), hidden=3, dtype=torch.float64)


def critic_of(task, replicas):
    return Critic(task, ReplicaGenerator([11] * replicas, "critic"), hidden=3, dtype=torch.float64)


def parameters_of(task):
    return oracles.weights(policy_of(task, 1))


@functools.cache
def truth_of(task):
    w = parameters_of(task)
    targets = list(range(oracles.largest_target(task) + 1))
    pi, scores, entropy_grads, rewards = {}, {}, {}, {}
    for target in targets:
        pi[target] = oracles.probabilities(w, task, target)
        scores[target] = torch.stack(
            [oracles.gradient(oracles.log_pi(w, task, target, c), w) for c in oracles.completions(task)]
        )
        entropy_grads[target] = torch.stack(
            [oracles.gradient(sum(oracles.score(w, task, target, c)[1]), w) for c in oracles.completions(task)]
        )
        rewards[target] = [oracles.reward(task, target, c) for c in oracles.completions(task)]
    return Truth(targets, pi, scores, entropy_grads, rewards)


class Batches(NamedTuple):
    """Every batch of G completions of each prompt, and what a train_step made of it; R batches."""

    targets: list
    indices: list
    """R tuples of P G indices into ``completions``."""
    chance: torch.Tensor
    """(R,), the probability of each batch."""
    grads: torch.Tensor
    """(R, parameters), gradient of the loss."""
    critic_grads: torch.Tensor | None
    metrics: dict
    G: int

    def rows(self):
        """Of each batch, the list of (target, index of the completion)."""
        return [[(self.targets[i // self.G], c) for i, c in enumerate(batch)] for batch in self.indices]

    def mean(self):
        return (self.chance[:, None] * self.grads).sum(0)


def flat(module):
    return torch.cat([p.grad.flatten(1) for p in module.parameters()], dim=1)


def every_batch(name, task, targets, G, **arguments):
    """Run one rung's train_step on all batches at once, one replica each, all with the same parameters."""
    truth, P = truth_of(task), len(targets)
    completions = oracles.completions(task)
    indices = list(itertools.product(range(len(completions)), repeat=P * G))
    R = len(indices)
    chance = [math.prod(truth.pi[targets[i // G]][c] for i, c in enumerate(batch)) for batch in indices]
    tokens = torch.tensor(completions)[torch.tensor(indices)].view(R, P, G, task.seq_len)

    task = DigitSum(**vars(task))
    object.__setattr__(task, "sample_targets", lambda generator, prompts: torch.tensor(targets).expand(R, P))
    policy = policy_of(task, R)
    asked = []
    policy.sample = lambda targets, group_size, generator, trace=None: (
        asked.append((targets.shape, group_size)) or tokens
    )
    modules = [policy]
    if name in WITH_CRITIC:
        arguments["critic"] = critic_of(task, R)
        modules.append(arguments["critic"])
    if name in ("rloo", "grpo"):
        arguments["group_size"] = G
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.0)
    arguments = {"entropy_coef": 0.0, "max_grad_norm": math.inf} | arguments
    metrics = RUNGS[name].train_step(policy, optimizer, ReplicaGenerator([0] * R), prompts=P, **arguments)
    assert asked == [((R, P), G)]
    grads = flat(policy)
    if arguments["max_grad_norm"] == math.inf:
        close(grads.norm(dim=1), metrics["grad_norm"])
    return Batches(
        list(targets), indices, torch.tensor(chance), grads, flat(modules[1]) if len(modules) > 1 else None, metrics, G
    )


def expected_grads(task, batches, advantage):
    """- 1/N sum_i A_i grad log pi(i), batch by batch; ``advantage`` maps the rewards of all prompts to lists of A."""
    truth, result = truth_of(task), []
    for rows in batches.rows():
        rewards = [truth.rewards[target][c] for target, c in rows]
        groups = [rewards[i : i + batches.G] for i in range(0, len(rewards), batches.G)]
        A = itertools.chain.from_iterable(advantage(groups))
        result.append(-sum(a * truth.scores[t][c] for a, (t, c) in zip(A, rows, strict=True)) / len(rows))
    return torch.stack(result)


def grad_J(task, targets):
    """Of J averaged over the prompts of the batch."""
    return sum(truth_of(task).grad_J(target) for target in targets) / len(targets)


def values_of(task, targets):
    with torch.no_grad():
        w = oracles.weights(critic_of(task, 1))
        return [oracles.value(w, task, target).item() for target in targets]


def batch_wise(advantage):
    """An advantage of a flat list, on prompts with one completion each."""
    return lambda groups: [[a] for a in advantage([r for (r,) in groups])]


def test_grad_J_equals_the_gradient_of_the_enumerated_J():
    for task in (FIXED, TOKENS, HALFWAY):
        w = parameters_of(task)
        for target in truth_of(task).targets:
            close(truth_of(task).grad_J(target), oracles.gradient(oracles.expected_reward(w, task, target), w))


# ---- each batch, and the mean over all batches ----

RLOO_CASES = [
    (FIXED, (1,), 3),
    (FIXED, (1, 2), 2),
    (VARIABLE, (1,), 2),
    (VARIABLE, (2,), 3),
    (VARIABLE, (0, 1), 2),
    (TOKENS, (1,), 3),
    (HALFWAY, (1,), 3),
    (POTENTIAL, (1,), 2),
]


@pytest.mark.parametrize(("task", "targets", "G"), RLOO_CASES, ids=short)
def test_rloo_gradient_is_unbiased(task, targets, G):
    batches = every_batch("rloo", task, targets, G)
    close(batches.chance.sum(), 1.0)
    close(batches.grads, expected_grads(task, batches, lambda gs: [oracles.leave_one_out(g) for g in gs]))
    close(-batches.mean(), grad_J(task, targets))


@pytest.mark.parametrize(
    ("task", "targets"),
    [
        (FIXED, (1, 1)),
        (FIXED, (0, 1, 2)),
        (VARIABLE, (1, 2)),
        (VARIABLE, (0, 1, 1)),
        (HALFWAY, (1, 2)),
        (TOKENS, (1, 2)),
    ],
)
def test_batch_mean_baseline_shrinks_the_gradient_by_one_minus_one_over_n(task, targets):
    """Completions are independent and E grad log pi = 0, so E[r_j grad log pi(i)] = 0 for j != i:
    E[(r_i - mean r) grad log pi(i)] = (1 - 1/N) grad J(prompt i), for different prompts too.
    """
    batches = every_batch("reinforce", task, targets, 1)
    close(batches.grads, expected_grads(task, batches, batch_wise(oracles.centred)))
    close(-batches.mean(), (1 - 1 / len(targets)) * grad_J(task, targets))


@pytest.mark.parametrize(("task", "targets"), [(FIXED, (1,)), (VARIABLE, (1, 2)), (HALFWAY, (0, 2)), (TOKENS, (1,))])
def test_plain_return_gradient_is_unbiased(task, targets):
    batches = every_batch("reinforce", task, targets, 1, advantage=lambda batch: total_return(batch.rewards))
    close(batches.grads, expected_grads(task, batches, lambda groups: groups))
    close(-batches.mean(), grad_J(task, targets))


def test_potential_shaping_leaves_the_policy_gradient_as_it_is():
    batches = every_batch("reinforce", POTENTIAL, (1, 2), 1, advantage=lambda batch: total_return(batch.rewards))
    close(-batches.mean(), grad_J(VARIABLE, (1, 2)))


@pytest.mark.parametrize(("task", "targets"), [(FIXED, (1,)), (VARIABLE, (1, 2)), (HALFWAY, (0, 2)), (TOKENS, (1, 2))])
def test_actor_critic_gradient_is_unbiased_whatever_the_critic(task, targets):
    V = values_of(task, targets)
    batches = every_batch("actor_critic", task, targets, 1)
    close(batches.grads, expected_grads(task, batches, lambda gs: [[g[0] - v] for g, v in zip(gs, V, strict=True)]))
    close(-batches.mean(), grad_J(task, targets))


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_critic_follows_its_regression_and_the_policy_does_not_move_it(name):
    """Its gradient is that of mean (r - V)^2 alone: nothing through A, nothing from the policy's loss."""
    task, targets = VARIABLE, (1, 2, 1)
    batches = every_batch(name, task, targets, 1, entropy_coef=0.1)
    w = oracles.weights(critic_of(task, 1))
    slopes = {t: oracles.gradient(oracles.value(w, task, t), w) for t in targets}
    V = dict(zip(targets, values_of(task, targets), strict=True))
    expected = torch.stack(
        [
            sum(2 * (V[t] - truth_of(task).rewards[t][c]) * slopes[t] for t, c in rows) / len(rows)
            for rows in batches.rows()
        ]
    )
    close(batches.critic_grads, expected)
    losses = [sum((truth_of(task).rewards[t][c] - V[t]) ** 2 for t, c in rows) / 3 for rows in batches.rows()]
    close(batches.metrics["value_loss"], losses)


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ppo_at_ratio_one_has_the_gradient_of_its_standardised_advantage(epochs, level):
    """With a learning rate of 0 every epoch is a first one."""
    task, targets = VARIABLE, (1, 2, 2)
    V = values_of(task, targets)

    def advantage(groups):
        return [[a] for a in oracles.z_score([g[0] - v for g, v in zip(groups, V, strict=True)], 1, 1e-8)]

    batches = every_batch("ppo", task, targets, 1, epochs=epochs, ratio_level=level)
    close(batches.grads, expected_grads(task, batches, advantage))
    assert (batches.metrics["clip_frac"] == 0).all()
    assert (batches.metrics["ratio_min"] == 1).all() and (batches.metrics["ratio_max"] == 1).all()


@pytest.mark.parametrize(
    ("task", "targets", "G"),
    [(FIXED, (1,), 3), (FIXED, (1, 2), 2), (VARIABLE, (1,), 3), (VARIABLE, (1, 2), 2), (TOKENS, (1,), 3)],
    ids=short,
)
def test_grpo_gradient_is_that_of_success_weighted_by_w_of_p(task, targets, G):
    """E = mean over prompts of w(p) grad p, w(p) = E[A | r = 1] - E[A | r = 0]; eps 1e-6, ddof 1."""

    def z_score(group):
        return oracles.z_score(group, 1, 1e-6)

    batches = every_batch("grpo", task, targets, G)
    close(batches.grads, expected_grads(task, batches, lambda gs: [z_score(g) for g in gs]))
    expected = 0.0
    for target in targets:
        p = sum(pi * r for pi, r in zip(truth_of(task).pi[target], truth_of(task).rewards[target], strict=True))
        expected = expected + oracles.binary_weight(p, G, z_score) * truth_of(task).grad_p(target) / len(targets)
    close(-batches.mean(), expected)


@pytest.mark.parametrize(("p", "w"), [(0.01, 2.440367171), (0.1, 2.177353734), (0.3, 1.835957934), (0.5, 1.735807198)])
def test_grpo_step_of_eight_completions_weighs_success_by_the_known_numbers(p, w):
    """One digit of two, T = 1, success with probability p exactly: 2^8 batches; w to ten digits, hence rtol 5e-10."""
    task = DigitSum(seq_len=1, digits=2)
    indices = list(itertools.product(range(2), repeat=8))
    R = len(indices)
    task_given = DigitSum(seq_len=1, digits=2)
    object.__setattr__(task_given, "sample_targets", lambda generator, prompts: torch.ones(R, 1, dtype=torch.long))
    policy = policy_of(task_given, R)
    with torch.no_grad():
        policy.head_weight.zero_()
        policy.head_bias.copy_(torch.tensor([[0.0, math.log(p / (1 - p))]]))
    policy.sample = lambda targets, group_size, generator, trace=None: torch.tensor(indices).view(R, 1, 8, 1)
    grpo.train_step(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.0),
        ReplicaGenerator([0] * R),
        advantage=lambda batch: group_z_score(batch.rewards, eps=0.0),
        prompts=1,
        entropy_coef=0.0,
        max_grad_norm=math.inf,
    )
    chance = torch.tensor([math.prod(p if c else 1 - p for c in batch) for batch in indices])
    weights = oracles.weights(policy)
    grad_p = oracles.gradient(oracles.success_probability(weights, task, 1), weights)
    close(-(chance[:, None] * flat(policy)).sum(0), w * grad_p, rtol=5e-10)


@pytest.mark.parametrize("name", RUNGS)
def test_entropy_bonus_adds_its_coefficient_times_the_gradient_of_the_summed_entropy(name):
    """- c / N sum_i sum_t grad H_t: a bonus (it raises entropy), summed over a sequence, averaged over sequences."""
    task, c = VARIABLE, 0.3
    targets, G = ((1, 2), 1) if name not in ("rloo", "grpo") else ((1,), 2)
    extra = {"epochs": 1} if name == "ppo" else {}
    without, with_bonus = (every_batch(name, task, targets, G, entropy_coef=x, **extra) for x in (0.0, c))
    grads = truth_of(task).entropy_grads
    expected = torch.stack([-c * sum(grads[t][i] for t, i in rows) / len(rows) for rows in with_bonus.rows()])
    close(with_bonus.grads - without.grads, expected, atol=1e-13)


# ---- several epochs ----


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("task", [VARIABLE, TOKENS], ids=["state", "tokens"])
def test_ppo_epochs_equal_an_independent_loop(level, task):
    """Four epochs of SGD on one batch: A and the old log-probabilities stay those of the first; each replica alone."""
    K, P, epochs, clip, c, lr, longest, seeds = 2, 6, 4, 0.15, 0.05, 2.0, 0.2, [7, 3]
    policy = Policy(task, ReplicaGenerator(seeds, "init"), hidden=3, dtype=torch.float64)
    critic = Critic(task, ReplicaGenerator(seeds, "critic"), hidden=3, dtype=torch.float64)
    start = [(oracles.weights(policy, k), oracles.weights(critic, k)) for k in range(K)]
    again = ReplicaGenerator(seeds, step=1)
    targets = task.sample_targets(again, P)
    tokens = policy.sample(targets, 1, again)
    metrics = ppo.train_step(
        policy,
        torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=lr),
        ReplicaGenerator(seeds, step=1),
        critic=critic,
        prompts=P,
        entropy_coef=c,
        max_grad_norm=longest,
        epochs=epochs,
        clip=clip,
        ratio_level=level,
    )
    clipped_norms = 0
    for k in range(K):
        w, v = start[k]
        rows = [(int(targets[k, p]), tuple(tokens[k, p, 0].tolist())) for p in range(P)]
        rewards = [oracles.reward(task, *row) for row in rows]
        values = [oracles.value(v, task, target).item() for target, _ in rows]
        A = oracles.z_score([r - x for r, x in zip(rewards, values, strict=True)], 1, 1e-8)
        old = None
        for _ in range(epochs):
            scored = [oracles.score(w, task, *row) for row in rows]
            if old is None:
                old = [[x.item() for x in logprobs] for logprobs, _ in scored]
            objective, entropy, taken, ratios = 0.0, 0.0, 0, []
            for (logprobs, entropies), before, a in zip(scored, old, A, strict=True):
                steps = [new - x for new, x in zip(logprobs, before, strict=True)]
                for step in steps if level == "token" else [sum(steps)]:
                    ratio = step.exp()
                    lost = (a > 0 and ratio > 1 + clip) or (a < 0 and ratio < 1 - clip)
                    objective = objective + (a * (1 + clip if a > 0 else 1 - clip) if lost else ratio * a)
                    taken += lost
                    ratios.append(ratio.item())
                entropy = entropy + sum(entropies)
            loss = -objective / P - c * entropy / P
            value_loss = sum((r - oracles.value(v, task, t)) ** 2 for r, (t, _) in zip(rewards, rows, strict=True)) / P
            moved = []
            for weights, scalar, bound in ((w, loss, longest), (v, value_loss, math.inf)):
                grads = torch.autograd.grad(scalar, list(weights.values()))
                norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
                if scalar is loss:
                    grad_norm = norm
                    clipped_norms += norm > bound
                scale = min(1.0, bound / norm)
                moved.append(
                    {
                        name: (p - lr * scale * g).detach().requires_grad_()
                        for (name, p), g in zip(weights.items(), grads, strict=True)
                    }
                )
            w, v = moved
        for module, weights in ((policy, w), (critic, v)):
            for name, p in module.named_parameters():
                close(p[k], weights[name], rtol=1e-10, atol=1e-12)  # four steps of rounding
        last = {
            "loss": loss,
            "value_loss": value_loss,
            "grad_norm": grad_norm,
            "clip_frac": int(taken) / len(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "reward": sum(rewards) / P,
            "success": sum(oracles.success(task, *row) for row in rows) / P,
        }
        for name, expected in last.items():
            close(metrics[name][k], expected, rtol=1e-10, atol=1e-12)
        assert metrics["clip_frac"][k] > 0  # the clip acted, or this test would show nothing
    assert clipped_norms > 0


# ---- replicas never mix ----


def run(name, task, seeds, steps=20):
    policy = Policy(task, ReplicaGenerator(seeds, "init"), hidden=8, dtype=torch.float64)
    modules, arguments = [policy], {}
    if name in WITH_CRITIC:
        arguments["critic"] = Critic(task, ReplicaGenerator(seeds, "critic"), hidden=8, dtype=torch.float64)
        modules.append(arguments["critic"])
    if name in ("rloo", "grpo"):
        arguments["group_size"] = 4
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.03)
    generator = ReplicaGenerator(seeds)
    history = []
    for step in range(steps):
        generator.seek(step)
        history.append(RUNGS[name].train_step(policy, optimizer, generator, prompts=6, **arguments))
    return parameters, history


@pytest.mark.parametrize("name", RUNGS)
def test_twenty_steps_of_a_replica_are_the_same_alone_and_among_five(name):
    """To 1e-10 in float64: one batched product may be blocked differently from five."""
    task = DigitSum(seq_len=3, digits=4, variable_length=True)
    alone, alone_history = run(name, task, [3])
    among, among_history = run(name, task, [0, 1, 2, 3, 4])
    start = Policy(task, ReplicaGenerator([3], "init"), hidden=8, dtype=torch.float64)
    for p, q in zip(alone, among, strict=True):
        close(p[0], q[3], rtol=1e-10, atol=1e-10)
    assert all((p - q).abs().max() > 0.01 for p, q in zip(alone, start.parameters(), strict=False))
    for here, there in zip(alone_history, among_history, strict=True):
        assert here.keys() == there.keys()
        for metric in here:
            assert here[metric].shape == (1,) and there[metric].shape == (5,)
            one, other = (x.nan_to_num(-99) for x in (here[metric][0], there[metric][3]))  # undefined in both
            close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", RUNGS)
def test_a_diverged_replica_leaves_the_others_bit_for_bit_as_they_were(name):
    """Its policy is NaN from the start: the other two take the same three steps as beside a sound one."""
    task = DigitSum(seq_len=2, digits=3, variable_length=True)
    results = []
    for sick in (False, True):
        policy = Policy(task, ReplicaGenerator([0, 1, 2], "init"), hidden=4, dtype=torch.float64)
        arguments, parameters = {}, list(policy.parameters())
        if name in WITH_CRITIC:
            arguments["critic"] = Critic(task, ReplicaGenerator([0, 1, 2], "critic"), hidden=4, dtype=torch.float64)
            parameters += arguments["critic"].parameters()
        with torch.no_grad():
            if sick:
                policy.head_bias[1] = math.nan
        generator = ReplicaGenerator([0, 1, 2])
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        for step in range(3):
            generator.seek(step)
            metrics = RUNGS[name].train_step(policy, optimizer, generator, prompts=8, **arguments)
        results.append((parameters, metrics))
    (sound, sound_metrics), (beside, beside_metrics) = results
    for p, q in zip(sound, beside, strict=True):
        oracles.same(p[0], q[0])
        oracles.same(p[2], q[2])
    assert all(q[1].isnan().any() for q in beside[:3])
    for metric in sound_metrics:
        oracles.same(sound_metrics[metric][[0, 2]], beside_metrics[metric][[0, 2]])


def test_a_diverged_critic_leaves_the_other_replicas_of_ppo_alone():
    task = DigitSum(seq_len=2, digits=3)
    policy = Policy(task, ReplicaGenerator([0, 1], "init"), hidden=4, dtype=torch.float64)
    critic = Critic(task, ReplicaGenerator([0, 1], "critic"), hidden=4, dtype=torch.float64)
    with torch.no_grad():
        critic.value_bias[0] = math.nan
    optimizer = torch.optim.SGD([*policy.parameters(), *critic.parameters()], lr=0.1)
    ppo.train_step(policy, optimizer, ReplicaGenerator([0, 1]), critic=critic, prompts=4)
    assert all(p[1].isfinite().all() for p in policy.parameters())


# ---- the calls themselves ----


@pytest.mark.parametrize(("name", "G"), [("reinforce", 1), ("actor_critic", 1), ("ppo", 1), ("rloo", 8), ("grpo", 8)])
def test_default_batches_are_as_documented(name, G):
    task, seen = DigitSum(seq_len=2, digits=2), []
    policy = policy_of(task, 2)
    arguments = {"critic": critic_of(task, 2)} if name in WITH_CRITIC else {}

    def advantage(batch):
        seen.append(batch)
        return RUNGS[name].advantage(batch)

    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    RUNGS[name].train_step(policy, optimizer, ReplicaGenerator([0, 1]), advantage=advantage, **arguments)
    assert len(seen) == 1 and seen[0].tokens.shape == (2, 64, G, 2)  # A is evaluated once, before the first epoch
    assert (seen[0].values is not None) == (name in WITH_CRITIC)
    defaults = {k: p.default for k, p in inspect.signature(RUNGS[name].train_step).parameters.items()}
    assert defaults["entropy_coef"] == 0.02
    if name == "ppo":
        assert (defaults["epochs"], defaults["clip"], defaults["ratio_level"]) == (4, 0.2, "token")


def test_the_table_of_rungs_names_each_train_step():
    assert {name: rung.train_step for name, rung in RUNGS.items()} == TRAIN_STEPS


@pytest.mark.parametrize("name", RUNGS)
def test_each_rung_passes_its_gradient_bound_on(name):
    """One replica per batch: norms above the bound are scaled to it, norms below it stay."""
    targets, G = ((1, 2), 1) if name not in ("rloo", "grpo") else ((1,), 2)
    free = every_batch(name, VARIABLE, targets, G)
    bound = free.metrics["grad_norm"].max().item() / 2
    clipped = every_batch(name, VARIABLE, targets, G, max_grad_norm=bound)
    norm = free.grads.norm(dim=1)
    assert (norm > bound).any() and (norm < bound).any()
    close(clipped.grads, free.grads * (bound / norm.clamp(min=bound))[:, None])
    assert inspect.signature(RUNGS[name].train_step).parameters["max_grad_norm"].default == 1.0


def test_raw_advantages_of_ppo_are_those_of_actor_critic():
    task, seen = DigitSum(seq_len=2, digits=2), []
    policy, critic = policy_of(task, 1), critic_of(task, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    ppo.train_step(
        policy, optimizer, ReplicaGenerator([0]), critic=critic, advantage=lambda b: seen.append(b) or ppo.advantage(b)
    )
    (batch,) = seen
    oracles.same(ppo.raw_advantage(batch), actor_critic.advantage(batch))
    oracles.same(ppo.raw_advantage(batch)[..., 0], batch.rewards[..., 0] - batch.values)


PAPERS = {
    "reinforce": ["Williams 1992"],
    "actor_critic": ["Sutton", "1999"],
    "ppo": ["Schulman", "arXiv:1707.06347"],
    "rloo": ["Kool", "Ahmadian", "arXiv:2402.14740"],
    "grpo": ["Shao", "arXiv:2402.03300"],
}


@pytest.mark.parametrize("name", RUNGS)
def test_each_rung_names_its_paper_and_its_bias(name):
    text = RUNGS[name].__doc__
    assert "Paper:" in text and "Bias:" in text
    for words in PAPERS[name]:
        assert words in text


@pytest.mark.parametrize(
    "module", ["advantages", "objectives", "update", "reinforce", "actor_critic", "ppo", "rloo", "grpo"]
)
def test_every_public_function_of_the_algorithms_is_documented(module):
    module = importlib.import_module(f"pgprog.algorithms.{module}")
    public = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    public = {n: f for n, f in public.items() if not n.startswith("_")}
    assert public and module.__doc__
    for function in public.values():
        assert re.search(r"\w{4}", function.__doc__ or "")
