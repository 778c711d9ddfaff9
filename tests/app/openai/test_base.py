"""Bodies that are valid JSON, but cannot be rendered in a prompt or written as JSON again."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.model.loader import load_tokenizer
from app.errors import RequestError
from app.openai.base import MAX_JSON_DEPTH, check_json
from app.openai.bodies import ChatCompletionRequest
from app.openai.prompts import PromptEncoder

BODY: dict[str, Any] = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": ["\ud800"]}, "surrogates not allowed"),
        ({"\udfff": 1}, "surrogates not allowed"),
        ({"a": [float("inf")]}, "not JSON compliant"),
        ({"a": {"b": float("nan")}}, "not JSON compliant"),
    ],
)
def test_values_that_json_cannot_carry_are_errors(value: dict[str, Any], complaint: str) -> None:
    """Tools with an unpaired surrogate were answered with 500."""
    tool = {"type": "function", "function": {"name": "f", "parameters": value}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}
    for more in ({"tools": [tool]}, {"guided_json": value}, {"response_format": form}):
        with pytest.raises(ValueError, match=complaint):
            ChatCompletionRequest.model_validate(BODY | more)


def test_nesting_has_a_bound() -> None:
    """Deeper nesting met Python's recursion limit in templates and encoders, and was answered with 500."""
    deepest: dict[str, Any] = {}
    for _ in range(MAX_JSON_DEPTH - 1):
        deepest = {"a": deepest}
    assert check_json(deepest) is deepest
    for deeper in ({"a": deepest}, {"a": [deepest]}):
        with pytest.raises(ValueError, match=f"deeper than {MAX_JSON_DEPTH}"):
            check_json(deeper)


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a":' * 200 + "1" + "}" * 200, '{"a": NaN}'])
def test_arguments_of_earlier_calls_must_be_strict_json(arguments: str) -> None:
    """They are text in the body, so only their own JSON has the unpaired surrogate."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*BODY["messages"], {"role": "assistant", "tool_calls": [call]}]
    request = ChatCompletionRequest.model_validate(BODY | {"messages": messages})
    with pytest.raises(RequestError, match="arguments of the tool call '1' cannot be written into the prompt"):
        PromptEncoder(load_tokenizer("builtin")).encode_chat(request, 4096)
