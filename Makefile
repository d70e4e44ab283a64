# Needs make and Python 3.11 or newer; everything else goes into .venv.
PYTHON ?= python3
WORKERS ?= 2
DEMO ?= runs/demo
DEMO_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
USER_STAMP := $(VENV)/.installed-data
DEV_STAMP := $(VENV)/.installed-dev

# Tests run in several processes; one run alone takes all cores.
check test bench: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo check lint test bench clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(USER_STAMP) ## run a small bandit experiment and write its report
	$(BIN)/ensemblepp bandit experiment=demo output_dir=$(DEMO) $(DEMO_OPTIONS)
	$(BIN)/ensemblepp report $(DEMO)

check: lint ## lint, types, import rules and the fast tests
	$(BIN)/pytest -q -n $(WORKERS) -m "not slow and not statistical"

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## everything: lint, types, import rules and all tests
	$(BIN)/pytest -n $(WORKERS)

bench: $(DEV_STAMP) ## run every benchmark
	set -e; for script in benchmarks/*/run.py; do echo "$$script"; $(BIN)/python "$$script"; done

clean: ## remove what builds and checks leave; .venv and the results in runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "make needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(USER_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[data]'
	touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[data,dev,llm,trl,video]'
	touch $(USER_STAMP) $@
