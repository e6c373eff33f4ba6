# Two commands do everything on a fresh machine, set-up included:
#   make demo   train a small model with DeepSpeed, open its checkpoint, convert it, verify it
#   make test   pass all tests
PYTHON      ?= python3
VENV        ?= .venv
# The runs of a test have up to 8 ranks of their own: more workers than cores do not help.
PYTEST_ARGS ?= -n 2
# PyTorch's own index of CPU builds; where it cannot be reached pip takes what it finds elsewhere.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip --disable-pip-version-check

export DS_ACCELERATOR := cpu
export DS_BUILD_OPS := 0
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint env bench clean

demo: $(STAMP)
	$(BIN)/python notebooks/demo/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

env: $(STAMP)

# torch first: DeepSpeed's build imports it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade "pip>=25.1" setuptools wheel ninja
	$(PIP) install -q --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints.txt torch
	$(PIP) install -q -c constraints.txt --no-build-isolation deepspeed
	$(PIP) install -q -c constraints.txt -e . --group test --group lint
	touch $@

clean:
	rm -rf $(VENV) demo-run bench-data .pytest_cache .mypy_cache .ruff_cache .hypothesis
