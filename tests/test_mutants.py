"""The planted faults still fit the code. ``python tests/mutants.py`` runs them."""

import ast
from pathlib import Path

import pytest

from mutants import MUTANTS, ROOT, Mutant, patched, try_mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_the_fault_applies_once_and_still_compiles(mutant):
    text = patched(mutant)
    original = (ROOT / "src" / "pgprog" / mutant.file).read_text()
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(original))
    assert (Path(__file__).parent / mutant.test).exists()


def test_faults_are_named_apart():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_an_old_text_that_is_gone_or_ambiguous_is_refused():
    for old in ("no such line", "return"):
        mutant = Mutant("x", "env.py", old, "", "test_env.py")
        with pytest.raises(ValueError, match=r"old text occurs \d+ times in env.py"):
            patched(mutant)
        assert try_mutant(mutant, ROOT / "src").startswith("DOES NOT APPLY")
