"""What others left in a run directory, or what breaks there: refused in one line, and nothing of theirs lost."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pgprog.cli import main
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.config import RunConfig
from pgprog.experiment.loop import refuse_divergence, run
from test_run import wait_for, workers_of

CONFIG = RunConfig(seq_len=2, digits=3, prompts=4, hidden=8, group_size=4, steps=6)
FLAGS = ["--seq-len", "2", "--digits", "3", "--prompts", "4", "--hidden", "8", "--group-size", "4", "--json"]


def train(out: Path, *more: str) -> int:
    return main(["train", "--steps", "2", *FLAGS, "--out", str(out), *more])


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("pgprog: error: ")
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("theirs", ["model.bin", "sub/x", "notes.txt", "runs/mine/thesis.tex"])
def test_overwrite_never_removes_a_file_that_is_not_a_runs(theirs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    (out / theirs).parent.mkdir(parents=True, exist_ok=True)
    (out / theirs).write_text("years of work")
    capsys.readouterr()
    assert train(out, "--overwrite") == 2
    assert "is no file of a run" in one_line(capsys)
    assert (out / theirs).read_text() == "years of work"
    assert (out / rundir.CHECKPOINT).exists()


def test_overwrite_wants_a_config_of_ours_not_any_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert train(tmp_path, "--overwrite") == 2
    assert "missing or no run's" in one_line(capsys)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'


def test_links_are_neither_followed_nor_removed(tmp_path, capsys):
    victim, out = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    assert train(out) == 0
    (out / "summary.json").unlink()
    (out / "summary.json").symlink_to(victim)
    capsys.readouterr()
    assert train(out, "--overwrite") == 2
    one_line(capsys)
    # As the file that a checkpoint is written to first, and as the metrics.
    (out / "summary.json").unlink()
    (out / rundir.RESULT).unlink()
    (out / f"{rundir.CHECKPOINT}.partial").symlink_to(victim)
    assert main(["train", "--resume", str(out), "--json"]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / rundir.LOCK).symlink_to(victim)
    assert train(tmp_path / "other") == 2
    with pytest.raises(OSError), rundir.RowWriter(tmp_path / "link") as log:
        (tmp_path / "link").symlink_to(victim)
        log.add([{"step": 1}])
    assert victim.read_text() == "precious"


def stopped(directory: Path) -> Path:
    done: list[int] = []
    directory.mkdir()
    run(CONFIG, [0], directory, lambda step, metrics: done.append(step), lambda: len(done) == 3)
    (directory / rundir.RESULT).unlink()
    return directory


METADATA = {
    "step": ["99", "1.5", '"a"', "-5", "x", "0", "null", "[" * 10_000],
    "rollouts": ["[]", "null", "[1, 2]", "[-1]", '["a"]'],
    "tokens": ["[]", "null", "[1, 2]", "[-1]", '["a"]'],
    "wall_seconds": ["null", "NaN", "-1", "Infinity"],
    "config": ["[]", "{", "{}"],
    "seeds": ["[]", '["a"]', "3", "[1]"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in METADATA.items() for value in values])
def test_a_checkpoint_with_damaged_metadata_is_refused(name, value, tmp_path):
    directory = stopped(tmp_path / "run")
    tensors, metadata = rundir.load_checkpoint(directory)
    save_file(tensors, directory / rundir.CHECKPOINT, metadata | {name: value})
    with pytest.raises(UsageError, match=r"checkpoint\.safetensors") as refused:
        run(CONFIG, [0], directory)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fault", ["nan", "dtype", "shape", "missing"])
def test_a_checkpoint_with_damaged_tensors_is_refused_by_resume_and_by_sample(fault, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    (out / rundir.RESULT).unlink()
    tensors, metadata = rundir.load_checkpoint(out)
    bias = tensors.pop("policy.head_bias")
    damaged = {"nan": bias * float("nan"), "dtype": bias.double(), "shape": bias[..., 1:].contiguous()}
    if fault in damaged:
        tensors["policy.head_bias"] = damaged[fault]
    save_file(tensors, out / rundir.CHECKPOINT, metadata)
    capsys.readouterr()
    for command in (["train", "--resume", str(out)], ["sample", "--run", str(out), "--target", "3"]):
        assert main(command) == 2
        assert "checkpoint.safetensors" in one_line(capsys)


ROWS = [b"garbage\n", b'{"seed": 0}\n', b"[]\n", b'{"step": "x"}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"]


@pytest.mark.parametrize("line", ROWS, ids=range(len(ROWS)))
def test_damaged_metrics_are_refused_and_kept(line, tmp_path):
    directory = stopped(tmp_path / "run")
    path = directory / rundir.METRICS
    path.write_bytes(line + path.read_bytes())
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"metrics\.jsonl: line 1 is no row"):
        run(CONFIG, [0], directory)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("kept", "step"), [(0, 0), (2, 2), (-1, 2)])
def test_metrics_that_end_before_their_checkpoint_are_refused_and_kept(kept, step, tmp_path):
    directory = stopped(tmp_path / "run")
    path = directory / rundir.METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) if kept >= 0 else b"".join(lines)[:-1])
    before = path.read_bytes()
    with pytest.raises(UsageError, match=rf"metrics\.jsonl ends at step {step}, its checkpoint is of step 3"):
        run(CONFIG, [0], directory)
    assert path.read_bytes() == before
    (directory / rundir.CHECKPOINT).unlink()
    assert run(CONFIG, [0], directory).steps == CONFIG.steps
    assert [row["step"] for row in rundir.read_rows(path)] == [1, 2, 3, 4, 5, 6]


def test_train_does_not_go_on_with_a_comparison(tmp_path, capsys):
    out = tmp_path / "compare"
    (out / "runs").mkdir(parents=True)
    rundir.write_json(out / rundir.CONFIG, {"command": "pgprog compare --seeds 2"})
    assert main(["train", "--resume", str(out)]) == 2
    error = one_line(capsys)
    assert "holds many runs: go on with the command that made it, pgprog compare --seeds 2" in error
    assert error.endswith(f": pgprog compare --resume {out}\n")


def test_a_comparison_does_not_go_on_with_a_run(tmp_path, capsys):
    assert train(tmp_path / "run") == 0
    for command in ("compare", "grid"):
        capsys.readouterr()
        assert main([command, "--resume", str(tmp_path / "run")]) == 2
        assert one_line(capsys).endswith(f" is missing; it is a single run: pgprog train --resume {tmp_path / 'run'}\n")


def test_a_run_that_was_killed_before_its_first_file_was_whole_is_in_nobodys_way(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / (rundir.CONFIG + ".partial")).write_text('{"command": "pgp')
    assert train(out) == 0
    assert not list(out.glob("*.partial"))


def test_a_folder_of_that_name_is_not_emptied(tmp_path, capsys):
    precious = tmp_path / "run" / (rundir.CONFIG + ".partial") / "thesis.tex"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    assert train(tmp_path / "run") == 2
    assert precious.read_text() == "precious"


def test_metrics_that_are_gone_are_missed(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    for name in (rundir.METRICS, rundir.RESULT):
        (out / name).unlink()
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--json"]) == 2
    assert "ends at step 0, its checkpoint is of step 2: put the whole file back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        (rundir.CHECKPOINT, "remove the folder {run}, and --resume {whole} trains that run again, and no other"),
        (rundir.METRICS, "remove the folder {run}, and --resume {whole} trains that run again, and no other"),
        (rundir.RESULT, "remove it, and --resume evaluates again"),
        (rundir.CONFIG, "--resume {whole} writes it again"),
    ],
)
def test_the_damage_of_one_run_of_many_is_named_with_its_cure(name, cure, tmp_path):
    whole = tmp_path / "grid"
    directory = whole / "runs" / "return-none"
    directory.parent.mkdir(parents=True)
    stopped(directory)
    (directory / name).write_text("garbage\n")

    def refusal():
        with pytest.raises(UsageError) as refused:
            rundir.read_json(directory / name) if name == rundir.CONFIG else run(CONFIG, [0], directory)
        return str(refused.value)

    if name != rundir.RESULT:  # a folder of the user's own that is called runs is no grid
        assert refusal().endswith("; it cannot be gone on with: train again, with another --out")
    rundir.write_json(whole / rundir.CONFIG, {"environment": rundir.environment()})
    assert refusal().endswith("; " + cure.format(run=directory, whole=whole))


def test_damaged_metrics_of_a_finished_run_are_one_line(tmp_path):
    run(CONFIG, [0], tmp_path)
    (tmp_path / rundir.METRICS).write_text("[" * 100_000)
    with pytest.raises(
        UsageError, match=r"metrics\.jsonl is no file of metrics .* or is damaged; it cannot be gone on"
    ):
        rundir.rows_so_far(tmp_path)


def damaged(lines: list[str], kind: str) -> list[str]:
    """The rows of a run, seeds 0 and 1, with something wrong."""
    row = json.loads(lines[2])
    match kind:
        case "gone":
            return []
        case "half":
            return [*lines[:-1], lines[-1][:20]]
        case "a line short":
            return lines[:2] + lines[3:]
        case "another seed":
            return [*lines[:2], json.dumps(row | {"seed": 5}) + "\n", *lines[3:]]
        case "a word":
            return [*lines[:2], json.dumps(row | {"entropy": "none"}) + "\n", *lines[3:]]
        case "too much":
            return [*lines[:2], json.dumps(row | {"success": 10**400}) + "\n", *lines[3:]]
        case "half a rollout":
            return [*lines[:2], json.dumps(row | {"rollouts": 0.5}) + "\n", *lines[3:]]
        case "no success":
            return [*lines[:2], json.dumps({k: v for k, v in row.items() if k != "success"}) + "\n", *lines[3:]]
        case _:
            return [*lines[:2], "[1]\n", *lines[3:]]


@pytest.mark.parametrize(
    "kind",
    ["gone", "half", "a line short", "another seed", "a word", "too much", "half a rollout", "no success", "a list"],
)
def test_a_finished_run_whose_rows_are_damaged_is_not_reported(kind, tmp_path, capsys):
    run(CONFIG, [0, 1], tmp_path)
    path = tmp_path / rundir.METRICS
    path.write_text("".join(damaged(path.read_text().splitlines(keepends=True), kind)))
    before = path.read_bytes()
    said = (
        r"ends at step (0|5), its checkpoint is of step 6: put" if kind in ("gone", "half") else r"line 3 is no row of"
    )
    with pytest.raises(UsageError, match=rf"metrics\.jsonl:? {said}"):
        run(CONFIG, [0, 1], tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["gone", "a line short"])
def test_a_comparison_over_damaged_rows_is_one_line_with_a_cure(kind, tmp_path, capsys):
    out = tmp_path / "compare"
    command = ["compare", "--algos", "reinforce", "rloo", "--seeds", "1", "--steps", "8", "--group-steps", "6", *FLAGS]
    assert main([*command, "--out", str(out)]) == 0
    path = out / "runs" / "rloo" / rundir.METRICS
    whole = path.read_text()
    capsys.readouterr()
    lines = damaged(whole.splitlines(keepends=True), kind)
    path.write_text("".join(lines)) if lines else path.unlink()
    assert main(["compare", "--resume", str(out), "--json"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    beside = f"or remove {path.with_name(rundir.CHECKPOINT)} and {path.with_name(rundir.RESULT)}, and --resume begins"
    assert (beside if kind == "gone" else f"remove the folder {path.parent}, and --resume {out}") in error
    path.write_text(whole)
    assert main(["compare", "--resume", str(out), "--json"]) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": []},
        {"tokens": ["a"]},
        {"success": ["x"]},
        {"success": []},
        {"success": [7]},
        {"success": [10**400]},
        {"success_sum_targets": [float("nan")]},
        {"success_by_target": [["a"] * 5]},
        {"success_by_target": [[0.5]]},
        {"success_by_target": [1]},
        {"rollouts": None},
        {"wall_seconds": "x"},
        {"steps": 6.0},
        {"more": 1},
    ],
)
def test_a_damaged_result_is_refused(change, tmp_path):
    run(CONFIG, [0], tmp_path)
    path = tmp_path / rundir.RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=r"result\.json is damaged"):
        run(CONFIG, [0], tmp_path)


def test_a_finished_run_whose_config_was_changed_is_refused(tmp_path):
    run(CONFIG, [0], tmp_path)
    with pytest.raises(UsageError, match=r"lr is 0\.006 in the one and 0\.5 in the other"):
        run(replace(CONFIG, lr=0.5), [0], tmp_path)


@pytest.mark.parametrize(
    "change", [{"seeds": ["a"]}, {"seeds": [None]}, {"seeds": [0, 1]}, {"lr": 10**400}, {"hidden": 10**9}]
)
def test_a_config_that_cannot_be_is_refused(change, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    content = json.loads((out / rundir.CONFIG).read_text()) | change
    (out / rundir.CONFIG).write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 2
    one_line(capsys)


def test_json_nested_too_deeply_is_refused(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    (out / rundir.CONFIG).write_text("[" * 200_000)
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 2
    assert "RecursionError" in one_line(capsys)


SIZES = [
    ["--hidden", "100000000"],
    ["--prompts", "1000000000"],
    ["--group-size", "1" + "0" * 30],
    ["--hidden", "1" + "0" * 30],
]


@pytest.mark.parametrize("flags", SIZES)
def test_sizes_that_cannot_be_held_are_refused_before_they_are_tried(flags, tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), *flags]) == 2
    assert "give" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_path_that_no_file_system_takes_is_one_line(tmp_path, capsys):
    for arguments in (["sample", "--run", "a" * 300, "--target", "3"], ["train", "--advantage", "a" * 300 + ".py:f"]):
        assert main(arguments) == 2
        assert "File name too long" in one_line(capsys)


def test_algo_of_a_single_run_is_refused(tmp_path, capsys):
    assert train(tmp_path / "run") == 0
    capsys.readouterr()
    assert main(["sample", "--run", str(tmp_path / "run"), "--algo", "ppo", "--target", "3"]) == 2
    assert "no comparison" in one_line(capsys)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "value_loss"])
def test_divergence_is_seen_in_every_quantity(name):
    metrics = {key: torch.zeros(2) for key in ("loss", "grad_norm", "value_loss")}
    refuse_divergence(3, [5, 7], metrics)
    metrics[name][1] = float("inf")
    with pytest.raises(UsageError, match=f"{name} is not finite at step 3, seed 7"):
        refuse_divergence(3, [5, 7], metrics)


def test_no_worker_outlives_a_killed_comparison(tmp_path):
    # One worker is busy, the other has nothing left to do.
    command = [sys.executable, "-m", "pgprog.cli", "compare", "--algos", "reinforce", "grpo", "--seeds", "1"]
    command += ["--steps", "1000000", "--group-steps", "1", "--equal-rollouts", "16", *FLAGS[:-1]]
    command += ["--workers", "2", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: (tmp_path / "run" / "runs" / "grpo" / rundir.RESULT).exists(), process)
        wait_for(lambda: (tmp_path / "run" / "runs" / "reinforce" / rundir.METRICS).exists(), process)
        workers = workers_of(process)
        assert len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    class Gone:
        poll = staticmethod(lambda: None)

    def all_gone():
        return not any(Path(f"/proc/{pid}").exists() and "forkserver" in _command_of(pid) for pid in workers)

    wait_for(all_gone, Gone, seconds=60)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def test_a_checkpoint_that_must_not_be_read_is_not_called_missing_or_damaged(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(out) == 0
    (out / rundir.RESULT).unlink()
    path = out / rundir.CHECKPOINT
    path.chmod(0)
    remedy = "Permission denied: give a path that can be read and written"
    if os.geteuid() == 0:  # who may read all but a folder
        path.unlink()
        path.mkdir()
        remedy = "Is a directory: give a path that can be read and written"
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--json"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"pgprog: error: {path}: {remedy}"


def test_curves_are_not_written_through_a_link(tmp_path):
    out, victim = tmp_path / "compare", tmp_path / "victim"
    command = ["compare", "--algos", "reinforce", "--seeds", "1", "--steps", "8", *FLAGS]
    assert main([*command, "--out", str(out)]) == 0
    before = (out / "curves.csv").read_bytes()
    assert before.count(b"\n") == 9
    victim.write_text("precious")
    for name in ("curves.csv", "learning_curves.png", "results.md"):
        (out / name).unlink()
        (out / name).symlink_to(victim)
    assert main(["compare", "--resume", str(out), "--json"]) == 0
    assert not any(path.is_symlink() for path in out.iterdir())
    assert victim.read_text() == "precious"
    assert (out / "curves.csv").read_bytes() == before


def test_a_program_without_a_guard_can_compare(tmp_path):
    program = tmp_path / "program.py"
    arguments = ["compare", "--algos", "reinforce", "--seeds", "1", "--steps", "8", *FLAGS, "--out"]
    program.write_text(f"from pgprog.cli import main\nassert main({arguments} + [{str(tmp_path / 'out')!r}]) == 0\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert json.loads(done.stdout)["interrupted"] is False


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def test_the_end_of_the_command_loses_nothing(tmp_path):
    """Neither its own output nor what a user's function has not yet written."""
    mine, log = tmp_path / "mine.py", tmp_path / "log"
    mine.write_text(f"log = open({str(log)!r}, 'a')\ndef A(rewards):\n    log.write('x')\n    return rewards\n")
    program = [sys.executable, "-m", "pgprog"]
    asked = subprocess.run([*program, "--version"], capture_output=True, text=True, env=BUFFERED, check=True)
    assert asked.stdout.startswith("pgprog ")
    for more in ([], ["--advantage", f"{mine}:A"]):
        out = tmp_path / f"run{len(more)}"
        command = [*program, "train", "--algo", "reinforce", "--steps", "2", *FLAGS[:6], "--json", "--out", str(out)]
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=BUFFERED, check=True)
        assert json.loads(done.stdout)["result"]["steps"] == 2
        assert (log.exists(), done.stderr.count("Traceback")) == (bool(more), 0)
    assert log.read_text() in ("xx", "xxx")  # at each step; the file is loaded for a trial before, and closed or not


@pytest.mark.parametrize(("end", "code"), [(">&-", 0), ("| true", None), (">/dev/full", 2), ("2>&-", 0)])
def test_output_that_nobody_takes_is_no_traceback(end, code):
    done = subprocess.run(
        f"{sys.executable} -m pgprog recipes --json {end}", shell=True, capture_output=True, text=True, env=BUFFERED
    )
    assert "Traceback" not in done.stderr
    assert code is None or done.returncode == code


LAST_KILL = """
import multiprocessing as mp, os, signal
from pgprog.experiment.config import RunConfig
from pgprog.experiment.executor import Job, run_jobs

config = RunConfig(seq_len=2, digits=3, prompts=4, hidden=8, group_size=4, steps=6)
left = 2
for _ in run_jobs([Job(str(i), config, (i,), None) for i in range(left)], 2, 100, lambda progress: None):
    left -= 1
    if left == 0:
        os.kill(mp.active_children()[0].pid, signal.SIGKILL)
print("done")
"""


def test_a_worker_that_is_killed_when_all_is_done_is_not_waited_for():
    done = subprocess.run([sys.executable, "-c", LAST_KILL], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
