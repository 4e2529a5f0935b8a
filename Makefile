# Everything runs in .venv, which is made from requirements.lock: by uv if it is here, else by
# venv and pip. It needs Python 3.11 to 3.13 and nothing else.

BIN := .venv/bin
READY := .venv/.ready
UV := $(shell command -v uv)
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
  && echo $$p && break; done)

ifdef UV
MAKE_VENV = uv venv --quiet --allow-existing --python '>=3.11,<3.14' .venv
# Bytecode now: a start of TensorFlow without it takes twice as long.
INSTALL = uv pip install --quiet --compile-bytecode --python $(BIN)/python
else
MAKE_VENV = $(or $(PYTHON),$(error Python 3.11, 3.12 or 3.13 is needed: none is on PATH)) -m venv .venv
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

# Two at a time, file by file, in the order of their names: gin's registry is one for a process.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart setup test test-all lint format golden lock clean

quickstart: $(READY) ## Train a small T5 on text that is here already
	@$(BIN)/rosetta-t5 quickstart

setup: $(READY) ## Install everything into .venv

test: $(READY) ## All tests but the slow ones
	@$(PYTEST)

test-all: $(READY) ## All tests
	@$(PYTEST) -m ""

lint: $(READY) ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy rosetta_t5 t5x

format: $(READY) ## Mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(READY) ## Write anew what every recipe comes to (tests/golden)
	$(BIN)/python tests/golden_recipes.py

lock: ## Choose the newest versions again, for Python 3.11 to 3.13 (needs uv)
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --extra t5 --extra cluster \
	  --custom-compile-command 'make lock' --output-file requirements.lock setup.cfg

clean: ## Remove what make made; runs stay
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# The t5 package asks for nightly versions of seqio and TensorFlow Datasets, which overwrite the
# real ones: it comes without what it asks for.
$(READY): requirements.lock setup.cfg pyproject.toml
	@echo "Setting up .venv (minutes the first time, less once packages are cached) ..."
	@test -x $(BIN)/python || $(MAKE_VENV)
	@$(INSTALL) -r requirements.lock
	@$(INSTALL) --no-deps t5==0.9.4
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@
