# `make compare` and `make test` set up what they need in .venv and run.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.PHONY: compare test lint mutants clean

compare: .venv/installed
	$(BIN)/python scripts/compare.py $(ARGS)

test: lint
	$(BIN)/pytest -n 2

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: .venv/installed
	$(BIN)/python tests/mutants.py
	$(BIN)/python tests/exact_mutants.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build src/*.egg-info
