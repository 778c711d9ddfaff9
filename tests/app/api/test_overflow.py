"""Prompts and outputs that do not fit, in words that agents know, on every API; by their public sources."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest

from folio.app.config.http import HttpSettings
from tests.app.api.asking import CHAT, COMPLETIONS, IGNORED, MESSAGES, RESPONSES, X, transport_of
from tests.fakes.replicas import Engines

# Each API's path, body for a text, field of the output limit, and field of the prompt.
APIS: list[tuple[str, Any, str, str]] = [
    (CHAT, lambda text: {"messages": [X | {"content": text}]}, "max_tokens", "messages"),
    (CHAT, lambda text: {"messages": [X | {"content": text}]}, "max_completion_tokens", "messages"),
    (COMPLETIONS, lambda text: {"prompt": text}, "max_tokens", "prompt"),
    (RESPONSES, lambda text: {"input": text}, "max_output_tokens", "input"),
    (MESSAGES, lambda text: {"messages": [X | {"content": text}]}, "max_tokens", "messages"),
]
# pi and opencode know a too long prompt by these, OpenAI's and Anthropic's.
KNOWN = r"maximum context length is \d+ tokens|prompt is too long"
CLAUDE_CODE = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
CLAUDE_CODE_LIMIT = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
CONTEXT = 64  # of `Engines`


def send(path: str, body: dict[str, Any], **settings: Any) -> tuple[Any, list[Any]]:
    transport = transport_of(engines := Engines(), HttpSettings(**settings))
    return transport.post(path, json={"model": "m"} | body), engines.calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_words", [CONTEXT, 100_000], ids=["tokens", "bytes"])
@pytest.mark.parametrize(("path", "body", "limit", "field"), APIS)
def test_a_prompt_that_is_too_long(path: str, body: Any, limit: str, field: str, num_words: int, stream: bool) -> None:
    """Texts of which the bytes alone are too many are refused before they are tokenised."""
    answer, calls = send(path, body("x 7 " * num_words) | {limit: 5, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], calls) == (400, "invalid_request_error", [])
    assert re.search(KNOWN, error["message"])
    if path == MESSAGES:
        found = re.fullmatch(CLAUDE_CODE + " maximum", error["message"])
        assert found is not None
        assert int(found[1]) > int(found[2]) == CONTEXT - 1
    else:
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert f"is {CONTEXT} tokens. However, your {field} resulted in" in error["message"]
        assert f"Please reduce the length of the {field}." in error["message"]


@pytest.mark.parametrize("policy", ["cut", "refuse"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "limit", "field"), APIS)
def test_an_output_limit_beyond_the_room(
    path: str, body: Any, limit: str, field: str, stream: bool, policy: Literal["cut", "refuse"]
) -> None:
    """Qwen Code asks for 32,000 tokens of any model. What fits is not touched."""
    fields = body("Hi") | {"stream": stream, "an_unknown_field": 1}
    answer, calls = send(path, fields | {limit: 32_000}, max_tokens=policy)
    if policy == "cut":
        assert answer.status_code == 200
        assert answer.headers[IGNORED] == f"an_unknown_field, {limit}"
        assert [call.params.max_tokens for call in calls] == [None]
    else:
        assert (answer.status_code, calls) == (400, [])
        message = answer.json()["error"]["message"]
        if path == MESSAGES:
            found = re.match(CLAUDE_CODE_LIMIT, message)
            assert found is not None
            assert (found[2], found[3]) == ("32000", str(CONTEXT))
        else:
            assert answer.json()["error"]["param"] == limit
            assert re.search(r"length is 64 tokens. However, you requested 320\d\d tokens", message)
    answer, [call] = send(path, fields | {limit: 20}, max_tokens=policy)
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "an_unknown_field")
    assert call.params.max_tokens == 20


def test_prompts_of_one_request_are_cut_one_by_one() -> None:
    answer, calls = send(COMPLETIONS, {"prompt": [[1] * 10, [1] * 60, [1] * 61], "max_tokens": 20})
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "max_tokens")
    assert [call.params.max_tokens for call in calls] == [20, None, None]
