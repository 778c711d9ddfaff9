"""A real Ray Serve application with two ranks: it answers, and comes back when a rank is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from ray import serve

from benchmarks.served import processes_called
from folio.app.config.engine import EngineConfig
from folio.app.errors import ConfigError
from folio.app.main import AppArgs, build
from folio.app.serving.tp_actors import ActorProcesses
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

DEADLINE_S = 90
QUESTION = "The key of room 417 is 93. The key of room 256 is 12. What is the key of room 417?"
NAME = "folio-on-two-ranks"


@dataclass(frozen=True)
class Server:
    url: str

    def ask(self) -> httpx.Response:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": "builtin", "temperature": 0, "messages": messages}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front) -> Iterator[Server]:
    front.delete()
    engine = EngineConfig(model="builtin", tensor_parallel_size=2, step_timeout_s=5.0, kv_memory_bytes=64 << 20)
    with deleted_at_the_end(NAME):
        serve.run(build(AppArgs(engine=engine)), name=NAME, route_prefix="/")
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
