"""Samplers, stale data, denominators, the three lessons: exact claims against plain loops; then each mode at work."""

import copy
import itertools
import json
import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from mutants import ROOT
from pgprog.doctor import length, lessons, sampler, stale, tour
from pgprog.doctor.mode import Effort, Finding
from pgprog.doctor_command import TITLES
from pgprog.exact.recipes import tiny_problem
from pgprog.experiment.config import RunConfig, validate
from pgprog.experiment.loop import run

SMALL, TINY = Effort(seeds=4), Effort(seeds=2, scale=0.05)
NAMES = ("sampler-mismatch", "stale", "length-bias", "no-entropy-bonus", "raw-advantages", "long-steps")
LONG = ("lagging-critic", "sampler-mismatch", "stale", "raw-advantages", "long-steps")  # `make test-long` runs them
MODES = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in NAMES]


def grad(value, policy):
    gradients = torch.autograd.grad(value, list(policy.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def each_completion(policy, target):
    """(length, log pi(y), r) of every completion, each scored by itself."""
    task = policy.task
    for n in range(task.seq_len + 1):
        for digits in itertools.product(range(task.digits), repeat=n):
            row = [*digits] + [task.eos] * (task.seq_len - n)
            logprob = policy.score(torch.tensor([[target]]), torch.tensor([[[row]]]))[0].sum()
            yield min(n + 1, task.seq_len), logprob, float(sum(digits) == target)


def mean_gradient(policy, mu, targets, factor):
    """E of RLOO's gradient where y is of ``mu`` and counts ``factor(pi / mu, length)`` times; mean over the prompts."""
    total = 0.0
    for target in targets.tolist():
        rows = list(zip(each_completion(policy, target), each_completion(mu, target), strict=True))
        p = sum(m.exp().item() * r for (_, _, r), (_, m, _) in rows)  # E of the others' mean
        for (n, logprob, r), (_, m, _) in rows:
            chance = m.exp().item()
            if chance > 0:
                w = factor(math.exp(logprob.item()) / chance, n)
                total = total + chance * w * (r - p) * grad(logprob, policy)
    return total / len(targets)


def agrees(row, found, truth):
    c = (found @ truth / (truth @ truth)).item()
    assert row["norm"] == pytest.approx(found.norm().item(), rel=1e-9)
    assert row["bias"] == pytest.approx((found - truth).norm().item(), rel=1e-9, abs=1e-14)
    assert row["scale"] == pytest.approx(c, rel=1e-9)


def true_gradient(policy, targets):
    return sum(
        logprob.exp().item() * r * grad(logprob, policy)
        for target in targets.tolist()
        for _, logprob, r in each_completion(policy, target)
    ) / len(targets)


# ---- exact claims ----


def test_another_sampler_against_a_loop():
    problem = tiny_problem(group_size=3, step=sampler.SHARPER)
    cold = copy.deepcopy(problem.policy)
    cold.temperature = 0.5
    found = sampler.exact_rows(sampler.COLD, problem)
    truth = true_gradient(problem.policy, problem.targets)
    expected = partial(mean_gradient, problem.policy, cold, problem.targets)
    agrees(found["none"], expected(lambda w, n: 1.0), truth)
    agrees(found["sequence, cap 2"], expected(lambda w, n: min(w, 2.0)), truth)
    assert found["sequence, no cap"]["relative_bias"] < 1e-12


def test_kl_and_effective_sample_size_of_a_sampler_against_a_loop():
    problem = tiny_problem(group_size=3, step=sampler.SHARPER)
    for changes, temperature, top_p in ((sampler.COLD, 0.5, 1.0), (sampler.NUCLEUS, 1.0, 0.7)):
        mu = copy.deepcopy(problem.policy)
        mu.temperature, mu.top_p = temperature, top_p
        kl = first = second = inside = 0.0
        for target in problem.targets.tolist():
            for (_, a, _), (_, b, _) in zip(
                each_completion(problem.policy, target), each_completion(mu, target), strict=True
            ):
                pi, m = a.exp().item(), b.exp().item()
                if m > 0:
                    kl += m * math.log(m / pi) / 2
                    first += m * (pi / m) / 2
                    second += m * (pi / m) ** 2 / 2
                    inside += pi / 2
        row = sampler.exact_rows(changes, problem)
        assert row["KL"] == pytest.approx(kl, rel=1e-9)
        assert row["ESS"] == pytest.approx(first**2 / second, rel=1e-9)
        assert row["covered"] == pytest.approx(inside, rel=1e-9)
    assert row["covered"] < 0.9  # of the nucleus


def test_data_one_update_old_against_a_loop():
    step = stale.UPDATES[-1]
    problem = tiny_problem(group_size=3, step=step)
    found = stale.one_update_old(step)
    truth = true_gradient(problem.policy, problem.targets)
    expected = partial(mean_gradient, problem.policy, problem.old, problem.targets)
    agrees(found["no ratio"], expected(lambda w, n: 1.0), truth)
    agrees(found["weights, cap 2"], expected(lambda w, n: min(w, 2.0)), truth)
    assert found["weights, cap 2"]["bias"] > 1e-4 > found["weights, no cap"]["bias"]


def test_a_sequence_mean_against_a_loop():
    problem = tiny_problem(group_size=2)
    expected = mean_gradient(problem.policy, problem.policy, problem.targets, lambda w, n: 1 / n)
    truth = true_gradient(problem.policy, problem.targets)
    agrees(length.exact_row("sequence_mean", problem), expected, truth)
    angle = math.degrees(math.acos(float(expected @ truth / (expected.norm() * truth.norm()))))
    assert length.by_formula(problem).angle == pytest.approx(angle, rel=1e-9) and angle > 1


def gap(policy, targets):
    sums = {0.0: [0.0, 0.0], 1.0: [0.0, 0.0]}
    for target in targets.tolist():
        for n, logprob, r in each_completion(policy, target):
            sums[r][0] += n * logprob.exp().item()
            sums[r][1] += logprob.exp().item()
    return sums[0.0][0] / sums[0.0][1] - sums[1.0][0] / sums[1.0][1]


def test_the_gap_widens_as_fast_as_it_is_said():
    problem = tiny_problem(group_size=2)
    g = mean_gradient(problem.policy, problem.policy, problem.targets, lambda w, n: 1 / n)
    moved, h = [], 1e-5
    for sign in (-1, 1):
        policy = copy.deepcopy(problem.policy)
        parts = (sign * h * g / g.norm()).split([p.numel() for p in policy.parameters()])
        with torch.no_grad():
            for p, part in zip(policy.parameters(), parts, strict=True):
                p.add_(part.view_as(p))
        moved.append(gap(policy, problem.targets))
    rate = length.exact_row("sequence_mean", problem)["gap, per unit step"]
    assert rate == pytest.approx((moved[1] - moved[0]) / (2 * h), rel=1e-5)


def test_lengths_of_a_policy_against_a_loop():
    policy = copy.deepcopy(tiny_problem().policy)  # targets 0 to 2, of which 0 and 1 are within reach
    found, targets = length.lengths(policy, None), torch.tensor([0, 1])
    assert found["gap"].item() == pytest.approx(gap(policy, targets), rel=1e-9)
    p = [sum(lp.exp().item() * r for _, lp, r in each_completion(policy, t)) for t in (0, 1)]
    assert found["success"].item() == pytest.approx(sum(p) / 2, rel=1e-9)
    assert found["gap"].item() == pytest.approx((found["wrong"] - found["right"]).item(), rel=1e-9)


def test_a_length_is_read_where_success_first_reaches_the_level():
    assert length.where([0.1, 0.15, 0.25, 0.1, 0.3], [1.0, 2.0, 4.0, 9.0, 9.0]) == pytest.approx(3.0)
    assert math.isnan(length.where([0.1, 0.15], [1.0, 2.0])) and math.isnan(length.where([0.3, 0.4], [1.0, 2.0]))
    score = length.paired(torch.tensor([3.0, 2.0, math.nan, 4.0]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert score == {"mean": pytest.approx(2.0), "standard error": pytest.approx(1 / math.sqrt(3))}
    assert length.surely_positive(score) and not length.surely_positive({})
    assert not length.surely_positive({"mean": 1.0, "standard error": 0.6})


def test_the_bonus_beside_the_gradient_against_a_loop():
    problem, config = tiny_problem(group_size=3), replace(lessons.PPO, entropy_coef=0.08)
    slope = sum(
        -logprob.exp().item() * logprob.item() * grad(logprob, problem.policy)
        for target in problem.targets.tolist()
        for _, logprob, _ in each_completion(problem.policy, target)
    ) / len(problem.targets)
    truth = true_gradient(problem.policy, problem.targets)
    row = lessons.bonus_row("none", config)
    assert row["bonus / E g"] == pytest.approx(0.08 * 2.5 * (slope.norm() / truth.norm()).item(), rel=1e-9)
    assert row["relative_bias"] < 1e-12


# ---- sweeps ----


def test_a_fault_bites_where_the_loss_is_large_and_sure():
    sure = lessons.Point([0.5, 0.6, 0.4], [0.9, 0.8, 0.9]).as_dict()
    d = [0.4, 0.2, 0.5]
    error = math.sqrt(sum((x - sum(d) / 3) ** 2 for x in d) / 2 / 3)
    assert sure["lost"] == pytest.approx(sum(d) / 3) and sure["standard error"] == pytest.approx(error)
    assert sure["bites"] is True
    assert lessons.Point([0.5, 0.9, 0.1], [0.9, 0.6, 0.6]).as_dict()["bites"] is False  # large, and not sure
    assert lessons.Point([0.50, 0.50], [0.53, 0.54]).as_dict()["bites"] is False  # sure, and small
    assert lessons.Point([0.9, 0.9], [0.5, 0.4]).as_dict()["bites"] is False  # a gain


def test_a_boundary_in_words():
    rows = {"1": {"bites": False}, "4": {"bites": True}, "8": {"bites": True}}
    assert lessons.boundary(rows) == "bites at 4, 8; not at 1"
    assert lessons.boundary({"1": {"bites": False}}) == "not reproduced in this range"
    assert lessons.boundary({"1": {"bites": True}}) == "bites at 1, everywhere in this range"


def test_the_critic_starts_off_by_so_much_once():
    seen = []

    class Noted(lessons.Started):
        def __call__(self, *arguments, critic, **options):
            self.make = lambda *a, critic, **o: seen.append(critic.value_bias.clone()) or {}
            return super().__call__(*arguments, critic=critic, **options)

    from pgprog.noise import ReplicaGenerator
    from pgprog.policy import Critic

    critic = Critic(tiny_problem().policy.task, ReplicaGenerator([0, 1], "critic"), 4)
    before, step = critic.value_bias.detach().clone(), Noted(lessons.PPO, -1.0)
    step(critic=critic)
    step(critic=critic)
    assert torch.equal(seen[0], before - 1) and torch.equal(seen[1], before - 1)


def test_a_sweep_runs_sick_and_cured_at_each_setting(monkeypatch):
    monkeypatch.setattr(lessons, "AXES", {"lr": (0.02, 0.04), "prompt_form": ("state",)})
    base = replace(lessons.PPO, steps=8, hidden=8, prompts=4)
    fault = {"undivided_lr": True}
    assert lessons.swept(base, fault, TINY) == {}
    found = lessons.swept(base, fault, Effort(seeds=2, full=True))
    assert {axis: list(rows) for axis, rows in found["sweep"].items()} == {
        "lr": ["0.02", "0.04"],
        "prompt_form": ["state"],
        "critic's V at the start": ["as drawn", "-1", "+1"],
    }
    for value in (0.02, 0.04):
        for name, changes in (("sick", fault), ("cured", {})):
            alone = run(validate(replace(base, lr=value, **changes)), range(2)).success
            assert found["sweep"]["lr"][f"{value:g}"][name] == pytest.approx(sum(alone) / 2)
    assert found["sweep"]["prompt_form"]["state"] == found["sweep"]["lr"]["0.02"]
    assert found["where it bites"].keys() == found["sweep"].keys()
    (panel,) = lessons.sweep_panel(found)
    assert len(panel.ticks) == 6 and lessons.sweep_panel({}) == ()


# ---- with the cure in the place of the fault ----

CURES = {
    "sampler-mismatch": (partial(sampler.sampler_mismatch, TINY, ()), "uncorrected, a bias"),
    "stale": (partial(stale.stale, TINY, 0), "the upper tail of the ratio"),
    "length-bias": (partial(length.length_bias, TINY, "sequence_sum"), "turns the gradient by the same angle"),
    "no-entropy-bonus": (partial(lessons.no_entropy_bonus, TINY, {}), "half of the success or more"),
    "raw-advantages": (partial(lessons.raw_advantages, TINY, {}), "raw advantages are unbiased"),
    "long-steps": (partial(lessons.long_steps, TINY, {}), "both together cost"),
}


@pytest.mark.parametrize("name", MODES)
def test_with_the_cure_for_the_fault_a_check_fails(name, monkeypatch):
    monkeypatch.setattr(length, "SIZES", (2, 3))  # whatever is exact is seen in the smaller ones
    monkeypatch.setattr(stale, "UPDATES", (0.03,))
    mode, statement = CURES[name]
    finding = mode()
    (check,) = [check for check in finding.checks if statement in check.statement]
    assert not check.holds and not finding.reproduced
    json.dumps(finding.as_dict(), allow_nan=False)


# ---- every mode at work ----


@cache
def found(name) -> Finding:
    return tour.MODES[name](SMALL)


@pytest.mark.parametrize("name", MODES)
def test_the_mode_happens(name):
    finding = found(name)
    assert not [check.statement for check in finding.checks if not check.holds]
    assert finding.reproduced and len(finding.checks) >= 4
    says_what_it_must(name)
    statement = CURES[name][1]
    assert [check.holds for check in finding.checks if statement in check.statement] == [True]


def says_what_it_must(name):
    content = json.loads(json.dumps(found(name).as_dict(), allow_nan=False))
    assert content["name"] == name and name in TITLES
    for key in ("title", "sick", "cure", "watch"):
        assert content[key].strip() == content[key] and len(content[key]) >= 10
    kinds = {c["kind"] for panel in content["panels"] for c in panel["curves"]}
    assert {"sick", "cured"} <= kinds
    for panel in content["panels"]:
        for c in panel["curves"]:
            assert len(c["x"]) == len(c["y"]) > 0
            assert c["low"] is None or len(c["low"]) == len(c["high"]) == len(c["x"])


@pytest.mark.long
def test_fresh_data_are_one_run_for_all_treatments():
    rows = {name: each["age 0"] for name, each in found("stale").numbers.items() if name in stale.TREATMENTS}
    assert len(rows) == 3 and len({row["success"] for row in rows.values()}) == 1
    clipped = run(
        RunConfig(recipe="rloo", seq_len=2, hidden=32, steps=3, prompts=8, lr=0.01, set=stale.TREATMENTS["clip 0.2"]),
        range(2),
    )
    plain = run(RunConfig(recipe="rloo", seq_len=2, hidden=32, steps=3, prompts=8, lr=0.01), range(2))
    assert clipped.success == plain.success  # a fresh batch's only step has a ratio of 1


def test_the_page_has_every_mode():
    page = (ROOT / "docs" / "doctor.md").read_text()
    for name in NAMES:
        assert f"pgprog doctor {name}" in page and f"figures/doctor/{name}.png" in page
        assert (ROOT / "docs" / "figures" / "doctor" / f"{name}.png").exists()
