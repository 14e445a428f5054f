"""The ten identities hold, say so when they do not, and the command tells it."""

import dataclasses
import json
import math

import pytest
import torch

from pgprog.cli import main
from pgprog.exact import foundations as module
from pgprog.exact.foundations import Identity, Number, foundations


@pytest.fixture(scope="module")
def identities():
    torch.set_default_dtype(torch.float64)
    return foundations(samples=20_000)


def numbers(identities, n):
    return {x.label: x for x in identities[n - 1].numbers}


def test_all_ten_hold(identities):
    assert [i.number for i in identities] == list(range(1, 11))
    assert all(i.holds for i in identities), [i.number for i in identities if not i.holds]


def test_the_numbers_of_the_bandit(identities):
    """Worked by hand: pi = softmax(0.4, -0.2, 1.1, 0), J = pi_0 + pi_3, grad_a J = pi_a (R_a - J)."""
    z = [math.exp(x) for x in (0.4, -0.2, 1.1, 0.0)]
    pi = [x / sum(z) for x in z]
    J = pi[0] + pi[3]
    gradient = [p * (r - J) for p, r in zip(pi, (1, 0, 0, 1), strict=True)]
    assert numbers(identities, 1)["E[R grad log pi]"].value == pytest.approx(gradient, rel=1e-12)
    # |grad log pi(a)|^2 = 1 - 2 pi_a + sum pi^2
    squares = [1 - 2 * p + sum(q * q for q in pi) for p in pi]
    for label, b in (("0", 0.0), ("E[R]", J)):
        trace = sum(p * (r - b) ** 2 * q for p, r, q in zip(pi, (1, 0, 0, 1), squares, strict=True))
        trace -= sum(g * g for g in gradient)
        found = numbers(identities, 4)[f"b = {label}: trace of the covariance"].value
        assert found == pytest.approx([trace], rel=1e-12)
    best = (pi[0] * squares[0] + pi[3] * squares[3]) / sum(p * q for p, q in zip(pi, squares, strict=True))
    assert numbers(identities, 4)["b*, the best constant"].value == pytest.approx([best], rel=1e-12)


def test_known_numbers_to_their_printed_digits(identities):
    four, nine = numbers(identities, 4), numbers(identities, 9)
    assert round(four["b = 0: trace of the covariance"].value[0], 5) == 0.29318
    assert round(four["b = E[R]: trace of the covariance"].value[0], 5) == 0.11378
    assert round(four["b = b*: trace of the covariance"].value[0], 5) == 0.10072
    assert round(four["b*, the best constant"].value[0], 5) == 0.53359
    # d/dx KL(pi || ref) = pi_0 pi_1 log(pi_0 / pi_1), d/dx KL(ref || pi) = pi_0 - ref_0
    assert nine["E[grad k2]"].value == pytest.approx([0.16 * math.log(4)], rel=1e-12)
    assert nine["E[grad k3]"].value == pytest.approx([0.3], rel=1e-12)
    six = numbers(identities, 6)
    assert six["trace of the covariance, per token"].value < six["trace of the covariance, per sequence"].value


def test_numbers_do_not_depend_on_the_default_dtype(identities):
    torch.set_default_dtype(torch.float32)
    again = foundations(samples=20_000)
    for a, b in zip(identities, again, strict=True):
        assert a.as_dict() == b.as_dict()


def test_the_sampled_numbers_follow_the_seed():
    def sampled(seed):
        return [x.value for x in module.baselines_and_variance(module.bandit(), 1000, seed).numbers if x.error]

    assert sampled(0) == sampled(0) != sampled(1)


def test_a_number_that_is_off_or_no_number_does_not_hold():
    assert Number("x", [1.0, 2.0], [1.0, 2.0 + 1e-13]).holds
    assert not Number("x", [1.0, 2.0], [1.0, 2.0 + 1e-11]).holds
    assert not Number("x", [math.nan], [math.nan]).holds
    assert not Number("x", [math.nan]).holds
    assert not Number("x", [math.nan], [0.0], 1.0).holds
    assert Number("x", [3.0]).holds


def test_the_command_prints_and_exits_zero(capsys):
    assert main(["foundations", "--samples", "2000"]) == 0
    out = capsys.readouterr().out
    assert "10 of 10 identities hold" in out and "E[R grad log pi]" in out and "0.29318" in out


def test_the_command_speaks_json(capsys):
    assert main(["foundations", "--samples", "2000", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is True and len(said["identities"]) == 10
    assert all(number["holds"] for identity in said["identities"] for number in identity["numbers"])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_failure_is_loud(monkeypatch, capsys, form):
    true = module.gae_limits()
    wrong = Identity(10, true.claim, [*true.numbers, dataclasses.replace(true.numbers[0], expected=[0.0] * 8)])
    monkeypatch.setattr(module, "gae_limits", lambda: wrong)
    assert main(["foundations", "--samples", "2000", *form]) == 1
    said = capsys.readouterr()
    assert "FAILED: identity 10 did not hold" in said.err
    assert ('"holds": false' if form else "DOES NOT HOLD") in said.out


def test_wrong_arguments_are_one_line(capsys):
    assert main(["foundations", "--samples", "1"]) == 2
    assert capsys.readouterr().err == "pgprog: error: --samples 1 is too few: give 2 or more\n"
    assert main(["foundations", "--seed", "-1"]) == 2
