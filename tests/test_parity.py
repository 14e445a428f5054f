"""The golden files of the libraries (parity/golden): sound in themselves, and agreeing where the libraries must."""

# ruff: noqa: E402 (the repository's root comes into sys.path first)
import json
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))

from parity.cases import LOSS_CASES, cases, digest
from parity.record import GOLDEN, entries, load

VERSIONS = {"trl": "1.16.0", "verl": "0.9.1", "openrlhf": "0.11.2"}
CASES = cases()
LIBRARIES = pytest.mark.parametrize("library", VERSIONS)


def golden(library, name, case):
    (found,) = entries(library, name=name, case=case)
    return {key: np.array(value) for key, value in found["outputs"].items()}


@LIBRARIES
def test_a_golden_file_says_what_made_it(library):
    table = load(library)
    assert (table["library"], table["version"]) == (library, VERSIONS[library])
    assert table["cases_sha256"] == digest()
    assert {(item["library"], item["version"]) for item in table["entries"]} == {(library, VERSIONS[library])}
    assert (GOLDEN / f"{library}.json").stat().st_size < 400_000


@LIBRARIES
def test_every_golden_value_is_finite_and_has_its_shape(library):
    seen = set()
    for item in load(library)["entries"]:
        mask = CASES[item["case"]].mask
        seen.add((item["name"], item["case"]))
        assert item["outputs"] and set(item["float32"]) <= set(item["outputs"])
        for key, value in item["outputs"].items():
            value = np.array(value)
            assert np.isfinite(value).all(), (item["name"], item["case"], key)
            if key.startswith(("grad_", "kl", "returns", "rollout_is_weights", "token_rewards", "mask")):
                assert value.shape == mask.shape
            elif key == "advantages":
                assert value.shape in (mask.shape, mask.shape[:2])
            elif key == "sampler_weights":
                assert value.shape in (mask.shape, (*mask.shape[:2], 1))
            else:
                assert value.shape == (), (item["name"], key)
    assert len(seen) == len(load(library)["entries"])


@LIBRARIES
def test_losses_leave_masked_places_alone_and_move_the_others(library):
    for item in load(library)["entries"]:
        if item["kind"] in ("loss", "step"):
            mask, gradient = CASES[item["case"]].mask, np.array(item["outputs"]["grad_logprobs"])
            assert (gradient[~mask] == 0).all(), (item["name"], item["case"])
            assert (gradient[mask] != 0).any(), (item["name"], item["case"])


def test_the_defaults_are_those_of_these_versions():
    table = json.loads((GOLDEN / "defaults.json").read_text())
    assert {library: part["version"] for library, part in table.items()} == VERSIONS


SHARED = [
    ("trl loss/grpo/token", "openrlhf loss/ppo/seq_mean_whole_batch", 1e-7),  # lengths + 1e-8 in OpenRLHF and verl
    ("trl loss/dapo/token", "openrlhf loss/ppo/token_mean", 1e-12),
    ("trl loss/bnpo/token", "trl loss/dapo/token", 1e-12),
    ("verl loss/vanilla/token_mean", "openrlhf loss/ppo/dual_clip", 1e-12),
    ("verl loss/gspo/paper", "openrlhf loss/gspo/paper", 1e-12),
    ("verl loss/sapo", "trl loss/sapo/token", 1e-7),
]


@pytest.mark.parametrize(
    "one, other, rtol, case",
    [
        (*pair, case)
        for pair in SHARED
        for case in LOSS_CASES
        if (pair[0], case) != ("verl loss/sapo", "empty")  # TRL counts the empty row, verl does not
    ],
)
def test_libraries_agree_on_what_they_share(one, other, rtol, case):
    one, other = (golden(*name.split(), case) for name in (one, other))
    for key in ("loss", "grad_logprobs"):
        np.testing.assert_allclose(one[key], other[key], rtol=rtol, atol=1e-14)
