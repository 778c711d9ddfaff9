"""A shelf of tiny models: each gives the tokens that it gives alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from folio.app.config.shelf import SLO, ModelConfig
from folio.app.engine.engine import Engine
from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import (
    ContextLengthError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from folio.app.shelf import control, turns
from folio.app.shelf.allocation import Allocation
from folio.app.shelf.shelf import Shelf
from tests.app.shelf.shelves import (
    GREEDY,
    KV_BYTES,
    LONG,
    MODELS,
    SWAP_BYTES,
    Outputs,
    TinyModels,
    asleep,
    control_of,
    device_of,
    in_step_thread,
    outputs,
    outputs_of,
    put_to_sleep,
    served,
    sleep_now,
    stream_of,
)
from tests.conftest import tokens
from tests.processes import until_async

SHORT = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
PARALLEL = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=12, n=2, best_of=3, use_beam_search=True, temperature=0, ignore_eos=True)
STOPPED = SamplingParams(max_tokens=30, temperature=1.0, seed=1, stop=("a", "e", "o"))
EMBED = {"pooling": PoolingParams()}

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def requests_of(name: str) -> list[tuple[list[int], SamplingParams, dict[str, Any]]]:
    if name == "embeds":
        return [(tokens(n, n), SamplingParams(max_tokens=1), EMBED) for n in (3, 40, 90)]
    options: list[dict[str, Any]] = [{}, {"adapter": "red"}, {"adapter": "blue"}] if name == "lora" else [{}]
    sampled: Sequence[SamplingParams] = (SHORT, SAMPLED, STOPPED)
    if name not in ("ngram", "draft"):
        sampled = (*sampled, PARALLEL, BEAMS)
    return [(tokens(5 + 13 * i, i), params, some) for some in options for i, params in enumerate(sampled)]


async def expected(models: TinyModels, name: str) -> list[Outputs]:
    return [await models.alone(name, *case[:2], **case[2]) for case in requests_of(name)]


async def actual(shelf: Shelf, name: str) -> list[Outputs]:
    return await asyncio.gather(*(outputs(shelf.model(name), *case[:2], **case[2]) for case in requests_of(name)))


async def test_all_kinds_of_models_share_memory_for_a_few(models: TinyModels) -> None:
    alone = {name: await expected(models, name) for name in MODELS}
    async with models.shelf(*MODELS, memory_of=("llama", "bamba")) as shelf:
        together = await asyncio.gather(*(actual(shelf, name) for name in MODELS))
        await shelf.check_integrity()
        assert dict(zip(MODELS, together, strict=True)) == alone
        assert sum(status.num_evictions for status in shelf.statuses()) > 0


@pytest.mark.parametrize("kind", ["own device", "shared device"])
async def test_one_model_is_served_alike_on_its_own_and_on_a_shared_device(models: TinyModels, kind: str) -> None:
    alone, is_own = await expected(models, "lora"), kind == "own device"
    memory_bytes = None if is_own else models.memory_for("lora", room_bytes=8 << 20, beside=["llama"])
    folder = models.adapter("lora", "red")
    gone = AdapterSource("other", str(folder), files_version(folder), "of older settings")  # a registry outlives them
    loaded = [gone, AdapterSource("loaded", str(folder), files_version(folder))]
    config = ModelConfig(name="lora", engine=models.engine("lora", kv_memory_bytes=8 << 20))
    async with models.opened([config], memory_bytes, loaded=loaded) as shelf:
        model = shelf.model("lora")
        assert (model.state, shelf.device_status() is None) == (("awake", True) if is_own else ("new", False))
        assert await actual(shelf, "lora") == alone
        assert await outputs(model, [1, 2], GREEDY, adapter="loaded") == await outputs(
            model, [1, 2], GREEDY, adapter="red"
        )
        plain = await outputs(model, [1, 2], GREEDY)
        await shelf.check_integrity()
        shelf.check()
        [status] = shelf.statuses()
        assert (status.state, status.num_wakes, status.wake_s, status.error) == ("awake", 1, 0, None)
        assert shelf.gpu_memory() is None
        with pytest.raises(RequestError, match="already"):
            shelf.add(config)
        if is_own:
            with pytest.raises(RequestError, match="cannot share its device"):
                shelf.add(models.config("llama"))
            assert shelf.set_budget(6 << 20, 1) in ("applied", "deferred")
        else:
            shelf.add(models.config("llama"))
            assert len((await outputs(shelf.model("llama"), [1, 2], GREEDY))[0]) == 24
            with pytest.raises(RequestError, match="budgets from device_memory_bytes"):
                shelf.set_budget(6 << 20, 1)
        running = asyncio.create_task(outputs(model, [1, 2], LONG))
        await until_async(lambda: model.status.num_running > 0)
        engine = await model.ready()
        engine.stop()
        with pytest.raises(UnavailableError):
            await running
        if not is_own:  # it is loaded again
            await until_async(lambda: served(shelf, "lora", plain))
        assert shelf.healthy is not is_own
    with pytest.raises(UnavailableError, match="send the request again"):
        shelf.check()
    with pytest.raises(UnavailableError, match="the server is stopping"):
        shelf.add(config)


async def test_weights_are_read_ahead_while_requests_wait_for_them(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[tuple[tuple[str, ...], bool]] = []
    alone = await expected(models, "llama")
    async with models.shelf("llama") as shelf:
        await shelf.model("llama").ready()
        reads = control_of(shelf)._read_ahead
        monkeypatch.setattr(reads, "want", lambda m, *, beside_steps: wanted.append((tuple(m), beside_steps)))
        await put_to_sleep(shelf, "llama")
        with asleep(shelf, "llama"):
            task = asyncio.create_task(actual(shelf, "llama"))
            await until_async(lambda: (("llama",), False) in wanted, 30.0)
        assert await task == alone
        assert wanted[-1][0] == ()


async def test_a_model_without_memory_beside_its_weights_is_refused(models: TinyModels) -> None:
    """Regression: it was loaded again and again, and its requests waited for ever."""
    async with models.shelf("llama", room_bytes=4096, deadline_s=20) as shelf:
        with pytest.raises(UnavailableError, match=r"the device has \d+ bytes for .* raise device_memory_bytes"):
            await outputs(shelf.model("llama"), [1, 2], GREEDY)


async def test_an_added_model_has_its_swap_space(models: TinyModels) -> None:
    """Regression: the bound of all models together was that of the models of the settings."""
    async with models.shelf() as shelf:
        for swap_bytes, most_bytes in ((1 << 20, 1 << 20), (1 << 21, 1 << 21), (1 << 19, 1 << 21)):
            shelf.add(ModelConfig(name=f"{swap_bytes}", engine=models.engine("llama", swap_bytes=swap_bytes)))
            assert device_of(shelf).shared.pages.swap_space.most_bytes == most_bytes


async def test_requests_of_two_event_loops(models: TinyModels) -> None:
    names = ["llama", "qwen3"]
    alone = {name: await models.alone(name, [3, 2], GREEDY) for name in names}

    async def give_up(shelf: Shelf, name: str) -> None:
        tasks = [asyncio.create_task(outputs(shelf.model(name), [3, 2], LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(tasks) == 3

    async def several(shelf: Shelf) -> None:
        for name in (*names, *names):
            found = await asyncio.gather(*(outputs(shelf.model(name), [3, 2], GREEDY) for _ in range(3)))
            assert found == [alone[name]] * 3

    async with models.shelf(*names, memory_of=["qwen3"], room_bytes=KV_BYTES // 4) as shelf:
        await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(several(shelf))) for _ in range(2)))
        for name in names:  # a loop that ends while its requests wait
            await asyncio.to_thread(lambda name=name: asyncio.run(give_up(shelf, name)))
        await several(shelf)


async def test_models_share_the_swap_space(models: TinyModels) -> None:
    """Regression: each had `swap_bytes` of host memory for its preempted requests, however many models there were."""
    names, prompt = ("llama", "qwen3", "gemma2"), tokens(20, 1)
    alone = {name: await models.alone(name, prompt, LONG) for name in names}
    configs = [ModelConfig(name=name, engine=models.engine(name, preemption="swap")) for name in names]
    async with models.shelf(*configs, memory_of=names, room_bytes=3 * KV_BYTES) as shelf:
        space = device_of(shelf).shared.pages.swap_space
        assert space.most_bytes == SWAP_BYTES
        memories = [(await shelf.model(name).ready()).driver.engine.memory for name in names]

        def put_all_to_sleep() -> None:
            owned = [memory.swapping.num_bytes(list(memory.tables.sequences)) for memory in memories]
            space.most_bytes = sum(owned) * 2 // 3
            for name in names:
                sleep_now(shelf, name)

        streams = {name: stream_of(shelf.model(name), prompt, LONG) for name in names}
        firsts = await asyncio.gather(*map(anext, streams.values()))
        got = {name: outputs_of(first)[0] for name, first in zip(names, firsts, strict=True)}
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(asleep(shelf, name))
            await in_step_thread(shelf, put_all_to_sleep)
            swapped = [memory.swapping.used_bytes for memory in memories]
            assert 0 < sum(swapped) == space.used_bytes <= space.most_bytes
            assert 0 in swapped, "one is recomputed"
        for name, stream in streams.items():
            async for deltas in stream:
                got[name] += outputs_of(deltas)[0]
            assert [got[name]] == alone[name], name
        assert space.used_bytes == 0


async def test_models_that_can_never_fit_are_refused_with_the_reason(models: TinyModels) -> None:
    alone = await models.alone("gemma2", [1, 2], GREEDY)
    async with models.shelf("gemma2", "bamba", memory_of=["gemma2"], room_bytes=KV_BYTES // 4) as shelf:
        for _ in range(2):
            results = await asyncio.gather(
                outputs(shelf.model("bamba"), [1], GREEDY),
                outputs(shelf.model("gemma2"), [1, 2], GREEDY),
                return_exceptions=True,
            )
            assert isinstance(results[0], UnavailableError)
            assert "device_memory_bytes" in str(results[0])
            assert results[1] == alone


@pytest.mark.thirds
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "draft", "bamba"])
async def test_requests_are_bounded_by_what_other_models_leave(models: TinyModels, name: str) -> None:
    """Regression: only the model's own weights were left out of the memory that requests were judged by. Those which
    could never run beside a step's workspace and a model that is kept always waited, and ended with 503."""
    configs = [models.config(name), ModelConfig(name="kept", engine=models.engine("llama"), keep="always")]

    async def load(shelf: Shelf) -> Engine:
        for config in configs:
            await outputs(shelf.model(config.name), [1, 2], GREEDY)
        return (await shelf.model(name).ready()).driver.engine

    async with models.shelf(*configs, memory_of=[name, "llama"]) as shelf:
        engine = await load(shelf)
        assert shelf.model(name).engine.context_tokens == 128
        kept = (await shelf.model("kept").ready()).driver.engine.footprint
        share = 1.0 if engine.speculation is None else engine.speculation.memory_share
        footprints, device = (engine.footprint, kept), shelf.device_status()
        room_bytes = math.ceil(engine.memory.pages_for(70) * engine.memory.pages.page_bytes / share)
        room_bytes += device.workspace_bytes + sum(of.weight_bytes + of.anchor_bytes for of in footprints)
    async with models.opened(configs, room_bytes) as shelf:
        await load(shelf)
        engine = await shelf.model(name).ready()
        for state in ("awake", "asleep"):
            if state == "asleep":
                await put_to_sleep(shelf, name)
            most = engine.context_tokens
            assert 70 <= most < 128
            message = rf"length is {most} tokens\..* The limit is 128 .* raise device_memory_bytes"
            for prompt, max_tokens in ((tokens(30), most - 29), (tokens(most), None), (tokens(120), 1)):
                with pytest.raises(ContextLengthError, match=message):
                    await outputs(shelf.model(name), prompt, replace(GREEDY, max_tokens=max_tokens))
            for prompt, max_tokens in ((tokens(30), most - 30), (tokens(most - 1), 1), (tokens(40), None)):
                found = await outputs(shelf.model(name), prompt, replace(GREEDY, max_tokens=max_tokens))
                assert len(found[0]) == (max_tokens or most - 40)
            with pytest.raises(RequestError, match="do not fit into the KV cache together"):
                await outputs(shelf.model(name), tokens(30), replace(GREEDY, max_tokens=most - 30, n=6))


async def test_a_request_that_can_never_fit_any_more_is_refused_alone(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all requests of its model were. It was accepted while there was more memory."""
    monkeypatch.setattr(control.Control, "_limit_requests", lambda *_: None)
    params = replace(GREEDY, max_tokens=90)
    alone = await models.alone("qwen3", [1, 2], GREEDY)
    page_bytes = models.reference("qwen3").driver.engine.memory.pages.page_bytes
    pages_a_block = models.reference("qwen3").driver.engine.memory.groups[0].layout.num_slices
    config = ModelConfig(name="qwen3", engine=models.engine("qwen3", max_model_len=None))
    async with models.shelf(config, memory_of=["qwen3"], room_bytes=5 * pages_a_block * page_bytes) as shelf:
        await shelf.model("qwen3").ready()
        results = await asyncio.gather(
            outputs(shelf.model("qwen3"), tokens(30), params),
            *(outputs(shelf.model("qwen3"), [1, 2], GREEDY) for _ in range(4)),
            return_exceptions=True,
        )
        assert results[1:] == [alone] * 4
        assert isinstance(results[0], UnavailableError), results[0]


async def test_an_idle_model_that_is_put_to_sleep_loses_no_turn(models: TinyModels) -> None:
    """Regression: a request that came before the next plan was taken for one of a model that had just had its turn, and
    waited behind all others; where the model stayed awake for its least time, until all of its requests had ended."""
    alone = await models.alone("llama", [1, 2], LONG)
    allocation = Allocation(budgets={}, preempt=(), sleep={"llama": "x"}, wake=(), prefetch=(), waits={}, refused={})
    async with models.shelf("llama") as shelf:
        model = shelf.model("llama")
        await model.ready()

        def lost() -> bool:
            control_of(shelf)._carry_out(allocation, {"llama": model})
            return model.lost_at is not None

        assert not await in_step_thread(shelf, lost)
        assert model.state == "asleep"
        running = asyncio.create_task(outputs(model, [1, 2], LONG))
        await until_async(lambda: model.status.num_running > 0)
        assert await in_step_thread(shelf, lost)
        assert await running == alone
        assert model.lost_at is None


async def test_the_queue_is_bounded_while_a_model_is_loaded(models: TinyModels) -> None:
    alone = await models.alone("llama", [1, 2], GREEDY)
    config = ModelConfig(name="llama", engine=models.engine("llama", max_queued_requests=3))
    async with models.shelf(config) as shelf:
        results = await asyncio.gather(
            *(outputs(shelf.model("llama"), [1, 2], GREEDY) for _ in range(10)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, OverloadedError)]
        assert len(refused) == 7
        assert all(error.retry_after_s > 0 for error in refused)
        assert [result for result in results if not isinstance(result, OverloadedError)] == [alone] * 3


async def test_a_busy_model_starves_no_other(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for one at a time, and one has always more requests than run at once."""
    monkeypatch.setattr(turns, "LEAST_TURN_S", 0.3)
    names = ("llama", "qwen3", "gpt2")
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in names}
    memory_bytes = models.memory_for("gpt2", room_bytes=KV_BYTES // 2, beside=names)
    configs = [models.config(name, slo=SLO(ttft_s=0.2)) for name in names]
    async with models.opened(configs, memory_bytes) as shelf:
        for name in names:
            await shelf.model(name).ready()
        ended = asyncio.Event()

        async def keep_busy(i: int) -> None:
            while not ended.is_set():
                assert len((await outputs(shelf.model("llama"), [i + 1, 2], LONG))[0]) == 100

        def needed_bytes() -> int:
            status = shelf.device_status()
            assert status is not None
            return status.needed_bytes

        busy = [asyncio.create_task(keep_busy(i)) for i in range(12)]
        not_enough = asyncio.create_task(until_async(lambda: needed_bytes() > memory_bytes))
        for _ in range(2):
            for name in names[1:]:
                async with asyncio.timeout(8):
                    assert await outputs(shelf.model(name), [1, 2], GREEDY) == alone[name]
        ended.set()
        await asyncio.gather(*busy, not_enough)
        await until_async(lambda: not needed_bytes())
