"""The engine over the CUDA backend: on the fake driver everywhere, on a real device with marker gpu."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.engine import LLM, EngineConfig, SamplingParams, kv_plan
from app.engine.batch import StepBatch
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.engine.tensor_parallel import communicator
from app.engine.tensor_parallel.processes import spawn_ranks
from app.errors import ConfigError
from tests.app.engine.tensor_parallel import test_decoding
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint
from tests.vmem.fake_driver import FakeDriver
from tests.vmem.small_memory import pages_read
from vmem import CudaBackend, Demand, KVMemory, MapError, select_backend
from vmem.dlpack import CPU

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in (1, 17, 63, 200, 300)]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("view", ["region", "block_table"])
def test_the_fake_device_gives_the_same_tokens(
    name: str, view: Any, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps finish late, one after the other: what a step may still read stays mapped, and nothing is left over."""
    model_type, settings = ARCHITECTURES[name]
    folder = make_checkpoint(model_type, **settings)
    shared = {"skip_tokenizer_init": True, "kv_view": view, "max_num_batched_tokens": 96, "max_model_len": 400}
    with LLM(folder, kv_memory_bytes=4 << 20, **shared) as llm:
        expected = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    driver = FakeDriver(16 << 20)

    def fake(*_: object, **__: object) -> CudaBackend:
        return CudaBackend(driver=driver, tensor_device=CPU)

    run, ensure = ModelRunner.run, KVMemory.ensure
    reading: list[set[int]] = [set()]

    def ensure_and_note(memory: KVMemory, demands: Iterable[Demand]) -> None:
        demands = list(demands)
        ensure(memory, demands)
        of_the_engine = isinstance(memory._backend, CudaBackend)  # and not of the self-test
        reading[0] = pages_read(memory, demands) if of_the_engine else set()

    def launch_and_run(runner: ModelRunner, batch: StepBatch) -> torch.Tensor:
        driver.launch(reading[0])
        return run(runner, batch)

    monkeypatch.setattr(kv_plan, "select_backend", fake)
    monkeypatch.setattr(KVMemory, "ensure", ensure_and_note)
    monkeypatch.setattr(ModelRunner, "run", launch_and_run)
    with LLM(folder, kv_memory_bytes=4 << 20, **shared) as llm:
        for i, prompt in enumerate(prompts()):
            llm.engine.submit(str(i), prompt, GREEDY)
        actual: dict[int, list[int]] = {}
        while llm.engine.has_work:
            for delta in llm.engine.step():
                actual.setdefault(int(delta.request_id), []).extend(delta.token_ids)
            if driver.num_running > 2:
                driver.finish_work(1)
            llm.engine.check_integrity()
        assert [actual[i] for i in range(len(expected))] == expected
        driver.finish_work()
    assert driver.leftovers == (0, 0, 0, 0, 0)
    assert not driver.violations


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_never_silently_something_else() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        LLM("builtin", device="cuda")
    with pytest.raises(MapError, match="no CUDA device"):
        select_backend(torch.device("cuda"), capacity_bytes=1 << 20)
    with pytest.raises(MapError, match="no memory backend for mps"):
        select_backend(torch.device("mps"), capacity_bytes=1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "bamba"])
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
def test_a_real_device_gives_the_same_tokens(name: str, view: Any, make_checkpoint: MakeCheckpoint) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = make_checkpoint(name, **(HYBRIDS[name] if name in HYBRIDS else ARCHITECTURES[name][1]))
    shared = {
        "skip_tokenizer_init": True,
        "kv_view": view,
        "max_num_batched_tokens": 96,
        "dtype": "float32",
        "prefix_cache_release_s": 0.0,
    }
    with LLM(folder, device="cpu", kv_memory_bytes=64 << 20, **shared) as llm:
        expected = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    with LLM(folder, device="cuda", kv_memory_bytes=1 << 30, max_model_len=400, **shared) as llm:
        assert [c.token_ids for c in llm.generate(prompts(), GREEDY)] == expected
        llm.engine.check_integrity()
        deadline = time.monotonic() + 10
        while llm.engine.report().physical_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_every_way_of_decoding_on_a_device(speculation: str, make_checkpoint: MakeCheckpoint) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    expected = test_decoding.generate(folder)
    settings = {"device": "cuda", "kv_memory_bytes": 1 << 30, "speculation": speculation}
    assert test_decoding.generate(folder, **settings) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("over_nccl", [True, False])
def test_two_ranks_on_real_devices(
    name: str, over_nccl: bool, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes with a device each; or threads that share one, which NCCL would not have."""
    if torch.cuda.device_count() < 1 + over_nccl:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices")
    folder = make_checkpoint(name, **ARCHITECTURES[name][1])
    shared = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=400, max_num_batched_tokens=96
    )
    with LLM(folder, device="cpu", skip_tokenizer_init=True, dtype="float32") as llm:
        expected = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    monkeypatch.setattr(communicator, "uses_nccl", lambda _: over_nccl)
    config = replace(shared, device="cuda", kv_memory_bytes=512 << 20, tensor_parallel_size=2)
    engine = Engine(config, spawn_ranks if over_nccl else thread_ranks)
    try:
        for i, prompt in enumerate(prompts()):
            engine.submit(str(i), prompt, GREEDY)
        actual: list[list[int]] = [[] for _ in expected]
        while engine.has_work:
            for delta in engine.step():
                actual[int(delta.request_id)].extend(delta.token_ids)
        assert actual == expected
        engine.check_integrity()
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_preemption_on_a_real_device_changes_nothing(policy: Any, make_checkpoint: MakeCheckpoint) -> None:
    """Blocks of 16 tokens are pages of 2 MiB there; 14 of them are half of what the prompts want."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    shared = {"skip_tokenizer_init": True, "max_model_len": 128, "block_tokens": 16, "dtype": "float32"}
    short = [prompt[:70] for prompt in prompts()]
    with LLM(folder, device="cpu", kv_memory_bytes=64 << 20, **shared) as llm:
        expected = [c.token_ids for c in llm.generate(short, GREEDY)]
    with LLM(folder, device="cuda", kv_memory_bytes=14 * 2 << 20, preemption=policy, **shared) as llm:
        assert [c.token_ids for c in llm.generate(short, GREEDY)] == expected
        assert llm.engine._scheduler.num_preempted[policy] > 0
        llm.engine.check_integrity()
