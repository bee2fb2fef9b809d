# Each target sets up what it needs, on a fresh machine too: a virtual
# environment, torch, the tools of requirements-dev.txt, the built extension.
#
#   make train      train a small GPT on 2 processes, or one per GPU
#   make test       all tests: C with sanitizers, then pytest (which compiles the
#                   CUDA kernels where there is nvcc, and runs them where there is a GPU)
#   make help       the other targets
#
# Another torch:        make train TORCH='torch==2.11.0'
# An own environment:   make train VENV=/path/to/venv  (torch in it is kept)

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV_FLAGS ?=
OUT ?= out
# make sim-test SIM_FLAGS=--one-each: one set of parameters of each test function.
SIM_FLAGS ?=

override VENV := $(abspath $(VENV))
BIN := $(VENV)/bin
TOOLS := $(VENV)/.fsdp_c-tools
BUILT := $(VENV)/.fsdp_c-built
SOURCES := $(shell find csrc -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.map' -o -name '*.cu')
C_FILES := $(shell find csrc tests/c tests/cuda tests/simdevice -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu')

# The tools come from the environment: ninja and torchrun are looked up on PATH.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help train test sim-test c-test lint format bench gpu-bench build clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

train: $(BUILT) ## train the example, compare it with the unsharded model first
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} torchrun --standalone --nproc-per-node \
	  $$(python -c 'import torch; print(torch.cuda.device_count() or 2)') \
	  examples/train_lm.py --verify --out $(OUT)

test: $(BUILT) c-test ## all tests; compiles the CUDA kernels where there is nvcc
	python -m pytest

sim-test: $(BUILT) ## the distributed tests on the simulated accelerator (docs/internals/simdevice.md)
	FSDP_C_TEST_DEVICE=sim python -m pytest tests/distributed tests/checkpoint \
	  $(SIM_FLAGS)

c-test: ## the C tests, with address and undefined behaviour sanitizers
	$(MAKE) -C tests/c -j$(shell nproc) asan
	$(MAKE) -C tests/c abi

lint: $(BUILT) ## formats, types, room order, symbols, words
	clang-format --style=file:csrc/.clang-format --dry-run -Werror $(C_FILES)
	ruff check
	ruff format --check
	mypy
	python -m mypy.stubtest fsdp_c._native
	python -m pytest -q tests/lint

format: $(TOOLS) ## rewrite all files in the common format
	clang-format --style=file:csrc/.clang-format -i $(C_FILES)
	ruff check --fix --exit-zero
	ruff format

bench: $(BUILT) ## host overhead and step time against torch's FSDP1, FSDP2, DDP
	python benchmarks/host_overhead.py
	python benchmarks/train_step.py
	python benchmarks/state_dict.py

gpu-bench: $(BUILT) ## steps on GPUs against torch's FSDP1 and FSDP2
	python benchmarks/gpu_step.py

build: $(BUILT) ## the extension, in place

clean: ## remove what was built (not the virtual environment)
	rm -rf build dist fsdp_c.egg-info fsdp_c/_native*.so fsdp_c/_cuda.so $(BUILT) \
	  .mypy_cache .pytest_cache .ruff_cache
	$(MAKE) -C tests/c clean

# torch first and only if there is none: pip must never replace it.
$(TOOLS): requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	touch $@

$(BUILT): $(TOOLS) setup.py pyproject.toml $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@
