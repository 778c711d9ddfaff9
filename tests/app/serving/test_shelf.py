"""Several models behind one ingress and one replica, with a real shelf and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from app.config.http import HttpSettings, KeyEntry
from app.config.shelf import ShelfConfig
from app.errors import ForbiddenError, RequestError, UnknownModelError
from app.openai.bodies import (
    BudgetRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ForkRequest,
    PinRequest,
    TokenizeRequest,
)
from app.openai.pooled.bodies import EmbeddingRequest
from app.request_context import CURRENT, RequestContext
from tests.local_server import LocalHandle, a_model, ingress_of, replica_of_shelf

SETTINGS: dict[str, Any] = {"kv_memory_bytes": 16 << 20, "max_num_batched_tokens": 512, "warm_up": False}
MODELS = (
    a_model("first", dtype="float32", **SETTINGS),
    a_model("second", max_model_len=512, dtype="float32", isolate_tenants=True, **SETTINGS),
    a_model("third", **SETTINGS),
)
SHELF = ShelfConfig(models=MODELS, device_memory_bytes=256 << 20)


@pytest.fixture
def server() -> Iterator[Any]:
    replica: Any = replica_of_shelf(SHELF)
    ingress = ingress_of(
        LocalHandle(replica), *MODELS, shelf={"device_memory_bytes": 256 << 20}, aliases={"claude-*": "second"}
    )
    ingress.replica = replica
    yield ingress
    replica.__del__()


def completion(model: str = "first", **fields: Any) -> CompletionRequest:
    body = {"model": model, "prompt": "The moon", "max_tokens": 4, "temperature": 0} | fields
    return CompletionRequest.model_validate(body)


async def states(server: Any) -> dict[str, str]:
    return {card.id: card.state for card in (await server.models()).data}


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
    with pytest.raises(RequestError, match="embeddings"):
        await server.embed(EmbeddingRequest(model="second", input="x"))
    answer = await server.generate(completion("second"))
    assert (await server.fork(ForkRequest(model="second", request_id=answer.id, max_tokens=2))).model == "second"
    with pytest.raises(UnknownModelError):
        await server.fork(ForkRequest(model="first", request_id=answer.id, max_tokens=2))
    assert (await states(server))["third"] == "new"


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
    prompt = list(range(300, 364))
    await server.pin(PinRequest(name="rules", model="second", prompt=prompt))
    assert [card.id for card in (await server.pins()).data] == ["rules"]
    cached = [
        (await server.generate(completion(m, prompt=[*prompt, 5]))).usage.prompt_tokens_details.cached_tokens
        for m in ("second", "first")
    ]
    assert cached[0] >= 48
    assert cached[1] == 0
    await server.unpin("rules")
    assert (await server.pins()).data == []


async def test_operators_see_all_models_together(server: Any) -> None:
    await server.generate(completion("first"))
    await server.generate(completion("second"))
    [load] = (await server.load()).replicas
    assert load.prompt_tokens == 2 * (await server.generate(completion("first"))).usage.prompt_tokens
    assert load.max_num_seqs == 128
    with pytest.raises(RequestError, match="device_memory_bytes"):
        await server.change_budget(BudgetRequest(budget_bytes=8 << 20))
    stats = await server.replica.record_routing_stats()
    assert list(stats["models"]) == ["first", "second", "third"]
    assert [of["wake_s"] > 0 for of in stats["models"].values()] == [False, False, True]
    figures = await server.replica.record_autoscaling_stats()
    assert figures["folio_max_num_seqs"] == 128
    assert figures["folio_num_running"] == 0
    server.replica.check_health()
