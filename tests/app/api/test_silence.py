"""Streams begin before their first token, are never silent for long, and clients read them as any other."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import anthropic
import httpx
import openai
import pytest
from ray.exceptions import RayTaskError

from folio.app.api import event_response
from folio.app.api.event_response import EventResponse
from folio.app.api.input.translate import Translator
from folio.app.engine.report import Progress
from folio.app.errors import DeadlineError, FolioError, OverloadedError, UnavailableError
from folio.app.fleet.departures import DEPARTURES
from folio.app.fleet.messages import Piece
from folio.app.serving import replica
from tests.app.api.asking import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.app.api.asking import X as USER
from tests.fakes.replicas import Engines, ingress_with, stopped
from tests.local_server import LocalServer, guarded_api, listening

BEGUN = Piece("Hel", (300,), replica="r7")
ENDED = Piece("lo", (301,), 0, "stop", replica="r7")
SILENCE = 0.3


class Scripted(Engines):
    """Replicas that answer each call by one of these scripts."""

    def __init__(self, *scripts: list[Any]) -> None:
        super().__init__()
        self._scripts = scripts

    def _items(self, call: Any) -> list[Any]:
        return self._scripts[min(len(self.calls), len(self._scripts)) - 1]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEAD_S", "_SILENCE_S", "_PROGRESS_S"):
        monkeypatch.setattr(event_response, name, 0.05)


@contextmanager
def server_with(*scripts: list[Any]) -> Iterator[str]:
    with listening(guarded_api(ingress_with(Scripted(*scripts)))) as url:
        yield url


def events_of(url: str, path: str, **more: Any) -> tuple[int, list[str]]:
    """The status, and what is sent between empty lines."""
    answer = httpx.post(url + path, json={"model": "m", "stream": True} | BODIES[path] | more, timeout=60)
    return answer.status_code, answer.text.removesuffix("\n\n").split("\n\n")


def kinds_of(events: list[str]) -> str:
    """A letter for each event, repetitions left out: comment, ping, response in progress, error, or another."""
    letters = ""
    signs = {": keep-alive": "c", "event: ping": "p", "event: response.in_progress": "i", "event: response.failed": "f"}
    for event in events:
        letter = next((sign for begin, sign in signs.items() if event.startswith(begin)), "x")
        if '"error":{' in event or '"error": {' in event:
            letter = "e" if letter != "f" else "f"
        letters += "" if letters.endswith(letter) else letter
    return letters


@pytest.mark.parametrize(
    ("path", "kinds", "broken"),
    [
        (CHAT, "cxcx", "ce"),
        (COMPLETIONS, "cxcx", "ce"),
        (MESSAGES, "pxpxpx", "pe"),  # there is always a ping behind the beginning
        (RESPONSES, "xixix", "xif"),  # response.created comes first
    ],
)
def test_signs_of_life_before_the_first_token_and_later(path: str, kinds: str, broken: str) -> None:
    """Seen: 94 s without a byte, not even headers. An error behind them is an event."""
    with server_with([SILENCE, BEGUN, SILENCE, ENDED]) as url:
        status, events = events_of(url, path)
    assert (status, kinds_of(events)) == (200, kinds)
    if path == RESPONSES:
        sent = [json.loads(event.partition("data: ")[2]) for event in events]
        assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
        assert len({event["response"]["id"] for event in sent if "response" in event}) == 1
    with server_with([SILENCE, RayTaskError("f", "t", DeadlineError("too slow"))]) as url:
        status, events = events_of(url, path)
    assert (status, kinds_of(events), "too slow" in events[-1]) == (200, broken, True)


def test_a_request_that_is_checked_slowly_is_refused_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy machine: a prompt that is too long was 200 and an error event, which agents do not retry."""
    monkeypatch.setattr(event_response, "_SILENCE_S", 5.0)
    translate = Translator.translate_chat

    def slowly(*args: Any) -> Any:
        time.sleep(SILENCE)
        return translate(*args)

    monkeypatch.setattr(Translator, "translate_chat", slowly)
    long = {"role": "user", "content": "x " * 100_000}
    with server_with([BEGUN, ENDED]) as url:
        status, events = events_of(url, CHAT, messages=[long])
    assert (status, "context_length_exceeded" in events[0]) == (400, True)


@pytest.mark.parametrize(
    ("num_replicas", "taken", "status"),
    [(2, [], 429), (2, ["r1"], 200), (0, [], 200)],
    ids=["not taken", "taken", "nobody there"],
)
def test_a_call_that_no_replica_has_taken_is_refused_with_a_status(
    num_replicas: int, taken: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen beside 40 requests for 32 samples each: "the queues are full" came after a second, as an event. Seen with
    the only replica killed: no head for ten seconds."""
    monkeypatch.setattr(event_response, "_SILENCE_S", 5.0)
    monkeypatch.setattr(DEPARTURES, "num_replicas", num_replicas)
    full = RayTaskError("f", "t", OverloadedError("full", 1.0))
    for path in BODIES:
        with server_with([*taken, SILENCE, full]) as url:  # each has met no refusal yet
            found, events = events_of(url, path)
            assert (path, found, "full" in events[-1]) == (path, status, True)


@pytest.mark.parametrize("fails", [False, True])
def test_official_clients_read_them(fails: bool) -> None:
    end: list[Any] = [RayTaskError("f", "t", DeadlineError("too slow"))] if fails else [BEGUN, SILENCE, ENDED]
    with server_with([SILENCE, *end]) as url:
        client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        claude: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="too slow") if fails else nullcontext():
            chunks = client.chat.completions.create(model="m", messages=[USER], stream=True)
            assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hello"
        with client.responses.stream(model="m", input="x") as response:
            *_, last = response
        assert last.type == ("response.failed" if fails else "response.completed")
        assert last.response.output_text == ("" if fails else "Hello")
        with (
            pytest.raises(anthropic.APIStatusError, match="too slow") if fails else nullcontext(),
            claude.messages.stream(model="m", max_tokens=9, messages=[USER]) as message,
        ):
            assert "".join(message.text_stream) == "Hello"


@pytest.mark.parametrize("path", BODIES)
def test_another_replica_goes_on_after_the_head(path: str) -> None:
    with server_with([SILENCE, stopped("r1")], [SILENCE, BEGUN, ENDED]) as url:
        status, events = events_of(url, path)
    assert (status, "Hel" in "".join(events), "e" in kinds_of(events)) == (200, True, False)


@pytest.mark.parametrize(
    ("error", "status"), [(DeadlineError("too slow"), 408), (UnavailableError("nobody"), 503)], ids=lambda x: str(x)
)
def test_an_error_before_the_head_is_a_status(error: FolioError, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_response, "_HEAD_S", 60.0)
    with server_with(*[[0.01, RayTaskError("f", "t", error)]] * 3) as url:
        for path in BODIES:
            assert events_of(url, path)[0] == status


def test_comments_tell_the_progress() -> None:
    progress = Progress(3, 12.5, 4096, 7000)
    with server_with([progress, SILENCE, BEGUN, SILENCE, ENDED]) as url:
        told = ": keep-alive " + json.dumps(
            {"queue": 3, "expected_s": 12.5, "computed_tokens": 4096, "prompt_tokens": 7000}
        )
        for path in (CHAT, COMPLETIONS):
            _, events = events_of(url, path, stream_options={"include_progress": True})
            comments = [event for event in events if event.startswith(":")]
            assert {told, ": keep-alive"} == set(comments)  # there is none behind the first token
            assert comments == sorted(comments, reverse=True)
            _, events = events_of(url, path)
            assert told not in events


def test_the_progress_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request waits until the first one has ended, which is when its place in the queue has been seen."""
    monkeypatch.setattr(replica, "PROGRESS_S", 0.02)
    local = LocalServer(max_num_seqs=1)
    try:
        with listening(local.api) as url, httpx.Client(base_url=url, timeout=60) as client:
            body = {"model": "builtin", "prompt": "x", "stream": True, "stream_options": {"include_progress": True}}
            long = {"max_tokens": 3000, "ignore_eos": True}
            with client.stream("POST", COMPLETIONS, json=body | long) as first:
                begun = first.iter_lines()
                next(begun)
                with client.stream("POST", COMPLETIONS, json=body | {"max_tokens": 2}) as second:
                    lines = second.iter_lines()
                    said = next(line for line in lines if line.startswith(": keep-alive {"))
                    first.close()
                    assert any(line == "data: [DONE]" for line in lines)
        told = json.loads(said.removeprefix(": keep-alive "))
        assert (told["queue"], told["computed_tokens"]) == (1, 0)
        assert told["expected_s"] >= 0
        local.wait_until_idle()
    finally:
        local.close()


async def test_parts_do_not_overlap_and_a_slow_reader_gets_no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_response, "_SILENCE_S", 0.001)
    sent: list[bytes] = []
    is_busy = False

    async def items() -> AsyncIterator[int]:
        for number in range(100):
            await asyncio.sleep(0.003 if number % 3 else 0)
            yield number

    async def send(message: Any) -> None:
        nonlocal is_busy
        assert not is_busy
        is_busy = True
        await asyncio.sleep(0.004 if len(sent) % 5 == 0 else 0)
        is_busy = False
        sent.append(message.get("body", b"head"))

    def failed(_: Exception) -> bytes:
        raise AssertionError

    response = EventResponse(items(), lambda number: b"%d" % number, failed, lambda: b"-", b"end")
    await response.stream_response(send)
    assert [part for part in sent if part != b"-"] == [b"head", *(b"%d" % number for number in range(100)), b"end", b""]
    assert sent.count(b"-") > 20
    assert len(asyncio.all_tasks()) == 1


async def test_signs_of_life_are_sent_in_the_order_in_which_they_are_made() -> None:
    """An item that came in the same turn of the event loop as the time of a sign was numbered first and sent second:
    OpenAI's client refuses `response.in_progress` before `response.created`."""
    numbers, sent = itertools.count(), list[bytes]()

    async def items() -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.call_later(0.01, arrived.set_result, None)
        loop.call_soon(time.sleep, 0.1)  # both times have passed when the loop looks again
        await arrived
        yield next(numbers)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def failed(error: Exception) -> bytes:
        raise error

    response = EventResponse(items(), lambda number: b"%d" % number, failed, lambda: b"%d" % next(numbers))
    await response.stream_response(send)
    assert b"".join(sent) == b"01"


async def test_a_client_that_leaves_while_it_waits_ends_the_request() -> None:
    async def items() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1

    async def send(message: Any) -> None:
        raise OSError("gone")

    def unused(_: Any) -> bytes:
        raise AssertionError

    response = EventResponse(items(), unused, unused, lambda: b"-")
    running = asyncio.create_task(response.stream_response(send))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(asyncio.all_tasks()) == 1
