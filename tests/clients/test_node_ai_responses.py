"""Vercel's AI SDK, versions 6 and 7, with its provider for OpenAI's responses API."""

from __future__ import annotations

import pytest

from tests.clients.client import Client
from tests.clients.node_client import check

CLIENT = Client("Vercel AI SDK over responses", ("npm:ai", "npm:@ai-sdk/openai", "npm:ai-7", "npm:openai-7"))


@pytest.fixture(params=["6", "7"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_chat(url: str, version: str) -> None:
    check("responses.mjs", url, "chat", AI_SDK=version)


def test_stream(url: str, version: str) -> None:
    check("responses.mjs", url, "stream", AI_SDK=version)


def test_tools(url: str, version: str) -> None:
    """Earlier items are sent as references to stored ones, and, with `store: false`, themselves."""
    check("responses.mjs", url, "tools", AI_SDK=version)


def test_structured(url: str, version: str) -> None:
    check("responses.mjs", url, "structured", AI_SDK=version)


def test_reasoning(url: str, version: str) -> None:
    check("responses.mjs", url, "reasoning", AI_SDK=version)


def test_embeddings(url: str, version: str) -> None:
    check("responses.mjs", url, "embeddings", AI_SDK=version)
