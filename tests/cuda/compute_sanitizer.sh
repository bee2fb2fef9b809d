#!/bin/sh
# Runs the tests of the CUDA kernels, and one training step, under NVIDIA's
# compute-sanitizer: memory errors, races in shared memory, uninitialised reads,
# misuse of barriers. Needs a GPU; run it at the root of the repository.
set -eu

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not on PATH: install the CUDA toolkit" >&2
  exit 2
fi
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "there is no NVIDIA GPU with a driver here" >&2
  exit 2
fi

python=${PYTHON:-python}
store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT

# Every allocation on its own, so that a step over the end of one is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck initcheck synccheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
    "$python" -m pytest -q tests/cuda/test_kernels.py -k "pack or norm"
  rm -f "$store/store"
  RANK=0 WORLD_SIZE=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
    "$python" tests/cuda/scenarios.py bf16 "$store" cuda
done
