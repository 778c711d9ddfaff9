"""A real Ray Serve application with two ranks that run one sequence: it answers, refuses what it has no room for, and
comes back when a rank is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from benchmarks.served import processes_called
from folio.app.config.engine import EngineConfig
from folio.app.config.http import HttpSettings
from folio.app.errors import ConfigError
from folio.app.main import AppArgs, build
from folio.app.serving.tp_actors import ActorProcesses
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

pytestmark = pytest.mark.third_day(1)
DEADLINE_S = 90
QUESTION = "The key of room 417 is 93. The key of room 256 is 12. What is the key of room 417?"
NAME = "folio-on-two-ranks"
ENOUGH_REFUSALS = 100  # some by the replica, then by load shedding; more only take time from the two that run


@dataclass(frozen=True)
class Server:
    url: str

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=DEADLINE_S)

    def ask(self) -> httpx.Response:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": "builtin", "temperature": 0, "messages": messages}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front) -> Iterator[Server]:
    front.delete()
    engine = EngineConfig(
        model="builtin",
        tensor_parallel_size=2,
        step_timeout_s=5.0,
        kv_memory_bytes=64 << 20,
        max_num_seqs=1,
        max_queued_requests=1,
    )
    with deleted_at_the_end(NAME):
        serve.run(build(AppArgs(engine=engine, http=HttpSettings(vllm_metrics=True))), name=NAME, route_prefix="/")
        yield Server(cluster_url)
    until(lambda: not any(processes()), DEADLINE_S, processes)


def processes() -> tuple[list[int], list[int]]:
    """Process ids of this application's replicas and peers."""
    return processes_called(f"ray::ServeReplica:{NAME}:EngineReplica"), processes_called("ray::RankActor")


def right(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"].endswith("417 is 93.")


def test_two_ranks_answer(server: Server) -> None:
    assert right(server.ask())
    replicas, peers = processes()
    assert len(replicas) == len(peers) == 1


def test_a_full_ingress_refuses(server: Server) -> None:
    """All refusals are the same answer and are counted, also those by load shedding before the body is read."""
    url = f"{server.url}/v1/completions"
    body = {"model": "builtin", "prompt": "a", "ignore_eos": True, "max_tokens": 400}

    def load() -> tuple[int, int]:
        [replica] = server.get("/v1/load").json()["replicas"]
        return replica["num_running"], replica["num_waiting"]

    def counted() -> Counter[str]:
        """Requests refused by the replica, shed, and ended by their length."""
        page, found = server.get("/metrics"), Counter[str]()
        if page.status_code == 503:  # no process has reported metrics yet
            return found
        for sample in (s for family in text_string_to_metric_families(page.text) for s in family.samples):
            if sample.name == "ray_folio_refused_requests_total":
                found[sample.labels["code"]] += int(sample.value)
            elif sample.name == "ray_folio_requests_total" and sample.labels["outcome"] == "refused":
                found["refused"] += int(sample.value)
            elif sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == "length":
                found["length"] += int(sample.value)
        return found

    with httpx.Client(timeout=DEADLINE_S) as client, ThreadPoolExecutor(2) as pool:
        long_ones = []
        for num_waiting in (0, 1):
            long_ones.append(pool.submit(httpx.post, url, json=body, timeout=DEADLINE_S))
            until(lambda expected=(1, num_waiting): load() == expected)  # type: ignore[misc]
        picker = server.get("/metrics/load").text
        assert 'vllm:num_requests_running{model_name="builtin"} 1.0\n' in picker
        assert 'vllm:num_requests_waiting{model_name="builtin"} 1.0\n' in picker
        refusals: list[httpx.Response] = []
        answered = len(long_ones)
        while len(refusals) < ENOUGH_REFUSALS and not all(one.done() for one in long_ones):
            answer = client.post(url, json=body | {"max_tokens": 1}, headers={"x-request-id": "mine"})
            if answer.status_code == 200:  # there was room for it at the end
                answered += 1
            else:
                refusals.append(answer)
    for answer in refusals:
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers.get_list("x-request-id") == ["mine"]
    assert [one.result().status_code for one in long_ones] == [200, 200]
    until(lambda: counted().total() >= len(refusals) + answered, state=counted)
    seen = counted()
    assert (seen["refused"] + seen["overloaded"], seen["length"]) == (len(refusals), answered)
    assert seen["overloaded"] > 0


@pytest.mark.daily(1)
@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_rank_is_replaced_with_all_others(server: Server, rank: int, number: signal.Signals) -> None:
    """Until then requests are answered, or refused with an error that says to send them again."""
    before = processes()
    os.kill(before[rank][0], number)

    def is_replaced() -> bool:
        answer = server.ask()
        if not answer.is_success:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        replicas, peers = processes()
        return right(answer) and not {*before[0], *before[1]} & {*replicas, *peers}

    until(is_replaced, DEADLINE_S)


def test_a_replica_without_bundles_for_its_ranks() -> None:
    with pytest.raises(ConfigError, match="4 ranks need a placement group of as many bundles; the replica has 0"):
        ActorProcesses(3, None)
