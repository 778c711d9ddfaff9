"""Vercel's AI SDK with its provider for servers like OpenAI's."""

from __future__ import annotations

from tests.clients.client import Client
from tests.clients.node_client import check

CLIENT = Client("Vercel AI SDK", ("npm:ai", "npm:@ai-sdk/openai-compatible"))
SCRIPT = "ai.mjs"


def test_chat(url: str) -> None:
    check(SCRIPT, url, "chat")


def test_stream(url: str) -> None:
    check(SCRIPT, url, "stream")


def test_tools(url: str) -> None:
    check(SCRIPT, url, "tools")


def test_structured(url: str) -> None:
    check(SCRIPT, url, "structured")


def test_reasoning(url: str) -> None:
    check(SCRIPT, url, "reasoning")


def test_embeddings(url: str) -> None:
    check(SCRIPT, url, "embeddings")
