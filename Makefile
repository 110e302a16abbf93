# `make demo` and `make test` do all of the set-up themselves. PYTHON=python3.12 names another interpreter.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.leret-ready
STAMP  := $(VENV)/.leret-set-up
# Python compiles what is imported, when it is, and keeps it; most of what is installed never is.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
RUN    ?= runs/demo
SEED   ?= 0

.PHONY: setup demo test test-all check format clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12
.PHONY: help

setup: $(STAMP)  ## fill .venv with leret and the tested versions of what it needs

# torch first: resolved together with the rest, an open range would pull gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "leret needs Python 3.11 or later, and $(PYTHON) is older or missing; try: make setup PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e '.[train]'
	@touch $@

$(STAMP): $(READY)
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps text-generation
	@touch $@

demo: $(READY)  ## a language model learns to search; the result lies in runs/demo
	$(BIN)/leret demo --run $(RUN) --seed $(SEED)

test: setup  ## the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

test-all: setup  ## the tests, slow ones included
	$(BIN)/python -m pytest -q

check: setup  ## format, lint, types, tests: all that is asked of a change
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

format: setup  ## put the code in its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what can be made again; .venv and runs stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
