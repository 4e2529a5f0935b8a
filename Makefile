# Everything runs in .venv, which is created from requirements.lock, with uv if it is installed and with
# venv and pip otherwise. Only Python 3.11, 3.12 or 3.13 is needed.

BIN := .venv/bin
READY := .venv/.ready
# XLA's GPU compiler has an environment of its own: beside it, jax would look for a GPU at every start.
GPU_READY := .venv-gpu/.ready
UV := $(shell command -v uv)
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
  && echo $$p && break; done)

ifdef UV
MAKE_VENV = uv venv --quiet --allow-existing --python '>=3.11,<3.14' $(@D)
# Without bytecode, the first import of TensorFlow takes twice as long.
INSTALL = uv pip install --quiet --compile-bytecode --python $(@D)/bin/python
else
MAKE_VENV = $(or $(PYTHON),$(error Python 3.11, 3.12 or 3.13 must be on PATH)) -m venv $(@D)
INSTALL = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
endif

# Three processes keep two cores busy, because many tests wait for other processes. Each runs whole files, in
# alphabetical order: gin's registry is global to a process.
# A container may forbid bytecode, without which every process would compile all modules and tests again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder
# Most of the suite's time is compilation. Without LLVM's optimizations and XLA's newer emitters of fused loops
# it takes a quarter of that time; XLA's own passes run as ever. `make test-all` compiles as users do.
# With huge pages, which glibc's malloc does not ask for by itself, tracing and compilation take 10% less time.
COMPILE_FAST := GLIBC_TUNABLES=glibc.malloc.hugetlb=1 XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

.PHONY: quickstart setup docs test test-all soak test-gpu-program gpu-compiler lint format golden lock clean

quickstart: $(READY) ## Pretrain and finetune a small T5 on text of this machine
	@$(BIN)/rosetta-t5 quickstart

setup: $(READY) ## Install everything into .venv

docs: $(READY) ## Build the documentation into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: $(READY) ## Run all tests except the slow ones
	@$(COMPILE_FAST) $(PYTEST)

test-all: $(READY) ## Run all tests
	@$(PYTEST) -m ""

test-gpu-program: $(GPU_READY) ## Compile steps for GPUs, which need not be here, and compare with the recorded figures
	@.venv-gpu/bin/pytest -q -m gpu_program tests/gpu_program

soak: $(READY) ## Train through 200 random faults, and compare with an undisturbed run (20 minutes)
	@$(BIN)/python tests/resume/soak.py $(SOAK)

gpu-compiler: $(GPU_READY) ## Install XLA's GPU compiler into .venv-gpu (3 GB)

lint: $(READY) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy rosetta_t5 t5x

format: $(READY) ## Fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(READY) ## Rewrite the golden text of every recipe (tests/golden)
	$(BIN)/python tests/golden_recipes.py

lock: ## Lock the newest versions for Python 3.11 to 3.13 (needs uv)
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --extra docs --extra t5 --extra cluster --extra serve \
	  --custom-compile-command 'make lock' --output-file requirements.lock setup.cfg

clean: ## Remove everything that make created, except runs
	rm -rf .venv .venv-gpu build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# The t5 package requires nightly versions of seqio and TensorFlow Datasets, which overwrite the released
# ones, so it is installed without its dependencies.
$(READY) $(GPU_READY): requirements.lock setup.cfg pyproject.toml
	@echo "Setting up $(@D) (minutes the first time, less once packages are cached) ..."
	@test -x $(@D)/bin/python || $(MAKE_VENV)
	@$(INSTALL) -r requirements.lock $(if $(findstring gpu,$@),"jax[cuda13]")
	@$(INSTALL) --no-deps t5==0.9.4
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@
