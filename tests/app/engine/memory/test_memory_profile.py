"""The plan of a device's memory: measured by a probe of an allocator, here a fake one, and kept by the KV memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.memory.kv_plan import build_memory
from folio.app.engine.memory.memory_profile import GRAPH_BYTES, HEADROOM_BYTES, DevicePlan, measure, plan_device
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.ranks.processes import spawn_ranks
from folio.app.errors import ConfigError, UnavailableError
from tests.app.engine.runs import on_gpu, run
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import VOCAB_SIZE, MakeCheckpoint
from tests.vmem.backends.stand_in_driver import StandInDriver

GIB = 1 << 30
CONFIG = EngineConfig(model="builtin").on_device("cuda")


@dataclass
class FakeMemory:
    """A device with memory of other processes, and an allocator that caches what it frees."""

    total: int = 80 * GIB
    others: int = 0
    held: int = 16 * GIB
    cached: int = 3 * GIB  # left over from loading
    most: int = field(default=0, init=False)

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.others - self.reserved(), self.total

    def allocated(self) -> int:
        return self.held

    def reserved(self) -> int:
        return self.held + self.cached

    def restart_peak(self) -> None:
        self.most = self.held

    def peak(self) -> int:
        return self.most

    def give_back(self) -> None:
        self.cached = 0

    def step(self, num_bytes: int) -> Callable[[int, int], None]:
        """A step that takes so many bytes."""

        def run(num_tokens: int, num_logits: int) -> None:
            assert (num_tokens, num_logits) == (8192, 256)
            if self.held + num_bytes > self.total - self.others:
                raise torch.OutOfMemoryError("out of memory")
            self.most = max(self.most, self.held + num_bytes)
            self.cached = num_bytes

        return run


def test_the_cache_gets_what_the_measured_step_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "folio.app.engine.memory.memory_profile")
    memory = FakeMemory()
    memory.most = 70 * GIB  # loading's peak does not count
    plan = measure(CONFIG, memory, memory.step(5 * GIB))
    assert (plan.weight_bytes, plan.activation_bytes, plan.other_bytes) == (16 * GIB, 5 * GIB, 0)
    assert plan.kv_bytes == 72 * GIB - 16 * GIB - 5 * GIB - GRAPH_BYTES - HEADROOM_BYTES
    assert memory.cached == 0  # the KV memory can take it
    assert "KV cache 49.00" in caplog.text


@pytest.mark.parametrize(("others", "utilization", "left"), [(8, 0.9, 72), (20, 0.9, 60), (20, 0.5, 40), (0, 1.0, 80)])
def test_memory_of_other_processes_is_not_taken(others: int, utilization: float, left: int) -> None:
    config = EngineConfig(model="builtin", gpu_memory_utilization=utilization).on_device("cuda")
    memory = FakeMemory(others=others * GIB)
    plan = measure(config, memory, memory.step(5 * GIB))
    assert plan.other_bytes == others * GIB
    assert plan.kv_bytes == (left - 16 - 5) * GIB - GRAPH_BYTES - HEADROOM_BYTES
    assert plan.kv_bytes + plan.activation_bytes + GRAPH_BYTES + HEADROOM_BYTES <= memory.free_and_total()[0]


def failing(error: BaseException, cause: BaseException | None = None) -> Callable[[int, int], None]:
    def run(num_tokens: int, num_logits: int) -> None:
        raise error from cause

    return run


A_STEP = (
    "a step of max_num_batched_tokens 8192 and max_num_seqs 256 does not fit beside 20.00 GiB of weights on a "
    "device of 24.00 GiB, of which 0.00 are outside of torch; lower these settings"
)
A_CACHE = r"gpu_memory_utilization is 0.9, which .* weights 16.00, activations 5.00, .* max_num_batched_tokens \(8192\)"
NO_MEMORY = torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(
    ("memory", "run", "error", "match"),
    [
        (FakeMemory(total=24 * GIB, held=20 * GIB), None, ConfigError, A_STEP),
        (FakeMemory(total=24 * GIB, held=16 * GIB), None, ConfigError, A_CACHE),
        # Ranks whose forward has failed are ended; the cause of that is rank 0's own error.
        (FakeMemory(), failing(UnavailableError("a step failed"), NO_MEMORY), ConfigError, "does not fit"),
        (FakeMemory(), failing(UnavailableError("rank 1 died")), UnavailableError, "rank 1 died"),
        (FakeMemory(), failing(RuntimeError("shapes")), RuntimeError, "shapes"),
    ],
)
def test_what_does_not_fit_names_the_settings(
    memory: FakeMemory, run: Callable[[int, int], None] | None, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        measure(CONFIG, memory, run or memory.step(5 * GIB))


@pytest.mark.parametrize(
    ("limit", "others", "warning"),
    [
        (40, 0, None),
        (57, 0, None),  # the utilization does not count
        (57, 10, f"the KV cache may take {57 * GIB} bytes, of which {47 * GIB} are free now"),
    ],
)
def test_a_configured_cache_is_measured_against_the_whole_device(
    limit: int, others: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: with `kv_memory_bytes`, also where replicas share it, nothing was measured, and a step ran out of
    memory once the cache had grown. What other processes have now may be given back, and is a warning only."""
    config = EngineConfig(model="builtin", kv_memory_bytes=limit * GIB).on_device("cuda")
    memory = FakeMemory(others=others * GIB)
    plan = measure(config, memory, memory.step(5 * GIB))
    assert (plan.kv_bytes, plan.beside_bytes) == (limit * GIB, (16 + 5 + 1 + 1) * GIB)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ([warning] if warning else [])
    more = EngineConfig(model="builtin", kv_memory_bytes=58 * GIB).on_device("cuda")
    most = f"kv_memory_bytes or shared_kv_memory_bytes is {58 * GIB}; at most {57 * GIB} fit .* max_num_batched_tokens"
    with pytest.raises(ConfigError, match=most):
        measure(more, memory, memory.step(5 * GIB))


def test_a_cpu_has_no_profile() -> None:
    unused: Any = None
    assert plan_device(EngineConfig(model="builtin").on_device("cpu"), unused) is None


def test_each_model_with_graphs_has_memory_for_them() -> None:
    draft: dict[str, Any] = {"speculation": "draft", "draft_model": "builtin"}
    for settings, captures, expected in (({}, True, 1), ({}, False, 0), (draft, True, 2)):
        executor: Any = SimpleNamespace(captures=captures, run_largest=lambda _, rows: torch.zeros(rows, 8))
        plan = plan_device(EngineConfig(model="builtin", **settings).on_device("cuda"), executor, FakeMemory)
        assert plan is not None
        assert plan.graph_bytes == expected * GRAPH_BYTES


def make_executor(folder: str, *, ranks: int = 1, **settings: Any) -> Executor:
    config = EngineConfig(model=folder, skip_tokenizer_init=True, tensor_parallel_size=ranks, num_threads=1, **settings)
    return Executor(config.on_device("cpu"), spawn_ranks if ranks == 1 else thread_ranks)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bamba", "qwen3_next"])
def test_the_largest_step_runs_without_a_cache(name: str, checkpoint: MakeCheckpoint) -> None:
    """Of more tokens than the model's positions, too."""
    with closing(make_executor(str(checkpoint(name)), adapter_dir=str(checkpoint(name)))) as executor:
        logits = executor.run_largest(executor.model.max_positions + 40, 7)
    assert logits.shape == (7, VOCAB_SIZE)
    assert logits.isfinite().all()


def test_the_cache_stays_attached(checkpoint: MakeCheckpoint) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    settings = {"skip_tokenizer_init": True, "num_threads": 1, "kv_memory_bytes": 4 << 20, "prefix_cache": False}
    with LLM(checkpoint("bamba"), **settings) as llm:
        before = run(llm.engine, [[5, 6, 7]], params)
        llm.engine.executor.run_largest(60, 2)
        assert run(llm.engine, [[5, 6, 7]], params) == before


def test_all_ranks_run_the_largest_step(checkpoint: MakeCheckpoint) -> None:
    logits = []
    for ranks in (1, 2):
        with closing(make_executor(str(checkpoint("llama")), ranks=ranks, dtype="float32")) as executor:
            logits.append(executor.run_largest(50, 3))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("capacity", "share", "most"), [(64 << 20, 1.0, 16), (64 << 20, 0.25, 4), (24 << 20, 1.0, 16)])
def test_the_kv_memory_keeps_to_the_plan(
    capacity: int, share: float, most: int, checkpoint: MakeCheckpoint, use_driver: Callable[..., None]
) -> None:
    """And to what the device has: of several ranks, one may have less than the plan's."""
    use_driver(StandInDriver(capacity))
    plan = DevicePlan(64 << 20, 1.0, 30 << 20, 8 << 20, graph_bytes=4 << 20, headroom_bytes=6 << 20)
    config = EngineConfig(model="builtin").on_device("cpu")
    with closing(make_executor(str(checkpoint("llama")))) as executor:
        memory = build_memory(config, executor.model, executor.layers, share=share, plan=plan)
        budget = memory.report().budget_bytes
        memory.close()
    most_bytes = min(most << 20, capacity - (12 << 20))
    assert most_bytes - (1 << 20) < budget <= most_bytes


@on_gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_the_plan_of_a_real_device(kv_dtype: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "folio.app.engine.memory.memory_profile")
    with LLM("builtin", device="cuda", kv_dtype=kv_dtype, gpu_memory_utilization=0.5) as llm:
        [record] = [record for record in caplog.records if record.name == "folio.app.engine.memory.memory_profile"]
        assert record.getMessage().startswith("device memory: of ")
        report, (_, total) = llm.engine.report(), torch.cuda.mem_get_info()
        assert 0 < report.budget_bytes < 0.5 * total - GRAPH_BYTES - HEADROOM_BYTES
        assert len(llm.generate(["The moon is"], SamplingParams(max_tokens=8, temperature=0))[0].token_ids) > 0
