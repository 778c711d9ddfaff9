"""Bounds of bodies that a route reads piece by piece."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.types import Message, Receive

from folio.app.config.http import BatchSettings, HttpSettings
from folio.app.edge.request_body import BodyBounds, limited
from folio.app.http.errors import HttpRefusal

from .asgi import scope_of


def receiving(*pieces: bytes, pause_s: float = 0.0) -> Receive:
    left = list(pieces)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


async def read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    return body


def test_only_files_are_streamed_and_only_into_a_store(tmp_path: Path) -> None:
    settings = HttpSettings(batches=BatchSettings(store=tmp_path, max_file_bytes=100), max_body_bytes=10)
    assert BodyBounds.of(scope_of("POST", "/v1/files"), settings).is_streamed
    for scope in (
        scope_of("POST", "/v1/files/"),
        scope_of("PUT", "/v1/files"),
        scope_of("POST", "/v1/batches"),
        scope_of("POST", "/v1/chat/completions"),
    ):
        assert BodyBounds.of(scope, settings) == BodyBounds(10, "max_body_bytes")
    without = settings.model_copy(update={"batches": BatchSettings()})
    assert not BodyBounds.of(scope_of("POST", "/v1/files"), without).is_streamed


async def test_a_body_within_its_bounds() -> None:
    bounds = BodyBounds(9, "batches.max_file_bytes")
    assert await read(limited(receiving(b"abc", b"def", b"ghi"), bounds, 10, 5.0)) == b"abcdefghi"


async def test_a_body_that_is_longer_than_it_said() -> None:
    with pytest.raises(HttpRefusal) as caught:
        await read(limited(receiving(b"abc", b"def", b"ghi"), BodyBounds(8, "batches.max_file_bytes"), 10, 5.0))
    assert caught.value.status == 413


@pytest.mark.parametrize(("piece", "is_refused"), [(b"x", True), (b"x" * 10, False)])
async def test_a_body_must_keep_a_least_rate(piece: bytes, is_refused: bool) -> None:
    """30 pieces take 0.6 s: too long for 30 bytes at 10 bytes in 0.1 s, but not for 300."""
    receive = limited(receiving(*[piece] * 30, pause_s=0.02), BodyBounds(1000, "batches.max_file_bytes"), 10, 0.1)
    if not is_refused:
        assert len(await read(receive)) == 300
        return
    with pytest.raises(HttpRefusal) as caught:
        await read(receive)
    assert caught.value.status == 408


async def test_the_disconnection_after_a_body_is_waited_for() -> None:
    receive = limited(receiving(b"abc"), BodyBounds(8, "batches.max_file_bytes"), 10, 0.05)
    await read(receive)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receive(), 0.2)


@pytest.mark.parametrize("store", ["batches", "./batches"])
def test_the_store_is_an_absolute_path(store: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        BatchSettings(store=Path(store))
