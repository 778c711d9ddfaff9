"""The load generator, against a server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from folio.app.cli.bench.load import Ask, Clock, HttpTarget, Record, open_loop
from folio.app.cli.connection import Server
from tests.app.cli.fake_server import Answer, serving, stream


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps({'choices': []} | fields)}\n\n".encode()


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value}])


def usage(num_tokens: int) -> bytes:
    return event(usage={"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 16}})


def ask_once(answer: Answer, max_tokens: int = 4, *, is_chat: bool = False) -> Record:
    """What the record of one request comes to."""

    async def ask(url: str) -> Record:
        async with Server(url) as server:
            target = HttpTarget("it", url, "one", server.session, is_chat=is_chat)
            [record] = await open_loop(target, [Ask([1, 2, 3], max_tokens)])
        return record

    with serving(answer) as url:
        return asyncio.run(ask(url))


def kinds(record: Record) -> set[str]:
    return {kind for kind in ("completed", "refused", "failed", "lost") if getattr(record, kind)}


def test_a_stream_is_counted_by_its_usage_and_dated_by_its_events() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        bodies.append(body)
        first = text("a")
        # Events that arrive in pieces, two events with several tokens each, and one that says nothing.
        return await stream(request, first[:9], first[9:], text(""), text("bcd"), usage(4), b"data: [DONE]\n\n")

    record = ask_once(answer)
    assert kinds(record) == {"completed"}
    assert bodies[0]["model"] == "one"
    assert (bodies[0]["prompt"], bodies[0]["max_tokens"], bodies[0]["stream"]) == ([1, 2, 3], 4, True)
    assert [count for _, count in record.events] == [1, 3]
    assert (record.num_tokens, record.num_cached_tokens) == (4, 16)
    assert 0 < record.ttft_s <= record.answered_s


def test_without_usage_every_event_counts_as_a_token() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, text("a"), text("b"), b"data: [DONE]\n\n")

    assert kinds(ask_once(answer, max_tokens=2)) == {"completed"}


def test_thoughts_count_and_a_usage_may_lack_a_field() -> None:
    """Regression: a model that thinks "sent no text", and a usage without its output tokens ended the run."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        parts = [event(choices=[{"delta": {name: "a"}}]) for name in ("reasoning", "reasoning_content", "content")]
        return await stream(request, *parts, event(usage={"prompt_tokens": 3}), b"data: [DONE]\n\n")

    record = ask_once(answer, 3, is_chat=True)
    assert kinds(record) == {"completed"}
    assert record.num_prompt_tokens == 3


def test_a_refusal_has_its_time_and_when_to_try_again() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "7"})

    record = ask_once(answer)
    assert kinds(record) == {"refused"}
    assert record.retry_after_s == 7.0
    assert record.answered_s > 0


@pytest.mark.parametrize(
    ("parts", "cut", "kind"),
    [
        ((text("a"), event(error={"message": "the replica is gone"})), False, "failed"),
        ((text("a"), usage(1)), False, "lost"),  # it just ends
        ((text("a"),), True, "lost"),
        ((text("a"), b"data: 5\n\n"), False, "lost"),  # regression: a TypeError ended the run
        ((text("a"), usage(1), b"data: [DONE]\n\n"), False, "lost"),  # fewer tokens than were asked for
    ],
)
def test_streams_that_do_not_end_well(parts: tuple[bytes, ...], cut: bool, kind: str) -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, *parts, cut=cut)

    assert kinds(ask_once(answer)) == {kind}


def test_other_statuses_are_failures() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    assert kinds(ask_once(answer)) == {"failed"}


def test_a_late_client_counts_from_when_the_request_was_due() -> None:
    """A blocked event loop delayed the sending, and answers looked quick."""
    sent: list[float] = []

    async def send(ask: Ask, record: Record, clock: Clock) -> None:
        record.sent_s = clock.now()
        sent.append(record.sent_s)
        if len(sent) == 1:
            while clock.now() < 0.1:  # nothing else runs meanwhile
                pass
        record.events, record.num_tokens, record.ended_s = [(clock.now(), 1)], 1, clock.now()

    _, late = asyncio.run(open_loop(send, [Ask([1], 1, at_s=0.0), Ask([1], 1, at_s=0.01)]))
    assert late.due_s == 0.01
    assert late.ttft_s >= 0.09
