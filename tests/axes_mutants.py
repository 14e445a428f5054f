"""Faults planted in the design space, one list per part, in the form of ``mutants.py`` and run by its runner.

python tests/axes_mutants.py [WORD ...]
"""

import importlib
import sys
from pathlib import Path

import mutants

AXES_MUTANTS = [
    mutant
    for path in sorted(Path(__file__).parent.glob("axes_mutants_*.py"))
    for name, found in vars(importlib.import_module(path.stem)).items()
    if name.endswith("_MUTANTS")
    for mutant in found
]

if __name__ == "__main__":
    mutants.MUTANTS[:] = AXES_MUTANTS
    sys.exit(mutants.main(sys.argv[1:]))
