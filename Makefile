# Everything a newcomer runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests that don't mind company run two at a time; those that start or kill processes have the machine to themselves.
CALM := tests/conformance tests/compress tests/sync tests/parallel tests/checkpoint
FAST := not slow and not lab and not gpu

.DEFAULT_GOAL := help
.PHONY: help demo test check format data bench bench-slow bench-host quality plot lab test-lab test-meshes test-all clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || \
	  sed -n 's/^\([a-z-]*\):.*## /  make \1   /p' $(MAKEFILE_LIST)

# torch comes first and pinned: asked for by the package alone, pip may choose another build of several GB.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gradwire needs Python 3.11 or newer, $(PYTHON) is `$(PYTHON) -V`; try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train on two workers, then on one, and compare the weights (under a minute)
	@mkdir -p build/demo
	$(BIN)/gradwire run -n 2 examples/digits.py --save build/demo/two.pt
	$(BIN)/python examples/digits.py --save build/demo/one.pt
	@$(BIN)/python examples/compare.py build/demo/two.pt build/demo/one.pt

test: $(READY)  ## the fast tests (a few minutes)
	$(BIN)/python -m pytest -q -m "$(FAST)" -n 2 $(CALM)
	$(BIN)/python -m pytest -q -m "$(FAST)" $(CALM:%=--ignore=%)

check: $(READY) ## lint, format, types, and every example in the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_docs.py tests/test_architecture.py

format: $(READY) ## put the sources into house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

data: $(READY)  ## fetch Fashion-MNIST and the text (Debian or Ubuntu; 44 MB)
	$(BIN)/python -m benchmarks.data

bench: $(READY) ## every benchmark against DDP, on a quiet machine (about an hour; the networks need root)
	$(BIN)/python -m benchmarks.run

bench-slow: $(READY) ## every plan and PyTorch's ways on slow networks (root; a quiet machine; about two hours)
	$(BIN)/python -m benchmarks.slow_networks

bench-host: $(READY) ## what the codecs and the exchange in shared memory cost (a quiet machine; a minute)
	$(BIN)/python -m benchmarks.codec_cost
	$(BIN)/python -m benchmarks.shared_memory

quality: data   ## what each plan costs in loss, three seeds (about an hour; goes on where it was stopped)
	$(BIN)/python -m benchmarks.quality --all --seeds 3

plot: $(READY)  ## from the results of the two above: loss over time, and docs/which-plan.md
	$(BIN)/python -m benchmarks.plot
	$(BIN)/python -m benchmarks.which_plan

lab: $(READY)   ## how to have several hosts on one machine
	@$(BIN)/python -m benchmarks.lab --help

test-lab: $(READY) ## tests over several hosts on one machine (root)
	$(BIN)/python -m pytest -q -m lab tests/lab

test-meshes: $(READY) ## every mesh and every model against one process, and what lies beneath (a few minutes)
	$(BIN)/python -m pytest -q -m slow -n 2 tests/conformance/test_meshes.py tests/parallel tests/checkpoint

test-all: $(READY) ## every test this machine can run
	$(BIN)/python -m pytest -q

clean:          ## remove everything that was built or installed here, but not data/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
