"""A user's own advantage: the same numbers as the built-in one, and every way to get it wrong."""

import pytest
import torch

from pgprog.cli import main
from pgprog.errors import UsageError
from pgprog.experiment import rundir
from pgprog.experiment.config import RunConfig
from pgprog.experiment.loop import run
from pgprog.experiment.user_advantage import load_advantage

SMALL = {"seq_len": 2, "digits": 3, "prompts": 4, "hidden": 8, "steps": 4, "dtype": "float64"}


def metrics(algo, tmp_path, advantage=None, seeds=(0, 1)):
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    run(RunConfig(**SMALL, algo=algo, advantage=advantage), list(seeds), directory)
    return rundir.read_rows(directory / rundir.METRICS)


def write(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text("import torch\n" + body)
    return f"{path}:mine"


def test_a_users_batch_mean_trains_exactly_as_reinforce_and_replicas_stay_apart(tmp_path):
    # rewards.mean() would mix the replicas if the function saw more than one.
    spec = write(
        tmp_path, "def mine(rewards):\n    return rewards - rewards.min() - (rewards - rewards.min()).mean()\n"
    )
    mine, builtin = metrics("reinforce", tmp_path, spec), metrics("reinforce", tmp_path)
    assert all(a == pytest.approx(b, rel=1e-12, abs=1e-12) for a, b in zip(mine, builtin, strict=True))


def test_a_users_value_baseline_trains_exactly_as_actor_critic(tmp_path):
    spec = write(tmp_path, "def mine(rewards, values):\n    return rewards - values[:, None]\n")
    assert metrics("actor_critic", tmp_path, spec) == metrics("actor_critic", tmp_path)


FAULTS = {
    "raises": ("def mine(r):\n    return r / [0]\n", r"mine.py:mine raised TypeError: .*shape \(4, 8\)"),
    "shape": ("def mine(r):\n    return r.mean()\n", r"returned shape \(\): .*shape \(4, 8\) was expected"),
    "nan": ("def mine(r):\n    return r / r.std(1, keepdim=True) * float('nan')\n", r"returned NaN or infinity"),
    "live": ("def mine(r):\n    return r * torch.ones(1, requires_grad=True)\n", r"live gradient"),
    "list": ("def mine(r):\n    return r.tolist()\n", r"returned list"),
    "none": ("def mine(r):\n    pass\n", r"returned NoneType"),
    "values": ("def mine(r, v):\n    return r\n", r"wants values, and this algorithm has no critic"),
    "three": ("def mine(r, v, w):\n    return r\n", r"takes 3 arguments"),
    "no such name": ("def yours(r):\n    return r\n", r"has no function 'mine', but: yours"),
    "exit": ("import sys\ndef mine(r):\n    sys.exit(0)\n", r"mine.py:mine raised SystemExit"),
    "exit at import": ("raise SystemExit(0)\n", r"fails to import \(SystemExit"),
    "builtin": ("mine = torch.zeros_like\n", r"shows no signature"),
    "by name": ("def mine(r, *, k):\n    return r\n", r"wants k by name"),
    "complex": ("def mine(r):\n    return r * 1j\n", r"returned Tensor"),
    "import": ("1 / 0\n", r"fails to import \(ZeroDivisionError: division by zero\)"),
    "syntax": ("def mine(r:\n", r"fails to import \(SyntaxError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_function_is_named_with_what_it_returned(name, tmp_path):
    body, message = FAULTS[name]
    with pytest.raises(UsageError, match=message):
        metrics("grpo", tmp_path, write(tmp_path, body))


def test_a_function_that_works_in_place_changes_nothing_but_its_own_copy(tmp_path):
    pure = write(tmp_path, "def mine(r, v):\n    return r - v[:, None]\n")
    expected = metrics("actor_critic", tmp_path, pure)
    in_place = write(tmp_path, "def mine(r, v):\n    r -= v[:, None]\n    v.zero_()\n    return r\n")
    assert metrics("actor_critic", tmp_path, in_place) == expected


@pytest.mark.parametrize("spec", ["mine.py", "nowhere.py:f", ":f", "f", ""])
def test_a_spec_without_file_or_function_is_refused(spec):
    with pytest.raises(UsageError, match=r"give FILE\.py:function"):
        load_advantage(spec)


def test_a_function_that_fails_at_the_first_call_leaves_one_line(tmp_path, capsys):
    spec = write(tmp_path, FAULTS["shape"][0])
    code = main(["train", "--steps", "2", "--advantage", spec, "--out", str(tmp_path / "run"), "--json"])
    assert code == 2
    assert not (tmp_path / "run").exists(), "nothing is left in the way of the next try"
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("pgprog: error: ")


def test_integer_advantages_are_taken_in_the_dtype_of_the_rewards(tmp_path):
    spec = write(tmp_path, "def mine(r):\n    return torch.ones(r.shape, dtype=torch.long)\n")
    assert torch.isfinite(torch.tensor(metrics("grpo", tmp_path, spec)[-1]["loss"]))
