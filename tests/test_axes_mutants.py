"""The planted faults of the design space still fit the code."""

import ast

import pytest

from axes_mutants import AXES_MUTANTS
from mutants import ROOT, patched


@pytest.mark.parametrize("mutant", AXES_MUTANTS, ids=[m.name for m in AXES_MUTANTS])
def test_the_fault_applies_once_and_still_compiles(mutant):
    original = (ROOT / "src" / "pgprog" / mutant.file).read_text()
    assert ast.dump(ast.parse(patched(mutant))) != ast.dump(ast.parse(original))
    assert (ROOT / "tests" / mutant.test).exists()


def test_faults_are_named_apart():
    assert len({m.name for m in AXES_MUTANTS}) == len(AXES_MUTANTS) > 150
