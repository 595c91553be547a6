# Each target sets itself up: `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
# Another torch, Python or optree, in a virtual environment of its own:
# make test TORCH=2.11.0 PYTHON=python3.12 OPTREE=0.14.0. All are in the folder VENVS.
VENVS ?= .
TORCH ?=
OPTREE ?=
VARIANT := $(if $(TORCH),-torch$(TORCH))$(if $(OPTREE),-optree$(OPTREE))
VENV := $(VENVS)/.venv$(VARIANT)$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(VARIANT),$(VENV)/constraints.txt,constraints.txt)
# Modules are compiled when they are first imported, and most never are.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS)

# Each process that a test starts would compile torch's modules anew: 3 s.
unexport PYTHONDONTWRITEBYTECODE

# One worker for each core; tests of one xdist_group stay on one worker.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup
# What is long, starts processes or compiles is left out; Hypothesis draws a few cases of each law.
FAST := -m 'not slow and not long and not processes' --hypothesis-profile fast \
	$(addprefix --ignore=tests/,docs benchmarks distributed silently_wrong func/test_compile.py) \
	--ignore-glob='tools/*'

# A command that fails leaves no half-written file of constraints.
.DELETE_ON_ERROR:

.PHONY: help demo test test-fast test-slow coverage check style types bench docs clean

help:
	@echo 'make demo       the main example, on real data'
	@echo 'make test       all tests but the slow tier'
	@echo 'make test-fast  under a minute, while you work'
	@echo 'make test-slow  examples in full, other tools, sweeps'
	@echo 'make accelerator  the tests on an emulated second device'
	@echo 'make check      ruff, strict types, import-linter, docs with warnings as errors'
	@echo 'make bench      what gradkit costs; ROOMS="training guarded" for some of it'
	@echo 'make docs       the site, in docs/_build/html'
	@echo 'make works-with  libraries that people use; ONLY="einops peft" for some of them'
	@echo 'make fuzz       random programs with gradkit and with plain torch; SECONDS=600 SEED=1'
	@echo 'make gpu        all tests and benchmarks on CUDA; make gpu-wheels for a machine without network'
	@echo 'make clean      remove what these have made'

demo: $(VENV)/demo
	$(BIN)/python examples/multitask_digits.py

# Everything but the slow tier; then some of it on a second kind of device, which is emulated.
test: $(VENV)/ready
	$(PYTEST) -m 'not slow'
	GRADKIT_EMULATE=cuda $(PYTEST) $(ON_DEVICE) -k "not compiled" $(FEW_ON_DEVICE)

# What runs on an emulated accelerator: processes of a group would be on the CPU.
ON_DEVICE := -m 'not slow and not long and not processes' --hypothesis-profile fast
# Those for which it makes a difference: streams, waits, threads of the engine, generators, ownership;
# and one test at least of each call.
FEW_ON_DEVICE := $(addprefix tests/,accelerator cuda retain/test_recorded_passes.py retain/test_retain.py \
	state/test_after_errors.py state/test_random_states.py state/test_threads.py \
	core/test_host_reads.py core/test_ownership.py eager/test_batched.py eager/test_laws.py \
	eager/test_passes.py streaming/test_gram.py streaming/test_reduced.py streaming/test_samples.py \
	checks/test_hooks_in_passes.py autograd/test_functions_that_write_grad.py)

# All quick tests on an emulated accelerator, of a kind that torch knows and of one that it does not.
.PHONY: accelerator
accelerator: $(VENV)/ready
	status=0; for kind in cuda npu; do GRADKIT_EMULATE=$$kind $(PYTEST) -m 'not slow and not processes' \
		--hypothesis-profile fast --ignore-glob='tools/*' \
		$(addprefix --ignore=tests/,docs benchmarks gpu) || status=1; done; exit $$status

# For work in between: under a minute.
test-fast: $(VENV)/ready
	$(PYTEST) $(FAST)

# The examples in full, other tools, sweeps. SKIP="tests/a.py tests/b.py::test_c" is left out;
# SHARD=2/8 runs the second eighth, without other libraries.
test-slow: $(VENV)/$(if $(SHARD),ready,bench)
	$(PYTEST) -m slow $(addprefix --deselect=,$(SKIP)) $(addprefix --shard=,$(SHARD))

# Random programs with gradkit and with plain torch: make fuzz SECONDS=600 SEED=1. Exit status 1 if
# any was wrong; each is named with the command that runs it again.
.PHONY: fuzz
SECONDS ?= 600
SEED ?= 0
fuzz: $(VENV)/ready
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

# Libraries that people use, each in an environment of its own, and the page that shows the results:
# make works-with ONLY="einops peft". Exit status 1 if something is no longer right.
.PHONY: works-with
works-with: $(VENV)/ready
	$(BIN)/python -m tests.works_with $(if $(ONLY),--only '$(ONLY)')

# Branches of gradkit that `make test` does not take, those in processes that it starts included.
coverage: $(VENV)/ready
	$(PYTEST) -m 'not slow' --cov --cov-report term-missing:skip-covered

check: style types docs

style: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/ready
	$(BIN)/mypy

docs: $(VENV)/ready
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html

# What gradkit costs, in under 15 minutes: ROOMS="training guarded" are some of the rooms.
bench: $(VENV)/bench
	$(BIN)/python -m benchmarks $(if $(ROOMS),--only $(ROOMS))

$(VENV)/constraints.txt: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PYTHON) tests/versions.py constraints --torch '$(TORCH)' --optree '$(OPTREE)' > $@

# The demo does without what tests and documents need, which takes longer to install.
$(VENV)/demo: $(VENV)/constraints.txt
	PIP_CONSTRAINT=$(CONSTRAINTS) $(PIP) -e '.[examples]'
	touch $@

$(VENV)/ready: $(VENV)/constraints.txt $(wildcard tools/*/pyproject.toml)
	PIP_CONSTRAINT=$(CONSTRAINTS) $(PIP) -e '.[test,examples,plot,docs]' \
		$(addprefix -e tools/,migrate parity doctor)
	touch $(VENV)/demo $@

# The virtual environment, and nothing run.
.PHONY: ready
ready: $(VENV)/ready

# The table of docs/versions.md: `make test` with each torch, Python and optree in it.
.PHONY: versions
versions:
	$(PYTHON) tests/versions.py run

# BackPACK and curvlinops go without what they ask for: torchvision, which only their examples import,
# and whose wheel does not load beside a torch for the CPU. The needs of BackPACK are in the extra,
# those of curvlinops, with which one test compares, are here.
$(VENV)/bench: $(VENV)/ready
	$(PIP) -e '.[bench,release,transformers,accelerate,lightning]'
	$(PIP) --no-deps backpack-for-pytorch curvlinops-for-pytorch einconv linear-operator jaxtyping \
		wadler-lindig
	touch $@

# The wheel and the source distribution in dist/, checked, and tried in an empty environment.
.PHONY: package
package: $(VENV)/bench
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python release/try_wheel.py dist/*.whl

clean:
	rm -rf $(VENVS)/.venv $(VENVS)/.venv-* .gpu dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f .coverage .coverage.*

# The pictures in docs/pictures, from full runs of the examples: a few minutes.
.PHONY: pictures
pictures: $(VENV)/ready
	$(BIN)/python docs/pictures.py

# For a machine with a GPU and torch, and no network: the packages that it lacks, collected here.
.PHONY: gpu-wheels gpu
PYTHON_VERSION ?= 3.12
WHEELS ?= wheels
RESULTS ?= results
gpu-wheels:
	$(PYTHON) -m gpu.wheels --python-version $(PYTHON_VERSION) --output $(WHEELS)

# There: all tests and benchmarks on CUDA. SHARD=2/4 or BENCH=1/2 is one part, which ends within
# ten minutes; without them, all parts in turn.
gpu:
	$(PYTHON) -m gpu --wheels $(WHEELS) --results $(RESULTS) \
		$(if $(SHARD),--shard $(SHARD)) $(if $(BENCH),--bench $(BENCH))
