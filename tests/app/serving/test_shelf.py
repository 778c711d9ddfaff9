"""Several models behind one ingress and one replica, with a real shelf and without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from folio.app.api.anthropic.body import CountTokensRequest, MessagesRequest
from folio.app.api.input import served_models
from folio.app.api.openai.bodies import ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.token_bodies import DetokenizeRequest, TokenizeRequest
from folio.app.api.operators import model_cards
from folio.app.api.operators.bodies import BudgetRequest, PinRequest
from folio.app.api.pooled.bodies import EmbeddingRequest
from folio.app.cli.main import main
from folio.app.config.http import HttpSettings, KeyEntry
from folio.app.dashboard.state import DashboardState, ReplicaState
from folio.app.dashboard.views import WatchCall
from folio.app.engine import AsyncEngine
from folio.app.errors import (
    ContextLengthError,
    DeadlineError,
    ForbiddenError,
    OverloadedError,
    RequestError,
    UnknownModelError,
    UnknownPinError,
    UnknownRequestError,
)
from folio.app.http.request_context import CURRENT, RequestContext
from folio.app.shelf import control
from folio.app.shelf.control import Control
from tests.app.serving.conftest import Recorded
from tests.app.serving.shelf_models import MODELS, SHELF, completion, states
from tests.local_server import LocalHandle, guarded_api, ingress_of, listening, replica_of_shelf
from tests.processes import until_async


@pytest.fixture
def server() -> Iterator[Any]:
    replica: Any = replica_of_shelf(SHELF)
    ingress = ingress_of(
        LocalHandle(replica), *MODELS, shelf={"device_memory_bytes": 256 << 20}, aliases={"claude-*": "second"}
    )
    ingress.replica = replica
    yield ingress
    replica.__del__()


async def test_models_are_loaded_by_their_first_requests(server: Any) -> None:
    assert await states(server) == {"first": "new", "second": "new", "third": "new"}
    await server.ready()
    assert [card.max_model_len for card in (await server.models()).data] == [None] * 3
    answer = await server.generate(completion("second"))
    assert answer.model == "second"
    assert await states(server) == {"first": "new", "second": "awake", "third": "new"}
    chunks = [chunk async for chunk in server.generate_stream(completion("first"))]
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    cards = {card.id: card.max_model_len for card in (await server.models()).data}
    assert cards == {"first": 4096, "second": 512, "third": None}
    assert (await server.model("claude-x")).id == "second"


async def test_every_route_uses_the_model_of_its_body(server: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = ChatCompletionRequest.model_validate({"model": "claude-x", "messages": messages, "max_tokens": 2})
    assert (await server.chat(chat)).model == "second"
    assert await states(server) == {"first": "new", "second": "awake", "third": "new"}
    assert (await server.tokenize(TokenizeRequest(model="second", prompt="x"))).max_model_len == 512
    assert (await server.tokenize(TokenizeRequest(prompt="x"))).max_model_len == 4096  # of the first one
    assert (await states(server))["first"] == "new"
    with pytest.raises(RequestError, match="embeddings"):
        await server.embed(EmbeddingRequest(model="second", input="x"))
    answer = await server.generate(completion("second"))
    assert (await server.fork(ForkRequest(model="second", request_id=answer.id, max_tokens=2))).model == "second"
    with pytest.raises(UnknownRequestError):
        await server.fork(ForkRequest(model="first", request_id=answer.id, max_tokens=2))
    assert (await states(server))["third"] == "new"


async def test_counting_tokens_loads_no_model(server: Any) -> None:
    """Regression: it asked a replica for the context, which loaded the model without a check for room."""
    server._models.find("second").shedder.note_refusal("local", 40.0, 8, time.monotonic())
    messages = [{"role": "user", "content": "Hi"}]
    count = CountTokensRequest.model_validate({"model": "second", "messages": messages})
    tokens = await server.tokenize(TokenizeRequest(model="second", messages=messages, add_generation_prompt=True))
    assert (await server.count_tokens(count)).input_tokens == tokens.count
    assert tokens.max_model_len == 512
    text = await server.detokenize(DetokenizeRequest(model="third", tokens=tokens.tokens))
    assert "Hi" in text.prompt
    with pytest.raises(ContextLengthError, match="context length is 512 tokens"):
        await server.tokenize(TokenizeRequest(model="second", prompt="x" * 100_000))
    assert await states(server) == {"first": "new", "second": "new", "third": "new"}


async def test_contexts_follow_the_memory_of_the_shelf(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_model_len` was that of a device without other models, for as long as the ingress ran."""
    await server.generate(completion("second"))
    monkeypatch.setattr(Control, "_limit_requests", lambda *_: None)
    monkeypatch.setattr(model_cards, "_CONTEXT_FRESH_S", 0.0)
    footprint = server.replica._shelf.engines()["second"].driver.engine.footprint
    body = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500}
    for num_bytes, most in ((1_000_000, 400), (16 << 20, 512)):
        footprint.set_attainable(num_bytes)
        await server.generate(completion("second"))
        context = 0
        async with asyncio.timeout(60):  # the replicas are asked beside the call
            while not most - 300 < context <= most:
                [context] = [card.max_model_len or 0 for card in (await server.models()).data if card.id == "second"]
        answer = await server.messages(MessagesRequest.model_validate(body))  # is cut
        assert answer.usage.output_tokens + answer.usage.input_tokens <= context
        assert (
            await server.generate(completion("second", max_tokens=context, ignore_eos=True))
        ).usage.total_tokens == context


async def test_a_tokenizer_is_loaded_beside_the_event_loop(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, real = threading.Event(), served_models.load_tokenizer

    def slowly(model: str) -> Any:
        assert goes_on.wait(20)
        return real(model)

    monkeypatch.setattr(served_models, "load_tokenizer", slowly)
    waiting = asyncio.create_task(server.tokenize(TokenizeRequest(model="third", prompt="x")))
    cancelled = asyncio.create_task(server.tokenize(TokenizeRequest(model="third", prompt="x")))
    assert (await server.tokenize(TokenizeRequest(model="first", prompt="x"))).count
    cancelled.cancel()
    await asyncio.wait([cancelled])
    goes_on.set()
    assert (await waiting).count


async def test_unknown_models_and_keys_for_others_load_nothing(server: Any) -> None:
    with pytest.raises(UnknownModelError, match="'first', 'second', 'third'"):
        await server.generate(completion("fourth"))
    entry = KeyEntry(name="k", key="sk-0123456789abcdef", models=frozenset({"first"}))
    token = CURRENT.set(RequestContext(HttpSettings(), "id", key=entry))
    try:
        for call in (
            server.generate(completion("third")),
            server.generate(completion("claude-x")),
            server.tokenize(TokenizeRequest(model="third", prompt="x")),
        ):
            with pytest.raises(ForbiddenError, match="does not allow the model"):
                await call
        await server.generate(completion("first"))
    finally:
        CURRENT.reset(token)
    assert await states(server) == {"first": "awake", "second": "new", "third": "new"}


async def test_models_compute_beside_each_other(server: Any) -> None:
    alone = [(await server.generate(completion(m, max_tokens=20))).choices[0].text for m in ("first", "second")]
    both = await asyncio.gather(*(server.generate(completion(m, max_tokens=20)) for m in ("first", "second") * 3))
    assert [answer.choices[0].text for answer in both] == alone * 3


async def test_pins_belong_to_a_model(server: Any) -> None:
    """Regression: unpinning by name removed the pins of all models, and a pin without a model was the first one's."""
    prompt = list(range(300, 364))

    async def pinned() -> list[tuple[str, str]]:
        return [(card.id, card.model) for card in (await server.pins()).data]

    async def cached(model: str) -> int:
        answer = await server.generate(completion(model, prompt=[*prompt, 5]))
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    await server.pin(PinRequest(name="rules", model="claude-x", prompt=prompt))
    assert await pinned() == [("rules", "second")]
    assert await cached("second") >= 48
    assert await cached("third") == 0
    await server.pin(PinRequest(name="rules", model="third", prompt=prompt[:32]))
    with pytest.raises(RequestError, match="several: 'first', 'second', 'third'; name one"):
        await server.pin(PinRequest(name="rules", prompt=prompt))
    with pytest.raises(RequestError, match="prefixes of 'second', 'third' are pinned as 'rules'; name the model"):
        await server.unpin("rules")
    with pytest.raises(UnknownPinError, match="not loaded"):
        await server.unpin("rules", "first")
    with pytest.raises(UnknownModelError):
        await server.unpin("rules", "fourth")
    with pytest.raises(UnknownPinError):
        await server.unpin("other")
    await server.unpin("rules", "claude-x")
    assert await pinned() == [("rules", "third")]
    await server.unpin("rules")
    assert await pinned() == []
    assert await states(server) == {"first": "new", "second": "awake", "third": "awake"}


async def test_a_model_whose_queues_are_full_does_not_shed_the_load_of_another(server: Any) -> None:
    shedder = server._models.find("second").shedder
    shedder.note_refusal("local", 40.0, 8, time.monotonic())
    shedder.note_all_refused(time.monotonic())
    with pytest.raises(OverloadedError, match="queue full on every engine replica"):
        await server.generate(completion("second"))
    await server.generate(completion("first"))
    assert (await states(server))["second"] == "new"


async def test_metrics_tell_models_apart(recorded: Recorded, server: Any) -> None:
    """Those of all models were added up, without speculation and start times."""
    await server.generate(completion("first"))
    await server.generate(completion("second", max_tokens=2))
    await server.replica.record_routing_stats()
    by_model = {
        name: {tags["model"]: value for found, value, tags in recorded if found == name}
        for name in ("folio_running_sequences", "folio_prefix_queried_tokens", "folio_output_tokens")
    }
    assert by_model["folio_running_sequences"] == {"first": 0, "second": 0, "third": 0}
    assert by_model["folio_prefix_queried_tokens"].keys() == {"first", "second"}
    assert by_model["folio_output_tokens"] == {"first": 4, "second": 2}
    states = {tags["model"]: tags["state"] for name, is_it, tags in recorded if name == "folio_model_state" and is_it}
    assert states == {"first": "awake", "second": "awake", "third": "new"}
    held = {tuple(tags.values()): value for name, value, tags in recorded if name == "folio_model_bytes"}
    device = {tags["kind"]: value for name, value, tags in recorded if name == "folio_device_bytes"}
    assert held["first", "weights"] > 0
    assert held["third", "weights"] == 0
    assert device["charged"] >= held["first", "weights"] + held["second", "weights"]
    assert device["used"] >= held["first", "kv"] + held["second", "kv"] > 0
    assert device["capacity"] == 256 << 20
    assert device["workspace"] > 0
    assert {tags["model"] for name, _, tags in recorded if name == "folio_ready_seconds"} == {"first", "second"}
    wakes = [tags["model"] for name, _, tags in recorded if name == "folio_model_wake_seconds"]
    assert sorted(wakes) == ["first", "second"]


async def test_operators_see_all_models_together(server: Any) -> None:
    await server.generate(completion("first"))
    await server.generate(completion("second"))
    [load] = (await server.load()).replicas
    assert load.prompt_tokens == 2 * (await server.generate(completion("first"))).usage.prompt_tokens
    assert load.max_num_seqs == 128
    models = {model.name: model for model in load.models}
    assert [model.state for model in models.values()] == ["awake", "awake", "new"]
    assert models["first"].weight_bytes > 0 < models["third"].wake_s
    with pytest.raises(RequestError, match="device_memory_bytes"):
        await server.change_budget(BudgetRequest(budget_bytes=8 << 20))
    stats = await server.replica.record_routing_stats()
    assert list(stats["models"]) == ["first", "second", "third"]
    assert [of["wake_s"] > 0 for of in stats["models"].values()] == [False, False, True]

    async def is_idle() -> bool:
        return (await server.replica.record_autoscaling_stats())["folio_device_share"] == 0

    await until_async(is_idle)  # with the next plan
    figures = await server.replica.record_autoscaling_stats()
    assert (figures["folio_max_num_seqs"], figures["folio_num_running"]) == (128, 0)
    server.replica.check_health()


@pytest.mark.parametrize("pools", [False, True])
async def test_a_deadline_holds_while_a_model_is_loaded(
    server: Any, monkeypatch: pytest.MonkeyPatch, pools: bool
) -> None:
    """Regression: vectors were waited for as long as the load took."""
    goes_on = threading.Event()

    class Slow(AsyncEngine):
        def __init__(self, *args: Any, **settings: Any) -> None:
            assert goes_on.wait(20)
            super().__init__(*args, **settings)

    monkeypatch.setattr(control, "AsyncEngine", Slow)
    embed = EmbeddingRequest(model="second", input="x", timeout_s=0.1)
    try:
        with pytest.raises(DeadlineError, match="not loaded within the request's timeout_s"):
            await asyncio.wait_for(
                server.embed(embed) if pools else server.generate(completion("second", timeout_s=0.1)), 10
            )
    finally:
        goes_on.set()


def test_the_dashboard_and_top_show_the_models(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica counted as silent until its first model was loaded."""
    monkeypatch.setenv("COLUMNS", "160")

    def ask(url: str, model: str) -> None:
        body = {"model": model, "prompt": "The moon", "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    def looked(url: str) -> ReplicaState:
        state = DashboardState.model_validate_json(httpx.get(f"{url}/dashboard/state", timeout=60).text)
        assert state.num_silent == 0
        [replica] = state.replicas
        return replica

    with listening(guarded_api(server, None, server.dashboard)) as url:
        before = looked(url)
        assert (before.model, before.maps, before.load.num_running) == ("", (), 0)
        assert [model.state for model in before.models] == ["new"] * 3
        ask(url, "first")
        ask(url, "second")
        found = looked(url)
        first, second, third = found.models
        assert found.device is not None
        assert found.memory is not None
        assert found.maps
        assert (first.state, second.state, third.state) == ("awake", "awake", "new")
        assert (first.num_wakes, third.num_wakes) == (1, 0)
        assert third.wake_s > first.wake_s == 0
        assert found.memory.physical_bytes == first.kv_bytes + second.kv_bytes > 0
        weight_bytes = first.device_weight_bytes + second.device_weight_bytes
        assert found.device.charged_bytes >= weight_bytes > third.device_weight_bytes == 0
        assert main(["top", "--url", url, "--once"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["folio", "3", "models"] in [line[:3] for line in lines]
    states = {line[0]: line[1] for line in lines if line and line[0] in ("first", "second", "third")}
    assert states == {"first": "awake", "second": "awake", "third": "new"}


def test_steps_of_all_models_are_seen_once(server: Any) -> None:
    """A look at another model than before took its steps for those of the first one, or left them out."""

    async def outputs() -> list[int]:
        replica, since, seen = server.replica, {"local": 0}, []
        for model in ("first", "second", "second", "first"):
            await replica.look(WatchCall(since=since))
            body = completion(model, max_tokens=5, ignore_eos=True)
            await server.generate(body)
            view = await replica.look(WatchCall(since=since))
            since = {"local": view.last_step}
            seen.append(sum(ReplicaState.model_validate_json(view.state).steps.outputs))
        return seen

    async def loaded() -> None:
        for model in ("first", "second"):
            await server.generate(completion(model))

    asyncio.run(loaded())
    assert asyncio.run(outputs()) == [5] * 4
