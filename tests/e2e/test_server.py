"""A real Ray Serve application with the built-in model: the official client over HTTP, and a handle."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from benchmarks.serving import disconnects
from examples.hotel_desk.app import DeskArgs, build_desk
from examples.hotel_desk.desk import PIN
from examples.hotel_desk.register import read_keys
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest, Message
from folio.app.client import Folio
from folio.app.errors import RequestError, UnavailableError, UnknownModelError, UnknownRequestError
from folio.vmem import MemoryReport
from tests.local_server import LocalServer
from tests.processes import until, until_async
from tests.promlint import complaints

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60


@dataclass(frozen=True)
class Server:
    url: str
    client: openai.OpenAI
    handle: Any

    def report(self) -> MemoryReport:
        [report] = self.handle.reports.remote().result().values()
        return report

    def wait_until_all_pages_are_free(self) -> None:
        until(lambda: not self.report().active_bytes, state=self.report)


@pytest.fixture(scope="module")
def server(cluster_url: str, folio: Any) -> Iterator[Server]:
    with openai.OpenAI(base_url=f"{cluster_url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield Server(cluster_url, client, folio)


@pytest.fixture(autouse=True)
def _pages_come_back(server: Server) -> Iterator[None]:
    yield
    server.wait_until_all_pages_are_free()


def ask(server: Server, question: str, **params: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": question}]
    return server.client.chat.completions.create(model="builtin", messages=messages, **({"temperature": 0} | params))


def test_models_and_health(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200

    def is_ready() -> bool:
        status = httpx.get(f"{server.url}/ready").status_code
        assert status in (200, 503)
        return status == 200

    until(is_ready)  # at first the ingress has yet to ask a replica
    models = server.client.models.list().data
    assert [m.id for m in models] == ["builtin"]
    assert server.client.models.retrieve("builtin").id == "builtin"


def test_the_edge_behind_haproxy(server: Server) -> None:
    """Headers come once, bodies as they arrive, and refusals before they have; and it is HAProxy that is in front."""
    assert httpx.get(f"{server.url}/-/routes").json()["error"]["code"] == "not_found"  # Serve's proxy has it
    asked = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "mine"})
    assert asked.headers.get_list("x-request-id") == ["mine"]
    assert asked.headers["x-content-type-options"] == "nosniff"
    refused = httpx.get(f"{server.url}/v1/models?{'x' * 9000}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (414, "url_too_long")
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        for _ in range(8):
            connection.sendall(chunk)
        connection.sendall(b"1\r\nx\r\n")  # one more than may be, and it has not ended yet
        answer = b""
        while b"body_too_large" not in answer:  # HAProxy keeps the connection, for the rest of the body
            received = connection.recv(1 << 16)
            assert received, answer
            answer += received
    assert answer.startswith(b"HTTP/1.1 413 ")


KEYS = "The key of room 417 is 93. The key of room 256 is 12."
SCHEMA = {"type": "object", "properties": {"room": {"enum": [417, 256]}}, "required": ["room"]}
FUNCTION = {"name": "find_key", "parameters": SCHEMA | {"additionalProperties": False}}
QUESTION = {"role": "user", "content": "What is the key of room 417?"}
CHAT, TEXT, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "conversation": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": f"{KEYS} {QUESTION['content']}"},
                {"role": "assistant", "content": "The key of room 417 is 93."},
                {"role": "user", "content": "What is the key of room 256?"},
            ]
        },
    ),
    "stop": (CHAT, {"messages": [QUESTION], "stop": ["is"]}),
    "log probabilities": (CHAT, {"messages": [QUESTION], "logprobs": True, "top_logprobs": 2, "max_tokens": 6}),
    "schema": (CHAT, {"messages": [QUESTION], "guided_json": SCHEMA, "max_tokens": 60}),
    "choices": (
        CHAT,
        {"messages": [QUESTION], "n": 3, "guided_choice": ["left", "right"], "temperature": 2, "seed": 1},
    ),
    "tool": (
        CHAT,
        {"messages": [QUESTION], "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ),
    "prompts": (
        TEXT,
        {"prompt": ["The key of room 5", "A page is"], "n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 8},
    ),
    "echo": (TEXT, {"prompt": KEYS, "echo": True, "logprobs": 1, "max_tokens": 2}),
    "best of": (TEXT, {"prompt": "A page", "best_of": 3, "seed": 3, "temperature": 1, "max_tokens": 4}),
    "beams": (TEXT, {"prompt": "A page is", "n": 2, "best_of": 4, "use_beam_search": True, "max_tokens": 8}),
    "response": (RESPONSES, {"input": [{"role": "user", "content": f"{KEYS} {QUESTION['content']}"}], "store": False}),
    "message": (MESSAGES, {"messages": [QUESTION], "system": KEYS, "max_tokens": 30}),
    "unknown model": (CHAT, {"messages": [QUESTION], "model": "other"}),
    "not a number of tokens": (TEXT, {"prompt": "x", "max_tokens": -1}),
    "refused by the engine": (CHAT, {"messages": [QUESTION], "guided_regex": "("}),
}
# Of each answer, or of how much of its prompt was cached.
CHANGING = {"id", "created", "created_at", "completed_at", "call_id", "item_id", "usage", "prompt_tokens_details"}


def stable(value: Any) -> Any:
    """What of an answer is the same each time; log probabilities as far as they are."""
    if isinstance(value, dict):
        return {name: stable(inner) for name, inner in value.items() if name not in CHANGING}
    if isinstance(value, list):
        return [stable(inner) for inner in value]
    return round(value, 2) if isinstance(value, float) else value


def texts(answer: Any) -> dict[int, str]:
    """The text, the arguments and the end of each output of a stream, however it is cut into events."""
    found: dict[int, str] = {}

    def add(index: int, value: Any) -> None:
        for name, inner in value.items():
            if isinstance(inner, dict):
                add(index, inner)
            elif isinstance(inner, list):
                for item in inner:
                    if isinstance(item, dict):
                        add(index, item)
            elif inner and name in ("text", "content", "arguments", "delta", "finish_reason", "stop_reason", "message"):
                found[index] = found.get(index, "") + str(inner)

    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", [event]):
                add(choice.get("index", 0), choice)
    return found


@pytest.fixture(scope="module")
def local() -> Iterator[TestClient]:
    """The same server in this process."""
    server = LocalServer(dtype="float32", kv_memory_bytes=96 << 20, max_num_seqs=32)
    with TestClient(server.api) as client:
        yield client
    server.close()


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_a_server_in_one_process(server: Server, local: TestClient, name: str) -> None:
    """HAProxy, Serve's proxies and Ray's messages change nothing of what `tests/app/api` checks, streamed and whole."""
    path, fields = ASKED[name]
    body = {"model": "builtin"} | fields
    if "temperature" not in body and not body.get("use_beam_search"):
        body["temperature"] = 0
    for stream in (False, True):
        found = httpx.post(f"{server.url}/v1/{path}", json=body | {"stream": stream}, timeout=DEADLINE_S)
        expected = local.post(f"/v1/{path}", json=body | {"stream": stream})
        assert found.status_code == expected.status_code, found.text
        if stream and found.is_success:
            assert texts(found) == texts(expected) != {}
        else:
            assert stable(found.json()) == stable(expected.json())


def test_disconnected_clients_leave_nothing(server: Server) -> None:
    """In every phase of a request and in every manner, twice each, while others ask and get right answers."""
    port = httpx.URL(server.url).port
    assert port is not None
    known = disconnects.num_connections(port)
    outcomes, answers = asyncio.run(disconnects.crowd(port, 32))
    assert sum(outcomes.values()) == 32
    assert answers["right"] > 0.8 * answers.total(), answers
    disconnects.wait_until_nothing_is_left(server.handle, port, "folio", known)


def test_forks_by_handle(server: Server) -> None:
    """Forks of a finished request and of a running one continue its tokens."""
    prompt = "The key of room 417 is 93. The key of room 417"
    greedy: dict[str, Any] = {"model": "builtin", "temperature": 0}
    whole = server.handle.generate.remote(CompletionRequest(prompt=prompt, max_tokens=6, **greedy)).result()
    begun = server.handle.generate.remote(CompletionRequest(prompt=prompt, max_tokens=2, **greedy)).result()
    fork = ForkRequest(request_id=begun.id, n=2, max_tokens=4, **greedy)
    forks = server.handle.fork.remote(fork).result()
    assert [begun.choices[0].text + choice.text for choice in forks.choices] == [whole.choices[0].text] * 2
    assert forks.usage.prompt_tokens == 0
    chunks = list(server.handle.options(stream=True).fork_stream.remote(fork))
    assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == 1) == forks.choices[1].text

    body = CompletionRequest(prompt=prompt, max_tokens=2000, ignore_eos=True, **greedy)
    running = server.handle.options(stream=True).generate_stream.remote(body)
    first = next(running)
    server.handle.fork.remote(fork.model_copy(update={"request_id": first.id})).result()
    running.cancel()
    unknown = first.id.replace("cmpl-", "cmpl-0")
    for request_id in (unknown, unknown.partition(".")[0], unknown + "0"):
        with pytest.raises(UnknownRequestError):
            server.handle.fork.remote(fork.model_copy(update={"request_id": request_id})).result()


def test_the_budget_is_set_by_handle(server: Server) -> None:
    """Lowered, refused, stale, and raised again; requests are answered meanwhile."""
    before = server.report()
    low = before.budget_bytes // 4
    assert server.handle.set_budget.remote(low, 1).result() in (["applied"], ["deferred"])
    assert server.handle.set_budget.remote(before.budget_bytes, 1).result() == ["stale"]
    assert server.report().budget_bytes == pytest.approx(low, rel=0.01)
    assert ask(server, "What is a page?").choices[0].message.content
    with pytest.raises(RequestError, match="must be between"):
        server.handle.set_budget.remote(1, 2).result()
    assert server.handle.set_budget.remote(before.budget_bytes, 3).result() == ["applied"]
    assert server.report().budget_bytes == before.budget_bytes


async def test_the_client_of_other_applications(server: Server) -> None:
    """Whole and streamed, forked, given up on the way, and with the application's own errors."""
    chat = ChatCompletionRequest(
        model="builtin", messages=[Message(role="user", content="What is vAttention?")], temperature=0
    )
    endless = CompletionRequest(model="builtin", prompt="a", max_tokens=4000, ignore_eos=True)

    folio = Folio("folio")
    await folio.ready()
    whole = await folio.chat(chat, session="s")
    assert whole.choices[0].message.content == ask(server, "What is vAttention?").choices[0].message.content
    chunks = [chunk async for chunk in folio.chat_stream(chat)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    reports = await folio.report()
    assert [whole.id.endswith(name) for name in reports] == [True]
    async with aclosing(folio.generate_stream(endless)) as pieces:
        first = await anext(pieces)
        fork = ForkRequest(model="builtin", request_id=first.id, max_tokens=2, n=2, ignore_eos=True)
        assert len((await folio.fork(fork)).choices) == 2
        forks = [chunk async for chunk in folio.fork_stream(fork)]
        assert {chunk.choices[0].index for chunk in forks} == {0, 1}
    task = asyncio.create_task(folio.generate(endless))

    async def is_running() -> int:
        return (await folio.report())[next(iter(reports))].active_bytes

    await until_async(is_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(UnknownModelError) as caught:
        await folio.generate(CompletionRequest(model="other", prompt="x"))
    assert type(caught.value) is UnknownModelError
    with pytest.raises(UnavailableError, match="no application 'other'"):
        await Folio("other").report()


def test_metrics_of_all_processes_are_on_one_page(server: Server) -> None:
    """What the ingress counts, the engine, the router, and Serve itself, of this application only."""

    def read() -> dict[tuple[str, ...], float]:
        answer = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S)
        if answer.status_code == 503:  # no process has reported metrics yet
            return {}
        assert answer.headers["content-type"].startswith("text/plain; version=")
        samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
        assert {(sample.labels["application"], sample.labels["model_name"]) for sample in samples} == {
            ("folio", "builtin")
        }
        assert not any("ray_folio_" in complaint for complaint in complaints(answer.text))
        return {
            (s.name, *(s.labels[tag] for tag in ("route", "outcome", "kind") if s.labels.get(tag))): s.value
            for s in samples
        }

    def read_with(name: tuple[str, ...]) -> dict[tuple[str, ...], float]:
        return metrics if (metrics := read()).get(name, 0) >= 1 else {}

    usage = ask(server, "What is a page?").usage
    list(ask(server, "What is a page?", stream=True))
    late = {"model": "builtin", "input": "x", "timeout_s": 1e-4}
    assert httpx.post(f"{server.url}/v1/responses", json=late, timeout=DEADLINE_S).status_code == 408
    # A process reports all its counters at once.
    metrics = until(lambda: read_with(("ray_folio_requests_total", "responses", "timeout")), state=read)
    assert metrics["ray_folio_requests_total", "chat", "ok"] >= 2
    assert metrics["ray_folio_requests_in_flight", "chat"] == 0
    assert metrics["ray_folio_prompt_tokens_total", "chat"] >= 2 * usage.prompt_tokens
    assert metrics["ray_folio_output_tokens_total", "chat"] >= 2 * usage.completion_tokens
    assert metrics[("ray_folio_time_to_first_token_seconds_count", "chat")] >= 1
    assert any(name.startswith("ray_folio_routed_requests") for name, *_ in metrics)
    assert any(name.startswith("ray_serve_") for name, *_ in metrics)
    assert metrics["ray_folio_prompt_length_tokens_count", "chat"] >= 2
    assert metrics["ray_folio_output_length_tokens_count", "chat"] >= 2
    metrics = until(lambda: read_with(("ray_folio_prefill_seconds_count",)), state=read)
    assert metrics[("ray_folio_step_seconds_count",)] >= usage.completion_tokens
    assert metrics["ray_folio_kv_bytes", "budget"] == server.report().budget_bytes
    assert not any(name.startswith("vllm:") for name, *_ in metrics)


@pytest.mark.nightly
def test_the_hotel_desk_composes_folio(server: Server) -> None:
    """The example application: its answers are right, its rules are pinned, and its errors are HTTP statuses."""
    desk = f"{server.url}/desk/ask"
    serve.run(build_desk(DeskArgs()), name="desk", route_prefix="/desk")
    try:
        [pin] = server.report().pins
        assert pin.name == PIN
        for room, key in random.Random(1).sample(sorted(read_keys().items()), 3):
            question = {"question": f"I have lost my key. What is the key of room {room}?"}
            with httpx.stream("POST", desk, json=question, timeout=DEADLINE_S) as answer:
                assert answer.status_code == 200
                pieces = list(answer.iter_text())
            assert "".join(pieces) == f"The key of room {room} is {key}."
        too_long = httpx.post(desk, json={"question": "room 101 " * 5000}, timeout=DEADLINE_S)
        assert too_long.status_code == 502
        assert "tokens" in too_long.json()["detail"]
    finally:
        serve.delete("desk")
        server.handle.unpin.remote(PIN).result()


def test_idle_memory_goes_back(server: Server) -> None:
    ask(server, "What is a page?")
    until(lambda: not server.report().physical_bytes)


def test_tokens_and_load(server: Server) -> None:
    question = {"messages": [{"role": "user", "content": "What is Folio?"}]}
    tokens = httpx.post(f"{server.url}/tokenize", json=question).json()
    assert tokens["count"] == ask(server, "What is Folio?", max_tokens=1).usage.prompt_tokens
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert "What is Folio?" in text
    before = httpx.get(f"{server.url}/v1/load").json()
    [replica] = before["replicas"]
    assert (before["num_replicas"], before["num_silent"], replica["ready_s"] > 0) == (1, 0, True)
    assert 0 < replica["free_tokens"] <= replica["total_tokens"]
    ask(server, "What is a block?", max_tokens=1)
    after = httpx.get(f"{server.url}/v1/load").json()
    assert after["total"]["prompt_tokens"] > before["total"]["prompt_tokens"]
