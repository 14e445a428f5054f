"""What the modes of the doctor claim exactly, against plain loops."""

import itertools
import math
from functools import partial

import pytest
import torch

from pgprog.algorithms.advantages import leave_one_out
from pgprog.algorithms.recipes import find
from pgprog.algorithms.update import update
from pgprog.doctor import baseline, critic, groups, live, noise, tokens
from pgprog.doctor.mode import Effort, curve, exact_success, expectation, moments_of
from pgprog.env import DigitSum
from pgprog.exact.enumeration import every_target
from pgprog.exact.recipes import tiny_problem
from pgprog.exact.scores import score_moments
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Policy, rollout


def rollout_of(policy):
    return rollout(policy, ReplicaGenerator([0]), 1, 2)


def grad(value, policy):
    gradients = torch.autograd.grad(value, list(policy.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def every_completion(task):
    """Rows of tokens padded with EOS, by length, by itertools."""
    rows = [
        [*digits, task.eos] + [task.eos] * (task.seq_len - length - 1)
        for length in range(task.seq_len)
        for digits in itertools.product(range(task.digits), repeat=length)
    ]
    return rows + [list(digits) for digits in itertools.product(range(task.digits), repeat=task.seq_len)]


def scored_one_by_one(policy, target):
    """(tokens, length, log pi(y), r) of every completion, each scored by itself."""
    task = policy.task
    for row in every_completion(task):
        length = row.index(task.eos) + 1 if task.eos in row else task.seq_len
        logprob = policy.score(torch.tensor([[target]]), torch.tensor([[[row]]]))[0].sum()
        yield row, length, logprob, float(sum(d for d in row if d != task.eos) == target)


def close(a, b, tolerance=1e-12):
    assert (torch.as_tensor(a) - torch.as_tensor(b)).abs().max() < tolerance


def test_the_sick_critic_has_its_fixed_point_where_it_is_said():
    problem = tiny_problem()
    proof = live.exact_values(live.live)
    for i, target in enumerate(problem.targets.tolist()):
        rows = [(logprob.item(), r) for _, _, logprob, r in scored_one_by_one(problem.policy, target)]
        p = sum(math.exp(logprob) * r for logprob, r in rows)
        H = -sum(math.exp(logprob) * logprob for logprob, _ in rows)
        close(proof["p"][i], p)
        close(proof["H"][i], H)
        # d/dV of E[- log pi (r - V) + (r - V)^2]
        V = p + H / 2
        close(sum(math.exp(logprob) * (logprob - 2 * (r - V)) for logprob, r in rows), 0.0)
        close(sum(math.exp(logprob) * logprob for logprob, _ in rows), -proof["H"][i])
    assert proof["slope of the sick critic's loss"]["at p"] == pytest.approx(max(proof["H"]), abs=1e-12)


def test_the_wrong_gradient_of_a_live_kl():
    problem, recipe = tiny_problem(group_size=2), find("rloo_kl", ("kl.coef=0.2",))
    right, extra = 0.0, 0.0
    for target in problem.targets.tolist():
        references = [logprob.item() for _, _, logprob, _ in scored_one_by_one(problem.reference, target)]
        for (_, _, logprob, r), ref in zip(scored_one_by_one(problem.policy, target), references, strict=True):
            pi, log_pi, s = logprob.exp().item(), logprob.item(), grad(logprob, problem.policy)
            right = right + pi * (r - 0.2 * (log_pi - ref)) * s / 2
            extra = extra - pi * 0.2 * log_pi * s / 2
    step = partial(live.kl_step, recipe=recipe, path=live.live)
    close(moments_of(step, problem, reference=problem.reference).mean, right + extra)
    detached = partial(live.kl_step, recipe=recipe, path=torch.Tensor.detach)
    close(moments_of(detached, problem, reference=problem.reference).mean, right)
    assert extra.norm() > 0.01


def test_where_both_runs_of_a_live_kl_end():
    task = DigitSum(seq_len=2, digits=3)
    ref, total = Policy(task, ReplicaGenerator([0], "init"), 4, torch.float64), {0.5: 0.0, 1.0: 0.0}
    for target in range(task.max_target + 1):
        rows = [
            (ref.score(torch.tensor([[target]]), torch.tensor([[[list(y)]]]))[0].sum().exp().item(), sum(y) == target)
            for y in itertools.product(range(3), repeat=2)
        ]
        for power in total:
            w = [(pi * math.exp(right / 0.2)) ** power for pi, right in rows]
            total[power] += sum(x for x, (_, right) in zip(w, rows, strict=True) if right) / sum(w) / 5
    for power, success in total.items():
        close(live.optimum(ref, 0.2, power), success)


def test_a_baseline_by_length_climbs_another_objective():
    problem = tiny_problem(group_size=2)
    expected = 0.0
    for target in problem.targets.tolist():
        for _, length, logprob, r in scored_one_by_one(problem.policy, target):
            expected = expected + logprob.exp().item() * (r - 0.2 * length) * grad(logprob, problem.policy) / 2
    close(moments_of(partial(update, advantage=baseline.bent), problem).mean, expected)
    close(baseline.priced_gradient(problem), expected)


def test_the_mean_of_a_is_read_as_a_lag_or_not_at_all():
    assert "lags: it is 0.30 below" in baseline.read_mean(0.3)
    assert "lags: it is 0.20 above" in baseline.read_mean(-0.2)
    assert "nothing" in baseline.read_mean(0.0) and "bias" not in baseline.read_mean(0.0).split(":")[0]


def test_an_expectation_is_that_of_all_batches():
    problem = tiny_problem(group_size=2)
    J = sum(
        logprob.exp().item() * r / 2
        for target in problem.targets.tolist()
        for _, _, logprob, r in scored_one_by_one(problem.policy, target)
    )
    close(expectation(lambda batch: batch.rewards.mean((-2, -1)), problem), J)
    close(expectation(lambda batch: leave_one_out(batch.rewards).mean((-2, -1)), problem), 0.0)


def test_a_running_mean_has_not_seen_the_batch():
    running, seen = baseline.RunningMean(), []
    for r in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0]):
        batch = rollout_of(tiny_problem().policy)._replace(rewards=torch.tensor([[r]]))
        seen.append((batch.rewards - running(batch)).flatten()[0].item())
    assert seen == pytest.approx([0.5, 0.5, 0.95 * 0.5 + 0.05])


@pytest.mark.parametrize("trained_on", [tokens.unshifted, tokens.late_mask, tokens.aligned])
def test_shifted_log_probabilities_by_hand(trained_on):
    problem = tiny_problem(group_size=2, prompt_form="tokens")
    policy, expected = problem.policy, 0.0
    for target in problem.targets.tolist():
        p = sum(logprob.exp().item() * r for _, _, logprob, r in scored_one_by_one(policy, target))
        for row, length, logprob, r in scored_one_by_one(policy, target):
            hidden, h = policy.read_prompts(torch.tensor([[target]])), 0.0
            for t, token in enumerate(row[:length]):
                before = policy.log_pi(hidden)[0, token, 0]
                hidden = policy.read(torch.tensor([[token]]), hidden)
                after = policy.log_pi(hidden)[0, token, 0]
                late = before if t > 0 else 0 * before
                h = h + {tokens.unshifted: after, tokens.late_mask: late, tokens.aligned: before}[trained_on]
            expected = expected + logprob.exp().item() * (r - p) * grad(h, policy) / 2
    step = partial(update, advantage=tokens.of_group, draw=tokens.drawn(trained_on))
    close(moments_of(step, problem).mean, expected)


def test_a_prompt_in_the_loss_by_hand():
    task = DigitSum(seq_len=2, digits=5, prompt_form="tokens")
    policy = Policy(task, ReplicaGenerator([0], "init"), 4, torch.float64)
    for target in range(task.max_target + 1):
        hidden = policy.read(torch.tensor([[target // 5]]), torch.zeros(1, 1, 4))
        expected = policy.log_pi(hidden)[0, target % 5, 0]
        batch = rollout_of(policy)._replace(targets=torch.tensor([[target]]))
        close(tokens.prompt_logprobs(policy, batch).detach(), expected.detach())
    total = sum(
        policy.log_pi(policy.read(torch.tensor([[1]]), torch.zeros(1, 1, 4)))[0, d, 0].exp().item() for d in range(5)
    )
    close(total, 1.0)


def test_the_critics_variance_by_hand():
    task = DigitSum(seq_len=2, digits=2)
    policy = Policy(task, ReplicaGenerator([3], "init"), 4, torch.float64)
    V, draw = torch.tensor([[0.3, 0.9, -0.2]]), task.target_weights()
    mean, second = 0.0, 0.0
    for target in range(3):
        for y in itertools.product(range(2), repeat=2):
            logprob = policy.score(torch.tensor([[target]]), torch.tensor([[[list(y)]]]))[0].sum()
            g = ((sum(y) == target) - V[0, target].item()) * grad(logprob, policy)
            mean, second = mean + logprob.exp().item() / 3 * g, second + logprob.exp().item() / 3 * g.square().sum()
    close(critic.trace(score_moments(policy, every_target(task)), V, draw)[0], second - mean.square().sum())


def test_a_paced_critic_stands_still():
    steps, rates = 40, []

    def recorded(policy, optimizer, generator, **options):
        rates.append(optimizer.param_groups[1]["lr"])
        return {}

    paced = critic.Paced(critic.stops, steps)
    original, critic.actor_critic.train_step = critic.actor_critic.train_step, recorded
    try:
        for _ in range(steps):
            paced(tiny_problem().policy, type("Groups", (), {"param_groups": [{"lr": 1.0}, {"lr": 0.5}]}), None)
    finally:
        critic.actor_critic.train_step = original
    assert rates == [0.5] * 2 + [0.0] * 38


@pytest.mark.parametrize("G", [2, 3, 5])
def test_the_share_of_empty_groups_by_hand(G):
    for p in (0.0, 0.1, 0.5, 0.97, 1.0):
        expected = sum(
            math.prod(p if right else 1 - p for right in group)
            for group in itertools.product((0, 1), repeat=G)
            if len(set(group)) == 1
        )
        close(groups.equal_rewards(torch.tensor([p]), G)[0], expected)


def test_the_smallest_group_with_half_informative():
    assert groups.smallest_group(0.01) == 69 and groups.smallest_group(0.5) == 2
    assert groups.smallest_group(0.0) is None and groups.smallest_group(1.0) is None
    for p in (0.02, 0.05, 0.3, 0.9):
        G = groups.smallest_group(p)
        assert 1 - p**G - (1 - p) ** G >= 0.5
        assert G == 2 or 1 - p ** (G - 1) - (1 - p) ** (G - 1) < 0.5


def test_a_curve_over_blocks_of_steps():
    values = torch.arange(48.0).unsqueeze(1) + torch.tensor([0.0, 10.0])
    made = curve("a", "sick", values)
    assert made.x[:2] == [1.5, 3.5] and made.y[:2] == [5.5, 7.5]
    assert made.low[0] == 0.5 and made.high[0] == 10.5 and len(made.x) == 24
    assert curve("a", "sick", values, list(range(48))).x == [float(i) for i in range(48)]


def test_the_prompt_adds_a_language_model_of_easy_prompts():
    problem = tiny_problem(group_size=2, prompt_form="tokens")
    p, log_x = [], []
    for target in problem.targets.tolist():
        p.append(sum(logprob.exp().item() * r for _, _, logprob, r in scored_one_by_one(problem.policy, target)))
        batch = rollout_of(problem.policy)._replace(targets=torch.tensor([[target]]))
        log_x.append(tokens.prompt_logprobs(problem.policy, batch)[0, 0])
    expected = sum((p_T - sum(p) / 2) * grad(x, problem.policy) / 2 for p_T, x in zip(p, log_x, strict=True))
    added = tokens.moments(tokens.with_prompt, problem, tokens.of_batch)
    added = added - tokens.moments(tokens.aligned, problem, tokens.of_batch)
    close(added, expected)
    close(tokens.language_model_gradient(problem), expected)
    assert expected.norm() > 1e-3


def test_signal_to_noise_by_hand():
    """One group of two of RLOO, over every pair, prompts random."""
    task = DigitSum(seq_len=1)
    policy = Policy(task, ReplicaGenerator([0], "init"), noise.WIDTH, torch.float64)
    mean, second, J, empty = 0.0, 0.0, 0.0, 0.0
    for target in range(10):
        logprobs = [policy.score(torch.tensor([[target]]), torch.tensor([[[[y]]]]))[0].sum() for y in range(10)]
        pi, s = [x.exp().item() for x in logprobs], [grad(x, policy) for x in logprobs]
        J, empty = J + pi[target] / 10, empty + (pi[target] ** 2 + (1 - pi[target]) ** 2) / 10
        for a, b in itertools.product(range(10), repeat=2):
            A = float(a == target) - float(b == target)
            g = A * (s[a] - s[b]) / 2
            mean, second = mean + pi[a] * pi[b] / 10 * g, second + pi[a] * pi[b] / 10 * g.square().sum()
    found = noise.at_start(1, group_size=2)
    signal = mean.square().sum()
    close(found["J"], J)
    close(found["empty groups"], empty)
    close(found["|E g|^2"], signal)
    close(found["tr Cov"], second - signal)
    assert found["signal/noise"] == pytest.approx(float(signal / (second - signal)) / 2, rel=1e-9)
    close(exact_success(policy)[0], J)


def test_data_one_update_old_come_from_the_old_policy():
    problem = tiny_problem(group_size=2)
    expected = 0.0
    for target in problem.targets.tolist():
        pairs = zip(scored_one_by_one(problem.old, target), scored_one_by_one(problem.policy, target), strict=True)
        for (_, _, old, r), (_, _, logprob, _) in pairs:
            expected = expected + old.exp().item() * (r - 1) * grad(logprob, problem.policy) / 2
    found = noise.treatment(find("rloo"), noise.paid_in_penalties, problem)["one update old"]
    assert found["norm"] == pytest.approx(expected.norm().item(), rel=1e-9)


def test_a_share_of_empty_groups_is_measured_with_its_error():
    policy = Policy(DigitSum(seq_len=2), ReplicaGenerator([0, 1], "init"), 16)
    found = groups.measure(policy, 4, 400, groups.equal_rewards)
    z = found["z"]
    assert len(z) > 20 and z.abs().max() < 5 and abs(z.square().mean() - 1) < 4 * (2 / len(z)) ** 0.5
    wrong = groups.measure(policy, 4, 400, lambda p, G: (1 - p) ** (G - 1))
    assert wrong["z"].square().mean() > 2


def test_a_wrong_prediction_of_empty_groups_is_refuted():
    refuted = groups.empty_groups(Effort(seeds=2, scale=0.3), predicted=lambda p, G: (1 - p) ** G)
    assert not refuted.checks[0].holds and not refuted.reproduced


def test_effort_scales_what_is_asked():
    assert Effort(scale=0.5).of(240) == 120 and Effort(scale=0.001).of(240) == 4
