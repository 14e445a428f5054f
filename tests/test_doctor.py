"""Each mode happens, its checks can fail, and the command shows them; the exact claims are in ``test_doctor_exact``."""

import json
from functools import cache, partial

import pytest
import torch
from rich.console import Console

from mutants import ROOT
from pgprog import doctor_command
from pgprog.cli import main
from pgprog.doctor import baseline, critic, groups, live, noise, own_run, tokens, tour
from pgprog.doctor.mode import Curve, Effort, Finding
from pgprog.report.doctor_figures import draw
from pgprog.report.doctor_tables import blocks, legend
from pgprog.report.doctor_tables import said as in_words

SMALL, TINY = Effort(seeds=3, scale=0.5), Effort(seeds=2, scale=0.05)
EFFORTS = {"lagging-critic": Effort(seeds=3), "sparse": Effort(seeds=3)}
NAMES = ("live-advantage", "live-kl", "action-baseline", "lagging-critic", "shift", "prompt-loss", "sparse")
NAMES += ("variance-for-bias", "empty-groups")
LONG = ("lagging-critic", "sampler-mismatch", "stale", "raw-advantages", "long-steps")  # `make test-long` runs them
MODES = [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in NAMES]
CHEAP = ("live-advantage", "shift", "empty-groups")


@cache
def found(name) -> Finding:
    return tour.MODES[name](EFFORTS.get(name, SMALL))


def as_json(name):
    return json.loads(json.dumps(found(name).as_dict(), allow_nan=False))


# ---- every mode ----


@pytest.mark.parametrize("name", MODES)
def test_the_mode_happens(name):
    failed = [check.statement for check in found(name).checks if not check.holds]
    assert not failed
    assert found(name).reproduced and len(found(name).checks) >= 4
    says_what_it_must(name)
    fails_a_check_with_the_cure_for_the_fault(name)


def says_what_it_must(name):
    content = as_json(name)
    assert content["name"] == name and content["reproduced"]
    for key in ("title", "sick", "cure", "watch"):
        assert content[key].strip() == content[key] and len(content[key]) > 15
    assert content["sick"].endswith(".") and content["cure"].endswith(".")
    assert content["numbers"]
    kinds = {c["kind"] for panel in content["panels"] for c in panel["curves"]}
    assert {"sick", "cured"} <= kinds
    for panel in content["panels"]:
        assert panel["y"]
        for c in panel["curves"]:
            assert len(c["x"]) == len(c["y"]) > 0
            assert c["low"] is None or len(c["low"]) == len(c["high"]) == len(c["x"])


def test_one_figure_each(tmp_path):
    paths = draw(tmp_path, [as_json(name) for name in CHEAP])
    assert [path.name for path in paths] == [f"{name}.png" for name in CHEAP]
    for name in CHEAP:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().count("<svg") == 1


CURES = {
    "live-advantage": (partial(live.live_advantage, TINY, torch.Tensor.detach), "gradient is 0 at V = p + H/2"),
    "live-kl": (partial(live.live_kl, TINY, torch.Tensor.detach), "with the fault E[g] is grad (J - beta KL + beta H)"),
    "action-baseline": (partial(baseline.action_baseline, TINY, baseline.others_mean), "b = c |y|"),
    "lagging-critic": (
        partial(critic.lagging_critic, Effort(seeds=2, scale=0.5), critic.keeps_up),
        "1.5 times that of the exact V",
    ),
    "shift": (partial(tokens.shift, TINY, tokens.aligned), "another direction"),
    "prompt-loss": (partial(tokens.prompt_loss, TINY, tokens.aligned), "what the prompt adds"),
    "sparse": (partial(noise.sparse, Effort(seeds=2, scale=0.3), {"group_size": 32}), "four times the completions"),
    "variance-for-bias": (
        partial(noise.variance_for_bias, TINY, noise.others_mean),
        "the baseline takes a third of the variance away",
    ),
    "empty-groups": (partial(groups.empty_groups, TINY, 16), "the small groups are empty more often"),
}


def fails_a_check_with_the_cure_for_the_fault(name):
    mode, statement = CURES[name]
    (check,) = [check for check in mode().checks if statement in check.statement]
    assert not check.holds
    assert [c.holds for c in found(name).checks if statement in c.statement] == [True]


# ---- the command ----


@pytest.fixture
def cached(monkeypatch):
    """Modes that cost nothing: what has been found."""
    findings = {name: found(name) for name in CHEAP}  # before the modes are replaced: found looks them up
    monkeypatch.setattr(tour, "MODES", {name: lambda effort, f=f: f for name, f in findings.items()})
    monkeypatch.setattr(doctor_command, "TITLES", {name: f.title for name, f in findings.items()})


def test_the_tour_as_json_and_in_a_directory(cached, tmp_path, capsys):
    assert main(["doctor", "--json", "--out", str(tmp_path / "new")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [mode["name"] for mode in content["modes"]] == list(CHEAP)
    assert content["reproduced"] and content["command"] == "pgprog doctor"
    assert json.loads((tmp_path / "new" / "doctor.json").read_text()) == content
    assert all((tmp_path / "new" / f"{name}{suffix}").exists() for name in CHEAP for suffix in (".png", ".svg"))


def test_one_mode_in_words(cached, capsys):
    assert main(["doctor", "shift", "--seeds", "3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in ("shift: Log-probabilities shifted by one", found("shift").cure, "1 of 1 modes reproduced"):
        assert said in text
    assert text.endswith("Reproduce: pgprog doctor shift --seeds 3")


def test_names_of_exact_numbers_are_explained_and_rounding_is_0():
    assert list(map(in_words, (9e-13, -9e-13, 2e-12, 0.25, 3))) == ["0", "0", "2e-12", "0.25", "3"]
    assert in_words([1e-17, 0.5]) == "[0, 0.5]"
    row = {"relative_bias": 3e-16, "scale": 0.75, "rest": 1e-15, "trace": 0.04}
    assert [legend({"sick": {"none": row}}).count(f"{name} = ") for name in row] == [1, 1, 1, 1]
    assert legend({"sick": {"p": 0.5}}) == legend(None) == ""


def test_numbers_of_the_same_names_are_a_table_where_it_fits(capsys):
    row = {"relative_bias": 3e-16, "E[g]": 0.75}
    numbers = {"steps": 160, "a": {"one": row, "two": row | {"E[g]": [1.0, 2.0]}}, "p": 0.5, "z": 1e-20, "lone": row}

    def printed(width):
        for block in blocks(numbers, width):
            Console(width=width).print(block)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    assert printed(60) == [
        "steps 160",
        "     relative_",
        "a         bias    E[g]",
        "one          0    0.75",
        "two          0  [1, 2]",
        "p 0.5; z 0",
        "lone: relative_bias 0, E[g] 0.75",
    ]
    assert printed(20)[1] == "    relative_"  # a narrow gap
    assert printed(19)[1:3] == ["a / one:", "relative_bias 0,"]  # broken where a reader of prose would break it
    for width in (19, 20, 60):
        assert "[1, 2]" in " ".join(printed(width))


def test_the_checks_of_a_prompt_in_the_loss_name_what_they_test():
    found = tokens.prompt_loss(TINY)
    exact = {check.statement: check.holds for check in found.checks if check.statement.startswith("exact")}
    assert all(exact.values())
    assert [s for s in exact if "that is grad J" in s] == [
        "exact: cured, A of the group: that is grad J (relative bias below 1e-12)"
    ]
    row = found.proof["cured"]
    assert row["1/N, the batch mean's own"] == 0.25 and abs(row["relative_bias"] - 0.25) < 1e-12
    assert any("(1 - 1/N) grad J" in s for s in exact)


def test_what_is_not_reproduced_is_said(monkeypatch, capsys):
    broken = tokens.shift(TINY, tokens.aligned)
    monkeypatch.setattr(tour, "MODES", {"shift": lambda effort: broken})
    assert main(["doctor", "shift"]) == 1
    text = capsys.readouterr().out
    assert "0 of 1 modes reproduced" in text and "not: shift" in text and "NO" in text


def test_the_list_is_the_tour(capsys):
    assert list(doctor_command.TITLES) == list(tour.MODES)
    assert set(NAMES) <= set(tour.MODES)
    assert main(["doctor", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(tour.MODES)
    assert main(["doctor", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == doctor_command.TITLES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["live-advantge"], "unknown mode 'live-advantge': did you mean 'live-advantage'?"),
        (["--seeds", "1"], "--seeds 1 is out of range"),
        (["--seeds", "101"], "--seeds 101 is out of range"),
    ],
)
def test_what_is_refused(arguments, said, capsys):
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_numbers_of_the_page_are_those_of_a_run():
    page = (ROOT / "docs" / "doctor.md").read_text()
    for name in NAMES:
        assert f"pgprog doctor {name}" in page and f"figures/doctor/{name}.png" in page
        assert (ROOT / "docs" / "figures" / "doctor" / f"{name}.png").exists()
    head, *sections = page.split("\n## ")
    assert [section.split("\n")[0] for section in sections] == list(tour.MODES)
    assert [name for line in head.splitlines() for name in tour.MODES if f"](#{name})" in line] == list(tour.MODES)
    for line in head.splitlines():
        if "](#" in line:
            assert 3 <= len(line.split("|")[3].replace(" - ", "-").split()) <= 6, line


def test_a_curve_has_a_kind_that_can_be_drawn():
    assert {"sick", "cured", "exact", "other"} == set(Curve.__annotations__["kind"].__args__)


# ---- a run of one's own ----


def a_run(tmp_path, *more):
    out = tmp_path / "run"
    arguments = ["train", "--seq-len", "3", "--hidden", "8", "--prompts", "8", "--steps", "60", "--out", str(out)]
    assert main([*arguments, *more]) == 0
    return out


def test_a_run_of_ones_own_is_examined(tmp_path, capsys):
    out = a_run(tmp_path, "--algo", "grpo", "--group-size", "2", "--lr", "1e-5")  # hardly a group with a success
    warned = json.loads((out / "summary.json").read_text())["warnings"]
    capsys.readouterr()
    assert warned and main(["doctor", "--run", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"]["0"]["warnings"] == warned and found["steps"] == 60
    assert set(found["seeds"]["0"]["last"]) == {*own_run.ALWAYS, "frac_reward_zero_std"}
    assert main(["doctor", "--run", str(out)]) == 0
    text = capsys.readouterr().out
    assert warned[0]["text"] in text and "see pgprog doctor" in text


def test_a_run_without_a_column_says_which_and_since_when(tmp_path, capsys):
    out = a_run(tmp_path, "--algo", "ppo")
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row.pop("explained_variance", None)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["doctor", "--run", str(out)]) == 2
    err = capsys.readouterr().err
    assert "has no explained_variance: written since pgprog 0.2.0" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "nowhere"], "does not exist: give the directory of a run"),
        (["shift", "--run", "nowhere"], "leave out names and other flags"),
    ],
)
def test_what_is_no_run_is_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
