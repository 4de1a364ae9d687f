# Two commands for people: `make demo` and `make test`. Everything they need is installed into .venv.
PYTHON ?= python3
# The torch the tests run on. It is installed first, because a plain range would pull another build.
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
# `make test-torch` runs the tests on this torch, with these other packages, in an environment of its own.
VERSION ?= $(TORCH)
CONSTRAINTS ?= constraints.txt
TORCH_VENV ?= .venv-torch-$(VERSION)
# Peers are installed without what they depend on: some would bring another torch, or torchvision.
BENCH_VENV := .venv-bench
BENCH_PIP := $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
PEERS := pyhessian==0.1 curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5 backpack-for-pytorch==1.7.1 geoopt==0.5.1 \
	adamp==0.3.0 torch-audit==0.3.0 opacus==1.6.0 \
	opt-einsum einconv einops linear-operator jaxtyping wadler-lindig tqdm unfoldnd click
TORCH_PIP = $(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo bench test test-all test-torch dist test-dist generated docs format clean lock

help: ## show the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.lab ## install, let six normalizers race on digits, write normgauge-out/report.html
	$(BIN)/normgauge compare --minutes 1.1 --out normgauge-out

test: $(VENV)/.dev ## install the dev extra, then lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

test-all: $(VENV)/.dev ## the heavy suites too
	NORMGAUGE_HEAVY=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

test-torch: $(TORCH_VENV)/.tests ## the tests on another torch, several GB: make test-torch VERSION=2.11.0
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -rs

bench: $(BENCH_VENV)/.peers ## measure normgauge beside its peers, interleaved (about 20 minutes), and write the page
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/book.py
	$(BENCH_VENV)/bin/python docs/generate_benchmarks.py

dist: $(VENV)/.dev ## build the wheel and the sdist into dist/
	rm -rf dist
	$(BIN)/python -m build

test-dist: dist ## install the wheel in a clean environment and run README's example with it, from another folder
	$(BIN)/python tools/check_dist.py dist torch==$(TORCH)

generated: $(VENV)/.dev ## write docs/_generated/ anew; support.md by docs/generate_support.py alone (minutes)
	$(BIN)/python docs/generate_normalizers.py
	$(BIN)/python docs/generate_studies.py
	$(BIN)/python docs/generate_ledger.py
	$(BIN)/python docs/generate_overview.py
	$(BIN)/python docs/generate_index.py
	$(BIN)/python docs/generate_instruments.py
	$(BIN)/python docs/generate_explore.py
	$(BIN)/python docs/generate_gallery.py
	$(BIN)/python docs/generate_notebooks.py
	$(BIN)/python docs/generate_checks.py
	$(BIN)/python docs/generate_benchmarks.py

docs: $(VENV)/.dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(VENV)/.dev ## write constraints.txt from what is installed
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch | grep -v ' @ ' > constraints.txt

clean: ## remove what the commands made
	rm -rf $(VENV) $(BENCH_VENV) .venv-torch-* site dist normgauge-out

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "normgauge needs Python 3.11 or newer: set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	touch $@

$(VENV)/.lab: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt --editable '.[lab]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.lab

$(BENCH_VENV)/.peers: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PIP) torch==$(TORCH)
	$(BENCH_PIP) --constraint constraints.txt --editable '.[lab]'
	$(BENCH_PIP) --no-deps $(PEERS)
	touch $@

# What torch itself pins is left to it.
$(TORCH_VENV)/.tests: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(filelock|fsspec|networkx|setuptools|sympy|typing_extensions)==' $(CONSTRAINTS) > $(TORCH_VENV)/constraints.txt
	$(TORCH_PIP) torch==$(VERSION)
	$(TORCH_PIP) --constraint $(TORCH_VENV)/constraints.txt torch==$(VERSION) --editable '.[test]'
	touch $@
