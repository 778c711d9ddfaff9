"""Requests to the API over fake replicas or an engine, and what became of them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from starlette.testclient import TestClient

from folio.app.config.http import HttpSettings
from tests.fakes.replicas import TOKENIZER, Engines, Pieces, ingress_with
from tests.local_server import guarded_api

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
IGNORED = "x-folio-ignored-fields"
LEFT_OUT = "[image left out: this model reads text only]"
X = {"role": "user", "content": "x"}
# The least of each body.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [X]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [X], "max_tokens": 9},
}
FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
SMALL_FUNCTION = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "freeform",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
# What Codex CLI sends to `/v1/responses`.
CODEX = {
    "instructions": "You are a coding agent.",
    "input": [USER],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019",
}


class Long(Pieces):
    """Fake replicas with room for the tools of an agent."""

    async def _max_model_len(self) -> int:
        return 1 << 16


def transport_of(engines: Engines, http: HttpSettings | None = None, **settings: Any) -> TestClient:
    return TestClient(guarded_api(ingress_with(engines, **settings), http), base_url="http://folio")


def openai_of(engines: Engines, **settings: Any) -> Any:
    """OpenAI's client, without types: bodies are often such as it has none for."""
    transport = transport_of(engines, **settings)
    return openai.OpenAI(base_url="http://folio/v1", api_key="none", max_retries=0, http_client=transport)


def anthropic_of(engines: Engines, **settings: Any) -> Any:
    transport = transport_of(engines, **settings)
    return anthropic.Anthropic(base_url="http://folio", api_key="none", max_retries=0, http_client=transport)


def post(engines: Engines, path: str, **fields: Any) -> Any:
    return transport_of(engines).post(path, json={"model": "m"} | BODIES[path] | fields)


def ask(engines: Engines, **fields: Any) -> Any:
    return post(engines, RESPONSES, **CODEX | fields)


def prompt_of(engines: Engines, number: int = -1) -> str:
    return str(TOKENIZER.decode(engines.calls[number].prompt_token_ids))


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def events_of(answer: Any) -> list[Any]:
    """The JSON of a stream's events but the end mark, comments left out, as clients see it that use `splitlines`."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
