"""Runs survive: kill -9 at any moment, a full disk, a lost directory, a second process, a foreign checkpoint."""

import contextlib
import json
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pgprog.cli import main
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.config import LADDER, RunConfig
from pgprog.experiment.loop import run

CONFIG = RunConfig(seq_len=2, digits=3, prompts=4, hidden=8, group_size=4, steps=40)
KILLS = int(os.environ.get("PGPROG_KILLS", "20"))
FLAGS = ["--seq-len", "2", "--digits", "3", "--prompts", "4", "--hidden", "8", "--group-size", "4"]


def without_wall(result):
    return replace(result, wall_seconds=0.0)


def state(directory: Path):
    """Everything that a run has left, wall-clock fields aside."""
    tensors, metadata = rundir.load_checkpoint(directory)
    result = json.loads((directory / rundir.RESULT).read_text()) | {"wall_seconds": 0}
    return (
        {name: tensor.tolist() for name, tensor in tensors.items()},
        {name: value for name, value in metadata.items() if name != "wall_seconds"},
        rundir.read_rows(directory / rundir.METRICS),
        result,
    )


@pytest.mark.parametrize("algo", LADDER)
@pytest.mark.parametrize("stop_at", [0, 1, 7, 10, 39])
def test_a_stopped_run_goes_on_to_the_same_bits(algo, stop_at, tmp_path):
    config, seeds = replace(CONFIG, algo=algo), [0, 5]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    expected = run(config, seeds, whole, checkpoint_every=10)
    done: list[int] = []
    run(config, seeds, parts, lambda step, metrics: done.append(step), lambda: len(done) == stop_at, 10)
    result = run(config, seeds, parts, checkpoint_every=10)
    assert without_wall(result) == without_wall(expected)
    assert state(parts) == state(whole)


def test_rows_past_the_checkpoint_are_cut_and_a_torn_line_too(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    whole.mkdir(), torn.mkdir()
    run(CONFIG, [0], whole, checkpoint_every=10)
    done: list[int] = []
    run(CONFIG, [0], torn, lambda step, metrics: done.append(step), lambda: len(done) == 25, 10)
    # As a kill leaves it: the checkpoint of step 20 never knew of the rows after it.
    kept = tmp_path / "kept"
    kept.mkdir()
    run(CONFIG, [0], kept, lambda step, metrics: None, iter([False] * 20 + [True]).__next__, 10)
    shutil.copy(kept / rundir.CHECKPOINT, torn / rundir.CHECKPOINT)
    (torn / rundir.RESULT).unlink()
    with open(torn / rundir.METRICS, "a") as file:
        file.write('{"seed": 0, "step": 26, "succ')
    run(CONFIG, [0], torn, checkpoint_every=10)
    assert state(torn) == state(whole)


def test_a_finished_run_is_not_repeated(tmp_path):
    first = run(CONFIG, [0], tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    steps: list[int] = []
    assert run(CONFIG, [0], tmp_path, lambda step, metrics: steps.append(step)) == first
    assert steps == []
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_process_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    # Forked, for an import of torch per kill would take most of the time; the process and its death are real.
    config = replace(CONFIG, algo="ppo", steps=300)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    started = time.monotonic()
    run(config, [0, 1], whole, checkpoint_every=2)
    share = (time.monotonic() - started) / KILLS
    rng, kills, reached = random.Random(0), 0, []
    while not (killed / rundir.RESULT).exists():
        process = mp.get_context("fork").Process(
            target=run, args=(config, [0, 1], killed), kwargs={"checkpoint_every": 2}
        )
        process.start()
        process.join(rng.uniform(0.1, 1.9) * share if kills < KILLS else None)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        if (killed / rundir.CHECKPOINT).exists():
            reached.append(int(rundir.load_checkpoint(killed)[1]["step"]))
    assert kills >= min(KILLS, 5), f"the run ended too soon to be killed: {kills}"
    assert reached == sorted(reached)
    assert len(set(reached)) > 3 or KILLS < 10, "kills fell on the same step"
    assert state(killed) == state(whole)


def test_the_command_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    # DAPO: batches of unequal size, prompts drawn again. Forked as above, but by what is typed, --resume and all.
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    often = ["--checkpoint-every", "7", "--json"]
    make = ["train", "--recipe", "dapo", "--steps", "120", *FLAGS, *often, "--out"]
    share = typed([*make, str(whole)]) / 6
    rng, kills = random.Random(0), 0
    while not (killed / rundir.SUMMARY).exists():
        begun = (killed / rundir.CONFIG).exists()
        arguments = ["train", "--resume", str(killed), *often] if begun else [*make, str(killed)]
        kills += typed(arguments, rng.uniform(0.5, 1.5) * share if kills < 6 else None) is None
    assert kills >= 3, f"the run ended too soon to be killed: {kills}"
    assert state(killed) == state(whole)
    assert timeless(killed) == timeless(whole)


def typed(arguments, seconds=None):
    """How long the command took, in a process of its own; None if it was killed for taking longer than that."""
    started = time.monotonic()
    process = mp.get_context("fork").Process(target=_exit_with, args=(arguments,))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    assert process.exitcode == 0
    return time.monotonic() - started


def timeless(directory):
    """What train says in the end, but for when and how it was started, and how long it took."""
    summary = json.loads((directory / rundir.SUMMARY).read_text())
    del summary["created"], summary["command"], summary["result"]["wall_seconds"]
    return summary


def test_compare_resumes_without_repeating_what_is_finished(tmp_path, capsys):
    arguments = ["--seeds", "2", "--steps", "60", "--workers", "2", *FLAGS, "--json"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["compare", *arguments, "--out", str(whole)]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main(["compare", *arguments, "--out", str(parts)]) == 0
    # One run as if never started, one as if killed after its first checkpoint, the others finished.
    (parts / rundir.SUMMARY).unlink()
    shutil.rmtree(parts / "runs" / "grpo")
    (parts / "runs" / "ppo" / rundir.RESULT).unlink()
    untouched = (parts / "runs" / "reinforce" / rundir.METRICS).stat().st_mtime_ns
    capsys.readouterr()
    assert main(["compare", "--resume", str(parts), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (parts / "runs" / "reinforce" / rundir.METRICS).stat().st_mtime_ns == untouched
    for summary in (got, expected):
        for field in ("command", "created"):
            del summary[field]
        for entry in summary["algorithms"].values():
            del entry["wall_seconds"]
    assert got == expected
    assert (parts / "curves.csv").read_text() == (whole / "curves.csv").read_text()


def test_resume_takes_no_other_settings(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--steps", "2", *FLAGS, "--out", str(out), "--json"]) == 0
    assert main(["train", "--resume", str(out), "--steps", "5", "--lr", "0.1"]) == 2
    assert "leave out --steps, --lr" in capsys.readouterr().err
    for command in ("train", "compare"):
        assert main([command, "--resume", str(tmp_path / "nowhere")]) == 2
        assert "nowhere" in capsys.readouterr().err
    assert main(["compare", "--resume", str(out)]) == 2
    assert "algos is missing" in capsys.readouterr().err


def test_a_second_process_on_a_run_is_refused_and_the_holder_named(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    with rundir.open_run(out):
        process = mp.get_context("fork").Process(
            target=_exit_with, args=(["train", "--steps", "1", *FLAGS, "--out", str(out)],)
        )
        process.start()
        process.join()
        assert process.exitcode == 2
        with pytest.raises(UsageError, match=rf"in use by process {os.getpid()} on .*, since "), rundir.lock(out):
            pass
    assert main(["train", "--steps", "1", *FLAGS, "--out", str(out), "--json"]) == 0


def _exit_with(arguments):
    os._exit(main(arguments))


def test_a_full_disk_is_told_in_one_line_and_the_run_goes_on_later(tmp_path):
    whole, full = tmp_path / "whole", tmp_path / "full"
    whole.mkdir(), full.mkdir()
    run(CONFIG, [0], whole, checkpoint_every=5)
    process = mp.get_context("fork").Process(target=_run_out_of_room, args=(full,))
    process.start()
    process.join()
    assert process.exitcode == 0, "no clear error"
    assert (full / rundir.CHECKPOINT).exists()
    assert not (full / rundir.RESULT).exists()
    run(CONFIG, [0], full, checkpoint_every=5)
    assert state(full) == state(whole)


def _run_out_of_room(directory):
    """Run with files limited to what metrics of some steps need, as a disk that fills up."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(step, metrics):
        if step == 12:
            size = (directory / rundir.CHECKPOINT).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))

    try:
        run(CONFIG, [0], directory, fill, checkpoint_every=5)
    except UsageError as error:
        text = str(error)
        os._exit(0 if "cannot be written (File too large) after step" in text and "--resume" in text else 1)
    os._exit(2)


@contextlib.contextmanager
def no_file_longer_than(size):
    """As on a disk that is full, but for the name of the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_from_the_start_is_told_and_nothing_is_left_in_the_way(tmp_path, capsys):
    arguments = ["train", "--steps", "2", *FLAGS, "--out", str(tmp_path / "run"), "--json"]
    with no_file_longer_than(100):
        assert main(arguments) == 2
    assert f"{tmp_path / 'run' / rundir.CONFIG}: File too large: make room" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == [rundir.LOCK]
    assert main(arguments) == 0


def test_rows_are_cut_where_no_copy_would_fit(tmp_path):
    path = tmp_path / rundir.METRICS
    rows = [json.dumps({"step": s, "seed": 7, "rollouts": 64 * s, "success": 0.5}) + "\n" for s in range(1, 9)]
    path.write_text("".join(rows))
    with no_file_longer_than(10):
        rundir.cut_rows(path, 5, [7])
    assert path.read_text() == "".join(rows[:5])


def test_rows_that_were_cut_short_are_not_written_a_second_time(tmp_path):
    path = tmp_path / rundir.METRICS
    with pytest.raises(OSError, match="File too large"), rundir.RowWriter(path) as log:
        log.add([{"step": 1, "success": 0.5}])
        with no_file_longer_than(10):
            log.flush()
    rundir.cut_rows(path, 0, [7])  # it can be read on
    assert path.read_bytes() == b""


def test_a_directory_that_vanishes_is_told_in_one_line(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()

    def vanish(step, metrics):
        if step == 12:
            shutil.rmtree(directory)

    with pytest.raises(UsageError, match=r"cannot be written \(No such file or directory\) after step 15"):
        run(CONFIG, [0], directory, vanish, checkpoint_every=5)


@pytest.mark.parametrize("change", [{"hidden": 16}, {"algo": "ppo"}, {"seq_len": 3}, {"lr": 0.5}, {"dtype": "float64"}])
def test_a_checkpoint_of_another_run_is_refused(change, tmp_path):
    done: list[int] = []
    run(CONFIG, [0], tmp_path, lambda step, metrics: done.append(step), lambda: len(done) == 3)
    with pytest.raises(UsageError, match=rf"does not fit config.json beside it: {next(iter(change))} is"):
        run(replace(CONFIG, **change), [0], tmp_path)
    with pytest.raises(UsageError, match=r"is of seeds \[0\], not \[1\]"):
        run(CONFIG, [1], tmp_path)


def test_a_checkpoint_cut_at_any_byte_is_refused_and_kept(tmp_path):
    done: list[int] = []
    run(CONFIG, [0], tmp_path, lambda step, metrics: done.append(step), lambda: len(done) == 3)
    path = tmp_path / rundir.CHECKPOINT
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="cannot be read"):
            run(CONFIG, [0], tmp_path)
        assert path.read_bytes() == whole[:length]
    path.write_bytes(whole)
    assert run(CONFIG, [0], tmp_path).steps == CONFIG.steps


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    from pgprog.algorithms.ladder import TRAIN_STEPS

    step_of, calls = TRAIN_STEPS["grpo"], []

    def poisoned(policy, *arguments, **options):
        calls.append(None)
        if len(calls) == 14:
            with torch.no_grad():
                policy.head_bias[1] = float("nan")
        return step_of(policy, *arguments, **options)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    run(CONFIG, [3, 8], whole, checkpoint_every=5)
    monkeypatch.setitem(TRAIN_STEPS, "grpo", poisoned)
    with pytest.raises(UsageError, match="not finite at step 14, seed 8"):
        run(CONFIG, [3, 8], broken, checkpoint_every=5)
    tensors, metadata = rundir.load_checkpoint(broken)
    assert metadata["step"] == "10"
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    rows = {(row["seed"], row["step"]): row for row in rundir.read_rows(broken / rundir.METRICS)}
    expected = {(row["seed"], row["step"]): row for row in rundir.read_rows(whole / rundir.METRICS)}
    assert rows[3, 14] == expected[3, 14], "the other replica is unharmed"
    # What broke it gone, it goes on.
    monkeypatch.setitem(TRAIN_STEPS, "grpo", step_of)
    run(CONFIG, [3, 8], broken, checkpoint_every=5)
    assert state(broken) == state(whole)
