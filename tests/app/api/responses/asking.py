"""Requests as Codex CLI sends them to `/v1/responses`, and what became of them."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

from tests.fakes.replicas import TOKENIZER, Pieces, ingress_with
from tests.local_server import guarded_api

FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}

SMALL_FUNCTION = {
    "type": "function",
    "name": "f",
    "parameters": {"properties": {"x": {"type": "integer"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "freeform",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
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


def ask(engines: Pieces, **fields: Any) -> Any:
    api = TestClient(guarded_api(ingress_with(engines)), base_url="http://folio")
    return api.post("/v1/responses", json={"model": "m"} | CODEX | fields)


def prompt_of(engines: Pieces) -> str:
    return TOKENIZER.decode(engines.calls[-1].prompt_token_ids)


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
