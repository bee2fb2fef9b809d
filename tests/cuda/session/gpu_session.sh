#!/usr/bin/env bash
# Everything that needs a GPU, step by step, on one GPU. At the root of the
# repository:
#
#   bash tests/cuda/session/gpu_session.sh probe build tests kernels abort
#   bash tests/cuda/session/gpu_session.sh suite
#   bash tests/cuda/session/gpu_session.sh others
#   bash tests/cuda/session/gpu_session.sh nccl2
#   bash tests/cuda/session/gpu_session.sh graph gloo
#   bash tests/cuda/session/gpu_session.sh bench offload
#   bash tests/cuda/session/gpu_session.sh fake example
#   bash tests/cuda/session/gpu_session.sh sanitize
#
# With 16 cores and a built.tgz (below) the first line took 4 minutes on an H100, and all
# of tests/distributed 7 minutes of 12 workers on an H200, others 4. `suite FILE...` runs
# some files only; nothing may follow. A step that fails does not stop the others.
# Times mean something where nothing else runs: do not run steps beside each other.
# MPS=1: ranks that share the GPU run at the same time instead of taking turns (CUDA's
# Multi-Process Service, up to 48 processes), so steps of two ranks have a time.
#
# Results: $OUT/log.txt, summary.txt, results.jsonl, built.tgz and pictures
# ($OUT: out/gpu). Nothing in the repository changes: all happens in a copy,
# $TREE. A machine that is given back after each call need not compile again:
# put built.tgz into .gpu/ at the root of the repository. A machine without a GPU
# can make it, too, with nvcc and the same Python and torch:
#   FSDP_C_CUDA=1 python setup.py build_clib build_ext --inplace
#   tar czf .gpu/built.tgz fsdp_c/_native*.so fsdp_c/_cuda.so
set -uo pipefail
ROOT=$PWD
SESSION=tests/cuda/session
[[ -f $ROOT/setup.py && -f $ROOT/$SESSION/gpu_session.sh ]] ||
  { echo "run it at the root of the repository" >&2; exit 2; }
ALL_STEPS=(probe build tests nccl2 kernels abort graph gloo fake bench offload suite others example sanitize)

usage() {
  sed -n '2,/^set /p' "$ROOT/$SESSION/gpu_session.sh" | sed -e '$d' -e 's/^# \{0,1\}//'
  echo "steps: ${ALL_STEPS[*]}"
}
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi

OUT=${OUT:-$ROOT/out/gpu}
TREE=${TREE:-${TMPDIR:-/tmp}/fsdp_c_gpu/tree}
WORK=$(dirname "$TREE")
VENV=${VENV:-/opt/torch/.venv}
PY=$VENV/bin/python
[[ -x $PY ]] || PY=$(command -v python3)
mkdir -p "$OUT" "$TREE"
PATH="$(dirname "$PY"):/usr/local/cuda/bin:$PATH"
export PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$TREE
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME=lo
unset FSDP_C_CUDA FSDP_C_TRANSPORT FSDP_C_NCCL_LIBRARY FSDP_C_TEST_DEVICE
exec > >(tee -a "$OUT/log.txt") 2>&1
SUMMARY=$OUT/summary.txt
JSON=$OUT/results.jsonl
START=$SECONDS

# job NAME LIMIT_S COMMAND...: runs it, notes how it ended, and goes on.
job() {
  local name=$1 limit=$2 begin=$SECONDS rc
  shift 2
  echo; echo "=== $name: $*"
  timeout -k 10 "$limit" "$@"
  rc=$?
  printf '%-48s %-9s %4d s (at %d s)\n' "$name" \
    "$([[ $rc == 0 ]] && echo ok || echo "FAILED $rc")" $((SECONDS - begin)) \
    $((SECONDS - START)) | tee -a "$SUMMARY"
  return $rc
}

refresh() { # the copy; what was built in it stays
  (cd "$ROOT" && tar cf - --exclude=./.git --exclude=./out --exclude=./build \
    --exclude=./.venv --exclude=./.gpu --exclude='*.so' .) | tar xf - -C "$TREE"
}

is_built() {
  (cd "$TREE" && [[ -f fsdp_c/_cuda.so ]] && "$PY" -c '
import torch
from fsdp_c import _native
assert _native.build_info()["torch_built"] == torch.__version__') >/dev/null 2>&1
}

probe() {
  job "probe: machine" 120 bash -c '
    nvidia-smi; nvcc --version | tail -2; gcc --version | head -1; g++ --version | head -1
    compute-sanitizer --version | head -2; nproc; free -g | head -2; df -h /dev/shm /tmp
    ip -br addr 2>/dev/null || cat /proc/net/dev'
  job "probe: python" 120 "$PY" -c '
import importlib, os, sys, sysconfig, torch
print(sys.version, sys.executable)
print("torch", torch.__version__, torch.version.cuda)
if torch.cuda.is_available():
    print("gpu", torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    print("nccl", torch.cuda.nccl.version())
print("Python.h", os.path.exists(sysconfig.get_path("include") + "/Python.h"))
for name in ("setuptools wheel ninja pytest xdist tqdm matplotlib numpy "
             "transformers accelerate peft safetensors").split():
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "?"))
    except Exception as error:
        print(name, "MISSING", error)'
}

# setup.py needs setuptools 77 for the fields of the licence alone. Without a
# network: from a wheel in .whl/, or, in the copy, without these fields.
allow_old_setuptools() {
  "$PY" -c 'import setuptools as s; exit(int(s.__version__.split(".")[0]) < 77)' && return
  if compgen -G "$ROOT/.whl/setuptools-*.whl" >/dev/null; then
    "$PY" -m pip install -q --no-index --no-deps --upgrade --target "$WORK/site" \
      "$ROOT"/.whl/setuptools-*.whl
    export PYTHONPATH=$WORK/site:$PYTHONPATH
  else
    sed -i 's/^OLDEST_SETUPTOOLS = .*/OLDEST_SETUPTOOLS = 1/' setup.py
    sed -i '/^license/d' pyproject.toml
  fi
}

build() {
  refresh
  local arch folder nvcc_pid
  if [[ -f $ROOT/.gpu/built.tgz ]] && ! is_built; then
    tar xzf "$ROOT/.gpu/built.tgz" -C "$TREE" && echo "took .gpu/built.tgz"
  fi
  if is_built && [[ ${REBUILD:-0} != 1 ]]; then
    echo "built already"
    return 0
  fi
  cd "$TREE" || return 1
  allow_old_setuptools
  # Kernels of one architecture, beside the C++: setup.py leaves a library alone
  # that is newer than its sources, and the right one is put in place afterwards.
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  folder=$("$PY" -c 'import sys, torch
print(f"build/{sys.implementation.cache_tag}-torch{torch.__version__}-cuda")')
  mkdir -p "$folder" "$WORK/nvcc"
  "$PY" csrc/cuda/build.py "$WORK/_cuda.so" --folder "$WORK/nvcc" \
    --arch "${arch:-90}" >"$WORK/nvcc.log" 2>&1 &
  nvcc_pid=$!
  touch "$folder/_cuda.so"
  job "build: extension" 480 env FSDP_C_CUDA=1 "$PY" setup.py -q build_clib build_ext --inplace
  if wait $nvcc_pid; then
    cp "$WORK/_cuda.so" fsdp_c/_cuda.so
    cp "$WORK/_cuda.so" "$folder/_cuda.so"
  else
    cat "$WORK/nvcc.log"
    rm -f fsdp_c/_cuda.so
  fi
  job "build: kernels" 10 test -s fsdp_c/_cuda.so
  is_built || { echo "the extension cannot be imported:"; "$PY" -c 'import fsdp_c'; return 1; }
  tar czf "$OUT/built.tgz" fsdp_c/_native*.so fsdp_c/_cuda.so
  job "build: doctor" 60 "$PY" -m fsdp_c doctor
}

pytest_job() { # NAME LIMIT ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  job "$name" "$limit" "$PY" -m pytest -q -p no:cacheprovider "$@"
}

# They share the GPU: each has at most 6 ranks (helpers.distributed), of 0.8 GiB each.
WORKERS=(-n 12 --dist worksteal)
"$PY" -c 'import xdist' 2>/dev/null || WORKERS=()

tests() {
  pytest_job "tests/cuda" 500 "${WORKERS[@]}" tests/cuda
}

probe_job() { # NAME LIMIT ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  job "$name" $((limit + 15)) "$PY" "$SESSION/gpu_probe.py" --json "$JSON" \
    --label "$name" --limit "$limit" "$@"
}

two_ranks() { # NAME SCENARIO [VARIABLE=VALUE...]
  local name=$1 scenario=$2
  shift 2
  job "nccl, 2 ranks: $name" 130 env NCCL_DEBUG=WARN "$@" "$PY" -m pytest -q \
    -p no:cacheprovider "tests/cuda/test_training.py::test_two_ranks_on_one_gpu[$scenario]"
}

nccl2() { # csrc/nccl against a real libnccl
  local each
  for each in full_shard bf16 gradient_accumulation no_shard shard_grad_op memory launches; do
    two_ranks $each $each
  done
  two_ranks "full_shard, c10d's NCCL" full_shard FSDP_C_TRANSPORT=c10d
  two_ranks "bf16, ATen's kernels" bf16 FSDP_C_CUDA=0
  two_ranks "full_shard, ordered" full_shard NCCL_LAUNCH_ORDER_IMPLICIT=1
  # Equal losses, and what a collective costs the host. The device's time means
  # nothing here: two processes take turns on it.
  for each in fsdp_c fsdp1 fsdp2; do
    probe_job "nccl, 2 ranks: $each bf16" 120 --group nccl --ranks 2 --impl $each
  done
  # Each tensor of a unit waits for both ranks' turn: 2.5 s a step, 0.12 with MPS=1.
  probe_job "nccl, 2 ranks: fully_shard bf16" 150 --group nccl --ranks 2 \
    --impl fully_shard --warmup 2 --losses 1 --steps 3
  FSDP_C_TRANSPORT=c10d probe_job "nccl, 2 ranks: fsdp_c bf16 over c10d" 120 --group nccl --ranks 2
  for each in fsdp_c fsdp2; do
    probe_job "nccl, 2 ranks: $each fp32" 120 --group nccl --ranks 2 --precision fp32 --impl $each
  done
}

abort() { # a rank that dies: the other one hears of it, and does not hang
  probe_job "abort: rank 1 dies" 100 --group nccl --ranks 2 --warmup 12 --die-at 4 \
    --group-timeout 15
}

graph() { # captured steps; a user's CUDA graph, captured while the watchdog looks
  local ranks
  for ranks in 1 2; do
    probe_job "graph: captured steps, $ranks ranks" 140 --group nccl --ranks $ranks --captured
  done
  two_ranks "captured step equals the plain one" captured_step
  probe_job "graph: captured after a step" 100 --group nccl --ranks 2 --warmup 6 --steps 2 --capture
}

gloo() { # CUDA tensors through gloo
  local each
  for each in fsdp1 fsdp2 fsdp_c; do
    probe_job "gloo, cuda, 2 ranks: $each fp32" 90 --group gloo --ranks 2 --impl $each --precision fp32
  done
  for each in fsdp1 fsdp_c; do
    probe_job "gloo, cuda, 2 ranks: $each bf16" 90 --group gloo --ranks 2 --impl $each
  done
}

kernels() { job "kernels: bandwidth" 200 "$PY" "$SESSION/gpu_kernels.py"; }

step_job() { # NAME LIMIT ARGUMENTS...: benchmarks/gpu_step.py
  local name=$1 limit=$2 json=$WORK/step.json
  shift 2
  rm -f "$json"
  job "gpu_step: $name" "$limit" "$PY" benchmarks/gpu_step.py --json "$json" "$@"
  [[ -s $json ]] && { tr -d '\n' <"$json"; echo; } >>"$JSON"
}

fake() { # rank 0 of 8: the shards, copies and launches of a real rank, no others
  local load
  for load in host-bound compute-bound wide; do
    step_job "fake 8, $load" 200 --fake-world 8 --workload $load --rounds 1 --steps 20
  done
  FSDP_C_CUDA=0 step_job "fake 8, host-bound, ATen's kernels" 120 --fake-world 8 \
    --workload host-bound --rounds 1 --steps 20
}

bench() { # one rank: no gathers
  local load
  for load in host-bound compute-bound; do
    step_job "$load" 260 --workload $load --rounds 2 --steps 20 --timeline "$OUT/$load.png"
  done
}

offload() { # parameters in host memory; rank 0 of 2
  step_job "fake 2, CPU offload" 200 --fake-world 2 --workload compute-bound --offload \
    --rounds 1 --steps 8
}

example() {
  job "example: train_lm" 200 "$PY" -m torch.distributed.run --standalone --nproc-per-node 1 \
    examples/train_lm.py --verify --steps 150 --out "$WORK/train"
  cp "$WORK/train/loss.png" "$OUT/loss.png" 2>/dev/null
  job "example: train_lm, resumed" 120 "$PY" -m torch.distributed.run --standalone \
    --nproc-per-node 1 examples/train_lm.py --steps 200 --resume --out "$WORK/train"
  job "example: hf_trainer" 120 "$PY" -m torch.distributed.run --standalone \
    --nproc-per-node 1 examples/hf_trainer.py --steps 30 --bf16 --out "$WORK/hf"
}

on_cuda() { # NAME FILE...: all ranks on one GPU
  local name=$1
  shift
  FSDP_C_TEST_DEVICE=cuda FSDP_C_TEST_TIMEOUT_FACTOR=3 pytest_job "$name on cuda" 540 \
    "${WORKERS[@]}" --one-each --tb=short "$@"
}

suite() {
  local files=("$@")
  ((${#files[@]})) || files=(tests/distributed)
  on_cuda suite "${files[@]}"
}

others() {
  on_cuda others tests/fakecuda tests/checkpoint tests/programs tests/integrations \
    tests/huggingface
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True on_cuda "expandable segments" \
    tests/distributed/test_{training_loops,captured_step,memory,fully_shard}.py
}

sanitize() {
  PYTHON=$PY SANITIZER_TIMEOUT_S=110 job "compute-sanitizer" 560 bash tests/cuda/compute_sanitizer.sh
}

if [[ ${MPS:-0} == 1 ]]; then
  export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d || exit 1
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

STEPS=("$@")
((${#STEPS[@]})) || STEPS=(probe build tests)
REST=()
if [[ ${STEPS[0]} == suite ]]; then
  REST=("${STEPS[@]:1}")
  STEPS=(suite)
fi
for step in "${STEPS[@]}"; do
  [[ " ${ALL_STEPS[*]} " == *" $step "* ]] || { echo "no step '$step'"; usage; exit 2; }
done
echo "--- gpu_session ${STEPS[*]} ${REST[*]:-}" | tee -a "$SUMMARY"
for step in "${STEPS[@]}"; do
  if [[ $step != probe && $step != build ]]; then
    cd "$ROOT" && { build || { echo "no build, no $step"; exit 1; }; }
    cd "$TREE" || exit 1
  fi
  "$step" ${REST[@]+"${REST[@]}"}
  cd "$ROOT" || exit 1
done
echo; echo "=== summary"; cat "$SUMMARY"
