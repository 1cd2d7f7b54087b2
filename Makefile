# `make demo` plans GPT-2 small on 2x4 and verifies the plan; `make test` and `make lint` check the project, `make docs` builds its site.
# Every target makes .venv and installs into it when pyproject.toml or constraints.txt is newer than the last install.
# `make matrix` runs the tests with other versions of torch and of the rest, `make gpu` measures a GPU.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON_OR_NONE := $(or $(PYTHON),false)
TORCH ?= torch==2.13.0
CELLS ?=
BIN := .venv/bin
INSTALLED := .venv/installed

# One thread per process: the tests run two processes, and torch's own threads would compete with them. Compiled files are kept, also
# where the environment says not to: the two processes, and those that tests start, would each compile the package again.
test test-all: export OMP_NUM_THREADS := 1
test test-all: export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

PLAN := solutions/gpt2-small-2x4.json
GPT2 := models/gpt2.py:small --set vocab=50304

.PHONY: demo test test-all lint bench docs docs-serve matrix gpu
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@mkdir -p $(dir $(PLAN))
	$(BIN)/autoshard plan $(GPT2) --set batch=512 --mesh 2x4 --train --out $(PLAN)
	$(BIN)/autoshard verify $(PLAN) $(GPT2) --set batch=8 --set seq=16

test: $(INSTALLED)
	$(PYTEST)

test-all: $(INSTALLED)
	$(PYTEST) -m ""

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site in build/site; a broken link or anchor ends it.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# DATA is handed to every script as its data's path. Those that need a GPU, or other versions of torch, are run by themselves.
BENCHES := $(filter-out $(patsubst %,benchmarks/%.py,matrix torch_versions gpu fake_cuda mutation quick_suite study inductor_kernels),$(wildcard benchmarks/*.py))
bench: $(INSTALLED)
	@set -e; for script in $(BENCHES) 'benchmarks/study.py all'; do echo "== $$script"; $(BIN)/python $$script $(DATA); done

# A third of the quick tests in each of {oldest, 2.13, 2.14.1, newest torch} x {oldest, newest of the rest}; CELLS=torch2.15-newest for one.
matrix: $(INSTALLED)
	$(BIN)/python benchmarks/matrix.py $(CELLS)

# On a machine with a GPU and a CUDA build of torch (PYTHON_GPU); parts that are done are not done again.
PYTHON_GPU ?= $(BIN)/python
gpu:
	$(PYTHON_GPU) benchmarks/gpu.py

# torch first and pinned: the newest build would bring its CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON_OR_NONE) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "autoshard needs Python 3.11 or newer, found $$($(PYTHON_OR_NONE) --version 2>/dev/null || echo none): make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
