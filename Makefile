# Everything a developer runs. Each target makes .venv if there is none and reuses it.
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The repository root holds folders named datasets and kernels: Python must not find them as top-level packages.
export PYTHONSAFEPATH := 1
export MLFLOW_DISABLE_TELEMETRY := true
# Many tests start Python: without the compiled files each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check check-static lint format types quick bench gpu-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# The mark is renewed when what is to be installed or compiled changes; the package itself is editable.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard */_*.c)
	test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $@

demo: $(VENV)/.installed ## collect, train and select on this machine, end to end
	$(BIN)/kernelcast demo

test: $(VENV)/.installed ## every test that this machine can run
	$(BIN)/python -m pytest -n 2 --dist loadgroup

quick: $(VENV)/.installed ## the tests that take less than about two seconds each
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

check-static: lint format types ## lint, format, types

check: check-static quick ## lint, format, types, quick tests

lint: $(VENV)/.installed ## ruff's checks
	$(BIN)/ruff check .

format: $(VENV)/.installed ## is everything formatted? (`.venv/bin/ruff format .` does it)
	$(BIN)/ruff format --check .

# mypy does not see setuptools' editable finder: it reads the rooms through a folder of links.
types: $(VENV)/.installed ## mypy
	$(BIN)/python tests/tools/link_farm.py .typecheck
	$(BIN)/mypy

bench: $(VENV)/.installed ## speed and quality figures, written to docs/results/
	$(BIN)/python benchmarks/run.py

gpu-check: ## everything that needs a GPU; PY=python3 uses a Python that has torch and triton
	$(PY) benchmarks/gpu_check.py

clean: ## remove what was built, but not .venv
	rm -rf build dist *.egg-info .typecheck .mypy_cache .ruff_cache .pytest_cache .hypothesis
