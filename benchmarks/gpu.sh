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

"$python" - <<'PY'
import torch
print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
PY
step "tests on the device: backend and engine" 150 "$python" -m pytest -q -m gpu tests/vmem tests/kernels tests/app/engine
step "tests of the memory over the fake driver" 130 "$python" -m pytest -q tests/vmem -m "not gpu"
step "benchmark: mapping" 150 "$python" -m benchmarks.mapping --device cuda
step "benchmark: preemption" 90 "$python" -m benchmarks.preemption --quick --device cuda

printf '\n%s\n' "${rows[@]}"
[[ "${rows[*]}" != *FAILED* ]]
