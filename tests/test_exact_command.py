"""``pgprog exact``: its rows against oracles, samples and the sampler of ``compare``; its errors and files."""

import dataclasses
import json
import math

import pytest
import torch

import oracles
from oracles import close
from pgprog.cli import main
from pgprog.env import DigitSum
from pgprog.errors import UsageError
from pgprog.exact.commands import Exact, ladder_estimator, subject
from pgprog.exact.enumeration import every_target
from pgprog.exact.estimators import (
    Estimator,
    Setting,
    gradients_of,
    is_local,
    measure,
    sample_gradients,
    table_of,
    users_estimator,
    weight_curve,
)
from pgprog.exact.scores import ScoreMoments, score_moments
from pgprog.exact.values import objective_gradient
from pgprog.experiment.config import LADDER, RunConfig
from pgprog.experiment.gradients import gradients
from pgprog.noise import ReplicaGenerator
from pgprog.policy import Critic, Policy

TASK = DigitSum(seq_len=2, digits=3, variable_length=True)
SIZES = {"--seq-len": 2, "--digits": 3, "--hidden": 3, "--group-size": 2, "--rollouts": 8, "--resamples": 100}
SMALL = [str(word) for pair in SIZES.items() for word in pair]


@pytest.fixture(scope="module")
def world():
    torch.set_default_dtype(torch.float64)
    policy = Policy(TASK, ReplicaGenerator([3], "init"), hidden=3, dtype=torch.float64)
    critic = Critic(TASK, ReplicaGenerator([3], "critic"), hidden=3, dtype=torch.float64)
    targets = every_target(TASK)
    scores = ScoreMoments(*(part[0] for part in score_moments(policy, targets)))
    setting = Setting(scores, TASK.target_weights(), critic(targets.unsqueeze(0))[0].detach(), rollouts=8)
    return policy, critic, setting


def test_the_ladder_is_measured_the_way_it_is_made(world):
    policy, _, setting = world
    truth = objective_gradient(policy).gradient[0]
    rows = {algo: measure(ladder_estimator(algo, 4), setting) for algo in LADDER}
    assert {algo: row.method for algo, (row, _) in rows.items()} == {
        "reinforce": "batch",
        "actor_critic": "group",
        "ppo": "sampled",
        "rloo": "group",
        "grpo": "group",
    }
    for algo, scale in (("reinforce", 1 - 1 / 8), ("actor_critic", 1.0), ("rloo", 1.0)):
        row, mean = rows[algo]
        close(mean, scale * truth, rtol=1e-10, atol=1e-14)
        assert row.weight == pytest.approx(scale, rel=1e-12)
        assert row.bias == pytest.approx((1 - scale) * truth.norm().item(), rel=1e-9, abs=1e-14)
        assert row.angle == pytest.approx(0, abs=1e-10)
        assert row.weight_range == pytest.approx((scale, scale), rel=1e-12)
    row, mean = rows["grpo"]
    p, draw = setting.scores.p, setting.draw
    w = torch.tensor([oracles.binary_weight(q, 4, lambda r: oracles.z_score(r, eps=1e-6)) for q in p.tolist()])
    close(mean, (draw * w) @ setting.scores.gradient, rtol=1e-10)
    assert row.angle == pytest.approx(math.degrees(math.acos(mean @ truth / mean.norm() / truth.norm())), rel=1e-6)
    assert row.signal_to_noise == pytest.approx((mean.square().sum() / row.trace).item(), rel=1e-12)
    assert row.signal_to_noise_per_rollout == pytest.approx(row.signal_to_noise / 8, rel=1e-12)
    assert {algo: (r.prompts, r.group_size, r.extra_models) for algo, (r, _) in rows.items()} == {
        "reinforce": (8, 1, 0),
        "actor_critic": (8, 1, 1),
        "ppo": (8, 1, 1),
        "rloo": (2, 4, 0),
        "grpo": (2, 4, 0),
    }


def test_squared_advantages_at_equal_rollouts(world):
    """E[A^2]: REINFORCE J (1 - J) (1 - 1 / N); RLOO E_T[p (1 - p)] G / (G - 1)."""
    _, _, setting = world
    J, p = setting.success, setting.scores.p
    found = {algo: measure(ladder_estimator(algo, 4), setting)[0].squared_advantage for algo in ("reinforce", "rloo")}
    assert found["reinforce"] == pytest.approx(J * (1 - J) * 7 / 8, rel=1e-12)
    assert found["rloo"] == pytest.approx((setting.draw @ (p * (1 - p))).item() * 4 / 3, rel=1e-12)


@pytest.mark.parametrize("algo", LADDER)
def test_exact_moments_agree_with_resamples_of_the_train_step(world, algo):
    """3,000 resamples, z = 5 in the standard errors of both."""
    policy, critic, setting = world
    estimator = ladder_estimator(algo, 4)
    row, mean = measure(estimator, setting)
    sampled = sample_gradients(estimator, policy, critic, 8, 3000, mean)
    for exact, value, error in (
        (row.trace, sampled.trace, sampled.trace_error),
        (row.second, sampled.second, sampled.second_error),
    ):
        assert abs(exact - value) < 5 * math.hypot(error, row.error)
        assert error < 0.05 * exact
    assert sampled.mean_norm**2 < sampled.second


@pytest.mark.parametrize("algo", LADDER)
def test_resamples_are_those_of_compare(algo):
    config = RunConfig(algo=algo, seq_len=2, digits=3, hidden=3, group_size=4, dtype="float64")
    policy, critic, seed = subject(Exact(seed=5), config)
    assert seed == 5
    found = gradients_of(ladder_estimator(algo, 4), policy, critic, 8, range(6))
    close(found, gradients(config, 6, 8, 5), rtol=0, atol=0)


def test_resamples_do_not_depend_on_how_many_are_drawn_at_once(world, monkeypatch):
    policy, critic, setting = world
    estimator, seen = ladder_estimator("grpo", 4), []
    mean = measure(estimator, setting)[1]
    whole = sample_gradients(estimator, policy, critic, 8, 10, mean)
    monkeypatch.setattr("pgprog.exact.estimators.RESAMPLES_AT_ONCE", 4)
    parts = sample_gradients(estimator, policy, critic, 8, 10, mean, seen.append)
    assert dataclasses.astuple(parts) == pytest.approx(dataclasses.astuple(whole), rel=1e-12)
    assert seen == [4, 8, 10]
    g = gradients_of(estimator, policy, critic, 8, range(10))
    assert whole.trace == pytest.approx((g - mean).square().sum(1).mean().item(), rel=1e-12)
    assert whole.second_error == pytest.approx((g.square().sum(1).std() / 10**0.5).item(), rel=1e-12)


def own(function, group_size=4, critic=False, name="own"):
    return Estimator(name, name, function, group_size, critic)


def test_functions_are_told_apart_by_calling_them(world):
    _, _, setting = world
    local = own(lambda b: b.rewards - b.rewards.mean(-1, keepdim=True))
    batch = own(lambda b: b.rewards - b.rewards.mean((-2, -1), keepdim=True), 1)
    mixed = own(lambda b: b.rewards - b.rewards.mean((-2, -1), keepdim=True), 4)
    with_values = own(lambda b: b.rewards - b.values.unsqueeze(-1), 4, critic=True)
    assert measure(local, setting)[0].method == "group"
    assert measure(batch, setting)[0].method == "batch"
    assert measure(mixed, setting, 500)[0].method == "sampled"
    row, mean = measure(with_values, setting)
    assert row.method == "group"
    close(mean, setting.gradient, rtol=1e-10)
    assert table_of(with_values, setting).success.shape == (len(setting.draw), 4)
    assert weight_curve(mixed, setting) is None and weight_curve(with_values, setting) is None


def test_a_function_that_cannot_take_one_group_is_not_local():
    def of_two_groups(rewards, targets):
        if len(rewards) < 2:
            raise UsageError("one group only")
        return rewards

    assert not is_local(of_two_groups, 3, 2, "mine")


def test_curves_are_those_of_the_weight(world):
    _, _, setting = world
    curve = weight_curve(ladder_estimator("grpo", 8), setting, points=11)
    assert curve.weight[5] == pytest.approx(oracles.binary_weight(0.5, 8, lambda r: oracles.z_score(r, eps=1e-6)))
    assert curve.p == pytest.approx([i / 10 for i in range(11)])
    # W(1) - W(0) is the mean of w; Simpson's rule is within 1e-3 of it on this grid.
    h = [1, 4, 2, 4, 2, 4, 2, 4, 2, 4, 1]
    assert curve.objective[-1] == pytest.approx(sum(a * b for a, b in zip(h, curve.weight, strict=True)) / 30, abs=1e-3)
    assert weight_curve(ladder_estimator("reinforce", 8), setting).weight == pytest.approx([7 / 8] * 201, rel=1e-11)


# ---- a user's function ----


FILE = """
import torch

def halved(rewards):
    return (rewards - rewards.mean(-1, keepdim=True)) / 2

def against_values(rewards, values):
    return rewards - values.unsqueeze(-1)

def short(rewards):
    return rewards[:, :1]

def nan(rewards):
    return rewards * float("nan")

def live(rewards):
    return rewards * torch.ones(1, requires_grad=True)

def broken(rewards):
    raise RuntimeError("no idea")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_users_function_gets_a_row(file, capsys):
    assert main(["exact", *SMALL, "--algos", "rloo", "--advantage", f"{file}:halved", "--json"]) == 0
    rloo, mine = json.loads(capsys.readouterr().out)["estimators"]
    assert mine["title"] == "halved" and mine["method"] == "group" and mine["extra_models"] == 0
    assert mine["weight"] == pytest.approx(1 / 4)  # (1 - 1/G) / 2
    assert mine["trace"] == pytest.approx(rloo["trace"] / 16)  # A is a quarter of leave-one-out's
    assert mine["sampled"]["trace"] == pytest.approx(rloo["sampled"]["trace"] / 16)


def test_a_users_function_may_want_values(file, capsys):
    assert main(["exact", *SMALL, "--algos", "--advantage", f"{file}:against_values", "--json"]) == 0
    (mine,) = json.loads(capsys.readouterr().out)["estimators"]
    assert mine["extra_models"] == 1 and mine["weight"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("short", "short returned shape (2, 1): a detached, finite tensor of shape (2, 2) was expected"),
        ("nan", "nan returned NaN or infinity: a detached, finite tensor of shape (2, 2) was expected"),
        ("live", "live returned a tensor with a live gradient: a detached, finite tensor of shape (2, 2) was expected"),
        ("broken", "broken raised RuntimeError: no idea on rewards of shape (2, 2)"),
        ("gone", "has no function 'gone'"),
    ],
)
def test_a_function_at_fault_is_one_line(file, capsys, function, said):
    assert main(["exact", *SMALL, "--algos", "rloo", "--advantage", f"{file}:{function}"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("pgprog: error: ") and err.count("\n") == 1


def test_whether_values_are_wanted_is_found_by_calling(file):
    from pgprog.experiment.user_advantage import load_advantage

    for name, wants in (("halved", False), ("against_values", True)):
        spec = f"{file}:{name}"
        found = users_estimator(spec, load_advantage(spec), 2)
        assert (found.name, found.critic) == (name, wants)


# ---- the command ----


def test_tables_figures_and_json(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["exact", *SMALL, "--out", str(out), "--critic-curves"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    titles = ("What it optimises", "How noisily", "Exact against 100 resamples", "What a critic does")
    for words in ("At the untrained policy", *titles, "PPO *", "* sampled", "GRPO's gradient is"):
        assert words in said
    found = json.loads((out / "exact.json").read_text())
    assert [row["name"] for row in found["estimators"]] == list(LADDER)
    assert found["task"]["seq_len"] == 2 and found["hidden"] == 3 and len(found["critic"]) == 39
    for name in ("effective_weight", "exact_noise", "critic"):
        for suffix in (".png", ".svg"):
            assert (out / (name + suffix)).stat().st_size > 5000
    assert main(["exact", *SMALL, "--out", str(out)]) == 2
    assert "--overwrite to replace it" in capsys.readouterr().err
    assert main(["exact", *SMALL[:-1], "0", "--algos", "rloo", "--out", str(out), "--overwrite"]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    assert main(["exact", *SMALL, "--out", str(tmp_path / "other"), "--overwrite"]) == 2
    assert "holds no exact.json" in capsys.readouterr().err


def test_without_resamples_nothing_is_sampled(capsys):
    assert main(["exact", *SMALL[:-1], "0", "--algos", "grpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimators"][0]["sampled"] is None


def test_a_runs_checkpoint_is_measured(tmp_path, capsys):
    run = tmp_path / "run"
    small = ["--seq-len", "2", "--digits", "3", "--hidden", "4", "--prompts", "8", "--steps", "3"]
    assert main(["train", "--algo", "ppo", *small, "--seed", "4", "--out", str(run)]) == 0
    capsys.readouterr()
    options = ["--run", str(run), "--group-size", "2", "--rollouts", "8", "--resamples", "0", "--json"]
    assert main(["exact", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 4 and found["hidden"] == 4 and found["task"]["digits"] == 3
    from pgprog.experiment.config import from_json
    from pgprog.experiment.learner import load_policy

    config = from_json(RunConfig, json.loads((run / "config.json").read_text()), run)
    policy, _ = load_policy(run, config)
    w = {name: t.double() for name, t in oracles.weights(policy).items()}
    success = [oracles.success_probability(w, policy.task, T).item() for T in range(5)]
    assert found["success_by_target"] == pytest.approx(success, rel=1e-7)  # features were rounded to float32
    # The critic is the run's own: Actor-Critic's trace is that of its values.
    _, critic, _ = subject(Exact(run=run), config)
    assert [p.dtype for p in critic.parameters()] == [torch.float64] * 4
    fresh = Critic(policy.task, ReplicaGenerator([4], "critic"), 4)
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(critic.parameters(), fresh.parameters(), strict=True))
    assert main(["exact", "--run", str(run), "--seed", "9"]) == 2
    assert "--seed 9 was not trained" in capsys.readouterr().err
    assert main(["exact", "--run", str(run), "--seq-len", "3"]) == 2
    assert "--seq-len with --run" in capsys.readouterr().err
    assert main(["exact", "--run", str(run), "--algo", "ppo"]) == 2
    assert "is none" in capsys.readouterr().err


def test_rewards_that_are_not_binary_are_refused_with_the_other_path_named(tmp_path, capsys):
    run = tmp_path / "run"
    small = ["--seq-len", "2", "--digits", "3", "--hidden", "3", "--prompts", "4", "--steps", "1"]
    assert main(["train", "--algo", "reinforce", *small, "--reward-form", "halfway", "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["exact", "--run", str(run)]) == 2
    err = capsys.readouterr().err
    assert "reward_form halfway pays more than 0 or 1" in err and "pgprog.exact.blackbox" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algos", "gpro"], "did you mean 'grpo'?"),
        (["--algos", "rloo", "rloo"], "names one twice"),
        (["--algos"], "names no algorithm"),
        (["--group-size", "1"], "--group-size 1"),
        (["--rollouts", "60"], "--rollouts 60 with --group-size 8: give a multiple"),
        (["--rollouts", "4"], "--rollouts 4"),
        (["--resamples", "1"], "--resamples 1"),
        (["--seed", "-3"], "--seed -3 is out of range"),
        (["--algo", "rloo"], "give its directory with --run"),
        (["--run", "nowhere"], "nowhere"),
        (["--seq-len", "0"], "--seq-len 0 is too small"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, said, capsys):
    assert main(["exact", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("pgprog: error: ")
    assert len(err.strip().splitlines()) == 1


def test_what_is_too_large_is_refused_before_anything_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("pgprog.exact.enumeration.MEMORY_LIMIT", 1000)
    assert main(["exact", *SMALL]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("pgprog: error: exact enumeration at seq_len 2, 3 digits, needs 4 prefixes")
    assert "moments" not in said.out


def test_numbers_do_not_depend_on_the_default_dtype(capsys):
    """The command runs with float32 as torch's default, the other tests with float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        assert main(["exact", *SMALL, "--critic-curves", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for part in ("estimators", "curves", "critic"):
        assert found[0][part] == found[1][part]
