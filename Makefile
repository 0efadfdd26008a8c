# `make demo` and `make test` do all their set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SGLANG_VENV ?= .venv-sglang
SGLANG := $(SGLANG_VENV)/.installed
SETUP := setup.cfg pyproject.toml constraints.txt configs/install.sh configs/install_apptainer.sh

# Many images set it; then each of the demo's dozen processes would compile torch and transformers
# anew, 5 to 12 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-quick sglang test-sglang lint check clean

install: $(STAMP)

$(STAMP): $(SETUP)
	sh configs/install.sh "$(PYTHON)" "$(VENV)"
	@touch $@

$(DEV): $(SETUP)
	sh configs/install.sh "$(PYTHON)" "$(VENV)" dev
	@touch $@ $(STAMP)

demo: $(STAMP)
	$(BIN)/agentrl demo configs/demo.yaml

test: $(DEV)
	$(BIN)/python -m pytest -n 2

test-quick: $(DEV)
	$(BIN)/python -m pytest -n 2 -m "not slow"

# The real SGLang without a GPU (Python 3.11, 2.7 GB), and the tests that talk to it.
$(SGLANG): configs/install_sglang_cpu.sh configs/sglang_cpu_requirements.txt configs/sglang_cpu_stand_ins.py
	sh configs/install_sglang_cpu.sh "$(PYTHON)" "$(SGLANG_VENV)"
	@touch $@

sglang: $(SGLANG)

test-sglang: $(DEV) $(SGLANG)
	$(BIN)/python -m pytest -m sglang tests/real

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf "$(VENV)" "$(SGLANG_VENV)" build *.egg-info data/demo runs/demo*
