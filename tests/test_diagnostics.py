"""Instruments: each formula against plain loops, and where there is a truth, against enumeration; warnings in words."""

import json
import math

import numpy as np
import pytest
import torch

from mutants import ROOT
from oracles import as_users_run_it, close, same
from pgprog.algorithms.advantages import group_z_score, leave_one_out
from pgprog.algorithms.diagnostics import (
    effective_sample_size,
    explained_variance,
    gradient_metrics,
    gradient_noise,
    group_metrics,
    kl_metrics,
    quantiles,
    ratio_quantiles,
    rollout_metrics,
    signal_and_noise,
    smallest_group,
    step_metrics,
)
from pgprog.algorithms.from_recipe import aggregation_of, objective_of
from pgprog.algorithms.recipes import find
from pgprog.algorithms.sampling import informative_groups
from pgprog.algorithms.update import policy_gradient, update
from pgprog.cli import main
from pgprog.doctor_command import TITLES
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.moments import group_moments, random_prompts
from pgprog.exact.scores import score_moments
from pgprog.exact.values import expected_return
from pgprog.exact.weight import group_advantage
from pgprog.experiment import rundir, watch
from pgprog.experiment.columns import COLUMNS, rows_with
from pgprog.experiment.config import RunConfig
from pgprog.experiment.instruments import exact_values
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import run
from pgprog.experiment.watch import CHECKS, Facts, Watch, facts_of, warnings_in
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, Rollout, rollout

TASK = DigitSum(seq_len=3, digits=3, variable_length=True)
K, P, G, T = 2, 3, 4, 3
Z = 4


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged_mask(seed=0):
    """Unequal lengths; one completion has nothing that counts."""
    lengths = torch.randint(1, T + 1, (K, P, G), generator=torch.Generator().manual_seed(seed))
    lengths[0, 1, 2] = 0
    return torch.arange(T) < lengths.unsqueeze(-1)


def made(**changes):
    """A batch of numbers without a policy behind them."""
    mask = ragged_mask()
    success = torch.rand(K, P, G, generator=torch.Generator().manual_seed(5)) < 0.5
    fields = {
        "targets": torch.zeros(K, P, dtype=torch.long),
        "tokens": torch.zeros(K, P, G, T, dtype=torch.long),
        "mask": mask,
        "logprobs": torch.where(mask, numbers(K, P, G, T, seed=1), 0),
        "entropies": torch.where(mask, numbers(K, P, G, T, seed=2).abs(), 0),
        "rewards": success.double() * 0.95,
        "success": success,
    }
    return Rollout(**(fields | changes))


def counted(x, mask, k):
    return [x[k, i, j, t].item() for i in range(P) for j in range(G) for t in range(T) if mask[k, i, j, t]]


# ---- what a batch says ----


def test_lengths_of_right_and_wrong_answers():
    batch = made()
    metrics = rollout_metrics(batch, numbers(K, P, G))
    for k in range(K):
        lengths = {True: [], False: []}
        for i in range(P):
            for j in range(G):
                if n := int(batch.mask[k, i, j].sum()):  # what a filter took out has no length
                    lengths[bool(batch.success[k, i, j])].append(n)
        close(metrics["length_right"][k], sum(lengths[True]) / len(lengths[True]))
        close(metrics["length_wrong"][k], sum(lengths[False]) / len(lengths[False]))


def test_a_length_of_no_answers_is_undefined():
    right = rollout_metrics(made(success=torch.ones(K, P, G, dtype=torch.bool)), numbers(K, P, G))
    assert right["length_wrong"].isnan().all() and not right["length_right"].isnan().any()


def test_spread_of_the_groups_means_and_stds_by_plain_loops():
    rewards = numbers(K, P, G, seed=3)
    rewards[0, 0] = 0.95  # a group of equal rewards, which no binary fraction holds: its std is exactly 0
    metrics = group_metrics(rewards, rewards > 0)
    for k in range(K):
        rows = [rewards[k, i].tolist() for i in range(P)]
        means = [sum(row) / G for row in rows]
        stds = [math.sqrt(sum((r - m) ** 2 for r in row) / (G - 1)) for row, m in zip(rows, means, strict=True)]
        if k == 0:
            stds[0] = 0.0
        for q in (10, 50, 90):
            close(metrics[f"group_mean_q{q}"][k], np.quantile(means, q / 100))
            close(metrics[f"group_std_q{q}"][k], np.quantile(stds, q / 100))
    same(
        group_metrics(torch.full((1, 2, 7), 0.95), torch.ones(1, 2, 7, dtype=torch.bool))["group_std_q90"],
        torch.zeros(1),
    )


def test_groups_paid_alike_but_of_both_kinds_are_neither_all_right_nor_all_wrong():
    success = torch.tensor([[[True, False], [False, False], [True, True], [True, False]]])
    rewards = torch.tensor([[[0.3, 0.3], [0.0, 0.0], [1.0, 1.0], [1.0, 0.3]]])
    metrics = group_metrics(rewards, success)
    close(metrics["frac_reward_zero_std"], [3 / 4])
    close(metrics["frac_all_wrong"], [1 / 4])
    close(metrics["frac_all_right"], [1 / 4])


def test_informative_groups_measured_and_predicted():
    """4000 groups at exact success probabilities: within 4 standard errors of 1 - p^G - (1 - p)^G, averaged."""
    task, n = DigitSum(seq_len=2, digits=3), 4000
    policy = Policy(task, ReplicaGenerator([1], "init"), 8, torch.float64)
    batch = rollout(policy, ReplicaGenerator([2]), n, G)
    expected = informative_groups(exact_values(policy, batch.targets)[0], G)
    measured = 1 - rollout_metrics(batch, leave_one_out(batch.rewards))["frac_reward_zero_std"]
    error = (expected * (1 - expected)).sum().sqrt() / n
    assert abs(measured - expected.mean()) <= Z * error
    assert error < 0.01 < expected.mean() < 0.99


# ---- the critic ----


def test_explained_variance_by_plain_loops():
    mask, returns, values = ragged_mask(), numbers(K, P, G, T, seed=1), numbers(K, P, G, T, seed=2)
    found = explained_variance(returns.flatten(1), values.flatten(1), mask)
    for k in range(K):
        r, v = counted(returns, mask, k), counted(values, mask, k)

        def variance(x):
            return sum((a - sum(x) / len(x)) ** 2 for a in x) / len(x)

        close(found[k], 1 - variance([a - b for a, b in zip(r, v, strict=True)]) / variance(r))


def test_explained_variance_of_a_perfect_a_constant_and_a_bad_critic():
    r = numbers(1, 50)
    close(explained_variance(r, r + 3), [1.0])
    close(explained_variance(r, torch.full_like(r, 7.0)), [0.0], atol=1e-12)
    close(explained_variance(r, -r), [-3.0], rtol=1e-10)
    assert explained_variance(torch.full((1, 7), 0.95), r[:, :7]).isnan().all()


@pytest.mark.parametrize("recipe", ["actor_critic", "gae"])
def test_the_critic_is_held_against_what_it_regresses_on(recipe):
    if recipe == "actor_critic":
        batch = made(values=numbers(K, P, seed=8))
        paid, values = batch.rewards, batch.values.unsqueeze(-1).expand(K, P, G)
        expected = explained_variance(paid.flatten(1), values.flatten(1))
    else:
        paid = torch.where(ragged_mask(), numbers(K, P, G, T, seed=9), 0)
        batch = made(prefix_values=numbers(K, P, G, T, seed=8), token_rewards=paid)
        to_go = paid.flip(-1).cumsum(-1).flip(-1)
        expected = explained_variance(to_go.flatten(1), batch.prefix_values.flatten(1), batch.mask)
    close(rollout_metrics(batch, numbers(K, P, G))["explained_variance"], expected)


@pytest.mark.parametrize("reward_form", ["outcome", "potential"])
def test_exact_values_are_those_of_each_replicas_own_prompts(reward_form):
    task = DigitSum(seq_len=2, digits=3, reward_form=reward_form)
    policy = Policy(task, ReplicaGenerator([1, 2], "init"), 4, torch.float64)
    targets = torch.tensor([[4, 0, 4], [1, 3, 0]])
    every = expected_return(policy, torch.arange(5))
    close(exact_values(policy, targets), torch.stack([every[k][targets[k]] for k in range(2)]))


# ---- ratios, KL, effective sample size ----


def test_quantiles_are_those_of_numpy_over_what_counts():
    x, mask = numbers(K, P, G, T), ragged_mask()
    shares = (0.0, 0.01, 0.25, 0.5, 0.99, 1.0)
    found = quantiles(x.flatten(1), shares, mask.flatten(1))
    for k in range(K):
        close(found[k], torch.tensor(np.quantile(counted(x, mask, k), shares)))
    close(quantiles(x, shares), torch.tensor(np.quantile(x.numpy(), shares, axis=-1)).movedim(0, -1))


def test_ratio_quantiles_see_both_tails_and_nothing_masked():
    mask, old = ragged_mask(), numbers(K, P, G, T, seed=3)
    new = old + numbers(K, P, G, T, seed=4)
    found = ratio_quantiles(torch.where(mask, new, 1e3), old, mask)
    for k in range(K):
        ratios = [math.exp(a - b) for a, b in zip(counted(new, mask, k), counted(old, mask, k), strict=True)]
        for name, q in (("min", 0), ("q01", 0.01), ("q50", 0.5), ("q99", 0.99), ("max", 1)):
            close(found[f"token_ratio_{name}"][k], np.quantile(ratios, q))


def test_kl_estimates_by_plain_loops_with_the_sampler_first():
    mask, first, second = ragged_mask(), numbers(K, P, G, T, seed=3), numbers(K, P, G, T, seed=4)
    found = kl_metrics("kl_old", first, second, mask)
    for k in range(K):
        logs = [a - b for a, b in zip(counted(first, mask, k), counted(second, mask, k), strict=True)]
        close(found["kl_old_k1"][k], sum(logs) / len(logs))
        close(found["kl_old_k3"][k], sum(math.exp(-x) - 1 + x for x in logs) / len(logs))


def test_effective_sample_size_by_plain_loops():
    log_w, valid = numbers(K, P, G, seed=6) * 2 + 300, ragged_mask().any(-1)
    found = effective_sample_size(log_w, valid)
    for k in range(K):
        w = [math.exp(log_w[k, i, j] - 300) for i in range(P) for j in range(G) if valid[k, i, j]]
        close(found[k], sum(w) ** 2 / (len(w) * sum(x * x for x in w)))
    close(effective_sample_size(torch.zeros(1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)), [1.0])
    one = torch.tensor([[[80.0, 0.0, 0.0, 0.0]]])
    close(effective_sample_size(one, torch.ones(1, 1, 4, dtype=torch.bool)), [1 / 4])
    close(effective_sample_size(one, torch.zeros(1, 1, 4, dtype=torch.bool)), [1.0])


def test_step_metrics_take_each_policy_for_what_it_is():
    new, old, sampler, ref = (numbers(K, P, G, T, seed=10 + i) for i in range(4))
    batch = made(old_logprobs=old, sampler_logprobs=sampler, ref_logprobs=ref)
    found, mask = step_metrics(batch, new, moved=True), batch.mask
    for name, first, second in (
        ("kl_old", old, new),
        ("kl_sampler", sampler, new),
        ("kl_ref", batch.logprobs, ref),
    ):
        for key, value in kl_metrics(name, first, second, mask).items():
            same(found[key], value)
    weights = torch.where(mask, new - sampler, 0).sum(-1)
    same(found["ess"], effective_sample_size(weights, mask.any(-1)))
    plain = step_metrics(made(old_logprobs=old), new, moved=True)
    same(plain["ess"], effective_sample_size(torch.where(mask, new - old, 0).sum(-1), mask.any(-1)))
    assert step_metrics(made(old_logprobs=old), new, moved=False) == {}


def test_update_measures_the_ratio_where_it_can_move():
    def step(**options):
        policy = Policy(TASK, ReplicaGenerator([3], "init"), 4, torch.float64)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        return update(policy, optimizer, ReplicaGenerator([3]), lambda b: leave_one_out(b.rewards), prompts=4,
                      group_size=2, **options)  # fmt: skip

    assert "token_ratio_q50" not in step()
    twice = step(epochs=2)
    assert twice["token_ratio_min"] < 1 < twice["token_ratio_max"] and 0 < twice["ess"] < 1
    assert twice["kl_old_k3"] > 0
    assert "token_ratio_q50" in step(minibatches=2)


# ---- signal and noise of the gradient ----


def test_signal_and_noise_by_plain_loops():
    M, shapes = 5, ((2, 3), (4,))
    parts = [numbers(K, M, *shape, seed=i) for i, shape in enumerate(shapes)]
    found = signal_and_noise(parts, share=0.75)
    for k in range(K):
        g = [[x for part in parts for x in part[k, m].flatten().tolist()] for m in range(M)]
        mean = [sum(column) / M for column in zip(*g, strict=True)]
        S = sum((x - y) ** 2 for row in g for x, y in zip(row, mean, strict=True)) / (M - 1)
        close(found.signal[k], sum(x * x for x in mean) - S / M)
        close(found.noise[k], 0.75 * S / M)
    metrics = gradient_metrics(found)
    close(metrics["grad_snr"], found.signal / found.noise)
    still = gradient_metrics(signal_and_noise([torch.ones(1, 3, 2)]))
    close(still["grad_signal"], [2.0])
    assert still["grad_snr"].isnan().all()


@pytest.mark.parametrize("prompts", [6, 8])
def test_signal_and_noise_are_unbiased_against_the_exact_moments_of_the_gradient(prompts):
    """RLOO on a small task: n = 4000 batches, each cut in 3; 8 prompts leave 2 over. Within 4 standard errors."""
    task, n = DigitSum(seq_len=2, digits=3), 4000
    one = Policy(task, ReplicaGenerator([5], "init"), 4, torch.float64)
    targets = torch.arange(task.max_target + 1)
    table = group_advantage(leave_one_out, G)
    exact = random_prompts(
        group_moments(table, score_moments(one, targets)), task.target_weights().to(torch.float64), prompts
    )
    policy = Policy(task, ReplicaGenerator([5] * n, "init"), 4, torch.float64)
    batch = rollout(policy, ReplicaGenerator(range(n)), prompts, G)
    batch = batch._replace(old_logprobs=batch.logprobs.detach())
    found = gradient_noise(policy, batch, leave_one_out(batch.rewards), policy_gradient, None, microbatches=3)
    for estimates, truth in ((found.signal, exact.mean.square().sum(-1)), (found.noise, exact.trace)):
        error = estimates.std() / n**0.5
        assert abs(estimates.mean() - truth) <= Z * error
        assert error < 0.03 * exact.trace
    assert abs(found.signal.mean() / found.noise.mean() - exact.mean.square().sum(-1) / exact.trace) < 0.05


@pytest.mark.parametrize("name", ["rloo", "grpo", "dapo", "dr_grpo", "ppo", "trl:grpo", "cispo"])
def test_the_parts_have_the_gradient_of_the_batch_as_their_mean(name):
    """signal + noise = |g|^2, g the gradient that ``update`` takes without the entropy bonus."""
    recipe = find(name)
    policy = Policy(TASK, ReplicaGenerator([3, 4], "init"), 4, torch.float64)
    other = Policy(TASK, ReplicaGenerator([8, 9], "init"), 4, torch.float64)
    seen = {}

    def advantage(batch):
        seen["batch"] = batch._replace(old_logprobs=batch.logprobs.detach())
        return group_z_score(batch.rewards)

    def draw(*arguments):
        batch = rollout(*arguments)
        with torch.no_grad():
            return batch._replace(ref_logprobs=other.score(batch.targets, batch.tokens)[0])

    objective, aggregation = objective_of(recipe), aggregation_of(recipe.aggregation)
    still = torch.optim.SGD(policy.parameters(), lr=0.0)
    metrics = update(
        policy, still, ReplicaGenerator([3, 4]), advantage, prompts=6, group_size=G, entropy_coef=0.0,
        max_grad_norm=math.inf, objective=objective, aggregation=aggregation, draw=draw,
    )  # fmt: skip
    batch = seen["batch"]
    before = [p.grad.clone() for p in policy.parameters()]
    A = group_z_score(batch.rewards)
    found = gradient_noise(policy, batch, A, objective, aggregation(batch.mask), microbatches=3)
    close(found.signal + found.noise, metrics["grad_norm"].square(), rtol=1e-9)
    for p, grad in zip(policy.parameters(), before, strict=True):
        same(p.grad, grad)


def test_noise_wants_two_prompts():
    policy = Policy(TASK, ReplicaGenerator([3], "init"), 4, torch.float64)
    batch = rollout(policy, ReplicaGenerator([3]), 1, 2)
    with pytest.raises(ValueError, match="1 prompts"):
        gradient_noise(policy, batch, batch.rewards, policy_gradient, None)


@pytest.mark.parametrize(("p", "G"), [(0.01, 69), (0.5, 2), (0.99, 69), (0.1819, 4), (0.3, 3)])
def test_the_smallest_group_with_half_the_groups_informative(p, G):
    assert smallest_group(p) == G
    chance = [1 - p**g - (1 - p) ** g for g in (G - 1, G)]
    assert chance[0] < 0.5 <= chance[1] + 1e-15


def test_no_group_is_large_enough_where_nothing_ever_succeeds():
    assert smallest_group(0.0) is None and smallest_group(1.0) is None
    assert smallest_group(1e-6) == math.ceil(math.log(0.5) / math.log1p(-1e-6))
    for p, share in ((-0.1, 0.5), (1.1, 0.5), (0.5, 0.0), (0.5, 1.0)):
        with pytest.raises(ValueError, match="probability"):
            smallest_group(p, share)


# ---- in a run ----


def small(**changes):
    usual = {"seq_len": 2, "digits": 3, "prompts": 4, "hidden": 8, "steps": 7, "dtype": "float64"}
    return RunConfig(**(usual | changes))


@pytest.mark.parametrize(
    "which", [{"algo": "reinforce"}, {"algo": "actor_critic"}, {"algo": "ppo"}, {"algo": "grpo"}, {"recipe": "dapo"}]
)
def test_instruments_change_no_bit_of_a_run_and_stand_in_their_rows(which, tmp_path):
    config, checkpoints, results = small(**which), [], []
    for every in (0, 1, 3):
        results.append(run(config, [0, 7], tmp_path / str(every) if directory(tmp_path, every) else None,
                           instruments_every=every, exact_critic=True))  # fmt: skip
        checkpoints.append(tmp_path / str(every) / rundir.CHECKPOINT)
    rows = {every: rundir.read_rows(tmp_path / str(every) / rundir.METRICS) for every in (0, 1, 3)}
    assert len({tuple(r.success) for r in results}) == 1
    loaded = [rundir.load_checkpoint(path.parent)[0] for path in checkpoints]
    for other in loaded[1:]:
        assert loaded[0].keys() == other.keys()
        for name, tensor in loaded[0].items():
            assert torch.equal(tensor, other[name]), name
    costly = {"grad_signal", "grad_noise", "grad_snr", "value_error"}
    for every, steps in ((0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7])):
        assert [row["step"] for row in rows[every] if "grad_signal" in row and row["seed"] == 7] == steps
        assert [{n: v for n, v in row.items() if n not in costly} for row in rows[every]] == rows[0]
    with_critic = which.get("algo") in ("actor_critic", "ppo")
    assert ("value_error" in rows[1][0]) == ("explained_variance" in {n for row in rows[1] for n in row}) == with_critic
    assert all(name in COLUMNS for row in rows[1] for name in row)


def directory(tmp_path, every):
    (tmp_path / str(every)).mkdir()
    return True


def test_the_first_reading_is_of_the_untrained_policy_and_its_own_batch(tmp_path):
    """By hand, from the same batch: RLOO, 4 prompts in 4 parts."""
    config = small(algo="rloo", steps=1)
    run(config, [5], tmp_path)
    (row,) = rundir.read_rows(tmp_path / rundir.METRICS)
    policy = make_learner(config, [5]).policy
    batch = rollout(policy, ReplicaGenerator([5], "train"), 4, 8)
    A, g = leave_one_out(batch.rewards), []
    for i in range(4):
        loss = -(batch.logprobs[:, i].sum(-1) * A[:, i]).mean()
        g.append(torch.cat([x.flatten() for x in torch.autograd.grad(loss, policy.parameters(), retain_graph=True)]))
    mean = sum(g) / 4
    S = sum((x - mean).square().sum() for x in g) / 3
    close(torch.tensor(row["grad_noise"]), S / 4, rtol=1e-9)
    close(torch.tensor(row["grad_signal"]), mean.square().sum() - S / 4, rtol=1e-9)


def test_rows_leave_out_what_is_undefined(tmp_path):
    run(small(seq_len=4, digits=10, prompts=2, algo="reinforce"), [0], tmp_path)
    rows = rundir.read_rows(tmp_path / rundir.METRICS)
    assert any("length_right" not in row for row in rows) and all("length_wrong" in row for row in rows)
    assert "NaN" not in (tmp_path / rundir.METRICS).read_text()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_negative_interval_is_refused(command, tmp_path, capsys):
    assert main([command, "--instruments-every", "-1", "--out", str(tmp_path / "run")]) == 2
    assert "--instruments-every -1 is out of range" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- warnings ----

GROUP, ALONE = Facts(8, stale=False), Facts(1, stale=True)
FILTER = Facts(8, stale=False, most_sampled=1536)


def window(n=100, **columns):
    """Rows with these values: a number, or a function of the share of the window that is past."""
    return [{"step": i + 1, **{name: v(i / n) if callable(v) else v for name, v in columns.items()}} for i in range(n)]


TRUE = {
    "silent_groups": (GROUP, {"frac_reward_zero_std": 0.92, "success": 0.01}),
    "collapsed_entropy": (ALONE, {"entropy": 0.1, "success": 0.2}),
    "clipped_tokens": (ALONE, {"clip_frac": 0.4}),
    "ratio_tails": (ALONE, {"token_ratio_q01": 0.5, "token_ratio_q99": 6.0}),
    "ratios_of_one": (ALONE, {"token_ratio_min": 1.0, "token_ratio_max": 1.0}),
    "lagging_critic": (ALONE, {"explained_variance": lambda x: 0.1 if x < 0.05 else -0.3}),
    "growing_wrong_answers": (GROUP, {"length_wrong": lambda x: 5 + 5 * x, "length_right": 5.0}),
    "faint_gradient": (GROUP, {"grad_signal": 0.01, "grad_noise": 1.0, "success": 0.1}),
    "worn_sample": (ALONE, {"ess": 0.1}),
    "spent_filter": (FILTER, {"sampled": lambda x: 1024.0 if x < 0.2 else 1536.0, "length": 5.0}),
}
FALSE = {
    "silent_groups": [{"frac_reward_zero_std": 0.92, "success": 0.97}, {"frac_reward_zero_std": 0.7, "success": 0.01}],
    "collapsed_entropy": [{"entropy": 0.1, "success": 0.9}, {"entropy": 0.5, "success": 0.2}],
    "clipped_tokens": [{"clip_frac": 0.2}, {}],
    "ratio_tails": [{"token_ratio_q01": 0.5, "token_ratio_q99": 2.0}, {}],
    "ratios_of_one": [{"token_ratio_min": 1.0, "token_ratio_max": 1.001}, {}],
    "lagging_critic": [{"explained_variance": lambda x: 0.1 if int(x * 100) % 2 else -0.3}, {}],
    "growing_wrong_answers": [
        {"length_wrong": lambda x: 5 + 5 * x, "length_right": 12.0},
        {"length_wrong": 5.0, "length_right": 5.0},
    ],
    "faint_gradient": [
        {"grad_signal": 0.1, "grad_noise": 1.0, "success": 0.1},
        {"grad_signal": 0.01, "grad_noise": 1.0, "success": 0.9},
        {"grad_signal": 0.0, "grad_noise": 0.0, "success": 0.0},
    ],
    "worn_sample": [{"ess": 0.9}, {}],
    "spent_filter": [{"sampled": lambda x: 1024.0 if x < 0.21 else 1536.0, "length": 5.0}, {}],
}


def test_every_warning_is_tried():
    assert set(TRUE) == set(FALSE) == set(CHECKS)


@pytest.mark.parametrize("kind", CHECKS)
def test_a_warning_is_given_where_it_holds_and_not_where_it_does_not(kind):
    facts, columns = TRUE[kind]
    assert {w.kind for w in warnings_in(window(**columns), facts)} == {kind}
    for columns in FALSE[kind]:
        assert CHECKS[kind](window(**columns), facts) is None
    assert CHECKS[kind](window(**TRUE[kind][1])[:1] if kind == "lagging_critic" else [], facts) is None


def test_what_a_warning_says():
    text = watch.silent_groups(window(frac_reward_zero_std=0.92, success=0.01), GROUP)
    assert text == (
        "92% of groups carry no signal: success is 1% and G = 8; the smallest G with half the groups informative is 69"
    )
    assert "no G helps" in watch.silent_groups(window(frac_reward_zero_std=1.0, success=0.0), GROUP)
    assert "mix the difficulties" in watch.silent_groups(window(frac_reward_zero_std=0.9, success=0.3), GROUP)
    assert watch.silent_groups(window(frac_reward_zero_std=0.95, success=0.1), GROUP) == (
        "95% of groups carry no signal: success is 10% and G = 8; with equal prompts 43% would, so prompts are decided "
        "or unequal and a larger G will not help: keep entropy up, take easier prompts or mix the difficulties of "
        "prompts"
    )
    assert "in 95% of steps" in watch.lagging_critic(window(**TRUE["lagging_critic"][1]), ALONE)


@pytest.mark.parametrize(
    ("p", "silent", "larger"),
    [
        ([0.02] * 12, None, True),  # alike
        ([0.01, 0.02, 0.03] * 4, None, True),  # nearly
        ([1.0] * 2 + [0.0] * 10, None, False),  # a collapsed policy: two prompts right for ever, the others wrong
        ([0.99] * 3 + [0.005] * 9, None, False),  # nearly
        ([0.05] * 12, 0.95**8 + 0.05**8 + 0.14, True),  # at the threshold
        ([0.05] * 12, 0.95**8 + 0.05**8 + 0.16, False),
    ],
)
def test_a_larger_group_is_the_cure_of_equal_prompts_alone(p, silent, larger):
    silent = silent or sum(q**8 + (1 - q) ** 8 for q in p) / len(p)
    text = watch.silent_groups(window(frac_reward_zero_std=silent, success=sum(p) / len(p)), GROUP)
    assert ("smallest G" in text) == larger and ("a larger G will not help" in text) != larger


def test_the_share_of_equal_prompts_is_that_of_groups_drawn():
    noise = np.random.default_rng(0)
    for p, larger in (([0.02] * 16, True), ([1.0] * 3 + [0.0] * 13, False)):
        rewards = noise.random((100, 16, 8)) < np.array(p)[:, None]
        rows = [
            {"step": i + 1, "frac_reward_zero_std": (r.max(1) == r.min(1)).mean(), "success": r.mean()}
            for i, r in enumerate(rewards)
        ]
        assert ("smallest G" in watch.silent_groups(rows, GROUP)) == larger


def test_a_filter_that_finds_nothing_is_no_collapse():
    """Its batches are empty, so their entropy is 0; where it finds something the policy's entropy is read."""
    empty = {"sampled": 1536.0, "length": 0.0, "entropy": 0.0, "success": 0.0}
    (warned,) = warnings_in(window(**empty), FILTER)
    assert warned.text == (
        "the filter draws all that it may, 1,536 completions, in 100% of steps, and finds no group of unequal rewards "
        "in 100%: a batch is full by the last draw at best, and empty slots move nothing; take easier prompts (harder "
        "ones where nearly all are solved), or a larger G (steps 1 to 100); see pgprog doctor empty-groups"
    )
    some = window(**empty | {"length": lambda x: 5.0 * (x >= 0.9), "entropy": lambda x: 0.1 * (x >= 0.9)})
    assert [warned.kind for warned in warnings_in(some, FILTER)] == ["collapsed_entropy", "spent_filter"]
    assert "no group of unequal rewards in 90%" in watch.spent_filter(some, FILTER)


def test_what_a_filter_may_draw_is_a_fact_of_the_run():
    assert facts_of(RunConfig(recipe="dapo")).most_sampled == 3 * 64 * 8
    assert facts_of(RunConfig(recipe="dapo", set=("sampling.dynamic=1",))).most_sampled is None
    assert watch.spent_filter(window(**TRUE["spent_filter"][1]), GROUP) is None


def test_ratios_of_one_are_right_where_nothing_is_stale():
    assert watch.ratios_of_one(window(token_ratio_min=1.0, token_ratio_max=1.0), GROUP) is None
    assert facts_of(RunConfig(algo="ppo")).stale and not facts_of(RunConfig(algo="grpo")).stale
    assert facts_of(RunConfig(recipe="grpo", set=("sampling.age=2",))).stale
    assert facts_of(RunConfig(algo="grpo")).completions == 8 and facts_of(RunConfig(algo="reinforce")).completions == 1


def test_a_kind_is_said_once_when_the_window_is_full_and_at_the_end():
    late = Watch(GROUP)
    said = [warned for row in window(200, **TRUE["silent_groups"][1]) for warned in late.see(row)]
    assert [(w.kind, w.step) for w in said] == [("silent_groups", watch.WINDOW)]
    assert late.look() == []
    assert warnings_in(window(watch.LEAST - 1, **TRUE["silent_groups"][1]), GROUP) == []
    assert [w.step for w in warnings_in(window(watch.LEAST, **TRUE["silent_groups"][1]), GROUP)] == [watch.LEAST]
    recovered = window(400, frac_reward_zero_std=lambda x: 1.0 if x < 0.15 else 0.0, success=0.1)
    assert warnings_in(recovered, GROUP) == []


@pytest.mark.parametrize(
    ("steps", "seen"), [(20, 20), (30, 20), (60, 30), (110, 60), (199, 100), (200, 100), (5000, 100)]
)
def test_a_short_run_is_warned_half_way_and_not_at_its_end(steps, seen):
    late = Watch(Facts(8, stale=False, steps=steps))
    said = [warned for row in window(min(steps, 300), **TRUE["silent_groups"][1]) for warned in late.see(row)]
    assert [(w.kind, w.step) for w in said] == [("silent_groups", seen)]
    assert f" (steps 1 to {seen}); see" in said[0].text
    assert facts_of(RunConfig(algo="grpo", steps=steps)).steps == steps


def test_a_warning_names_the_steps_that_it_has_read():
    rows = window(400, frac_reward_zero_std=lambda x: 0.0 if x < 0.5 else 0.95, success=0.01)
    (warned,) = warnings_in(rows, GROUP)
    assert (warned.kind, warned.step) == ("silent_groups", 290)
    assert warned.text.endswith(" (steps 191 to 290); see pgprog doctor empty-groups")
    (decided,) = warnings_in(window(frac_reward_zero_std=0.95, success=0.1), GROUP)
    assert decided.text.endswith(" (steps 1 to 100); see pgprog doctor no-entropy-bonus")
    growing = window(400, **TRUE["growing_wrong_answers"][1])
    assert " (steps 1 to 100); " in warnings_in(growing, GROUP)[0].text


@pytest.mark.parametrize("kind", CHECKS)
def test_a_warning_names_a_mode_and_the_pages_know_it(kind):
    facts, columns = TRUE[kind]
    (warned,) = warnings_in(window(**columns), facts)
    assert warned.text.endswith(f"; see pgprog doctor {watch.SEE[kind]}")
    metrics, page = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "doctor"))
    assert f"| `{kind}` |" in metrics.split("## Warnings")[1]
    table = page.split("\n## ")[0]
    for mode in watch.SEE[kind].split():
        assert mode in TITLES
        assert any(f"`{kind}`" in line and f"](#{mode})" in line for line in table.splitlines()), mode


def test_faint_signal_is_judged_over_more_readings_than_a_window_holds():
    rows = [
        row | ({"grad_signal": 0.01, "grad_noise": 1.0} if i % 100 == 0 else {})
        for i, row in enumerate(window(800, success=0.1))
    ]
    assert [w.kind for w in warnings_in(rows, GROUP)] == ["faint_gradient"]
    assert warnings_in(rows[:400], GROUP) == []


FEW = ["--prompts", "4"]
REAL = {
    "silent_groups": ["--algo", "grpo", "--digits", "10", "--group-size", "2", "--lr", "1e-4", *FEW],
    "clipped_tokens": ["--algo", "ppo", "--lr", "0.02", "--undivided-lr", "--clip", "0.01", "--prompts", "8"],
    "collapsed_entropy": [
        "--algo",
        "reinforce",
        "--digits",
        "10",
        "--lr",
        "0.3",
        "--entropy-coef",
        "0",
        "--prompts",
        "4",
    ],
    "spent_filter": ["--recipe", "dapo", "--digits", "10", "--group-size", "2", "--lr", "1e-4", *FEW],
    "ratios_of_one": ["--algo", "ppo", "--lr", "1e-30", "--critic-lr", "1e-30", "--dtype", "float64", *FEW],
    "lagging_critic": [
        "--algo",
        "actor_critic",
        "--digits",
        "2",
        "--critic-lr",
        "1e-9",
        "--lr",
        "1e-4",
        "--prompts",
        "32",
    ],
}


@pytest.mark.parametrize("kind", REAL)
def test_a_small_real_run_is_warned_in_words(kind, tmp_path, capsys):
    with as_users_run_it():
        steps = str(watch.WINDOW + 10)
        shared = ["--seq-len", "5", "--hidden", "8", "--steps", steps, "--out", str(tmp_path / "run")]
        assert main(["train", *shared, *REAL[kind]]) == 0
    out = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / rundir.SUMMARY).read_text())
    (warned,) = [w for w in summary["warnings"] if w["kind"] == kind]
    assert out.count(f": {warned['text']}.") == 2  # live, and at the end
    assert f"Warning, step {warned['step']}: " in out


def test_a_resumed_run_has_the_same_warnings_as_one_in_a_piece(tmp_path, capsys):
    shared = ["train", "--algo", "grpo", "--seq-len", "5", "--prompts", "2", "--hidden", "4", "--group-size", "2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        assert main([*shared, "--steps", "130", "--checkpoint-every", "60", "--out", str(out)]) == 0
    (cut / rundir.RESULT).unlink()
    tensors, metadata = rundir.load_checkpoint(cut)
    rundir.save_checkpoint(cut, tensors, {k: v for k, v in metadata.items() if k != "format"})
    capsys.readouterr()
    assert main(["train", "--resume", str(cut)]) == 0
    assert "Warning, step" not in capsys.readouterr().out  # nothing is said live a second time
    one, other = (json.loads((out / rundir.SUMMARY).read_text())["warnings"] for out in (whole, cut))
    assert one == other and one


# ---- a directory without the columns ----


def test_a_missing_column_is_named_with_the_version_that_writes_it(tmp_path):
    (tmp_path / rundir.METRICS).write_text('{"step": 1, "success": 0.5}\n{"step": 2, "success": 0.5, "ess": 1.0}\n')
    (tmp_path / rundir.CONFIG).write_text('{"environment": {"pgprog": "0.1.0"}}')
    assert [row["step"] for row in rows_with(tmp_path, ["success"])] == [1, 2]
    assert [row["step"] for row in rows_with(tmp_path, ["success", "ess"])] == [2]
    since = COLUMNS["explained_variance"].since
    with pytest.raises(UsageError, match=rf"no explained_variance: written since pgprog {since}, in runs with a c"):
        rows_with(tmp_path, ["success", "explained_variance"])
    with pytest.raises(UsageError, match=r"this run was made by 0\.1\.0"):
        rows_with(tmp_path, ["grad_snr"])
    with pytest.raises(UsageError, match="no version of pgprog writes it"):
        rows_with(tmp_path, ["loss_of_hair"])


def test_a_directory_that_holds_no_metrics_is_refused(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        rows_with(tmp_path, ["success"])
    (tmp_path / rundir.METRICS).write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        rows_with(tmp_path, ["success"])
    (tmp_path / rundir.METRICS).write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match="does not say which version"):
        rows_with(tmp_path, ["success"])


def test_the_page_defines_every_metric():
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in COLUMNS:
        stem = f"group_{name.split('_')[1]}_q" if name.startswith("group_") else name
        assert f"`{stem}" in page or f"`{name}`" in page, name


def test_what_a_filter_left_empty_counts_nowhere():
    """DAPO's batch with empty slots: every completion of a fixed length has that length."""
    from pgprog.algorithms import from_recipe
    from pgprog.algorithms.recipes import RECIPES

    task = DigitSum(seq_len=4)
    policy = Policy(task, ReplicaGenerator([0, 1], "init"), hidden=8, dtype=torch.float64)
    batch = from_recipe.draw_of(RECIPES["dapo"])(policy, ReplicaGenerator([0, 1], "train"), 12, 3)
    assert batch.valid is not None and not batch.valid.all() and batch.valid.any()
    batch = batch._replace(mask=batch.mask & batch.valid.unsqueeze(-1))
    metrics = rollout_metrics(batch, from_recipe.advantage_of(RECIPES["dapo"])(batch))
    close(metrics["length"], torch.full((2,), 4.0))
    close(metrics["frac_reward_zero_std"], torch.zeros(2))
    close(metrics["frac_zero_advantage"], torch.zeros(2))
    for k in range(2):
        kept = batch.success[k][batch.valid[k]]
        close(metrics["success"][k], kept.double().mean())
