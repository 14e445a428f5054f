"""The grid: its cells, its figure, resume and signals, combinations without meaning, and bad input."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from rich.console import Console

from axes_mutants_grid import GRID_MUTANTS
from mutants import ROOT, patched
from pgprog.algorithms.recipes import find
from pgprog.cli import main
from pgprog.errors import UsageError
from pgprog.experiment import grid, rundir
from pgprog.experiment.config import RunConfig
from pgprog.experiment.grid import Cell, jobs_of, plan, run_grid, summarise
from pgprog.experiment.grid_config import ADVANTAGES, BASE, COLUMNS, CONSTRAINTS, ROWS, GridConfig
from pgprog.experiment.loop import Result, run
from pgprog.report.grid_figures import draw_grid, heat_map
from pgprog.report.grid_tables import print_grid, remarks
from pgprog.stats import bootstrap_mean
from test_run import wait_for

TINY = ["--seq-len", "2", "--digits", "3", "--hidden", "8", "--prompts", "4", "--group-size", "3", "--dtype", "float64"]
AXES = ["--advantages", "return", "group_z", "gae", "--constraints", "none", "clip_sequence", "trust_region"]
SMALL = {"seq_len": 2, "digits": 3, "hidden": 8, "prompts": 4, "group_size": 3, "dtype": "float64"}
PNG = b"\x89PNG"


def invented():
    """What a grid says of results that nobody trained: one cell refused, one missing, one stopped."""
    config = GridConfig(
        advantages=("return", "group_z", "gae"), constraints=("none", "clip_sequence", "trust_region"), seeds=2
    )
    cells = plan(config, None)
    results = {}
    for number, job in enumerate(jobs_of(cells)):
        success = [0.1 * number + 0.02, 0.1 * number + 0.09]
        results[job.name] = Result(200, 25_600, [76_800, 76_800], 1.5, success, [0.99, 0.99], [[0.5], [0.5]])
    del results["group_z-none"]
    results["return-clip_sequence"] = replace(results["return-clip_sequence"], steps=7)
    return summarise(config, cells, results) | {"interrupted": False}


def test_every_cell_of_the_default_grid_has_the_same_batches_and_only_the_axes_differ():
    cells = plan(GridConfig(), None)
    assert [(cell.advantage, cell.constraint) for cell in cells] == [(a, c) for a in ROWS for c in COLUMNS]
    runs = [job.config for job in jobs_of(cells)]
    assert {(r.prompts, r.completions, r.steps, r.steps * r.most_rollouts_per_step) for r in runs} == {
        (16, 8, 200, 25_600)
    }
    # The learning rate is divided by the gradient steps on a batch.
    assert {r.policy_lr * r.choices.gradient_steps for r in runs} == {2e-2}
    refused = {(cell.advantage, cell.constraint) for cell in cells if cell.job is None}
    assert refused == {("gae", c) for c in ("clip_sequence", "clip_sequence_mean", "kl_reward")}
    for cell in cells:
        if cell.job is not None:
            first = find(BASE, ("sampling.group=true", *ADVANTAGES[cell.advantage].changes))
            assert cell.job.config.choices.advantage == first.advantage
            assert cell.job.config.choices.aggregation == first.aggregation


def test_labels_say_where_a_batch_is_passed_over_again_and_are_apart():
    for entry in CONSTRAINTS.values():
        assert ("sampling.epochs=4" in entry.changes) == ("4 epochs" in entry.label)
    for axis in (ADVANTAGES, CONSTRAINTS):
        assert len({entry.label for entry in axis.values()}) == len(axis)
        assert len({entry.changes for entry in axis.values()}) == len(axis)
        assert all(re.fullmatch("[a-z_]+", name) for name in axis)  # names of folders


def test_set_changes_every_cell_and_wins():
    config = GridConfig(constraints=("clip_token", "none"), set=("sampling.epochs=2", "advantage.eps=0.1"))
    choices = [job.config.choices for job in jobs_of(plan(config, None))]
    assert {(r.sampling.epochs, r.advantage.eps) for r in choices} == {(2, 0.1)}


def test_a_filter_that_may_draw_again_is_paid_for():
    config = GridConfig(advantages=("group_z",), constraints=("none",), set=("sampling.dynamic=3",))
    assert jobs_of(plan(config, None))[0].config.steps == 25_600 // (3 * 128)


def test_a_cell_is_named_by_its_row_and_column():
    assert Cell("gae", "none", None).name == "gae-none"


def test_a_grid_keeps_each_cell_in_a_folder_of_its_own(tmp_path):
    config = GridConfig(advantages=("value_z",), constraints=("kl_loss",))
    (cell,) = plan(config, tmp_path)
    assert cell.job.directory == tmp_path / "runs" / "value_z-kl_loss"
    assert (cell.job.name, cell.job.seeds) == ("value_z-kl_loss", (0, 1, 2, 3, 4))


def test_every_cell_says_what_it_is():
    said = invented()
    kinds = [cell["status"] for cell in said["cells"]]
    assert kinds == ["done", "stopped", "done", "missing", "done", "done", "done", "refused", "done"]
    assert said["cells"][0]["success"] == {
        "mean": pytest.approx(0.055, rel=1e-12),
        "ci95": [pytest.approx(0.02), pytest.approx(0.09)],
        "seeds": [0.02, 0.09],
    }
    refused = said["cells"][7]
    assert (refused["advantage"], refused["constraint"]) == ("gae", "clip_sequence")
    assert refused["reason"].startswith("the advantage differs from token to token, and constraint.ratio=sequence")
    assert remarks(said)[0] == f"(1) no meaning: {refused['reason']}."
    assert said["cells"][1]["exceptions"] == ["lr 0.02 / 4 epochs = 0.005: k epochs move k steps"]


def test_the_table_says_every_mean_and_what_is_empty(capsys):
    said = invented() | {"interrupted": True}
    print_grid(Console(), said)
    printed = capsys.readouterr().out
    for cell in said["cells"]:
        if "success" in cell:
            low, high = cell["success"]["ci95"]
            assert f"{cell['success']['mean']:.3f}" in printed and f"{low:.2f}-{high:.2f}" in printed
    assert "(1)" in printed and "(1) no meaning: the advantage differs" in printed
    assert "Interrupted" in printed and "Every cell is vpg" in printed


def test_the_colours_stand_at_the_places_of_their_cells():
    said = invented()
    panel = heat_map(said).axes[0]
    shown = panel.images[0].get_array()
    texts = {tuple(round(x) for x in t.get_position()): t.get_text() for t in panel.texts}
    for number, cell in enumerate(said["cells"]):
        y, x = divmod(number, 3)
        if "success" in cell:
            assert shown[y, x] == cell["success"]["mean"]
            assert texts[x, y].startswith(f"{cell['success']['mean']:.3f}\n")
        else:
            assert bool(shown.mask[y, x])
            assert texts[x, y] == {"refused": "(1)", "missing": "-"}[cell["status"]]
    hatched = [(round(p.get_x() + 0.5), round(p.get_y() + 0.5)) for p in panel.patches if p.get_hatch()]
    assert hatched == [(1, 2)]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["return r", "group z-score", "GAE 0.95"]
    plt.close("all")


def test_the_figure_prints_every_value_with_its_interval(tmp_path):
    said = invented()
    draw_grid(tmp_path, said)
    assert (tmp_path / "grid.png").read_bytes().startswith(PNG)
    drawn = (tmp_path / "grid.svg").read_text()
    texts = re.findall(r"<!-- (.*?) -->", drawn, flags=re.DOTALL)  # what each text is, which is drawn as outlines
    for cell in said["cells"]:
        if "success" in cell:
            low, high = cell["success"]["ci95"]
            assert f"{cell['success']['mean']:.3f}" in texts
            assert f"{low:.2f}-{high:.2f}" in texts
    assert "7/200" in texts  # of the cell that was stopped
    assert any(text.startswith("(1) the advantage differs") for text in texts)
    assert drawn.count("<pattern") == 1  # the hatch


def test_ctrl_c_keeps_what_was_reached_but_no_run_without_a_step(tmp_path, monkeypatch):
    config = GridConfig(advantages=("return",), constraints=("none", "kl_loss"), seeds=1)

    def results(jobs, *_, **__):
        yield jobs[0], Result(0, 0, [0], 0.1, [0.5], [0.5], [[0.5]])
        yield jobs[1], Result(7, 896, [2688], 0.1, [0.5], [0.5], [[0.5]])
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "run_jobs", results)
    said = run_grid(config, {}, tmp_path, workers=1, checkpoint_every=100, on_progress=lambda progress: None)
    assert json.loads(json.dumps(said)) == json.loads((tmp_path / rundir.GRID).read_text())
    assert said["interrupted"] is True
    assert [cell["status"] for cell in said["cells"]] == ["missing", "stopped"]
    assert said["cells"][1]["success"] == {"mean": 0.5, "ci95": [None, None], "seeds": [0.5]}


def test_overwrite_replaces_a_whole_grid_and_nothing_else(tmp_path):
    out = tmp_path / "grid"
    with rundir.open_run(out):
        (out / rundir.CONFIG).write_text('{"environment": {"pgprog": "0.1.0"}}')
        for name in (rundir.GRID, "grid.png", "grid.svg"):
            (out / name).write_text("")
        (out / "runs" / "group_z-clip_token").mkdir(parents=True)
        (out / "runs" / "group_z-clip_token" / rundir.RESULT).write_text("")
    (out / "runs" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match=r"mine.txt is no file of a run"), rundir.open_run(out, overwrite=True):
        pass
    assert (out / rundir.GRID).exists()
    (out / "runs" / "mine.txt").unlink()
    with rundir.open_run(out, overwrite=True):
        assert [path.name for path in out.iterdir()] == [rundir.LOCK]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--advantages", "return", "rloo"], r"unknown advantage 'rloo': .*choose one of return, batch_mean"),
        (["--constraints", "clip_tokens"], r"unknown constraint 'clip_tokens': did you mean 'clip_token'"),
        (["--constraints", "none", "none"], "--constraints none none names one twice: give each once"),
        (["--rollouts", "100"], "--rollouts 100 is less than one step: it takes 128, give that or more"),
        (["--seeds", "0"], "--seeds 0 is too few"),
        (["--first-seed", "-1"], "--first-seed -1 is out of range"),
        (["--workers", "0"], "--workers 0 is too few: give 1 or more"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0 is too small"),
        (["--set", "advantage.no=1"], r"no cell of the grid can be run; return-none: unknown choice of advantage 'no'"),
        (["--set", "nonsense"], r"return-none: --set nonsense: give axis.choice=value"),
        (["--set", "kl.coef=-1"], r"kl.coef -1: give 0 or more"),
        (["--advantages", "gae", "--constraints", "clip_sequence"], "gae-clip_sequence: the advantage differs"),
        (["--prompts", "0"], "--prompts 0 is too small: give 1 or more"),
        (["--group-size", "1"], "--group-size 1 with vpg"),
        (["--ppo-epochs", "2"], "--ppo-epochs is of --algo ppo"),
        (["--digits", "1"], "digits 1"),
        (["--resume", "nowhere"], "nowhere/config.json does not exist"),
    ],
)
def test_bad_input_is_one_line(flags, said, tmp_path, capsys):
    out = [] if "--resume" in flags else ["--out", str(tmp_path / "grid")]
    assert main(["grid", *flags, *out]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.startswith("pgprog: error: ")
    assert re.search(said, errors)
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("mutant", GRID_MUTANTS, ids=[m.name for m in GRID_MUTANTS])
def test_the_fault_applies_once_and_still_compiles(mutant):
    original = (ROOT / "src" / "pgprog" / mutant.file).read_text()
    assert ast.dump(ast.parse(patched(mutant))) != ast.dump(ast.parse(original))
    assert (ROOT / "tests" / mutant.test).exists()


def test_faults_are_named_apart():
    assert len({m.name for m in GRID_MUTANTS}) == len(GRID_MUTANTS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small grid: its directory, and what it printed with --json."""
    out = tmp_path_factory.mktemp("grid") / "grid"
    command = [sys.executable, "-m", "pgprog.cli", "grid", *AXES, *TINY, "--rollouts", "50", "--seeds", "3"]
    command += ["--first-seed", "4", "--workers", "2", "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_the_file_says_what_was_printed_and_every_cell_pays_the_same(made):
    out, said = made
    assert said == json.loads((out / rundir.GRID).read_text())
    assert [(cell["advantage"], cell["constraint"]) for cell in said["cells"]] == [
        (a, c) for a in ("return", "group_z", "gae") for c in ("none", "clip_sequence", "trust_region")
    ]
    done = [cell for cell in said["cells"] if cell["status"] == "done"]
    assert len(done) == 8
    # 50 / (4 x 3) = 4.2 steps: 48 rollouts, whatever the cell.
    assert {(cell["steps"], cell["rollouts"]) for cell in done} == {(4, 48)}
    assert said["interrupted"] is False
    assert said["config"]["seeds"] == 3
    assert all(cell["wall_seconds"] > 0 for cell in done)


def test_a_cell_equals_the_run_of_its_changes(made):
    out, said = made
    changes = {
        ("return", "none"): (),
        ("group_z", "clip_sequence"): (
            "advantage.baseline=group_mean",
            "advantage.scale=group_std",
            "constraint.kind=clip",
            "constraint.ratio=sequence",
            "sampling.epochs=4",
        ),
        ("gae", "trust_region"): ("advantage.baseline=gae", "advantage.lam=0.95", "constraint.kind=trust_region"),
    }
    for cell in said["cells"]:
        if (place := (cell["advantage"], cell["constraint"])) not in changes:
            continue
        assert cell["changes"] == ["sampling.group=true", *changes[place]]
        config = RunConfig(recipe="vpg", set=tuple(cell["changes"]), steps=4, lr=2e-2, group_lr_factor=1.0, **SMALL)
        alone = run(config, [4, 5, 6])
        assert cell["success"]["seeds"] == alone.success
        assert cell["tokens"] == sum(alone.tokens) / 3
        interval = bootstrap_mean(alone.success)
        assert cell["success"]["mean"] == pytest.approx(sum(alone.success) / 3, rel=1e-12)
        assert cell["success"]["ci95"] == [interval.low, interval.high]
        kept = json.loads((out / "runs" / cell["run"] / rundir.RESULT).read_text())
        assert kept["success"] == alone.success


def test_finished_cells_are_not_repeated_and_the_rest_is_made(made, tmp_path, capsys):
    made_in, said = made
    out = tmp_path / "grid"
    shutil.copytree(made_in, out)
    (out / rundir.GRID).unlink()
    shutil.rmtree(out / "runs" / "return-none")
    checkpoints = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    assert len(checkpoints) == 7
    assert main(["grid", "--resume", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)

    def timeless(summary):
        return [{name: value for name, value in cell.items() if name != "wall_seconds"} for cell in summary["cells"]]

    assert timeless(again) == timeless(said)
    assert {path: path.stat().st_mtime_ns for path in checkpoints} == checkpoints
    walls = {cell["run"]: cell["wall_seconds"] for cell in said["cells"] if "run" in cell}
    for cell in again["cells"]:
        if "run" in cell and cell["run"] != "return-none":
            assert cell["wall_seconds"] == walls[cell["run"]]


def test_a_run_of_a_grid_can_be_sampled(made, capsys):
    flags = ["--algo", "group_z-none", "--target", "2", "--n", "2", "--json"]
    assert main(["sample", "--run", str(made[0]), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 4


def test_sigterm_to_all_processes_ends_a_grid_with_what_was_reached(tmp_path):
    out = tmp_path / "grid"
    command = [sys.executable, "-m", "pgprog.cli", "grid", "--advantages", "return", "--constraints", "none", "kl_loss"]
    command += ["none_stale", *TINY, "--rollouts", "1000000", "--seeds", "2", "--workers", "2", "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        metrics = [out / "runs" / f"return-{c}" / rundir.METRICS for c in ("none_stale", "kl_loss", "none")]
        wait_for(lambda: sum(path.exists() for path in metrics) >= 2, process)
        os.killpg(process.pid, signal.SIGTERM)
        printed, errors = process.communicate(timeout=100)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    said = json.loads((out / rundir.GRID).read_text())
    assert said["interrupted"] is True
    stopped = [cell for cell in said["cells"] if cell["status"] == "stopped"]
    assert len(stopped) == 2
    assert all(0 < cell["steps"] < cell["steps_planned"] == 83_333 for cell in stopped)
    assert [cell["status"] for cell in said["cells"]].count("missing") == 1
    assert "Interrupted" in printed and f"pgprog grid --resume {out}" in printed
    assert (out / "grid.png").read_bytes().startswith(PNG)


def test_resume_takes_no_settings_beside_it(made, capsys):
    assert main(["grid", "--resume", str(made[0]), "--rollouts", "500"]) == 2
    assert "leave out --rollouts" in capsys.readouterr().err


def test_help_answers_without_torch():
    program = "import sys, pgprog.arguments; sys.exit(' '.join({'torch', 'matplotlib'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
