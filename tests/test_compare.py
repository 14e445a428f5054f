"""The comparison: plan, gradient noise, summary, figures, and signals."""

import csv
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.cli import main
from pgprog.experiment import compare as comparison
from pgprog.experiment import rundir
from pgprog.experiment.compare import EQUAL, Outcome, plan, summarise
from pgprog.experiment.config import LADDER, CompareConfig, RunConfig
from pgprog.experiment.executor import Job, Measurement, keep_freed_memory, run_jobs
from pgprog.experiment.gradients import GradientNoise, gradient_noise, gradients, ratio_of_single_successes
from pgprog.experiment.learner import make_learner
from pgprog.experiment.loop import Result, step_options
from pgprog.experiment.watch import Warned
from pgprog.noise import ReplicaGenerator
from test_run import wait_for, workers_of

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"seq_len": 2, "digits": 3, "hidden": 8, "dtype": "float64"}


def test_the_default_plan_gives_all_the_same_prompts_and_repeats_group_methods_at_equal_rollouts():
    main_jobs, equal_jobs, budget = plan(CompareConfig(), None)
    assert {job.name: (job.config.prompts, job.config.rollouts_per_step, job.config.steps) for job in main_jobs} == {
        "reinforce": (64, 64, 1500),
        "actor_critic": (64, 64, 1500),
        "ppo": (64, 64, 1500),
        "rloo": (64, 512, 400),
        "grpo": (64, 512, 400),
    }
    assert budget == 64 * 1500
    # 96,000 / 512 = 187.5: the run's annealing ends at the budget, rounded down to whole steps.
    assert {job.name: job.config.steps for job in equal_jobs} == {"rloo" + EQUAL: 187, "grpo" + EQUAL: 187}
    assert all(job.seeds == (0, 1, 2, 3, 4) for job in (*main_jobs, *equal_jobs))


def test_seeds_begin_where_they_are_told_to():
    main_jobs, _, _ = plan(CompareConfig(seeds=2, first_seed=100), None)
    assert {job.seeds for job in main_jobs} == {(100, 101)}


def test_a_larger_budget_repeats_the_methods_that_had_less():
    _, equal_jobs, budget = plan(CompareConfig(equal_rollouts=204_800), None)
    assert budget == 204_800
    assert {job.config.algo: job.config.steps for job in equal_jobs} == dict.fromkeys(
        ("reinforce", "actor_critic", "ppo"), 3200
    )


@pytest.mark.parametrize("algo", LADDER)
def test_gradient_noise_equals_one_policy_at_a_time(algo):
    config, resamples = RunConfig(algo=algo, group_size=4, **SMALL), 6
    got = gradients(config, resamples, 16, policy_seed=2)
    expected = []
    for resample in range(resamples):
        learner = make_learner(config, [2])
        options = step_options(config, learner) | {"prompts": 4 if algo in ("rloo", "grpo") else 16}
        options |= {"entropy_coef": 0.0, "max_grad_norm": math.inf} | ({"epochs": 1} if algo == "ppo" else {})
        parameters = [*learner.policy.parameters(), *(learner.critic.parameters() if learner.critic else ())]
        TRAIN_STEPS[algo](learner.policy, SGD(parameters, lr=0.0), ReplicaGenerator([resample], "resample"), **options)
        expected.append(-torch.cat([p.grad.flatten() for p in learner.policy.parameters()]))
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-11, atol=1e-15)

    noise = gradient_noise(config, resamples, 16, policy_seed=2)
    rows = [[float(x) for x in row] for row in expected]
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
    mean = sum(norms) / resamples
    means = [sum(column) / resamples for column in zip(*rows, strict=True)]
    trace = sum((x - m) ** 2 for row in rows for x, m in zip(row, means, strict=True)) / (resamples - 1)
    assert noise.mean_norm == pytest.approx(mean, rel=1e-11)
    assert noise.var_norm == pytest.approx(sum((n - mean) ** 2 for n in norms) / (resamples - 1), rel=1e-9)
    assert noise.mean_squared_norm == pytest.approx(sum(n * n for n in norms) / resamples, rel=1e-11)
    assert noise.trace_covariance == pytest.approx(trace, rel=1e-11)
    assert noise.no_gradient == sum(n == 0 for n in norms) / resamples
    assert noise.rollouts == 16


def test_grpo_is_rloo_times_g_minus_one_over_root_g_where_no_group_has_two_successes():
    # One group per resample; with three digits and length 4 a success is rare, and most groups have none or one.
    config = RunConfig(algo="rloo", group_size=8, **SMALL | {"seq_len": 4, "digits": 6})
    rloo = gradients(config, 60, 8, policy_seed=0)
    grpo = gradients(replace(config, algo="grpo"), 60, 8, policy_seed=0)
    policy = make_learner(config, [0] * 60).policy
    generator = ReplicaGenerator(range(60), "resample")
    targets = policy.task.sample_targets(generator, 1)
    successes = policy.task.success(targets, policy.sample(targets, 8, generator)).sum((1, 2))
    single = successes == 1
    assert single.sum() >= 10
    # eps = 1e-6 is added to a std of 1 / sqrt(8).
    expected = ratio_of_single_successes(8) / (1 + 1e-6 * math.sqrt(8))
    torch.testing.assert_close(grpo[single], rloo[single] * expected, rtol=1e-10, atol=1e-14)
    assert (rloo[successes == 0] == 0).all()


def test_compare_writes_everything_that_it_says(tmp_path, capsys):
    out = tmp_path / "compare"
    flags = ["--seeds", "2", "--steps", "15", "--seq-len", "2", "--digits", "3", "--hidden", "8", "--workers", "2"]
    assert main(["compare", *flags, "--prompts", "8", "--group-size", "4", "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((out / rundir.SUMMARY).read_text())
    assert list(summary["algorithms"]) == list(LADDER)
    assert summary["config"]["group_steps"] == 4
    untrained = RunConfig(algo="rloo", seq_len=2, digits=3, hidden=8, prompts=8, group_size=4)
    assert summary["gradient_noise"]["rloo"] == asdict(gradient_noise(untrained, 50, 64, policy_seed=0))
    assert summary["equal_rollouts"] == 15 * 8
    for algo, entry in summary["algorithms"].items():
        assert entry["rollouts"] == entry["steps"] * entry["rollouts_per_step"]
        assert entry["tokens"] == 2 * entry["rollouts"]
        assert len(entry["success"]["seeds"]) == 2
        assert entry["success"]["mean"] == pytest.approx(sum(entry["success"]["seeds"]) / 2, rel=1e-12)
        assert entry["success"]["mean"] == pytest.approx(sum(entry["success_by_target"]) / 5, rel=1e-12)
        assert entry["at_equal_rollouts"]["rollouts"] <= 120
        assert entry["at_equal_rollouts"]["rollouts"] + entry["rollouts_per_step"] > 120
        assert (out / "runs" / algo / rundir.CHECKPOINT).exists()
    pairs = [(entry["from"], entry["to"]) for entry in summary["paired_differences"]]
    assert pairs == list(itertools.pairwise(LADDER))
    first, second = (summary["algorithms"][a]["success"]["seeds"] for a in LADDER[:2])
    expected = [b - a for a, b in zip(first, second, strict=True)]
    assert summary["paired_differences"][0]["difference"]["seeds"] == pytest.approx(expected, abs=1e-15)
    for name in ("learning_curves", "final_success", "success_by_target", "gradient_noise"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()
    page = (out / "results.md").read_text()
    for entry in summary["algorithms"].values():
        assert f"| {entry['title']} | {entry['success']['mean']:.3f} [" in page
    with open(out / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (3 * 15 + 2 * 4 + 2 * 3)
    # It is not replaced without being asked.
    again = ["compare", *flags, "--prompts", "8", "--group-size", "4", "--out", str(out), "--json"]
    assert main(again) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    # A run of a comparison can be looked at, and must be named.
    assert main(["sample", "--run", str(out), "--target", "3", "--n", "2", "--json"]) == 2
    assert "name a run of it with --algo, one of actor_critic, grpo" in capsys.readouterr().err
    assert (
        main(["sample", "--run", str(out), "--algo", "ppo", "--seed", "1", "--target", "3", "--n", "2", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["seed"] == 1


def test_overwrite_replaces_a_whole_comparison(tmp_path):
    out = tmp_path / "compare"
    with rundir.open_run(out):
        (out / rundir.CONFIG).write_text('{"environment": {"pgprog": "0.1.0"}}')
        for name in ("grpo", "ppo"):
            (out / "runs" / name).mkdir(parents=True)
            (out / "runs" / name / rundir.METRICS).write_text("")
    with rundir.open_run(out, overwrite=True):
        assert [path.name for path in out.iterdir()] == [rundir.LOCK]


def test_seeds_beside_each_other_equal_a_run_alone(tmp_path, capsys):
    # In float32 at the default sizes, bit for bit; see docs on what it rests on.
    out = tmp_path / "compare"
    assert (
        main(["compare", "--algos", "actor_critic", "--seeds", "3", "--steps", "5", "--out", str(out), "--json"]) == 0
    )
    alone = tmp_path / "alone"
    assert main(["train", "--algo", "actor_critic", "--seed", "2", "--steps", "5", "--out", str(alone), "--json"]) == 0
    together = [row for row in rundir.read_rows(out / "runs" / "actor_critic" / rundir.METRICS) if row["seed"] == 2]
    assert together == rundir.read_rows(alone / rundir.METRICS)


@contextmanager
def long_comparison(out):
    """A process that compares until it is told to stop, head of a group of its own as a shell's job is."""
    command = [sys.executable, "-m", "pgprog.cli", "compare", "--seeds", "2", "--steps", "100000", "--group-steps", "8"]
    command += ["--algos", "grpo", "reinforce", "ppo", "--prompts", "4", "--workers", "2", "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_processes_ends_compare_with_what_was_reached(stop, code, tmp_path):
    out = tmp_path / "compare"
    with long_comparison(out) as process:
        metrics = [out / "runs" / algo / rundir.METRICS for algo in ("reinforce", "ppo")]
        wait_for(lambda: all(path.exists() for path in metrics), process)
        os.killpg(process.pid, stop)
        printed, errors = process.communicate(timeout=100)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    summary = json.loads((out / rundir.SUMMARY).read_text())
    assert summary["interrupted"] is True
    assert "Interrupted" in printed
    assert list(summary["gradient_noise"]) == ["grpo", "reinforce", "ppo"]
    assert summary["paired_differences"] == [], "part of a run compares with nothing"
    for algo in ("reinforce", "ppo"):
        entry = summary["algorithms"][algo]
        assert 0 < entry["steps"] < entry["steps_planned"] == 100_000
        assert entry["at_equal_rollouts"] is None
        assert len(rundir.read_rows(out / "runs" / algo / rundir.METRICS)) == 2 * entry["steps"]


def test_workers_that_have_hardly_started_outlive_a_signal_too(tmp_path):
    out = tmp_path / "compare"
    with long_comparison(out) as process:
        wait_for(lambda: len(workers_of(process)) == 2, process)
        os.killpg(process.pid, signal.SIGTERM)
        printed, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (143, "")
    assert f"Go on: pgprog compare --resume {out}" in printed
    assert json.loads((out / rundir.SUMMARY).read_text())["interrupted"] is True


def test_a_worker_that_was_killed_ends_the_comparison_in_one_line(tmp_path):
    out = tmp_path / "compare"
    with long_comparison(out) as process:
        metrics = [out / "runs" / algo / rundir.METRICS for algo in ("reinforce", "ppo")]
        wait_for(lambda: all(path.exists() for path in metrics), process)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("pgprog: error: a worker process was killed") and errors.count("\n") == 1
    with rundir.open_run(out, resume=True):  # nobody holds it
        pass


def test_ctrl_c_before_the_first_job_still_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        raise KeyboardInterrupt

    out = tmp_path / "compare"
    monkeypatch.setattr(comparison, "run_jobs", interrupted)
    assert main(["compare", "--steps", "5", "--out", str(out)]) == 130
    assert f"pgprog compare --resume {out}" in " ".join(capsys.readouterr().out.split())
    assert json.loads((out / rundir.SUMMARY).read_text())["interrupted"] is True


def test_a_run_without_a_step_is_not_reached(tmp_path, monkeypatch):
    config = CompareConfig(algos=("reinforce", "rloo"), seeds=1)

    def stopped_at(steps):
        def results(jobs, *_):
            yield jobs[-2], Result(steps, 64 * steps, [320], 0.1, [0.5], [0.5], [[0.5]])
            raise KeyboardInterrupt

        monkeypatch.setattr(comparison, "run_jobs", results)
        summary, _ = comparison.compare(
            config, {}, tmp_path, workers=1, checkpoint_every=100, on_progress=lambda progress: None
        )
        assert summary["interrupted"] is True
        return list(summary["algorithms"])

    assert stopped_at(0) == []
    assert stopped_at(1) == ["rloo"]


@pytest.mark.parametrize("whole", [True, False])
def test_part_of_a_run_is_compared_with_nothing(whole, tmp_path, monkeypatch):
    """REINFORCE's main run is the one at equal rollouts, RLOO has one of its own; each is whole, or a step short."""

    def results(jobs, *_):
        for job in (job for job in jobs if isinstance(job, Job)):
            steps = job.config.steps - (0 if whole else 1)
            yield job, Result(steps, 64 * steps, [320], 0.1, [0.5], [0.5], [[0.5]])

    monkeypatch.setattr(comparison, "run_jobs", results)
    config = CompareConfig(algos=("reinforce", "rloo"), seeds=1)
    summary, _ = comparison.compare(config, {}, tmp_path, workers=1, checkpoint_every=100, on_progress=lambda _: None)
    equal = {algo: entry["at_equal_rollouts"] for algo, entry in summary["algorithms"].items()}
    assert [(entry["from"], entry["to"]) for entry in summary["paired_differences"]] == [("reinforce", "rloo")] * whole
    assert {algo: entry and entry["steps"] for algo, entry in equal.items()} == (
        {"reinforce": 1500, "rloo": 187} if whole else {"reinforce": None, "rloo": None}
    )
    # 64 rollouts a step are what REINFORCE was to spend, and an eighth of what RLOO was.
    spent = [note for note in summary["notes"] if "of the equal rollouts" in note]
    assert [note.split(" of ")[0] for note in spent] == ["RLOO spent 12%"] * whole


def test_a_warning_is_counted_over_the_seeds_and_told_of_the_first(monkeypatch):
    monkeypatch.setattr(
        comparison, "warnings_in", lambda rows, _: [Warned("kind", row["step"], "said") for row in rows]
    )
    job = Job("run", RunConfig(**SMALL), (3, 4, 5), None)
    found = comparison.warnings_of(job, [{"seed": 4, "step": 7}, {"seed": 5, "step": 6}])
    assert found == [{"kind": "kind", "seeds": 2, "of": 3, "step": 7, "text": "said"}]


def test_workers_import_nothing_from_the_working_directory(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit(9)\n")
    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), "--algos", "reinforce", "--seeds", "1"]
    command += ["--steps", "2", "--prompts", "4", "--seq-len", "2", "--digits", "3", "--hidden", "8", "--out", "made"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_measurements_come_before_runs_and_the_end_is_told_of_once():
    job = Job("run", RunConfig(steps=1, prompts=2, **SMALL), (0,), None)
    measurement = Measurement("noise", replace(job.config, steps=10**6))
    told = []
    done = [each.name for each, _ in run_jobs([job, measurement], 1, 100, lambda _: None, lambda: told.append(0))]
    assert done == ["noise", "run"]
    assert told == [0]


def test_what_was_measured_is_said_in_the_order_of_the_config():
    config = CompareConfig(algos=("rloo", "reinforce", "grpo"), seeds=1)
    noise = GradientNoise(2, 64, 8, 0.1, 0.2, 0.3, 0.4, 0.5, [0.1, 0.2])
    outcome = Outcome(noise={"grpo": noise, "rloo": replace(noise, mean_norm=0.2)}, interrupted=True)
    said = summarise(config, outcome, 64)["gradient_noise"]
    assert list(said) == ["rloo", "grpo"]
    assert said["rloo"]["mean_norm"] == 0.2


@pytest.mark.parametrize("missing", [OSError, AttributeError, TypeError])
def test_another_c_library_is_left_alone(missing, monkeypatch):
    def library(_):
        raise missing

    monkeypatch.setattr("ctypes.CDLL", library)
    keep_freed_memory()


def test_commands_start_without_scipy_and_matplotlib():
    program = "import sys, pgprog.commands; sys.exit(' '.join({'scipy', 'matplotlib'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_short_runs_have_curves_too(tmp_path):
    from pgprog.report.figures import curves_by_seed

    rows = [{"seed": s, "step": t, "rollouts": 8 * t, "success": 0.1 * t + s} for t in range(1, 5) for s in (0, 1)]
    steps, rollouts, curves = curves_by_seed(rows)
    assert steps.tolist() == [1, 2, 3, 4]
    assert rollouts.tolist() == [8, 16, 24, 32]
    assert curves[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=1e-12)
    assert curves[1].tolist() == pytest.approx([1.1, 1.2, 1.3, 1.4], rel=1e-12)
