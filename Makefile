# Everything below sets itself up: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check bench docs clean

demo: $(VENV)/ready
	$(BIN)/python examples/multitask_digits.py

test: $(VENV)/ready
	$(BIN)/python -m pytest

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

docs: $(VENV)/ready
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(PIP) -e '.[test,examples,plot,docs]'
	touch $@

# BackPACK goes without what it asks for: torchvision, which only its examples import, and whose
# wheel does not load beside a torch for the CPU. The others of its needs are in the extra.
$(VENV)/bench: $(VENV)/ready
	$(PIP) -e '.[bench]'
	$(PIP) --no-deps backpack-for-pytorch
	touch $@

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The pictures in docs/pictures, from full runs of the examples: a few minutes.
.PHONY: pictures
pictures: $(VENV)/ready
	$(BIN)/python docs/pictures.py
