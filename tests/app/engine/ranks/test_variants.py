"""Warm-up covers every variant of a kernel.

`python -m tests.app.engine.ranks.test_variants FOLDER` serves a mixed load after the warm-up of a CPU engine whose
attention calls Triton's kernels, too. Triton specialises them as for an H100 and compiles nothing; the launches do
nothing, and tokens come from torch. It prints a line of JSON: the variants of the warm-up's requests alone, of the
whole warm-up, of the load, and those of the load that came late. That takes a process without Triton's interpreter,
which `tests.conftest` chooses when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from folio.app.engine.ranks.variants import step_shapes
from folio.kernels.provider import AttendLayer, AttentionCall, CacheWrite, StoreLayer

if TYPE_CHECKING:
    from tests.conftest import MakeCheckpoint

ROOT = Path(__file__).parents[4]


def test_shapes_fit_the_engine() -> None:
    for max_num_seqs, step_tokens, max_tokens in ((1, 1, 2), (5, 64, 40), (3, 8, 5000), (256, 8192, 131072)):
        shapes = list(step_shapes(max_num_seqs, step_tokens, max_tokens))
        assert len(shapes) == len(set(shapes))
        for shape in shapes:
            assert len(shape) <= max_num_seqs
            assert sum(num_tokens for _, num_tokens in shape) <= max(step_tokens, max_num_seqs)
            assert all(num_computed + num_tokens <= max_tokens for num_computed, num_tokens in shape)
    large = list(step_shapes(256, 8192, 131072))
    assert ((0, 64), (2048, 1)) in large
    assert ((2048, 1), *[(1, 1)] * 255) in large
    assert ((0, 256),) in large


@pytest.mark.processes
@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_no_variant_is_left_for_requests(name: str, checkpoint: MakeCheckpoint) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    folder = checkpoint(name)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.app.engine.ranks.test_variants", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["late"] == []
    assert found["served"] > 8  # the load reached prefill and decode kernels in both views
    # The requests alone would not do, so that this test would notice if the load were too plain.
    assert found["requests"] < found["served"] <= found["warm_up"]


# --- in a process without the interpreter ---------------------------------------------------------------------------


def serve(folder: str) -> dict[str, Any]:
    import triton

    from folio.app.config.engine import EngineConfig
    from folio.app.engine.engine import Engine
    from folio.app.engine.ranks import executor
    from folio.app.engine.startup import warm_up, warm_up_variants
    from folio.kernels.reference import SdpaProvider
    from folio.kernels.triton.provider import TritonProvider
    from tests.kernels.triton.no_device import use_no_device

    class Both(TritonProvider):
        """Launches Triton's kernels, which do nothing, and gives torch's results."""

        def __init__(self) -> None:
            with patch.object(torch.cuda, "is_available", lambda: True):
                super().__init__()
            self._sdpa = SdpaProvider()

        def unsupported(self, call: AttentionCall) -> str | None:
            return None

        def run_write(self, new: CacheWrite) -> None:
            self.prepare_write(new)(new.key, new.value, new.key_cache, new.value_cache)

        def run_attend(self, call: AttentionCall) -> torch.Tensor:
            return self.prepare_attend(call)(call.query, call.key_cache, call.value_cache)

        def prepare_write(self, new: CacheWrite) -> StoreLayer:
            launch, store = super().prepare_write(new), self._sdpa.prepare_write(new)
            return lambda *tensors: (launch(*tensors), store(*tensors))[1]

        def prepare_attend(self, call: AttentionCall) -> AttendLayer:
            launch, attend = super().prepare_attend(call), self._sdpa.prepare_attend(call)
            return lambda *tensors: (launch(*tensors), attend(*tensors))[1]

    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        seen.add((fn.name, key))
        return True  # it need not be compiled

    use_no_device()
    triton.knobs.runtime.jit_cache_hook = note
    config = EngineConfig(
        model=folder,
        skip_tokenizer_init=True,
        kv_memory_bytes=32 << 20,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        max_model_len=1000,
        block_tokens=16,
    )
    with patch.object(executor, "select_provider", lambda *_, **__: Both()):
        engine = Engine(config)
    try:
        seen.clear()
        warm_up(engine)  # on a CPU, requests alone
        requests = len(seen)
        warm_up_variants(engine)
        early = set(seen)
        seen.clear()
        _serve_mixed_load(engine)
        memory = engine.memory
        memory.policy.options = replace(memory.policy.options, max_mappings=1)  # new sequences have no region
        _serve_mixed_load(engine)
        assert engine.report().demotions > 0
        engine.check_integrity()
        return {
            "requests": requests,
            "warm_up": len(early),
            "served": len(seen),
            "late": sorted(name for name, _ in seen - early),
        }
    finally:
        engine.close()


def _serve_mixed_load(engine: Any) -> None:
    """Prompts of all lengths, one after the other and many at once, chunked, cached, decoding beside each other."""
    from folio.app.engine import SamplingParams

    lengths = [1, 2, 3, 5, 9, 17, 33, 65, 129, 300, 700]
    for together in ([[n] for n in lengths], [lengths], [[700, 1, 1, 700, 40]], [[5] * 12]):
        for round_, prompts in enumerate(together):
            for i, length in enumerate(prompts):
                params = SamplingParams(max_tokens=3 + i, temperature=i % 2, seed=1, ignore_eos=True)
                engine.submit(f"{round_} {i}", [(7 * length + k) % 500 for k in range(length)], params)
            while engine.has_work:
                for delta in engine.step():
                    assert delta.error is None, delta.error


if __name__ == "__main__":
    print(json.dumps(serve(sys.argv[1])))
