#!/usr/bin/env bash
# Everything the project has for a CUDA machine, without Ray, in under 9 minutes; ends in a short table.
# Needs python3 with torch, transformers, cuda-bindings and pytest; hypothesis and matplotlib are used where they are.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
rows=()

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "==> $name"
  if timeout "$limit" "$@"; then rows+=("ok      $((SECONDS - start))s  $name"); else rows+=("FAILED  $((SECONDS - start))s  $name"); fi
}

kernel_tests() { # in as many processes as there are processors, because most of the time goes into compiling
  local count pids=() status=0
  count=$(nproc)
  for ((i = 0; i < count; i++)); do
    "$python" -m pytest -q -p no:cacheprovider -m gpu tests/kernels --shard "$i/$count" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || { code=$?; ((code == 5)) || status=1; }; done # 5: no tests in this one
  return $status
}
export -f kernel_tests
export python

"$python" - <<'PY'
import torch
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
PY
step "tests on the device: kernels" 150 bash -c kernel_tests
step "tests on the device: backend and engine" 100 "$python" -m pytest -q -m gpu tests/vmem tests/app/engine
step "tests of the memory over the fake driver" 70 "$python" -m pytest -q -x tests/vmem -m "not gpu"
step "benchmark: attention" 120 "$python" -m benchmarks.attention --quick --device cuda
step "benchmark: mapping" 50 "$python" -m benchmarks.mapping --quick --device cuda
step "benchmark: preemption" 40 "$python" -m benchmarks.preemption --quick --device cuda

printf '\n%s\n' "${rows[@]}"
[[ "${rows[*]}" != *FAILED* ]]
