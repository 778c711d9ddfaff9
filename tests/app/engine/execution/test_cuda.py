"""The engine over the CUDA backend: on the stand-in driver everywhere, on a real device with marker gpu."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from folio.app.engine import LLM, EngineConfig, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.execution.model_runner import ModelRunner
from folio.app.engine.execution.work_queue import InlineQueue
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.memory import kv_plan
from folio.app.engine.ranks import executor, self_test
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.tensor_parallel.gpu_sharing import SWITCH
from folio.app.errors import ConfigError
from folio.vmem import CudaBackend, KVMemory, MapError, StepDemand, select_backend
from folio.vmem.backends.cuda import CPU
from tests.app.engine.execution.strict_pointers import StrictProvider, strict_copy
from tests.app.engine.tensor_parallel import test_decoding
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, MakeCheckpoint
from tests.processes import until
from tests.vmem.backends.stand_in_driver import StandInDriver
from tests.vmem.small_memory import pages_read

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in (1, 17, 63, 200, 300)]


@pytest.fixture
def use_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], StandInDriver]]:
    """A function that makes engines use a device without a GPU, over the real bindings and a stand-in for the library.
    Its steps finish late, one after the other: what a step may still read must stay mapped. No kernel may be given a
    tensor whose address is a hole, which Triton refuses."""
    drivers: list[StandInDriver] = []

    def use() -> StandInDriver:
        drivers.append(StandInDriver(32 << 20))
        _install(drivers[-1], monkeypatch)
        return drivers[-1]

    yield use
    [driver] = drivers
    driver.finish_work()
    assert driver.leftovers == (0, 0, 0, 0, 0)
    assert driver.violations == []


def _install(driver: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: object, **__: object) -> CudaBackend:
        return CudaBackend(driver=driver, tensor_device=CPU)

    run, ensure = ModelRunner.run, KVMemory.ensure
    select_provider, select_block_copy = executor.select_provider, kv_plan.select_block_copy
    reading: list[set[int]] = [set()]

    def ensure_and_note(memory: KVMemory, demands: Iterable[StepDemand]) -> None:
        demands = list(demands)
        ensure(memory, demands)
        reading[0] = pages_read(memory, demands)

    def launch_and_run(runner: ModelRunner, batch: StepBatch) -> torch.Tensor:
        driver.launch(reading[0])
        if driver.num_running > 2:
            driver.finish_work(1)
        return run(runner, batch)

    monkeypatch.setattr(kv_plan, "select_backend", backend)
    monkeypatch.setattr(self_test, "select_backend", backend)
    monkeypatch.setattr(executor, "select_provider", lambda *args: StrictProvider(select_provider(*args), driver))
    copy = select_block_copy(torch.device("cpu"))
    if copy is not None:
        monkeypatch.setattr(kv_plan, "select_block_copy", lambda device: strict_copy(copy, driver))
    monkeypatch.setattr(KVMemory, "ensure", ensure_and_note)
    monkeypatch.setattr(ModelRunner, "run", launch_and_run)


@pytest.mark.parametrize("lowers", [False, True])
def test_memory_that_nobody_uses_goes_back_to_the_driver(
    lowers: bool, make_checkpoint: MakeCheckpoint, use_device: Callable[[], StandInDriver]
) -> None:
    """Counted in the driver's handles: of an idle engine the anchor page is left; of one whose budget is lowered what
    that allows at most, although prefixes are cached."""
    model_type, settings = ARCHITECTURES["llama"]
    folder, driver = make_checkpoint(model_type, **settings), use_device()
    keep_s = 1000.0 if lowers else 0.0
    shared = {"skip_tokenizer_init": True, "kv_memory_bytes": 4 << 20, "max_model_len": 400}
    with LLM(folder, kv_idle_release_s=keep_s, prefix_cache_release_s=keep_s, **shared) as llm:
        memory, most, left = llm.engine.memory, 0, 1
        llm.engine.submit("a", prompts()[-1], GREEDY)
        while llm.engine.has_work:
            llm.engine.step()
            most = max(most, driver.leftovers[0])
        if lowers:
            assert memory.set_budget(memory.least_budget_bytes, 1) == "deferred"
            left += memory.least_budget_bytes // memory.pages.page_bytes
        assert most > left
        driver.finish_work()
        until(lambda: driver.leftovers[0] <= left, 30.0)
        memory.check_integrity()
        assert memory.held_bytes == (driver.leftovers[0] - 1) * memory.pages.page_bytes


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("view", "layout", "num_layers", "async_scheduling"),
    [
        ("region", "interleaved", 3, "off"),
        ("block_table", "interleaved", 3, "on"),
        ("auto", "per_layer", 3, "on"),
        ("auto", "sliced", 3, "off"),
        ("auto", "sliced", 10, "on"),
        ("region", "sliced", 10, "on"),
        ("auto", "whole", 10, "on"),
    ],
)
def test_the_fake_device_gives_the_same_tokens(
    name: str,
    view: Any,
    layout: Any,
    num_layers: int,
    async_scheduling: str,
    make_checkpoint: MakeCheckpoint,
    use_device: Callable[[], StandInDriver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every layout. Sliced blocks of one layer group share handles unless regions are asked for."""
    model_type, settings = ARCHITECTURES[name]
    folder = make_checkpoint(model_type, **(settings | {"num_hidden_layers": num_layers}))
    shared = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96, "max_model_len": 400}
    with LLM(folder, kv_memory_bytes=4 << 20, kv_view="block_table", **shared) as llm:
        expected = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    use_device()
    monkeypatch.setattr(executor, "ThreadQueue", lambda _: InlineQueue())  # the device has a queue of its own
    shared["async_scheduling"] = async_scheduling
    with LLM(folder, kv_memory_bytes=8 << 20, kv_view=view, kv_layout=layout, **shared) as llm:
        first = llm.engine.memory.groups[0].layout
        tiled = layout in ("sliced", "whole")
        assert (first.extent_blocks > 1) == (tiled and view == "auto" and name == "llama")
        assert layout != "whole" or first.num_slices == 1
        assert layout != "sliced" or first.num_slices == (2 if (name, num_layers) == ("llama", 10) else 1)
        assert generate(llm, prompts()) == expected


@pytest.mark.thirds
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
def test_no_kernel_is_given_the_address_of_a_hole(
    view: Any, make_checkpoint: MakeCheckpoint, use_device: Callable[[], StandInDriver]
) -> None:
    """Triton refuses a tensor that begins at a hole. Homes and regions began with one when block 0 or slot 0 had given
    its page back: after a window had moved on, and after idle release."""
    folder = make_checkpoint("gemma2", **ARCHITECTURES["gemma2"][1])
    shared = {"skip_tokenizer_init": True, "kv_view": view, "max_num_batched_tokens": 96, "max_model_len": 400}
    with LLM(folder, kv_memory_bytes=4 << 20, **shared) as llm:
        expected = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    driver = use_device()
    released = {"kv_idle_release_s": 0.0, "prefix_cache_release_s": 0.0}
    with LLM(folder, kv_memory_bytes=4 << 20, **shared, **released) as llm:
        assert generate(llm, prompts()) == expected  # of Gemma's windows of 48 tokens all but one prompt leave some
        driver.finish_work()
        until(lambda: not llm.engine.report().physical_bytes)
        # One that runs on while others, which have lower slots and blocks, are gone and their pages with them.
        for i, prompt in enumerate(prompts()):
            most = 24 if i < len(prompts()) - 1 else 60
            llm.engine.submit(str(i), prompt, replace(GREEDY, max_tokens=most))
        while llm.engine.has_work:
            llm.engine.step()
            driver.finish_work()
            time.sleep(0.001)  # lets the mapper run
        llm.engine.check_integrity()


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of the prompts, with a check of memory after every step."""
    for i, prompt in enumerate(prompts):
        llm.engine.submit(str(i), prompt, GREEDY)
    tokens: list[list[int]] = [[] for _ in prompts]
    while llm.engine.has_work:
        for delta in llm.engine.step():
            tokens[int(delta.request_id)].extend(delta.token_ids)
        llm.engine.check_integrity()
    return tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_an_error() -> None:
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
    shared["kv_idle_release_s"] = 0.0
    with LLM(folder, device="cuda", kv_memory_bytes=1 << 30, max_model_len=400, **shared) as llm:
        assert [c.token_ids for c in llm.generate(prompts(), GREEDY)] == expected
        llm.engine.check_integrity()
        until(lambda: not llm.engine.report().physical_bytes)


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
@pytest.mark.parametrize(
    ("sharing", "launch", "num_devices"),
    [(None, spawn_ranks, 2), ("gloo", thread_ranks, 1), ("gloo", spawn_ranks, 1), ("nccl", spawn_ranks, 1)],
)
def test_two_ranks_on_real_devices(
    name: str,
    sharing: str | None,
    launch: Launch,
    num_devices: int,
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes with a device each, over NCCL; threads and processes that share one."""
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices")
    if sharing == "nccl" and torch.cuda.nccl.version() < (2, 30):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()}")
    if sharing is not None:
        monkeypatch.setenv(SWITCH, sharing)
    folder = make_checkpoint(name, **ARCHITECTURES[name][1])
    shared = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=400, max_num_batched_tokens=96
    )
    with LLM(folder, device="cpu", skip_tokenizer_init=True, dtype="float32") as llm:
        expected = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    config = replace(shared, device="cuda", kv_memory_bytes=512 << 20, tensor_parallel_size=2)
    engine = Engine(config, launch)
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


LOSE_THE_DEVICE = """
import asyncio, os, sys, time
import torch
from folio.app.engine import AsyncEngine, EngineConfig, SamplingParams
from folio.app.errors import EngineError

engine = AsyncEngine(EngineConfig(
    model=sys.argv[1], device="cuda", skip_tokenizer_init=True, max_model_len=100, kv_memory_bytes=1 << 28
))

async def collect():
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    return [d async for deltas in engine.generate([1, 2, 3], params) for d in deltas]

asyncio.run(collect())
torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]  # an assertion in the kernel
errors, deadline = [], time.monotonic() + 30
while engine.healthy and time.monotonic() < deadline:
    try:
        asyncio.run(collect())
    except EngineError as error:
        errors.append(type(error).__name__)
    time.sleep(0.1)
print(*errors)
print("healthy" if engine.healthy else "stopped", flush=True)
os._exit(0)  # as the replica does
"""


@pytest.mark.gpu
@pytest.mark.processes
def test_a_device_that_is_lost_stops_the_engine(make_checkpoint: MakeCheckpoint) -> None:
    """In a process of its own, whose context is of no use afterwards."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    command = [sys.executable, "-c", LOSE_THE_DEVICE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    first, *others = done.stdout.split()
    assert (first, others[-1]) == ("EngineError", "stopped"), done.stderr[-3000:]
    assert set(others[:-1]) <= {"UnavailableError"}, done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_preemption_on_a_real_device_changes_nothing(policy: Any, make_checkpoint: MakeCheckpoint) -> None:
    """Blocks of 16 tokens are pages of 2 MiB there. Three prompts begin in 14 of them, and grow beyond."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    shared = {"skip_tokenizer_init": True, "max_model_len": 128, "block_tokens": 16, "dtype": "float32"}
    shared["kv_layout"] = "interleaved"
    alike, params = [prompts()[-1][i : i + 60] for i in range(0, 120, 20)], replace(GREEDY, max_tokens=40)
    with LLM(folder, device="cpu", kv_memory_bytes=64 << 20, **shared) as llm:
        expected = [c.token_ids for c in llm.generate(alike, params)]
    with LLM(folder, device="cuda", kv_memory_bytes=14 * 2 << 20, preemption=policy, **shared) as llm:
        assert [c.token_ids for c in llm.generate(alike, params)] == expected
        assert llm.engine.load.take_activity().num_preempted[policy] > 0
        llm.engine.check_integrity()
