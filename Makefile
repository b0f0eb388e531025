# `make` alone prints what there is. Every target sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
# torch warns on import where NumPy is absent; nothing here needs NumPy.
RUN := $(BIN)/python -W 'ignore:Failed to initialize NumPy'
# One worker per core and one thread per worker: two pools of threads on one core only wait.
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
	--doctest-modules src tests
SOURCES := src tests tools examples
KERNELS := $(wildcard native/*.h native/*.txt native/src/*)
# The scripts that can be run; the other files of examples/ are what they share.
STUDIES := $(shell grep -l '^if __name__' examples/*.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo examples test test-all test-native check bench docs clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

setup: $(STAMP) ## create .venv with everything a contributor needs

$(STAMP): pyproject.toml constraints.txt $(KERNELS)
	@echo "setting up .venv (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
		-C cmake.define.ANYMAMBA_STRICT=ON -c constraints.txt torch -e '.[cli,io,train,dev]'
	@touch $@

demo: $(STAMP) ## see the library at work
	$(RUN) -m anymamba demo

examples: $(STAMP) ## run the short form of every study in examples/ (minutes)
	rm -rf examples/results/quick
	for study in $(STUDIES); do $(RUN) $$study --quick || exit 1; done

test: $(STAMP) ## run the tests and the examples in docstrings, without the slow ones
	$(TEST) -m "not slow"

test-all: $(STAMP) ## run every test
	$(TEST)

test-native: $(STAMP) ## run the kernels under sanitizers and compile them for Arm
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[native]'
	$(RUN) tools/sanitize_native.py

check: $(STAMP) ## format, lint, types, layers, doors, names, spelling
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(RUN) tools/check_doors.py
	$(RUN) tools/check_names.py
	$(RUN) tools/check_native.py
	$(BIN)/codespell $(SOURCES) $(wildcard docs) $(wildcard *.md) Makefile pyproject.toml
	$(BIN)/lint-imports --no-logo
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(STAMP) ## measure speed and memory; writes docs/benchmarks.* (half an hour, an idle machine)
	$(RUN) -m anymamba bench --save docs/benchmarks

docs: $(STAMP) ## follow every relative link and run every python block of the documents
	$(RUN) tools/check_docs.py

clean: ## remove .venv, caches and build output
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
