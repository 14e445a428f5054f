"""Runs: what is written, what is read back, and what is refused."""

import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pgprog.algorithms.ladder import TRAIN_STEPS
from pgprog.cli import main
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.config import CRITIC_METHODS, GROUP_METHODS, LADDER, RunConfig
from pgprog.experiment.executor import exit_code, stop_on_interrupt
from pgprog.experiment.learner import make_learner, make_task
from pgprog.experiment.loop import evaluate, run, step_options
from pgprog.noise import ReplicaGenerator

SMALL = ["--seq-len", "2", "--digits", "3", "--prompts", "4", "--hidden", "8"]


def small(**changes):
    return RunConfig(
        **({"seq_len": 2, "digits": 3, "prompts": 4, "hidden": 8, "steps": 6, "dtype": "float64"} | changes)
    )


def rows_of(directory: Path):
    return rundir.read_rows(directory / rundir.METRICS)


def test_the_ladder_is_the_same_everywhere():
    assert tuple(TRAIN_STEPS) == LADDER
    assert set(GROUP_METHODS) | set(CRITIC_METHODS) < set(LADDER)


@pytest.mark.parametrize("algo", LADDER)
def test_every_step_logs_every_metric_for_every_seed(algo, tmp_path):
    run(small(algo=algo), [0, 7], tmp_path)
    rows = rows_of(tmp_path)
    assert [(row["step"], row["seed"]) for row in rows] == [(step, seed) for step in range(1, 7) for seed in (0, 7)]
    wanted = {"success", "loss", "grad_norm", "entropy", "advantage_mean", "advantage_std", "frac_zero_advantage"}
    if algo in GROUP_METHODS:
        wanted |= {"frac_reward_zero_std", "frac_all_wrong", "frac_all_right"}
    if algo == "ppo":
        wanted |= {"clip_frac", "ratio_min", "ratio_max"}
    if algo in CRITIC_METHODS:
        wanted |= {"value_loss"}
    assert wanted <= rows[0].keys()
    if algo not in GROUP_METHODS:
        assert "frac_reward_zero_std" not in rows[0]
    assert rows[-1]["rollouts"] == 6 * 4 * (8 if algo in GROUP_METHODS else 1)


def test_a_run_is_the_sum_of_its_train_steps(tmp_path):
    config, seeds = small(algo="reinforce", steps=3), [5]
    run(config, seeds, tmp_path)
    learner = make_learner(config, seeds)
    generator = ReplicaGenerator(seeds)
    for step in range(3):
        generator.seek(step)
        left = 1 - step / 3
        learner.optimizer.param_groups[0]["lr"] = config.policy_lr * left
        TRAIN_STEPS["reinforce"](
            learner.policy,
            learner.optimizer,
            generator,
            entropy_coef=config.entropy_coef * left,
            **step_options(config, learner),
        )
    saved = load_file(tmp_path / rundir.CHECKPOINT)
    for name, parameter in learner.policy.named_parameters():
        assert torch.equal(saved[f"policy.{name}"], parameter.detach()), name


def test_ppo_divides_its_learning_rate_by_its_epochs_unless_told_not_to():
    rate = {
        flag: make_learner(small(algo="ppo", undivided_lr=flag), [0]).optimizer.param_groups[0]["lr"]
        for flag in (False, True)
    }
    assert rate[0] * 4 == rate[1] == small().lr
    assert small(algo="ppo").exceptions()
    assert not small(algo="reinforce").exceptions()


def test_the_lessons_flags_reach_the_train_step():
    learner = make_learner(small(algo="ppo"), [0])
    cured = step_options(small(algo="ppo"), learner)
    assert "advantage" not in cured
    assert cured["ratio_level"] == "token"
    taken = step_options(small(algo="ppo", raw_advantages=True, ratio_level="sequence"), learner)
    assert taken["advantage"].__name__ == "raw_advantage"
    assert taken["ratio_level"] == "sequence"


def test_target_weights_of_sum_drawn_targets_are_the_distribution_of_a_sum_of_digits():
    # Three digits of {0, 1}: binomial.
    weights = make_task(small(seq_len=3, digits=2, targets="sum")).target_weights()
    torch.testing.assert_close(weights, torch.tensor([1, 3, 3, 1], dtype=torch.float64) / 8, rtol=1e-15, atol=0)


def test_evaluation_depends_on_the_seed_alone_and_covers_every_target():
    config = small()
    together = evaluate(make_learner(config, [0, 3, 9]).policy, [0, 3, 9])
    alone = evaluate(make_learner(config, [3]).policy, [3])
    assert together.shape == (3, 5)
    assert torch.equal(together[1], alone[0])


def test_a_stopped_run_is_saved_where_it_stopped(tmp_path):
    done = []
    result = run(small(steps=50), [0], tmp_path, lambda step, metrics: done.append(step), lambda: len(done) == 7)
    assert result.steps == 7
    assert len(rows_of(tmp_path)) == 7
    assert rundir.load_checkpoint(tmp_path)[1]["step"] == "7"


def test_a_run_that_diverges_names_step_and_seed(tmp_path, monkeypatch):
    step_of = TRAIN_STEPS["reinforce"]
    calls = []

    def poisoned(policy, *arguments, **options):
        calls.append(None)
        if len(calls) == 4:
            with torch.no_grad():
                policy.head_bias[1] = float("nan")
        return step_of(policy, *arguments, **options)

    monkeypatch.setitem(TRAIN_STEPS, "reinforce", poisoned)
    with pytest.raises(UsageError, match=r"not finite at step 4, seed 9: .* lower --lr"):
        run(small(algo="reinforce", steps=50), [4, 9], tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4], "what came before is kept"


def test_train_then_sample(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--algo", "grpo", "--steps", "3", *SMALL, "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["result"]["steps"] == 3
    assert main(["sample", "--run", str(out), "--target", "3", "--n", "5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["completions"]) == 5
    for row in shown["completions"]:
        assert len(row["completion"]) == 2
        assert row["sum"] == sum(row["completion"])
        assert row["success"] == (row["sum"] == 3) == (row["reward"] == 1.0)
    assert main(["sample", "--run", str(out), "--target", "3", "--n", "2"]) == 0
    assert "completion" in capsys.readouterr().out


def test_sample_shows_an_empty_completion_of_a_variable_length_run(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["train", "--steps", "1", *SMALL, "--variable-length", "--prompt-form", "tokens", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    capsys.readouterr()
    assert main(["sample", "--run", str(out), "--target", "0", "--n", "64", "--json"]) == 0
    completions = [row["completion"] for row in json.loads(capsys.readouterr().out)["completions"]]
    assert {len(completion) for completion in completions} == {0, 1, 2}
    assert all(digit in (0, 1, 2) for completion in completions for digit in completion)


BAD = {
    "unknown algorithm": (["train", "--algo", "ppoo"], r"unknown algorithm 'ppoo': did you mean 'ppo'\?"),
    "group of one": (["train", "--algo", "grpo", "--group-size", "1"], r"--group-size 1 with grpo"),
    "length 0": (["train", "--seq-len", "0"], r"--seq-len 0 is too small: give 1"),
    "one digit": (["train", "--digits", "1"], r"--digits 1 is too small: give 2"),
    "negative steps": (["train", "--steps", "-3"], r"--steps -3 is too small"),
    "negative group steps": (["train", "--group-steps", "-3"], r"--steps -3 is too small"),
    "batch of one": (["train", "--algo", "reinforce", "--prompts", "1"], r"--prompts 1 with reinforce"),
    "lr 0": (["train", "--lr", "0"], r"--lr 0 is out of range"),
    "lr nan": (["train", "--lr", "nan"], r"--lr nan is out of range"),
    "entropy": (["train", "--entropy-coef", "-1"], r"--entropy-coef -1 is out of range"),
    "clip": (["train", "--clip", "1.5"], r"--clip 1.5 is out of range"),
    "seed": (["train", "--seed", "-1"], r"--seed -1 is out of range"),
    "huge task": (["train", "--seq-len", "100000"], r"a target up to 900000 is over 5000"),
    "unwritable": (["train", "--out", "/proc/nowhere"], r"/proc/nowhere cannot be written"),
    "not a number": (["train", "--steps", "many"], r"error: --steps 'many' is no integer; see pgprog train --help"),
    "unknown flag": (["train", "--stepz", "3"], r"Unrecognized options: --stepz"),
    "unknown choice": (["train", "--targets", "odd"], r"invalid choice 'odd' for argument '--targets'"),
    "unknown command": (["trian"], r"unknown command 'trian': did you mean 'train'\? choose one of train, compare,"),
    "no command": ([], r"Expected one of \{train, compare, grid, sample"),
    "no seeds": (["compare", "--seeds", "0"], r"--seeds 0 is too few"),
    "unknown contender": (["compare", "--algos", "grpo", "dpo"], r"unknown algorithm 'dpo'"),
    "twice": (["compare", "--algos", "grpo", "grpo"], r"names one twice"),
    "a flag twice": (["train", "--seed", "1", "--lr", "1", "--seed", "2"], r"--seed is given twice: give it once"),
    "a list twice": (["compare", "--algos", "grpo", "--algos", "rloo"], r"--algos is given twice: give it once"),
    "twice, spelled two ways": (["train", "--group_size=4", "--group-size", "8"], r"--group-size is given twice"),
    "a choice twice": (
        ["train", "--recipe", "dapo", "--set", "constraint.clip_high=0.3", "--set=constraint.clip_high=0.4"],
        r"--set constraint.clip_high is given twice",
    ),
    "workers": (["compare", "--workers", "0"], r"--workers 0 is too few"),
    "budget": (["compare", "--equal-rollouts", "10"], r"--equal-rollouts 10 is less than one step"),
    "first seed": (["compare", "--first-seed", "-1"], r"--first-seed -1 is out of range"),
    "no run": (["sample", "--run", "/nowhere", "--target", "3"], r"/nowhere/config.json does not exist"),
    "nearly a flag": (
        ["train", "--step", "5"],
        r"Unrecognized options: --step, 5; did you mean --steps\?; see pgprog train",
    ),
    "another's flag": (
        ["train", "--seeds", "1"],
        r"options: --seeds 1; did you mean --seed\?; see pgprog train --help",
    ),
    "no percentage": (
        ["plan", "--success-rate", "5%"],
        r"--success-rate '5%' is no value for it; see pgprog plan --help",
    ),
    "no integer": (
        ["sample", "--run", "x", "--target", "abc"],
        r": --target 'abc' is no integer; see pgprog sample --help",
    ),
    "no number": (["train", "--lr", "fast"], r": --lr 'fast' is no number; see pgprog train --help"),
    "no function": (["train", "--advantage", "mine.py"], r"--advantage 'mine.py' names no function: give FILE.py:fun"),
    "no advantage file": (["train", "--advantage", "nowhere.py:f"], r"--advantage 'nowhere.py:f' is not there"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[name]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("pgprog: error: ")
    import re

    assert re.search(message, captured.err), captured.err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(("terminal", "said"), [(True, "\nStopping, and saving what was reached.\n"), (False, "")])
def test_a_signal_is_answered_at_once_where_somebody_looks(terminal, said, capfd, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: terminal and fd == 2)
    with stop_on_interrupt() as came:
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    assert capfd.readouterr().err == said


def test_set_adds_up(capsys):
    changes = ("constraint.clip_high=0.3", "constraint.clip_low=0.3", "advantage.eps=0.3")
    command = ["recipes", "dapo", "--set", changes[0], f"--set={changes[1]}", "--set", changes[2], "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["changed"].keys() == {change.split("=")[0] for change in changes}


def test_a_users_advantage_is_another_algorithm():
    assert RunConfig(algo="grpo").title == "GRPO"
    assert RunConfig(algo="grpo", advantage="mine.py:advantage").title == "mine.py:advantage in GRPO"


def test_an_existing_run_is_overwritten_only_when_asked(tmp_path, capsys):
    out = tmp_path / "run"
    base = ["train", *SMALL, "--out", str(out), "--json"]
    assert main([*base, "--steps", "2"]) == 0
    before = (out / rundir.METRICS).read_text()
    assert main([*base, "--steps", "1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / rundir.METRICS).read_text() == before
    assert main([*base, "--steps", "1", "--overwrite"]) == 0
    assert len(rows_of(out)) == 1


def test_overwrite_refuses_a_directory_that_holds_no_run(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["train", "--steps", "1", *SMALL, "--out", str(tmp_path), "--overwrite"]) == 2
    assert "is no file of a run" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def trained(tmp_path) -> Path:
    out = tmp_path / "run"
    assert main(["train", "--steps", "1", *SMALL, "--out", str(out), "--json"]) == 0
    return out


def sample_error(out: Path, capsys) -> str:
    capsys.readouterr()
    assert main(["sample", "--run", str(out), "--target", "3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_foreign_checkpoint_is_refused(tmp_path, capsys):
    out = trained(tmp_path)
    save_file({"weight": torch.ones(3)}, out / rundir.CHECKPOINT)
    assert "is no checkpoint of this version" in sample_error(out, capsys)


def test_a_pickle_is_refused_and_not_run(tmp_path, capsys):
    out = trained(tmp_path)
    torch.save({"weight": torch.ones(3)}, out / rundir.CHECKPOINT)
    assert "cannot be read" in sample_error(out, capsys)


def test_a_checkpoint_cut_at_any_byte_is_refused(tmp_path, capsys):
    out = trained(tmp_path)
    whole = (out / rundir.CHECKPOINT).read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        (out / rundir.CHECKPOINT).write_bytes(whole[:length])
        assert "cannot be read" in sample_error(out, capsys), length


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, capsys):
    out = trained(tmp_path)
    config = json.loads((out / rundir.CONFIG).read_text())
    (out / rundir.CONFIG).write_text(json.dumps(config | {"hidden": 16}))
    assert "does not fit" in sample_error(out, capsys)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"algo": 3}', "null"])
def test_a_broken_config_is_refused(content, tmp_path, capsys):
    out = trained(tmp_path)
    (out / rundir.CONFIG).write_text(content)
    assert str(out / rundir.CONFIG) in sample_error(out, capsys)


@pytest.mark.parametrize(
    ("field", "value"), [("steps", "many"), ("hidden", None), ("digits", 2.5), ("prompt_form", "odd")]
)
def test_a_config_with_a_field_of_another_type_is_refused(field, value, tmp_path, capsys):
    out = trained(tmp_path)
    config = json.loads((out / rundir.CONFIG).read_text())
    (out / rundir.CONFIG).write_text(json.dumps(config | {field: value}))
    assert field.replace("_", "") in sample_error(out, capsys).replace("_", "").replace("-", "")


def test_sample_refuses_a_target_or_seed_that_is_not_there(tmp_path, capsys):
    out = trained(tmp_path)
    capsys.readouterr()
    for arguments, message in (
        (["--target", "5"], "out of reach"),
        (["--target", "3", "--seed", "1"], "was not trained"),
    ):
        assert main(["sample", "--run", str(out), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_train_cleanly_with_what_was_reached(stop, code, tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "pgprog.cli",
        "train",
        "--algo",
        "reinforce",
        "--steps",
        "1000000",
        "--out",
        str(out),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (out / rundir.METRICS).exists(), process)
        process.send_signal(stop)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    said = " ".join(printed.split())
    assert "of 1000000 steps" in said
    assert f"Interrupted. Go on: pgprog train --resume {out}" in said
    summary = json.loads((out / rundir.SUMMARY).read_text())
    assert summary["interrupted"] is True
    steps = summary["result"]["steps"]
    assert len(rows_of(out)) == steps > 0
    assert rundir.load_checkpoint(out)[1]["step"] == str(steps)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_acts_as_by_itself(first):
    process = mp.get_context("fork").Process(target=_asked_twice, args=(first,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def _asked_twice(first):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with stop_on_interrupt() as came:
        assert exit_code(came) == 0
        os.kill(os.getpid(), first)
        assert came == [first]
        assert exit_code(came) == 128 + first
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)


def test_signals_are_as_they_were_when_nobody_listens_any_more():
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_interrupt():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers_of(process):
    """The processes that do its jobs: children of the server that it has started."""
    servers = [pid for pid in children_of(process.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [worker for server in servers for worker in children_of(server)]


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_commands_run_on_one_thread(tmp_path):
    # Small operations: a second thread makes them slower, and results depend on the number of threads.
    torch.set_num_threads(2)
    assert main(["train", "--steps", "1", *SMALL, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert torch.get_num_threads() == 1


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("pgprog ")


def test_a_reader_who_has_enough_is_no_error():
    command = f"{sys.executable} -m pgprog.cli foundations --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr
    assert len(done.stdout) == 10


def test_a_resumed_run_reads_its_instruments_as_it_did(tmp_path, capsys):
    from pgprog.arguments import Train
    from pgprog.commands import with_readings

    out = tmp_path / "run"
    assert main(["train", *SMALL, "--steps", "4", "--instruments-every", "3", "--out", str(out)]) == 0
    saved = json.loads((out / rundir.CONFIG).read_text())
    assert saved["instruments_every"] == 3 and saved["exact_critic"] is False
    assert with_readings(Train(resume=out), saved).instruments_every == 3
    assert with_readings(Train(resume=out, instruments_every=7), saved).instruments_every == 7
    assert with_readings(Train(resume=out), {"instruments_every": "3"}).instruments_every == Train().instruments_every


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "dapo", "--algo", "ppo"], "--algo ppo and --recipe dapo: give one of them"),
        (["--recipe", "dapo", "--exact-critic"], "--exact-critic with dapo: it has no critic"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(arguments, message, capsys):
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
