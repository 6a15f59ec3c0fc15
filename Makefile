# Everything runs from .venv, which is built when missing and rebuilt when its inputs change.
PYTHON ?= python3
MODEL  ?= smollm2-135m
PROMPT ?= def fibonacci(n):
BIN    := .venv/bin
STAMP  := .venv/.installed
WARM   := .venv/.kernels

.PHONY: help setup model run chat test lint format bench docs clean
.DEFAULT_GOAL := help
.SILENT:
MAKEFLAGS += --no-print-directory

help: ## Show this list
	grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: model $(WARM) ## Complete a prompt with the default model: make run PROMPT='...'
	$(BIN)/draftree run $(MODEL) --n-gen 128 --prompt '$(subst ','\'',$(PROMPT))'

chat: model $(WARM) ## Talk to the default model
	$(BIN)/draftree chat $(MODEL)

test: model ## Run the tests (CPU; `make test ARGS='-m gpu'` for the others)
	$(BIN)/python -m pytest -q $(ARGS)

lint: setup ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Rewrite the files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: model ## Measure everything beside llama.cpp, write results/*.json and docs/benchmarks.md
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[bench,peers]'
	$(BIN)/python -m benchmarks all $(ARGS)

docs: setup ## Regenerate the generated pages
	$(BIN)/python -m draftree.cli.reference > docs/cli.md
	$(BIN)/python -m draftree.serve.reference > docs/http.md

setup: $(STAMP) ## Build .venv with the exact versions of constraints.txt

model: setup ## Download the default model if it is not there
	$(BIN)/draftree pull $(MODEL) --quiet

# Kernels are compiled for this machine before the first prompt, not during it.
$(WARM): $(STAMP) $(wildcard draftree/kernels/*/*.py) | model
	echo 'compiling the CPU kernels (once, about half a minute)' >&2
	$(BIN)/draftree run $(MODEL) --n-gen 24 --prompt 'one two three' >/dev/null 2>&1
	touch $@

clean: ## Remove .venv and what the tools left behind
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find draftree benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt Makefile
	command -v '$(PYTHON)' >/dev/null || { \
	  echo "error: '$(PYTHON)' was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	'$(PYTHON)' -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(sys.version_info < (3, 11) and \
	  "error: $(PYTHON) is Python " + v + ", draftree needs 3.11 or newer; name one: make PYTHON=python3.12")'
	$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'setting up .venv (once, a few minutes)' >&2; '$(PYTHON)' -m venv --clear .venv; }
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
