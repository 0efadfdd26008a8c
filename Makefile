# `make demo` and `make test` do all their set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SETUP := setup.cfg pyproject.toml constraints.txt configs/install.sh

# Many images set it; then each of the demo's dozen processes would compile torch and transformers
# anew, 5 to 12 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-quick lint check clean

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

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf "$(VENV)" build *.egg-info data/demo runs/demo*
