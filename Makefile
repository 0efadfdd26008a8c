# `make demo` and `make test` do all their set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-quick lint check clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt configs/install.sh
	sh configs/install.sh "$(PYTHON)" "$(VENV)"
	@touch $@

demo: $(STAMP)
	$(BIN)/agentrl demo configs/demo.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

test-quick: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf "$(VENV)" build *.egg-info data/demo runs/demo*
