# Each target sets up what it needs, on a fresh machine too: a virtual
# environment, torch, the tools of requirements-dev.txt, the built extension.
#
#   make train      train a small GPT on 2 processes, or one per GPU
#   make test       all tests: C with sanitizers, then pytest (which runs the CUDA
#                   kernels where there is a GPU)
#   make help       the other targets
#
# A push runs .ci/run, a night `make nightly` (CONTRIBUTING.md).
#
# Another torch:        make train TORCH='torch==2.11.0'
# An own environment:   make train VENV=/path/to/venv  (torch in it is kept)

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV_FLAGS ?=
OUT ?= out
# A CUDA build of torch for the fake CUDA, in an environment of its own.
CUDA_VENV ?= .venv-cuda
CUDA_TORCH ?= torch==2.14.1
# make cuda-test CUDA_FLAGS=--one-each
CUDA_FLAGS ?=
CUDA_TESTS ?= $(addprefix tests/,fakecuda distributed checkpoint cuda programs integrations \
  huggingface)
CUDA_SMOKE := $(patsubst %,tests/fakecuda/test_%.py,bridge step_streams waits offload gloo)
# make pytest PYTEST_FLAGS='-n 2 --dist worksteal': two tests at a time.
PYTEST_FLAGS ?=
override VENV := $(abspath $(VENV))
BIN := $(VENV)/bin
BUILD_IN_PLACE = $(BIN)/python setup.py -q build_ext --inplace
# As pip names it; in torch.__version__ some builds add more.
TORCH_VERSION = $$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))')
TOOLS := $(VENV)/.fsdp_c-tools
# The extension in place is of one environment: another's takes its place.
BUILT := build/built$(subst /,-,$(VENV))
SOURCES := $(shell find csrc -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.map' -o -name '*.cu')
C_FILES := $(shell find csrc tests/c tests/cuda tests/fakecuda -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu')

# The tools come from the environment: torchrun is looked up on PATH.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help train test pytest test-all cuda-test cuda-smoke on-fake-cuda on-fake-cuda-bench c-test lint formats types rules format tidy \
  bench device-bench gpu-bench build wheel debug sanitize profile nightly clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

train: $(BUILT) ## train the example, compare it with the unsharded model first
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} torchrun --standalone --nproc-per-node \
	  $$(python -c 'import torch; print(torch.cuda.device_count() or 2)') \
	  examples/train_lm.py --verify --out $(OUT)

test: c-test pytest ## what a push needs: C tests with sanitizers, then pytest

pytest: $(BUILT)
	python -m pytest $(PYTEST_FLAGS)

test-all: $(BUILT) c-test ## every combination: hours
	python -m pytest --full $(PYTEST_FLAGS)

cuda-test: ## the tests on a fake CUDA, without a GPU (docs/internals/fakecuda.md)
	$(MAKE) on-fake-cuda VENV='$(CUDA_VENV)' TORCH='$(CUDA_TORCH)'

cuda-smoke: ## sharded models on the fake CUDA: NCCL, streams, waits, offload; a minute
	$(MAKE) cuda-test CUDA_TESTS='$(CUDA_SMOKE)' CUDA_FLAGS=--one-each

# Without a toolkit: headers that torch's packages lack.
on-fake-cuda: $(BUILT)
	test -e "$${CUDA_HOME:-/usr/local/cuda}/include/crt/host_defines.h" || \
	  python -m pip install -q --no-deps $$(python -c 'import torch; \
	  print(*(f"nvidia-cuda-{name}=={torch.version.cuda}.*" for name in ("crt", "cccl")))')
	FSDP_C_TEST_DEVICE=cuda PYTHONPATH=tests python -m fakecuda \
	  python -m pytest $(CUDA_TESTS) $(CUDA_FLAGS)

c-test: ## the C tests, with address and undefined behaviour sanitizers
	$(MAKE) -C tests/c -j$(shell nproc) asan
	$(MAKE) -C tests/c abi

lint: formats types rules ## formats, types, room order, symbols, words

formats: $(TOOLS)
	clang-format --style=file:csrc/.clang-format --dry-run -Werror $(C_FILES)
	ruff check
	ruff format --check

types: $(BUILT)
	mypy
	python -m mypy.stubtest --mypy-config-file .ci/stubtest.ini fsdp_c._native

rules: $(BUILT)
	python -m pytest -q tests/lint

tidy: $(TOOLS) ## clang-tidy over the C rooms (csrc/.clang-tidy)
	python -m pip install -q clang-tidy==22.1.8
	printf '%s\n' $(wildcard csrc/*/*.c csrc/core/*/*.c) | \
	  xargs -P $(shell nproc) -I {} clang-tidy --quiet --warnings-as-errors='*' \
	    --extra-arg-before=-std=c11 {} -- -D_GNU_SOURCE -Icsrc/core -Icsrc \
	    -isystem $$(python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	    -DFSDP_C_VERSION='""' -DFSDP_C_TORCH_VERSION='""' -DFSDP_C_CUDA=0

format: $(TOOLS) ## rewrite all files in the common format
	clang-format --style=file:csrc/.clang-format -i $(C_FILES)
	ruff check --fix --exit-zero
	ruff format

bench: $(BUILT) ## docs/measurements anew, against torch's FSDP1, FSDP2, DDP (needs valgrind)
	python benchmarks/report.py --save-json $(OUT)/bench

device-bench: ## docs/measurements/device.md anew: memory and calls of a step on the fake CUDA
	$(MAKE) on-fake-cuda-bench VENV='$(CUDA_VENV)' TORCH='$(CUDA_TORCH)'

on-fake-cuda-bench: $(BUILT)
	python benchmarks/device.py --save-json $(OUT)/device.json

gpu-bench: $(BUILT) ## steps on GPUs against torch's FSDP1 and FSDP2
	python benchmarks/gpu_step.py

build: $(BUILT) ## the extension, in place

wheel: $(BUILT) ## a wheel in dist/, tried in a fresh environment without a compiler
	rm -rf dist build/wheel-venv
	python -m pip wheel -q --no-build-isolation --no-deps -w dist .
	python -m venv build/wheel-venv
	build/wheel-venv/bin/python -I -m pip install -q dist/*.whl torch==$(TORCH_VERSION)
	cd build/wheel-venv && env -i PATH=bin OMP_NUM_THREADS=1 bin/torchrun \
	  --standalone --nproc-per-node 2 ../../.ci/smoke.py

# The next `make build` makes the usual extension again, from the objects it has.
debug: $(TOOLS) ## the extension without optimisation, with symbols and asserts, in place
	rm -f $(BUILT)
	FSDP_C_DEBUG=1 $(BUILD_IN_PLACE)

sanitize: $(TOOLS) ## the extension with address and undefined behaviour sanitizers, in place
	rm -f $(BUILT)
	FSDP_C_SANITIZE=1 $(BUILD_IN_PLACE)

profile: $(BUILT) ## callgrind of one training step, functions by cost, in $(OUT)/profile
	rm -rf $(OUT)/profile && mkdir -p $(OUT)/profile
	valgrind -q --tool=callgrind --instr-atstart=no \
	  --callgrind-out-file=$(OUT)/profile/callgrind.out \
	  python benchmarks/host_instructions.py --counted fsdp_c-orig --steps 1 \
	  --warmup 3 --worker-folder $(OUT)/profile
	callgrind_annotate $(OUT)/profile/callgrind.out.1 >$(OUT)/profile/all.txt
	grep -e PROGRAM -e _native $(OUT)/profile/all.txt | head -40

nightly: ## what one machine can check in a night; each part once, then the verdict
	.ci/nightly

clean: ## remove what was built (not the virtual environment)
	rm -rf build dist fsdp_c.egg-info fsdp_c/_native*.so fsdp_c/_cuda.so $(BUILT) \
	  .mypy_cache .pytest_cache .ruff_cache
	$(MAKE) -C tests/c clean

# torch first and only if there is none: pip must never replace it, not for the sake
# of a tool either.
$(TOOLS): requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -q -r requirements-dev.txt torch==$(TORCH_VERSION)
	touch $@

# setup.py shows its progress, pip would not; pip then finds everything compiled.
$(BUILT): $(TOOLS) setup.py pyproject.toml $(SOURCES)
	$(BUILD_IN_PLACE)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	rm -f build/built-*
	touch $@
