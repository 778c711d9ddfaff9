"""Fuzzing: arbitrary bodies never give a 5xx, errors are OpenAI's JSON, and streams carry any text to any client.

CI tries a few hundred bodies; `pytest --hypothesis-profile=nightly tests/app/api/test_fuzz.py` thousands.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from folio.app.api.anthropic.body import MessagesRequest
from folio.app.api.openai.bodies import CompletionRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.replies import Completion, CompletionChoice
from folio.app.http.error_json import is_anthropic
from tests.app.api.fake_service import FakeService
from tests.local_server import LocalServer, guarded_api
from tests.nightly import examples

_HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SETTINGS = settings(max_examples=examples(60, nightly=3000), deadline=None, suppress_health_check=_HEALTH)
FEWER = settings(max_examples=examples(15, nightly=500), deadline=None, suppress_health_check=_HEALTH)

TEXT = st.text(st.characters(), max_size=12)  # unpaired surrogates included
ODD_TEXT = st.sampled_from(["", " ", "\0", "\ud800", "\n\r\u2028\x85", "data: [DONE]", "👩‍👩‍👧", "a" * 3000, "builtin"])
NUMBER = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 10**30, -(2**63), 2**31, 1e308, 5e-324, -0.0])
LEAF = st.none() | st.booleans() | NUMBER | TEXT | ODD_TEXT
WILD = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
# Valid lengths are short; lengths beyond the context are refused.
LENGTHS = st.sampled_from([0, 1, 2, -1, 5000, 10**30, True, "3", 1.5])
FEW = st.sampled_from([0, 1, 2, 3, -1, 129, 10**30, "1", None])
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": LENGTHS,
    "max_completion_tokens": LENGTHS,
    "n": FEW,
    "best_of": FEW,
    "logprobs": FEW | st.booleans(),
    "top_logprobs": FEW,
    "prompt_logprobs": FEW,
    "stream": st.booleans(),
    "echo": st.booleans(),
    "use_beam_search": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "guided_json": st.sampled_from([{}, {"enum": [1]}, {"type": 5}, "{", '{"enum": ["\\ud800"]}']),
    "guided_choice": st.lists(TEXT, max_size=3),
    "guided_regex": st.sampled_from(["a|b", "(", "[a-c]{1,3}", ""]),
    "logit_bias": st.dictionaries(st.sampled_from(["0", "7", "2047", "99999", "x"]), st.floats(-100, 100), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 2100), max_size=3),
    "stream_options": st.just({"include_usage": True}),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    "prompt": st.lists(st.integers(-1, 2100), max_size=4) | TEXT | st.lists(TEXT, max_size=3),
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\udfff"}'}}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "king"]), "content": TEXT | WILD},
    optional={"name": WILD, "tool_calls": st.just([CALL]) | WILD, "tool_call_id": st.just("1") | WILD},
)


def bodies(base: dict[str, Any], fields: set[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid body with some fields replaced or added: mostly by plausible values, sometimes by any."""
    some = {name: PLAUSIBLE.get(name, WILD) | (WILD if name not in LONG else LENGTHS) for name in sorted(fields)}
    more = st.lists(st.sampled_from(sorted(some)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: some[name] for name in names})
    )
    return more.map(lambda values: base | values)


LONG = {"max_tokens", "max_completion_tokens"}
COMPLETIONS = bodies(
    {"model": "builtin", "prompt": "The key of room", "max_tokens": 2}, {*CompletionRequest.model_fields, "surprise"}
)
CHATS = bodies(
    {"model": "builtin", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    {*ChatCompletionRequest.model_fields, "surprise"} - {"messages"},
) | st.lists(MESSAGE, max_size=3).map(lambda messages: {"model": "builtin", "messages": messages, "max_tokens": 2})


def events_of(stream: str) -> list[str]:
    """The data of server-sent events, as the standard defines them."""
    assert stream.endswith("\n\n")
    events = []
    for block in re.split(r"(?:\r\n|\r|\n){2}", stream)[:-1]:
        data = []
        for line in re.split(r"\r\n|\r|\n", block):
            name, _, value = line.partition(":")
            assert name in ("data", "event"), line
            if name == "data":
                data.append(value.removeprefix(" "))
        events.append("\n".join(data))
    return events


def lines_of(stream: str) -> list[str]:
    """The data of events as seen by clients that split the stream with `splitlines`."""
    return [line.removeprefix("data: ") for line in stream.splitlines() if line]


def post(server: LocalServer, path: str, content: bytes, headers: dict[str, str] | None = None) -> Any:
    """Post, and check that the answer is well-formed and not a 5xx."""
    client = TestClient(server.api, raise_server_exceptions=False)
    answer = client.post(path, content=content, headers={"content-type": "application/json"} | (headers or {}))
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error.keys() == ({"message", "type"} if is_anthropic(path) else {"message", "type", "param", "code"})
        assert error["message"]
    elif is_anthropic(path):
        last = events_of(answer.text)[-1] if "event-stream" in answer.headers["content-type"] else answer.text
        assert json.loads(last)["type"] in ("message_stop", "message"), last
    elif answer.headers["content-type"].startswith("text/event-stream"):
        *events, last = events_of(answer.text)
        assert last == "[DONE]" or json.loads(last)["error"]["type"] != "server_error", last
        assert all(json.loads(event)["object"] for event in events)
    else:
        assert answer.json()["choices"]
    return answer


BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"])},
    optional={
        "text": TEXT | WILD,
        "thinking": TEXT | WILD,
        "id": st.just("1") | WILD,
        "tool_use_id": st.just("1") | WILD,
        "name": st.just("f") | WILD,
        "input": st.just({"a": "\udfff"}) | WILD,
        "content": TEXT | WILD,
        "is_error": st.booleans() | WILD,
        "cache_control": st.just({"type": "ephemeral"}) | WILD,
    },
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT | st.lists(BLOCK, max_size=3)}
)
MESSAGES = bodies(
    {"model": "builtin", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    {*MessagesRequest.model_fields, "surprise"} - {"messages", "max_tokens"},  # which is bounded, not refused
) | st.lists(TURN, max_size=3).map(lambda turns: {"model": "builtin", "messages": turns, "max_tokens": 2})


ANYTHING = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHATS, "/v1/messages": MESSAGES}


@pytest.mark.parametrize("path", ANYTHING)
@SETTINGS
@given(data=st.data())
def test_bodies_of_anything(server: LocalServer, path: str, data: st.DataObject) -> None:
    post(server, path, json.dumps(data.draw(ANYTHING[path])).encode())


GOOD = json.dumps({"model": "builtin", "prompt": "é👩 x", "max_tokens": 1}, ensure_ascii=False).encode()


@SETTINGS
@given(data=st.data())
def test_broken_bodies(server: LocalServer, data: st.DataObject) -> None:
    """Truncated, with bytes changed, added or repeated, in other encodings, and with other content types."""
    at = data.draw(st.integers(0, len(GOOD)))
    kinds = [GOOD[:at], GOOD[:at] + data.draw(st.binary(max_size=4)) + GOOD[at:], GOOD[:at] + GOOD[at + 1 :], GOOD * 2]
    content = data.draw(st.sampled_from([*kinds, GOOD.decode().encode("utf-16"), gzip.compress(GOOD)]))
    types = ["application/json", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "", "a/b/c"]
    headers = {
        "content-type": data.draw(st.sampled_from(types)),
        "content-encoding": data.draw(st.sampled_from(["identity", "gzip", "nonsense"])),
        "x-session-id": data.draw(st.text(st.characters(max_codepoint=255, exclude_categories=["Cc"]), max_size=300)),
    }
    post(server, "/v1/completions", content, {name: value.encode("latin-1") for name, value in headers.items()})  # type: ignore[misc]


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 50_000, b'{"a":' + b"9" * 10_000 + b"}", b"NaN", b"\xff"]
)
def test_deep_and_malformed_bodies(server: LocalServer, content: bytes) -> None:
    assert post(server, "/v1/chat/completions", content).status_code == 400


class _TextStream(FakeService):
    """A service that streams these pieces of text."""

    pieces: tuple[str, ...] = ()

    async def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncIterator[Completion]:
        for piece in self.pieces:
            yield Completion(id="c", created=0, model="m", choices=[CompletionChoice(text=piece)])


TEXT_STREAM = _TextStream()
STREAM_CLIENT = TestClient(guarded_api(TEXT_STREAM))
PIECE = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["", "\n\n", "\r", "data: ", "\ndata: [DONE]\n\n", "\u2028", "\x85\u2029", "event: x\n", ":", "\0", "\ufeff"]
)


@SETTINGS
@given(pieces=st.lists(PIECE, min_size=1, max_size=5))
def test_streams_carry_any_text(pieces: list[str]) -> None:
    TEXT_STREAM.pieces = tuple(pieces)
    stream = STREAM_CLIENT.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True}).content.decode()
    for *events, last in (events_of(stream), lines_of(stream)):
        assert last == "[DONE]"
        assert [json.loads(event)["choices"][0]["text"] for event in events] == pieces


@FEWER
@given(
    body=st.fixed_dictionaries(
        {
            "prompt": st.sampled_from(["A page is", ["A page", "The key of room 417 is"], [300, 301, 302], "é👩"]),
            "seed": st.integers(0, 99),
            "temperature": st.sampled_from([0, 1.0, 2.0]),
            "max_tokens": st.integers(1, 12),
        },
        optional={
            "n": st.integers(1, 3),
            "echo": st.booleans(),
            "logprobs": st.integers(0, 2),
            "stop": st.sampled_from([" ", ["e", "the"], "👩", "."]),
            "include_stop_str": st.booleans(),
            "ignore_eos": st.booleans(),
            "guided_regex": st.sampled_from(["(é|👩|\u2028|[a-z ]){1,9}"]),
            "logit_bias": st.just({"5": 40.0}),
            "min_tokens": st.just(1),
        },
    )
)
def test_chunks_add_up_to_the_full_answer(server: LocalServer, body: dict[str, Any]) -> None:
    """Text, log probabilities, finish reasons and usage of every output."""
    body |= {"model": "builtin"}
    whole = post(server, "/v1/completions", json.dumps(body).encode()).json()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    stream = post(server, "/v1/completions", json.dumps(body | more).encode()).text
    assert lines_of(stream) == events_of(stream)
    *events, usage, _ = events_of(stream)
    texts: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, list[Any]] = defaultdict(list)
    ends = {}
    for event in events:
        [choice] = json.loads(event)["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"] is not None:
            tokens[choice["index"]] += zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = choice["finish_reason"], choice.get("stop_reason")
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts.pop(index) == choice["text"]
        assert ends.pop(index) == (choice["finish_reason"], choice.get("stop_reason"))
        if choice["logprobs"] is not None:
            pairs = zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
            assert tokens.pop(index) == list(pairs)
            assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert (texts, ends, tokens) == ({}, {}, {})
    counts = json.loads(usage)["usage"]
    assert all(counts[name] == whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
