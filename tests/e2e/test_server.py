"""A real Ray Serve application with the built-in model: the official client over HTTP, and a handle."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from benchmarks.serving import disconnects
from examples.hotel_desk.app import DeskArgs, build_desk
from examples.hotel_desk.desk import PIN
from examples.hotel_desk.register import read_keys
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest, Message
from folio.app.api.operators.bodies import PinRequest
from folio.app.client import Folio
from folio.app.config.engine import EngineConfig
from folio.app.config.http import HttpSettings
from folio.app.errors import RequestError, UnavailableError, UnknownModelError, UnknownRequestError
from folio.app.main import AppArgs, build
from folio.vmem import MemoryReport
from tests.processes import until, until_async
from tests.promlint import complaints
from tools.builtin_model import corpus

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


def test_chat(server: Server) -> None:
    answer = ask(server, "What is Folio?")
    choice = answer.choices[0]
    assert choice.message.content.startswith("Folio is a server for language models")
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens > 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_equals_whole(server: Server) -> None:
    whole = ask(server, "What is PagedAttention?")
    chunks = list(ask(server, "What is PagedAttention?", stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_long_outputs_come_in_pieces(server: Server) -> None:
    """How many is a matter of time."""
    more: Any = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    chunks = list(ask(server, "What is Folio?", stream=True, **more))
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 1


def test_conversation(server: Server) -> None:
    messages: list[Any] = [
        {
            "role": "user",
            "content": "The key of room 417 is 93. The key of room 256 is 12. What is the key of room 417?",
        },
        {"role": "assistant", "content": "The key of room 417 is 93."},
        {"role": "user", "content": "What is the key of room 256?"},
    ]
    answer = server.client.chat.completions.create(model="builtin", messages=messages, temperature=0)
    assert answer.choices[0].message.content == "The key of room 256 is 12."


def test_completions(server: Server) -> None:
    prompt = "The key of room 417 is 93. The key of room 256 is 12. The key of room 417 is"
    more: Any = {"max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = server.client.completions.create(model="builtin", prompt=prompt, **more)
    stream = server.client.completions.create(model="builtin", prompt=prompt, stream=True, **more)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 5


def test_stop_seed_and_n(server: Server) -> None:
    answer = ask(server, "What is Folio?", stop=[" Ray"], n=1)
    assert answer.choices[0].message.content == "Folio is a server for language models on"
    assert answer.choices[0].finish_reason == "stop"
    sampled = [
        ask(server, "Hello", temperature=2.0, seed=seed, max_tokens=12).choices[0].message.content
        for seed in (1, 1, 2, 3, 4)
    ]
    assert sampled[0] == sampled[1]
    assert len(set(sampled)) > 1


def test_a_request_that_takes_too_long_is_408(server: Server) -> None:
    body = {"model": "builtin", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "timeout_s": 0.2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


def test_errors_reach_the_client_typed(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="at least 1"):
        ask(server, "x", max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        server.client.completions.create(model="other", prompt="x")
    answer = httpx.post(f"{server.url}/v1/completions", content="{oops", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(server: Server, stream: bool) -> None:
    """Those of all outputs of all prompts."""
    body: dict[str, Any] = {"model": "builtin", "prompt": ["a", "b"], "n": 2, "max_tokens": 4000, "ignore_eos": True}
    body |= {"stream": stream, "temperature": 2.0}
    if stream:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
            lines = answer.iter_lines()  # dropping the iterator would close the connection
            next(lines)
            assert server.report().active_bytes > 0
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(DEADLINE_S, read=0.5))
    server.wait_until_all_pages_are_free()


def test_disconnected_clients_leave_nothing(server: Server) -> None:
    """In every phase of a request and in every manner, twice each, while others ask and get right answers."""
    port = httpx.URL(server.url).port
    assert port is not None
    known = disconnects.num_connections(port)
    outcomes, answers = asyncio.run(disconnects.crowd(port, 32))
    assert sum(outcomes.values()) == 32
    assert answers["right"] > 0.8 * answers.total(), answers
    disconnects.wait_until_nothing_is_left(server.handle, port, "folio", known)


def test_look_up_with_16_in_flight_is_as_good_as_alone(server: Server) -> None:
    """About 950 tokens of context: an answer is right only if every cached key and value is."""
    rng = random.Random(1)
    turns = [corpus.look_up_conversation(rng, 100, 1)[0] for _ in range(16)]

    def answer(turn: corpus.Turn) -> str:
        return str(ask(server, turn.question, max_tokens=16).choices[0].message.content)

    alone = [answer(turn) for turn in turns]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(answer, turns))
    right_alone = sum(text == turn.answer for text, turn in zip(alone, turns, strict=True))
    right_together = sum(text == turn.answer for text, turn in zip(together, turns, strict=True))
    assert right_alone >= 14
    assert right_together >= right_alone - 1  # bfloat16: another batch may round a close call the other way


def test_handle_gives_the_same_answers(server: Server) -> None:
    messages = [Message(role="user", content="What is vAttention?")]
    chat = ChatCompletionRequest(model="builtin", messages=messages, temperature=0)
    whole = server.handle.chat.remote(chat).result()
    over_http = ask(server, "What is vAttention?")
    assert whole.choices[0].message.content == over_http.choices[0].message.content
    assert whole.usage.completion_tokens == over_http.usage.completion_tokens
    chunks = list(server.handle.options(stream=True).chat_stream.remote(chat))
    assert "".join(c.choices[0].delta.content for c in chunks) == whole.choices[0].message.content

    completion = CompletionRequest(model="builtin", prompt="The key of room 5", max_tokens=8, temperature=0)
    pieces = list(server.handle.options(stream=True).generate_stream.remote(completion))
    assert (
        "".join(p.choices[0].text for p in pieces) == server.handle.generate.remote(completion).result().choices[0].text
    )


def test_several_outputs_of_several_prompts(server: Server) -> None:
    """Streamed they are the same, mixed; the usage has each prompt once."""
    more: Any = {"prompt": ["The key of room 5", "A page is"], "n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 8}
    whole = server.client.completions.create(model="builtin", **more)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) > 2
    alone = server.client.completions.create(model="builtin", **(more | {"prompt": "A page is", "n": 1}))
    assert alone.choices[0].text == whole.choices[3].text
    assert whole.usage is not None
    assert alone.usage is not None
    assert alone.usage.prompt_tokens < whole.usage.prompt_tokens < 4 * alone.usage.prompt_tokens
    options = {"include_usage": True}
    *chunks, last = server.client.completions.create(model="builtin", stream=True, stream_options=options, **more)
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities(server: Server) -> None:
    """Of a chat, whole and streamed, and of an echoed prompt, which is as likely as when it was generated."""
    chat = ask(server, "What is Folio?", logprobs=True, top_logprobs=2, max_tokens=6)
    entries = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == chat.choices[0].message.content
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    chunks = ask(server, "What is Folio?", logprobs=True, top_logprobs=2, max_tokens=6, stream=True)
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]

    prompt = "The key of room 417 is 93. The key of room 417 is"
    more: Any = {"logprobs": 1, "temperature": 0}
    first = server.client.completions.create(model="builtin", prompt=prompt, max_tokens=2, **more).choices[0]
    echoed = server.client.completions.create(
        model="builtin", prompt=prompt + first.text, max_tokens=0, echo=True, **more
    ).choices[0]
    assert echoed.text == prompt + first.text
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.logprobs.token_logprobs[0] is None
    at = echoed.logprobs.text_offset.index(len(prompt))
    assert echoed.logprobs.tokens[at:] == first.logprobs.tokens
    assert echoed.logprobs.token_logprobs[at:] == pytest.approx(first.logprobs.token_logprobs, abs=0.1)


def test_beams_and_best_of(server: Server) -> None:
    beams = ask(
        server, "What is a block?", n=2, max_tokens=8, extra_body={"use_beam_search": True, "best_of": 4}
    ).model_dump()["choices"]
    assert beams[0]["score"] >= beams[1]["score"]
    assert beams[0]["message"] != beams[1]["message"]
    best = server.client.completions.create(model="builtin", prompt="A page", n=1, best_of=3, max_tokens=4)
    assert len(best.choices) == 1


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


def test_outputs_have_the_form_that_is_asked_for(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "room": {"enum": [417, 256]}},
        "required": ["ok", "room"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    whole = ask(server, "Is room 417 free?", response_format=form, max_tokens=60)
    answer = json.loads(whole.choices[0].message.content)
    assert (type(answer["ok"]), answer["room"] in (417, 256)) == (bool, True)
    chunks = ask(server, "Is room 417 free?", response_format=form, max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    chosen = ask(server, "Which?", n=3, temperature=2.0, extra_body={"guided_choice": ["left", "right"]})
    assert {choice.message.content for choice in chosen.choices} <= {"left", "right"}
    with pytest.raises(openai.BadRequestError, match="guided_json"):
        ask(server, "x", response_format=form, extra_body={"guided_json": {}})
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "x", extra_body={"guided_regex": "("})
    assert caught.value.param == "structure"


def test_tools_that_must_be_called(server: Server) -> None:
    """Whole and streamed; then the tool's answer goes back."""
    parameters = {
        "type": "object",
        "properties": {"room": {"enum": [417, 256]}},
        "required": ["room"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "find_key", "parameters": parameters}}]
    question: list[Any] = [{"role": "user", "content": "What is the key of room 417?"}]
    more: Any = {"model": "builtin", "tools": tools, "temperature": 0}
    create = server.client.chat.completions.create
    [choice] = create(messages=question, tool_choice="required", parallel_tool_calls=False, **more).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name == "find_key"
    assert json.loads(call.function.arguments)["room"] in (417, 256)

    named: Any = {"type": "function", "function": {"name": "find_key"}}
    deltas = [
        call
        for chunk in create(messages=question, tool_choice=named, n=2, stream=True, **more)
        for choice in chunk.choices
        if choice.index == 1
        for call in choice.delta.tool_calls or []
    ]
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "93"}
    answer = create(messages=[*question, choice.message, result], max_tokens=8, **more)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 40


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


def test_usage_counts_cached_tokens_and_salts_separate_callers(server: Server) -> None:
    question = "The key of room 417 is 93. " * 12 + "What is the key of room 417?"

    def cached_tokens(salt: str) -> int:
        details = ask(server, question, extra_body={"cache_salt": salt}).usage.prompt_tokens_details
        return int(details.cached_tokens)

    assert cached_tokens("one") == 0
    prompt_tokens = ask(server, question).usage.prompt_tokens
    assert cached_tokens("one") == prompt_tokens - 1
    assert cached_tokens("other") == 0
    *_, last = ask(
        server, question, stream=True, stream_options={"include_usage": True}, extra_body={"cache_salt": "one"}
    )
    assert last.usage.prompt_tokens_details.cached_tokens == prompt_tokens - 1


def test_a_pinned_conversation_stays(server: Server) -> None:
    rules = Message(role="system", content="The key of room 11 is 22. " * 12)
    server.handle.pin.remote(PinRequest(name="rules", messages=[rules])).result()
    try:
        [pin] = server.report().pins
        assert (pin.name, pin.num_bytes > 0) == ("rules", True)
        messages: list[Any] = [
            {"role": "system", "content": rules.content},
            {"role": "user", "content": "What is the key of room 11?"},
        ]
        answer = server.client.chat.completions.create(model="builtin", messages=messages, temperature=0)
        assert "22" in (answer.choices[0].message.content or "")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == pin.num_tokens
        with pytest.raises(RequestError, match="pinned already"):
            server.handle.pin.remote(PinRequest(name="rules", prompt="x " * 200)).result()
        with pytest.raises(RequestError, match="too short to pin"):
            server.handle.pin.remote(PinRequest(name="short", prompt="x")).result()
    finally:
        server.handle.unpin.remote("rules").result()
    with pytest.raises(RequestError, match="no prefix named"):
        server.handle.unpin.remote("rules").result()


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


ENOUGH_REFUSALS = 200  # some by the replica, then by load shedding; more only take time from the two that run


def test_a_full_ingress_refuses(server: Server) -> None:
    """All refusals are the same answer and are counted, also those by load shedding before the body is read."""
    engine = EngineConfig(model="builtin", kv_memory_bytes=64 << 20, max_num_seqs=1, max_queued_requests=1)
    http = HttpSettings(vllm_metrics=True)
    serve.run(build(AppArgs(engine=engine, http=http)), name="small", route_prefix="/small")
    url = f"{server.url}/small/v1/completions"
    body = {"model": "builtin", "prompt": "a", "ignore_eos": True, "max_tokens": 1000}
    by_code: dict[str, float] = {}

    def load() -> tuple[int, int]:
        [replica] = httpx.get(f"{server.url}/small/v1/load", timeout=DEADLINE_S).json()["replicas"]
        return replica["num_running"], replica["num_waiting"]

    def num_counted() -> float:
        page = httpx.get(f"{server.url}/small/metrics", timeout=DEADLINE_S)
        if page.status_code == 503:  # no process has reported metrics yet
            return 0
        samples = [s for family in text_string_to_metric_families(page.text) for s in family.samples]
        for sample in samples:
            if sample.name == "ray_folio_refused_requests_total":
                by_code[sample.labels["code"]] = sample.value
            elif sample.name == "ray_folio_requests_total":
                by_code[sample.labels["outcome"]] = sample.value
        return by_code.get("refused", 0) + by_code.get("overloaded", 0)

    def values_of(start: str) -> list[float]:
        page = httpx.get(f"{server.url}/small/metrics", timeout=DEADLINE_S)
        return [float(line.rpartition(" ")[2]) for line in page.text.splitlines() if line.startswith(start)]

    try:
        with httpx.Client(timeout=DEADLINE_S) as client, ThreadPoolExecutor(2) as pool:
            long_ones = []
            for num_waiting in (0, 1):
                long_ones.append(pool.submit(httpx.post, url, json=body, timeout=DEADLINE_S))
                until(lambda expected=(1, num_waiting): load() == expected)  # type: ignore[misc]
            picker = httpx.get(f"{server.url}/small/metrics/load", timeout=DEADLINE_S).text
            assert 'vllm:num_requests_running{model_name="builtin"} 1.0\n' in picker
            assert 'vllm:num_requests_waiting{model_name="builtin"} 1.0\n' in picker
            refusals = []
            while len(refusals) < ENOUGH_REFUSALS and not all(one.done() for one in long_ones):
                answer = client.post(url, json=body | {"max_tokens": 1}, headers={"x-request-id": "mine"})
                if answer.status_code != 200:  # else there was room for it at the end
                    refusals.append(answer)
        for answer in refusals:
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
            assert int(answer.headers["retry-after"]) > 0
            assert answer.headers.get_list("x-request-id") == ["mine"]
        assert [one.result().status_code for one in long_ones] == [200, 200]
        num_refused = len(refusals)
        until(lambda: num_counted() >= num_refused, state=lambda: (by_code, num_refused))
        assert num_counted() == num_refused
        assert by_code["overloaded"] > 0  # by load shedding
        until(lambda: sum(values_of('vllm:request_success_total{finished_reason="length",')) >= len(long_ones))
    finally:
        serve.delete("small")


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


def test_responses(server: Server) -> None:
    """Whole, streamed, and continued from an earlier answer; then forked by its id."""
    create: Any = server.client.responses.create
    keys = "The key of room 417 is 93. The key of room 256 is 12."
    question = {"role": "user", "content": f"{keys} What is the key of room 417?"}
    more: dict[str, Any] = {"model": "builtin", "temperature": 0}
    first = create(input=[question], **more)
    assert (first.output_text, first.status) == ("The key of room 417 is 93.", "completed")
    events = list(create(input=[question], stream=True, **more))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == first.output_text
    assert events[-1].response.usage.input_tokens_details.cached_tokens > 0
    second = create(input=[question, *first.output, {"role": "user", "content": "And of room 256?"}], **more)
    assert second.usage.input_tokens > first.usage.input_tokens
    cut = create(input="What is Folio?", max_output_tokens=2, **more)
    assert (cut.status, cut.usage.output_tokens) == ("incomplete", 2)
    fork = ForkRequest(request_id=cut.id, max_tokens=3, **more)
    assert server.handle.fork.remote(fork).result().usage.completion_tokens == 3


def test_messages(server: Server) -> None:
    """A conversation in Anthropic's API, with a nonce in each request: whole and streamed; the second one is cached."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE_S)
    keys = "The key of room 417 is 93. The key of room 256 is 12. " * 3
    question: Any = {"role": "user", "content": f"{keys} What is the key of room 417?"}

    def asked(nonce: str) -> dict[str, Any]:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"}]
        more: dict[str, Any] = {"model": "builtin", "max_tokens": 30_000, "extra_body": {"temperature": 0}}
        return more | {"system": system, "messages": [question]}

    def texts_of(message: Any) -> list[str]:
        return [block.text for block in message.content]

    first = client.messages.create(**asked("fa690"))
    assert texts_of(first) == ["The key of room 417 is 93."]
    assert first.stop_reason == "end_turn"
    with client.messages.stream(**asked("0aaa9")) as stream:
        second = stream.get_final_message()
    assert texts_of(second) == texts_of(first)
    assert (second.usage.cache_read_input_tokens or 0) > second.usage.input_tokens
    count = client.messages.count_tokens(model="builtin", messages=[question]).input_tokens
    assert count == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def test_pins_over_http(server: Server) -> None:
    """The same prefix may be pinned again, by a request too; another one under that name is refused."""
    text = "The rules of this house are long and have to be read by everybody who comes in. " * 3
    pinned = httpx.post(f"{server.url}/v1/pins", json={"name": "rules", "prompt": text}, timeout=DEADLINE_S)
    card = pinned.json()
    assert (pinned.status_code, card["id"], card["num_replicas"], card["num_tokens"] >= 16) == (200, "rules", 1, True)
    again = httpx.post(f"{server.url}/v1/pins", json={"name": "rules", "prompt": text}, timeout=DEADLINE_S)
    assert again.json() == card
    with pytest.raises(openai.BadRequestError, match="rules"):
        ask(server, text + "What is a page?", extra_body={"pin": "rules"})
    for _ in range(2):
        answer = ask(server, text + "What is a page?", max_tokens=1, extra_body={"pin": "question"})
        assert answer.usage.prompt_tokens_details.cached_tokens >= card["num_tokens"]
    pins = httpx.get(f"{server.url}/v1/pins").json()["data"]
    assert [pin["id"] for pin in pins] == ["question", "rules"]
    assert httpx.get(f"{server.url}/v1/load").json()["total"]["pinned_bytes"] > 0
    for name in ("rules", "question"):
        assert httpx.delete(f"{server.url}/v1/pins/{name}").json()["deleted"] is True
    assert httpx.delete(f"{server.url}/v1/pins/rules").status_code == 404
    assert httpx.get(f"{server.url}/v1/pins").json()["data"] == []


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
