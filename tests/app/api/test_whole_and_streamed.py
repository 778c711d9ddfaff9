"""One output of the model on every API: the same parts, reason of the end and usage as JSON and as a stream."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json

from folio.app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    NoReplicaError,
    OverloadedError,
    RequestError,
)
from tests.app.api.asking import BODIES, CHAT, MESSAGES, PARAMETERS, RESPONSES, events_of, post, transport_of
from tests.fakes.replicas import CALL, TOKENIZER, Engines, Pieces

FUNCTION = {"name": "f", "parameters": PARAMETERS}
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "n": 2, "logprobs": True},
    RESPONSES: {"tools": [{"type": "function"} | FUNCTION]},
    MESSAGES: {"tools": [{"name": "f", "input_schema": PARAMETERS}]},
}
# The events of a stream, by their types.
ORDERS = {
    RESPONSES: "created in_progress (output_item.added "
    r"(content_part.added ((output|reasoning)_text.delta )*(output|reasoning)_text.done content_part.done |"
    "(function_call_arguments.delta )*function_call_arguments.done )"
    "output_item.done )+(completed|incomplete) ",
    MESSAGES: "message_start ping (content_block_start (content_block_delta )*content_block_stop )*"
    "message_delta message_stop ",
}
TYPES: dict[str, tuple[TypeAdapter[Any], TypeAdapter[Any]]] = {
    CHAT: (TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)),
    RESPONSES: (TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)),
    MESSAGES: (TypeAdapter(Message), TypeAdapter(RawMessageStreamEvent)),
}

# A part is its kind and text, or the name and the arguments of a call. What an answer tells: its parts, the reason of
# its end, and its tokens (prompt, cached, output, reasoning).
Part = tuple[str, ...]
Told = tuple[list[Part], tuple[str | None, ...], tuple[int, ...]]


def told_by_chat(answers: list[Any]) -> Told:
    """By a whole answer, or by chunks; of two outputs that are equal."""
    outputs = []
    for index in range(2):
        texts, calls, entries, end = {"reasoning": "", "text": ""}, list[list[str]](), list[Any](), None
        for choice in (c for answer in answers for c in answer["choices"] if c["index"] == index):
            body = choice.get("message") or choice["delta"]
            assert body.get("reasoning") == body.get("reasoning_content")
            texts["reasoning"] += body.get("reasoning_content") or ""
            texts["text"] += body.get("content") or ""
            for call in body.get("tool_calls") or ():
                if call.get("index", len(calls)) == len(calls):
                    assert (call["type"], call["id"][:5]) == ("function", "call_")
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
            entries += (choice["logprobs"] or {"content": []})["content"]
            if "message" in choice:
                assert (body["content"] is None) == (bool(calls) and not texts["text"])
            end = choice["finish_reason"] or end
        said = [part for part in texts.items() if part[1]]
        outputs.append(([*said, *map(tuple, calls)], (end,), entries))
    assert outputs[0] == outputs[1]
    parts, ends, entries = outputs[0]
    assert [entry["token"] for entry in entries] == [TOKENIZER.decode([300 + i]) for i in range(len(entries))]
    usage = answers[-1]["usage"]
    details = usage.get("completion_tokens_details") or {"reasoning_tokens": 0}
    tokens = usage["completion_tokens"] // 2, details["reasoning_tokens"] // 2, len(entries)
    return parts, ends, (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], *tokens)


def told_by_response(answer: Any) -> Told:
    parts: list[Part] = []
    for item in answer["output"]:
        if item["type"] == "function_call":
            parts.append((item["name"], item["arguments"]))
        else:
            kind = "text" if item["type"] == "message" else "reasoning"
            parts.append((kind, "".join(part["text"] for part in item["content"])))
    usage = answer["usage"]
    tokens = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    end = answer["status"], answer["output"][-1]["status"]
    assert (answer["incomplete_details"] is None) == (answer["status"] == "completed")
    return parts, end, (*tokens, usage["output_tokens_details"]["reasoning_tokens"])


def told_by_response_events(events: list[Any]) -> Told:
    """By the last event, with which the deltas, the ends of their texts and the items agree."""
    answer = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in answer["output"]]
    assert {item["status"] for item in added} == {"in_progress"}
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == answer["output"]
    texts = [""] * len(added)
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == added[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
        elif "text" in event or "arguments" in event:
            assert event.get("text", event.get("arguments")) == texts[event["output_index"]]
    told = told_by_response(answer)
    assert texts == [part[-1] for part in told[0]]
    return told


def told_by_message(answer: Any) -> Told:
    parts: list[Part] = []
    for block in answer["content"]:
        if block["type"] == "tool_use":
            parts.append((block["name"], json.dumps(block["input"])))
        elif block["type"] == "thinking":
            parts.append(("reasoning", block["thinking"]))
            assert block["signature"]
        else:
            parts.append(("text", block["text"]))
    usage = answer["usage"]
    cached, details = usage["cache_read_input_tokens"], usage.get("output_tokens_details") or {"thinking_tokens": 0}
    tokens = usage["input_tokens"] + cached, cached, usage["output_tokens"], details["thinking_tokens"]
    return parts, (answer["stop_reason"], answer["stop_sequence"]), tokens


def told_by_message_events(events: list[Any]) -> Told:
    answer, partial = events[0]["message"], ""
    assert (answer["content"], answer["stop_reason"]) == ([], None)
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(answer["content"])
            answer["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = answer["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop" and partial:
            answer["content"][event["index"]]["input"] = from_json(partial, allow_partial="trailing-strings")
            partial = ""
        elif event["type"] == "message_delta":
            answer |= event["delta"]
            answer["usage"] |= event["usage"]
    return told_by_message(answer)


READERS: dict[str, tuple[Any, Any]] = {
    CHAT: (lambda answer: told_by_chat([answer]), told_by_chat),
    RESPONSES: (told_by_response, told_by_response_events),
    MESSAGES: (told_by_message, told_by_message_events),
}


class Output(Pieces):
    """Equal outputs, interleaved, or in one piece each to a request that is not streamed."""

    streams = False

    def _items(self, call: Any) -> list[Any]:
        items = super()._items(call)
        if not self.streams:
            one = {name: sum((getattr(item, name) for item in items), ()) for name in ("token_ids", "logprobs")}
            items = [replace(items[-1], text="".join(item.text for item in items), **one)]
        last = call.params.n - 1
        return [replace(item, index=i, num_unfinished=last - i) for item in items for i in range(last + 1)]


HALF = '<tool_call>\n{"name": "f", "arguments": {"x": 1'
THOUGHTS = ("<think>", "so", "</think>", "Well.", f"\n{CALL}", "More.")
# Reasons of the end on each API.
Ends = tuple[tuple[str | None, ...], ...]
ENDED: Ends = ("stop",), ("completed", "completed"), ("end_turn", None)
CALLED: Ends = ("tool_calls",), ("completed", "completed"), ("tool_use", None)
CUT: Ends = ("length",), ("incomplete", "incomplete"), ("max_tokens", None)
UNKNOWN = CALL.replace("f", "g")
WELL, F, SO = ("text", "Well."), ("f", '{"x": 1}'), ("reasoning", "so")


def stopped_by(text: str, status: str) -> Ends:
    return ("stop",), ("completed", status), ("stop_sequence", text)


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize(
    ("texts", "more", "parts", "ends"),
    [
        (["Hel", "", "lo"], {}, [("text", "Hello")], ENDED),
        (["Hel\u2028lo"], {}, [("text", "Hel\u2028lo")], ENDED),
        ([""], {}, [], ENDED),
        (["Hel"], {"finish_reason": "length"}, [("text", "Hel")], CUT),
        (["a"], {"stop_reason": "</a>"}, [("text", "a")], stopped_by("</a>", "completed")),
        (["Well.", f"\n{CALL}"], {}, [WELL, F], CALLED),
        ([CALL, CALL], {}, [F, F], CALLED),
        (THOUGHTS[:4], {}, [SO, WELL], ENDED),
        (THOUGHTS, {}, [SO, WELL, F, ("text", "More.")], CALLED),
        (["<th", "ink>", "a", "b", "</think>", "\n\nWell", "."], {}, [("reasoning", "ab"), WELL], ENDED),
        (["no <tool", "_call>{} <tool"], {}, [("text", "no <tool_call>{} <tool")], ENDED),
        ([CALL], {"finish_reason": "length"}, [F], CUT),
        ([HALF, ', "y": "ab'], {"finish_reason": "length"}, [("f", '{"x": 1, "y": "ab')], CUT),
        ([HALF], {"stop_reason": "STOP"}, [("f", '{"x": 1')], stopped_by("STOP", "incomplete")),
        ([HALF, "}}\n"], {"stop_reason": "STOP"}, [F], (*CALLED[:2], ("stop_sequence", "STOP"))),
        ([UNKNOWN], {}, [("text", UNKNOWN)], ENDED),
    ],
)  # fmt: skip
def test_an_output(path: str, texts: list[str], more: Any, parts: list[Part], ends: Ends) -> None:
    """Regression: a client ran a call that a stop string had cut without the rest of its arguments."""
    engines = Output(*texts, encodes=True, **more)
    transport = transport_of(engines, reasoning_parser="qwen3" if "</think>" in texts else "auto")
    tokens = [len(TOKENIZER.encode(text)) for text in texts]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {"model": "m"} | BODIES[path] | FIELDS[path] | {limit: max(1, sum(tokens))}
    whole = transport.post(path, json=body)
    engines.streams = True
    options = {"stream_options": {"include_usage": True}} if path == CHAT else {}
    stream = transport.post(path, json=body | options | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream)
    of_whole, of_event = TYPES[path]
    of_whole.validate_json(whole.text)
    for event in events:
        if event.get("type") != "ping":
            of_event.validate_python(event)
    if path in ORDERS:
        types = "".join(f"{event['type'].removeprefix('response.')} " for event in events)
        assert re.fullmatch(ORDERS[path], types), types
        assert re.findall("^event: (.*)$", stream.text, re.MULTILINE) == [event["type"] for event in events]
    thought = texts.index("</think>") + 1 if "</think>" in texts else 0
    usage: tuple[int, ...] = len(engines.calls[0].prompt_token_ids), 2, sum(tokens), sum(tokens[:thought])
    if path == CHAT:  # it has no order of parts, and a log probability for each piece
        usage += (len(texts),)
        content = "".join(part[1] for part in parts if part[0] == "text")
        parts = (
            [part for part in parts if part[0] == "reasoning"]
            + [("text", content)] * bool(content)
            + [part for part in parts if part[0] not in ("reasoning", "text")]
        )
    elif path == RESPONSES:  # an empty answer is a message
        parts = parts or [("text", "")]
    else:  # a call that was cut is what can be read of it
        cuts = {'{"x": 1, "y": "ab': '"}', '{"x": 1': "}"}
        parts = [(name, text + cuts.get(text, "")) for name, text in parts]
    told = parts, ends[list(FIELDS).index(path)], usage
    read_whole, read_events = READERS[path]
    assert read_whole(whole.json()) == told
    assert read_events(events) == told


TOO_LONG = "context_length_exceeded"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status", "code", "late", "kind"),
    [
        (EngineError("a step failed"), 500, "engine_error", "server_error", "api_error"),
        (OverloadedError("too many"), 429, "overloaded", "rate_limit_exceeded", "overloaded_error"),
        (NoReplicaError("gone", 2.0), 503, "unavailable", "server_error", "overloaded_error"),
        (DeadlineError("too late"), 408, "timeout", "server_error", "timeout_error"),
        (RequestError("wrong", "prompt"), 400, "invalid_value", "invalid_prompt", "invalid_request_error"),
        (ContextLengthError("too long", "prompt"), 400, TOO_LONG, TOO_LONG, "invalid_request_error"),
        (RuntimeError("secret"), 500, "engine_error", "server_error", "api_error"),
    ],
    ids=str,
)  # fmt: skip
def test_an_error(
    path: str, error: Exception, status: int, code: str, late: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At once it is a status, also of a stream. In a stream that has begun it is the last event."""
    for stream in (False, True):
        answer = post(Engines(error), path, stream=stream)
        assert (answer.status_code, "retry-after" in answer.headers) == (status, status in (429, 503))
        told = answer.json()["error"]
        assert told["type" if path == MESSAGES else "code"] == (kind if path == MESSAGES else code)
        assert "secret" not in told["message"]
        assert status == 500 or str(error) in told["message"]
        if path == MESSAGES and code == TOO_LONG:
            assert told["message"].startswith("prompt is too long: ")  # as Claude Code knows it
    caplog.clear()
    caplog.set_level(logging.INFO)
    *_, last = events_of(post(Pieces("Hel", error=error), path, stream=True))
    if path == RESPONSES:
        [record] = [record for record in caplog.records if "failed" in record.getMessage()]
        level = logging.ERROR if code == "engine_error" else logging.INFO
        assert (record.levelno, record.exc_info is not None) == (level, level == logging.ERROR)
        answer = last["response"]
        assert (last["type"], answer["status"], answer["error"]["code"]) == ("response.failed", "failed", late)
        assert (answer["output"][0]["content"][0]["text"], answer["output"][0]["status"]) == ("Hel", "incomplete")
        told = answer["error"]
    else:
        told = last["error"]
        assert told["type" if path == MESSAGES else "code"] == (kind if path == MESSAGES else code)
    assert "secret" not in told["message"]
    assert "secret" in str(error) or str(error) in told["message"]
