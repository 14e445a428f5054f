# `make compare` and `make test` set up what they need in .venv and run; `make parity` in .venv-parity as well.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
PARITY_PIP := .venv-parity/bin/pip install --quiet --disable-pip-version-check --no-compile -c parity/constraints.txt

.PHONY: compare test test-long lint mutants parity clean

compare: .venv/installed
	$(BIN)/python scripts/compare.py $(ARGS)

test: lint
	$(BIN)/pytest -n 2

# The modes of the doctor that train longest.
test-long: .venv/installed
	$(BIN)/pytest -n 2 -m long

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: .venv/installed
	$(BIN)/python tests/mutants.py
	$(BIN)/python tests/exact_mutants.py
	$(BIN)/python tests/axes_mutants.py

# The golden values of TRL, verl and OpenRLHF, made anew by the libraries; then ours held against them.
parity: .venv-parity/installed .venv/installed
	set -e; out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	for library in trl verl openrlhf; do .venv-parity/bin/python -m parity.$${library}_golden "$$out"; done; \
	.venv-parity/bin/python -m parity.check "$$out"
	$(BIN)/pytest tests/test_parity.py tests/test_parity_recipes.py

# It sees the packages of .venv (torch is most of it) and adds what is missing. verl and OpenRLHF by --no-deps: their
# formulas use nothing of ray, deepspeed, flash-attn and the like.
.venv-parity/installed: parity/constraints.txt .venv/installed
	$(BIN)/python -m venv --clear .venv-parity
	$(BIN)/python -c '$(SITE)' > "$$(.venv-parity/bin/python -c '$(SITE)')/packages_of_venv.pth"
	$(PARITY_PIP) trl tensordict omegaconf codetiming orjson pillow
	$(PARITY_PIP) --no-deps verl openrlhf
	touch $@

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Setting up .venv: it downloads torch and takes a minute or more"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-parity .mypy_cache .pytest_cache .ruff_cache .hypothesis build src/*.egg-info
