# make demo   sets everything up and prints text from the embedded model
# make test   sets everything up and runs the tests
# make lint   formatting, lint and types
# make test-slow   also the tests that take minutes or gigabytes

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt LICENSE $(shell find src native -type f -not -name '*.pyc' -not -name '*.so')

.PHONY: demo test test-slow lint clean

demo: $(VENV)/installed
	$(BIN)/k3 demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/pip install --quiet '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build
