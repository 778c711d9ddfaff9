"""Instructor's modes over the official client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.client import MODEL, USER, Client, Total

instructor = pytest.importorskip("instructor")

CLIENT = Client(
    "Instructor",
    ("instructor", "openai"),
    absent={
        "chat": "structured output is its purpose",
        "tools": "structured output is its purpose",
        "reasoning": "it returns the object alone",
        "embeddings": "structured output is its purpose",
    },
)


def _client(url: str, mode: Any) -> Any:
    import openai

    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_structured(url: str, mode: str) -> None:

    client = _client(url, instructor.Mode[mode])
    answer = client.chat.completions.create(model=MODEL, messages=[USER], response_model=Total, max_retries=0)
    assert isinstance(answer, Total)


def test_stream(url: str) -> None:
    client = _client(url, instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(model=MODEL, messages=[USER], response_model=Total, max_retries=0)
    assert isinstance(last.total, int)
