# Everything runs in a virtual environment of its own; PYTHON may name another interpreter (3.10 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# one thread per rank: ranks outnumber cores
export OMP_NUM_THREADS := 1

.PHONY: train test test-all bench lint reference clean

train: $(VENV)/.installed
	$(BIN)/hpcli train examples/configs/fsdp8.yaml

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not long"

test-all: $(VENV)/.test
	HP_EXAMPLES=20000 $(BIN)/python -m pytest

bench: $(VENV)/.installed
	$(BIN)/python -m bench

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/mypy hyper_parallel hpcli

# the YAML reference in the README is generated from the configuration's models
reference: $(VENV)/.installed
	$(BIN)/python tests/test_readme.py

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/pip install -q -e ".[test,mindspore]"
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/pip install -q -e ".[lint]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
