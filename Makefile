# Everything a checkout can do. Each target sets up what it needs first; doing so a second time costs nothing.
# Needed on the machine: python3 (>= 3.11, with venv), make, git.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is to be checked: folders that exist, so that a part of the tree can be checked too.
CODE := $(wildcard actors schemas tests bench examples)
# Spread over the cores; one file stays in one process, so that a module's server is started once.
PYTEST_ARGS ?= -n 2 --dist loadfile
DEMO_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types architecture wheel bench bench-governor faults format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.stamp-dev ## install everything for development into .venv

demo: $(VENV)/.stamp-run ## run the notes demo (DEMO_ARGS=--json, DEMO_ARGS=FOLDER)
	@$(BIN)/millstream demo $(DEMO_ARGS)

test: $(VENV)/.stamp-dev ## all tests but the kills, against a real nats-server
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not faults"

check: lint types architecture wheel ## style, types, architecture, the built wheel

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.stamp-dev
	$(BIN)/mypy $(CODE)
	$(BIN)/pyright

architecture: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest tests/test_architecture.py

wheel: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest tests/test_wheel.py

faults: $(VENV)/.stamp-dev ## kill every process for real; the model with two faults
	MILLSTREAM_MODEL_FAULTS=2 $(BIN)/python -m pytest $(PYTEST_ARGS) -m "faults or model"

bench: $(VENV)/.stamp-run ## tasks per second and latencies, beside a bare nats-py loop
	@$(BIN)/python bench/run.py $(BENCH_ARGS)

bench-governor: $(VENV)/.stamp-dev ## limits kept and used, fairness, failover (BENCH_ARGS=--quick)
	@$(BIN)/python bench/governor.py $(BENCH_ARGS)

format: $(VENV)/.stamp-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- set-up: a stamp is newer than pyproject.toml when the environment has what that file asks for -------------------

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit("Expected Python >= 3.11, got %d.%d - name another with `make PYTHON=python3.12`" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo 'This Python lacks venv: install it (Debian: `apt-get install python3-venv`)' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# Running needs little; the development set contains it, so installing that satisfies both.
$(VENV)/.stamp-run: pyproject.toml | $(VENV)/.stamp-venv
	@echo 'setting up $(VENV) (once)' >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[server,fast]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/.stamp-venv
	@echo 'setting up $(VENV) for development (once)' >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.stamp-run $@
