"""A real Ray Serve application with three engine replicas: requests go where their prefix is cached,
and a lost replica costs only its requests in flight."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from benchmarks.served import Served, processes_called
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.operators.bodies import PinRequest
from folio.app.engine import SamplingParams
from folio.app.engine.request.prefix_keys import prompt_keys
from folio.app.errors import UnknownRequestError
from folio.app.fleet.fleet import RoutedRequest
from folio.app.fleet.messages import GenerateRequest
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

DEADLINE_S = 90
ARGS = {
    "engine": {"model": "builtin", "kv_memory_bytes": 64 << 20, "num_threads": 1},
    "routing": {"report_period_s": 0.2},
}
STORY = "The keys hang in the hall, and each has a number on it that somebody painted there long ago. "


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front) -> Iterator[Served]:
    front.delete()
    server = Served("folio-routing", cluster_url, ARGS)
    with deleted_at_the_end(server.name):
        server.deploy(num_replicas=3)
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="builtin", messages=messages, temperature=0, max_tokens=16, **more)


def converse(client: openai.OpenAI, name: str, num_turns: int) -> tuple[int, int]:
    """A conversation; returns the prompt tokens of all turns but the first, and how many of them were cached."""
    messages: list[Any] = []
    prompt_tokens = cached_tokens = 0
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{name}, part {turn}. {STORY * 2}"})
        answer = ask(client, messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        if turn:
            prompt_tokens += answer.usage.prompt_tokens
            cached_tokens += answer.usage.prompt_tokens_details.cached_tokens
    return prompt_tokens, cached_tokens


def test_conversations_stay_where_they_are_cached(server: Served, client: openai.OpenAI) -> None:
    names = [f"Story {i}" for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        turns = list(pool.map(lambda name: converse(client, name, 4), names))
    prompt_tokens, cached_tokens = map(sum, zip(*turns, strict=True))
    # What is new in a turn is about a third of its prompt.
    assert cached_tokens > 0.5 * prompt_tokens
    reports = server.reports()
    assert len(reports) == 3
    assert sum(bool(report.keys or report.changes) for report in reports) >= 2  # and they are not all at one replica
    assert sum(report.cached_tokens for report in reports) >= cached_tokens


def test_a_router_learns_prefixes_from_reports(server: Served) -> None:
    """The prompt came over HTTP, through the ingress's router. The one in this process goes by reports alone."""
    token_ids = list(range(100, 260))
    body = {"model": "builtin", "prompt": token_ids, "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
    engines: Any = server.engines
    engines.max_model_len.remote().result()  # the router in this process begins
    router = engines._router._asyncio_router.request_router
    routed = RoutedRequest("r", len(token_ids) + 1, prompt_keys(token_ids, 16, None))

    def knows_the_prefix() -> bool:
        known = router.route().fleet.fresh([replica.unique_id for replica in router.curr_replicas], time.monotonic())
        return bool((router.route().fleet.cached_tokens(routed, known) >= 160).any())

    until(knows_the_prefix, DEADLINE_S)
    request = GenerateRequest("r", [*token_ids, 300], SamplingParams(max_tokens=2, temperature=0))
    [[piece]] = engines.options(stream=True).complete_as_stream.remote(request)
    assert piece.num_cached_tokens == 160


def test_forks_find_their_replica(server: Served) -> None:
    """A fork goes to the replica of its request; of a missing replica it is refused."""
    greedy: dict[str, Any] = {"model": "builtin", "temperature": 0}
    numbers = itertools.count(300)
    for _ in range(20):  # until the router knows several replicas
        prompts = [[next(numbers)] * 40 for _ in range(6)]
        begun = [
            server.ingress.generate.remote(CompletionRequest(prompt=prompt, max_tokens=60, **greedy))
            for prompt in prompts
        ]
        ids = [answer.result().id for answer in begun]
        if len({request_id.partition(".")[2] for request_id in ids}) > 1:
            break
    else:
        pytest.fail("one replica got all requests")
    for request_id in ids:
        fork = ForkRequest(request_id=request_id, max_tokens=2, **greedy)
        assert len(server.ingress.fork.remote(fork).result().choices) == 1
    lost = ForkRequest(request_id=ids[0].partition(".")[0] + ".nowhere", **greedy)
    with pytest.raises(UnknownRequestError, match="is gone"):
        server.ingress.fork.remote(lost).result()


def test_a_replica_is_killed_under_load(server: Served) -> None:
    """Every request ends with an answer or a 503; then three replicas serve, and the new one has the prefixes that were
    pinned on the others."""
    pin = PinRequest(name="story", prompt=STORY * 4, tenant="a")
    for _ in range(2):  # the second time it is there already
        server.ingress.pin.remote(pin).result()
    body = {"model": "builtin", "prompt": "What is Folio?", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def complete(i: int) -> httpx.Response:
        if i == 20:
            server.kill_one()
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(complete, range(60)))
    assert {response.status_code for response in responses} <= {200, 503}
    answered = [response for response in responses if response.status_code == 200]
    assert len({response.json()["choices"][0]["text"] for response in answered}) == 1
    assert len(answered) >= 40
    for response in responses:
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "unavailable"
    server.wait_until(lambda: server.num_running == 3 and len(server.processes()) == 3, DEADLINE_S)
    until(lambda: [report.num_running for report in server.reports()] == [0, 0, 0])
    pinned = [[pin.name for pin in status.memory.pins] for status in server.engines.broadcast("status").results()]
    assert pinned == [["story"]] * 3


def test_an_ingress_is_killed_under_load(server: Served) -> None:
    """HAProxy retries unanswered requests at the next ingress; a stream that has begun loses its connection, which no
    client takes for its end."""
    url = f"{server.url}/v1/completions"
    body = {"model": "builtin", "prompt": "What is Folio?", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    assert httpx.post(url, json=body | {"max_tokens": 1}, timeout=DEADLINE_S).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        with httpx.stream("POST", url, json=body | {"max_tokens": 4000, "stream": True}, timeout=DEADLINE_S) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            others = [pool.submit(httpx.post, url, json=body, timeout=DEADLINE_S) for _ in range(4)]
            while sum(report.num_running + report.num_waiting for report in server.reports()) < 5:
                assert not any(other.done() for other in others)
            [ingress] = processes_called(f"ray::ServeReplica:{server.name}:Ingress")
            os.kill(ingress, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                list(lines)
        assert [other.result().json()["usage"]["completion_tokens"] for other in others] == [1500] * 4
