"""A real Ray Serve application, called by gRPC."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import grpc
import pytest
import ray
from ray.serve.context import _get_global_client

from folio.app.client import (
    CompletionRequest,
    DeadlineError,
    Folio,
    FolioError,
    PinRequest,
    RequestError,
    UnknownModelError,
)
from folio.app.proto import folio_pb2 as pb
from folio.app.proto.folio_pb2_grpc import FolioStub
from tests.cluster import NAME
from tests.processes import until_async

ROOM = CompletionRequest(
    model="builtin", prompt="The key of room 417 is 93. The key of room 417 is", max_tokens=3, temperature=0
)
ENDLESS = {"model": "builtin", "prompt": "a", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(folio: Any) -> str:
    client: Any = _get_global_client()
    options = ray.get(client._controller.get_grpc_config.remote())
    assert options.grpc_servicer_functions, "the cluster of the tests has no gRPC"
    return f"grpc://127.0.0.1:{options.port}/{NAME}"


async def all_pages_are_free(folio: Folio) -> bool:
    return not any(report.active_bytes for report in (await folio.report()).values())


async def text_of(folio: Folio, request: CompletionRequest) -> str:
    return "".join([chunk.choices[0].text async for chunk in folio.generate_stream(request)])


async def test_answers_streams_and_pins(url: str) -> None:
    async with Folio(url) as folio:
        await folio.ready()
        answer = await folio.generate(ROOM)
        assert answer.choices[0].text.strip().startswith("93")
        assert await text_of(folio, ROOM) == answer.choices[0].text
        await folio.pin(PinRequest(name="a/ü", prompt="The key of room 5 is 6. " * 8))
        assert [card.id for card in (await folio.pins()).data] == ["a/ü"]
        await folio.unpin("a/ü")
        assert (await folio.load()).num_replicas == 1
        await until_async(lambda: all_pages_are_free(folio))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "other"}, UnknownModelError),
        ({"n": -1}, RequestError),
        (ENDLESS | {"timeout_s": 0.2}, DeadlineError),
        ({"prompt": "a" * (10 << 20)}, RequestError),  # longer than a body may be
        ({"prompt": "a" * (17 << 20)}, RequestError),  # longer than gRPC takes
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_come_through(url: str, fields: dict[str, Any], kind: type[FolioError], streams: bool) -> None:
    """Those of streams, too: Serve's proxy takes down the status with a message, and without one said OK."""
    request = CompletionRequest(**({"model": "builtin", "prompt": "a"} | fields))

    async with Folio(url) as folio:
        with pytest.raises(kind):
            await (text_of(folio, request) if streams else folio.generate(request))


async def test_calls_that_are_given_up_free_their_memory(url: str) -> None:
    """Streams that are closed, and calls whose deadline has passed."""
    async with Folio(url) as folio, grpc.aio.insecure_channel(url.split("/")[2]) as channel:
        for _ in range(10):
            async with aclosing(folio.generate_stream(CompletionRequest(**ENDLESS))) as chunks:
                async for _ in chunks:
                    break
        late = pb.GenerateRequest(model="builtin", text="a", max_tokens=2000, sampling=pb.Sampling(ignore_eos=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await FolioStub(channel).Generate(late, timeout=0.5, metadata=[("application", NAME)])
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_async(lambda: all_pages_are_free(folio))
