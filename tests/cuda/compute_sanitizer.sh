#!/usr/bin/env bash
# Runs the tests of the CUDA kernels, and one training step, under NVIDIA's
# compute-sanitizer: memory errors, races in shared memory, uninitialised reads,
# misuse of barriers. Needs a GPU; run it at the root of the repository.
#
# Only the process itself is instrumented, not the compilers that it starts, and
# errors that CUDA's API reports to its caller are not findings: the libraries
# probe, and so does the table of kernels. Ends with 1 after all tools have run
# if one of them found something.
set -uo pipefail

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not on PATH: install the CUDA toolkit" >&2
  exit 2
fi
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "there is no NVIDIA GPU with a driver here" >&2
  exit 2
fi

python=${PYTHON:-python}
limit=${SANITIZER_TIMEOUT_S:-300}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
common=(--error-exitcode 9 --target-processes application-only
  --report-api-errors no --print-limit 20)
ours=() # of all kernels of a process, ours; the option's name has changed
for option in --kernel-regex --kernel-name; do
  if compute-sanitizer --help 2>&1 | grep -qE -- "$option( |=|$)"; then
    ours=("$option" kns=fsdp_cuda)
    break
  fi
done
failed=0

# check NAME ARGUMENTS...: runs compute-sanitizer, and goes on.
check() {
  local name=$1 rc
  shift
  echo "== $name"
  timeout -k 10 "$limit" compute-sanitizer "${common[@]}" "$@"
  rc=$?
  echo "== $name: $([[ $rc == 0 ]] && echo clean || echo "FAILED, exit $rc")"
  [[ $rc == 0 ]] || failed=1
}

# Every allocation on its own, so that a step over the end of one is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export RANK=0 WORLD_SIZE=1
check "memcheck: a bf16 step, all kernels" --tool memcheck \
  "$python" tests/cuda/scenarios.py bf16 "$folder" cuda
for tool in memcheck racecheck synccheck initcheck; do
  check "$tool: the tests of the kernels" --tool "$tool" ${ours[@]+"${ours[@]}"} \
    "$python" -m pytest -q -p no:cacheprovider tests/cuda/test_kernels.py \
    -k "(test_pack and 100-0.25) or test_norm_and_scale"
done
exit $failed
