"""Requests to try on the OpenAPI page; all of them work with the built-in model."""

from __future__ import annotations

from typing import Any

from fastapi.openapi.models import Example

_KEYS = "The key of room 417 is 93. The key of room 256 is 12."
_ROOM: dict[str, Any] = {
    "type": "object",
    "properties": {"room": {"enum": [417, 256]}},
    "required": ["room"],
    "additionalProperties": False,
}
_QUESTION = [{"role": "user", "content": "What is Folio?"}]


def _example(summary: str, **value: Any) -> Example:
    return {"summary": summary, "value": value}


CHAT = {
    "question": _example("A question", model="builtin", temperature=0, messages=_QUESTION),
    "stream": _example(
        "Streamed, with the usage at the end",
        model="builtin",
        temperature=0,
        messages=[{"role": "user", "content": [{"type": "text", "text": f"{_KEYS} What is the key of room 256?"}]}],
        stream=True,
        stream_options={"include_usage": True},
    ),
    "tool": _example(
        "A tool that has to be called",
        model="builtin",
        messages=[{"role": "user", "content": "What is the key of room 417?"}],
        tools=[{"type": "function", "function": {"name": "find_key", "parameters": _ROOM}}],
        tool_choice="required",
    ),
    "schema": _example(
        "JSON that follows a schema",
        model="builtin",
        messages=_QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "room", "schema": _ROOM}},
    ),
}
COMPLETION = {
    "prompt": _example(
        "A prompt", model="builtin", prompt=f"{_KEYS} The key of room 417 is", max_tokens=8, temperature=0
    ),
    "beams": _example(
        "The two likeliest of four beams",
        model="builtin",
        prompt="Folio is",
        max_tokens=8,
        n=2,
        best_of=4,
        use_beam_search=True,
    ),
    "batch": _example("Two prompts as token ids", model="builtin", prompt=[[76, 77], [78, 79, 80]], max_tokens=4),
}
RESPONSE = {
    "question": _example("A question", model="builtin", input="What is a block?", temperature=0),
    "stream": _example(
        "Streamed, with instructions",
        model="builtin",
        instructions=_KEYS,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What is the key of room 417?"}]}],
        temperature=0,
        stream=True,
    ),
}
TOKENIZE = {
    "text": _example("A text", model="builtin", prompt="What is Folio?", return_token_strs=True),
    "conversation": _example("A conversation", model="builtin", messages=_QUESTION),
}
PIN = {"rules": _example("A text that many prompts begin with", name="rules", prompt=f"{_KEYS} " * 4)}
