"""The engine over the CUDA backend: on the stand-in driver everywhere, on a real device with marker gpu."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from folio.app.engine import LLM, EngineConfig, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.execution.work_queue import InlineQueue
from folio.app.engine.ranks import executor
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.tensor_parallel.gpu_sharing import SWITCH
from folio.app.errors import ConfigError
from folio.vmem import MapError, select_backend
from tests.app.engine.runs import on_gpu, run
from tests.app.engine.tensor_parallel import decoding
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint, tokens
from tests.processes import until
from tests.vmem.backends.stand_in_driver import StandInDriver

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [tokens(length, length) for length in (1, 17, 63, 200, 300)]


def generate(folder: Any, **settings: Any) -> list[list[int]]:
    """Greedy tokens of the prompts, with a check of memory after every step."""
    shared = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96, "max_model_len": 400}
    with LLM(folder, **({"kv_memory_bytes": 4 << 20} | shared | settings)) as llm:
        return run(llm.engine, PROMPTS, GREEDY)


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
    checkpoint: MakeCheckpoint,
    use_device: Callable[[], StandInDriver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every layout. Sliced blocks of one layer group share handles unless regions are asked for."""
    folder = checkpoint(name, num_hidden_layers=num_layers)
    expected = generate(folder, kv_view="block_table")
    use_device()
    monkeypatch.setattr(executor, "ThreadQueue", lambda _: InlineQueue())  # the device has a queue of its own
    shared = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96, "max_model_len": 400}
    shared |= {"kv_view": view, "kv_layout": layout, "async_scheduling": async_scheduling}
    with LLM(folder, kv_memory_bytes=8 << 20, **shared) as llm:
        first = llm.engine.memory.groups[0].layout
        tiled = layout in ("sliced", "whole")
        assert (first.extent_blocks > 1) == (tiled and view == "auto" and name == "llama")
        assert layout != "whole" or first.num_slices == 1
        assert layout != "sliced" or first.num_slices == (2 if (name, num_layers) == ("llama", 10) else 1)
        assert run(llm.engine, PROMPTS, GREEDY) == expected


@pytest.mark.thirds
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
def test_no_kernel_is_given_the_address_of_a_hole(
    view: Any, checkpoint: MakeCheckpoint, use_device: Callable[[], StandInDriver]
) -> None:
    """Triton refuses a tensor that begins at a hole. Homes and regions began with one when block 0 or slot 0 had given
    its page back: after a window had moved on, and after idle release."""
    folder = checkpoint("gemma2")
    shared = {"skip_tokenizer_init": True, "kv_view": view, "max_num_batched_tokens": 96, "max_model_len": 400}
    expected = generate(folder, kv_view=view)
    driver = use_device()
    released = {"kv_idle_release_s": 0.0, "prefix_cache_release_s": 0.0}
    with LLM(folder, kv_memory_bytes=4 << 20, **shared, **released) as llm:
        assert (
            run(llm.engine, PROMPTS, GREEDY) == expected
        )  # of Gemma's windows of 48 tokens all but one prompt leave some
        driver.finish_work()
        until(lambda: not llm.engine.report().physical_bytes)
        assert driver.leftovers[0] <= 1, "more than the anchor page"
        # One that runs on while others, which have lower slots and blocks, are gone and their pages with them.
        for i, prompt in enumerate(PROMPTS):
            most = 24 if i < len(PROMPTS) - 1 else 60
            llm.engine.submit(str(i), prompt, replace(GREEDY, max_tokens=most))
        while llm.engine.has_work:
            llm.engine.step()
            driver.finish_work()
            time.sleep(0.001)  # lets the mapper run
        llm.engine.check_integrity()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        LLM("builtin", device="cuda")
    with pytest.raises(MapError, match="no CUDA device"):
        select_backend(torch.device("cuda"), capacity_bytes=1 << 20)
    with pytest.raises(MapError, match="no memory backend for mps"):
        select_backend(torch.device("mps"), capacity_bytes=1 << 20)


@on_gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "bamba"])
@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
def test_a_real_device_gives_the_same_tokens(name: str, view: Any, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(name)
    shared = {"kv_view": view, "dtype": "float32", "prefix_cache_release_s": 0.0}
    expected = generate(folder, device="cpu", kv_memory_bytes=64 << 20, **shared)
    shared |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 96, "kv_idle_release_s": 0.0}
    with LLM(folder, device="cuda", kv_memory_bytes=1 << 30, max_model_len=400, **shared) as llm:
        assert run(llm.engine, PROMPTS, GREEDY) == expected
        until(lambda: not llm.engine.report().physical_bytes)


@on_gpu
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_every_way_of_decoding_on_a_device(speculation: str, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    expected = decoding.generate(folder)
    settings = {"device": "cuda", "kv_memory_bytes": 1 << 30, "speculation": speculation}
    assert decoding.generate(folder, **settings) == expected


@on_gpu
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
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes with a device each, over NCCL; threads and processes that share one."""
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices")
    if sharing == "nccl" and torch.cuda.nccl.version() < (2, 30):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()}")
    if sharing is not None:
        monkeypatch.setenv(SWITCH, sharing)
    folder = checkpoint(name)
    expected = generate(folder, device="cpu", dtype="float32")
    config = EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=400,
        max_num_batched_tokens=96,
        device="cuda",
        kv_memory_bytes=512 << 20,
        tensor_parallel_size=2,
    )
    engine = Engine(config, launch)
    try:
        assert run(engine, PROMPTS, GREEDY) == expected
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


@on_gpu
@pytest.mark.processes
def test_a_device_that_is_lost_stops_the_engine(checkpoint: MakeCheckpoint) -> None:
    """In a process of its own, whose context is of no use afterwards."""
    folder = checkpoint("llama")
    command = [sys.executable, "-c", LOSE_THE_DEVICE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    first, *others = done.stdout.split()
    assert (first, others[-1]) == ("EngineError", "stopped"), done.stderr[-3000:]
    assert set(others[:-1]) <= {"UnavailableError"}, done.stdout


@on_gpu
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_preemption_on_a_real_device_changes_nothing(policy: Any, checkpoint: MakeCheckpoint) -> None:
    """Blocks of 16 tokens are pages of 2 MiB there. Three prompts begin in 14 of them, and grow beyond."""
    folder = checkpoint("llama")
    shared = {"skip_tokenizer_init": True, "max_model_len": 128, "block_tokens": 16, "dtype": "float32"}
    shared["kv_layout"] = "interleaved"
    alike, params = [PROMPTS[-1][i : i + 60] for i in range(0, 120, 20)], replace(GREEDY, max_tokens=40)
    with LLM(folder, device="cpu", kv_memory_bytes=64 << 20, **shared) as llm:
        expected = [c.token_ids for c in llm.generate(alike, params)]
    with LLM(folder, device="cuda", kv_memory_bytes=14 * 2 << 20, preemption=policy, **shared) as llm:
        assert [c.token_ids for c in llm.generate(alike, params)] == expected
        assert llm.engine.load.take_activity().num_preempted[policy] > 0
        llm.engine.check_integrity()
