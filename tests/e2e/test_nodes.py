"""Folio on several Ray nodes of one machine: `ray start` for each, with an environment and a clock of its own.

Nightly with three nodes. They share the machine's address, so each has ports of its own; on machines of their own all
have the same.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.served import free_port
from folio.app.cli.start.env import ENVIRONMENT
from folio.app.http import haproxy
from tests.processes import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
NUM_NODES = 2
# Two raylets more, and 80 s.
pytestmark = pytest.mark.nightly
# Nodes but the first live so many seconds in the past: more than `routing.stale_after_s`.
CLOCK_S = -60.0
QUESTION = "The key of room 417 is 93. The key of room 256 is 12. What is the key of room 417?"
MARK = "FOLIO_TEST_NODE"
# Bundles with something of which a node has one: no node has enough for both ranks.
RANK = {"CPU": 0.25, "rank": 1.0}
RANK_EACH = {"rank": 1}


@dataclass
class Node:
    """`ray start`, and all that comes of it: its processes are those with its name in their environment."""

    name: str
    port: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, *arguments: str) -> None:
        # Ports that Ray would pick itself are those of the cluster that other tests have on this machine.
        agents = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
        command += [
            *arguments,
            "--num-cpus=2",
            "--object-store-memory=80000000",
            f"--resources={json.dumps(RANK_EACH)}",
        ]
        command += ["--min-worker-port=0", "--max-worker-port=0", *(f"--{a}-port={free_port()}" for a in agents)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=ROOT)
        until(lambda: self.running() and b"Ray runtime started" in self.log.read_bytes(), DEADLINE_S)

    @property
    def log(self) -> Path:
        return Path(self.environment["RAY_TMPDIR"]) / f"{self.name}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def running(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return True

    def called(self, title: str = "") -> list[int]:
        """Process ids."""
        mark, found = f"{MARK}={self.environment[MARK]}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = mark in (folder / "environ").read_bytes().split(b"\0")
                if is_ours and title in (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile, or is another user's
                continue
        return found

    def kill(self) -> None:
        """All its processes, whatever they do, as when the machine is gone."""
        until(self._kill_what_is_left, DEADLINE_S)

    def _kill_what_is_left(self) -> bool:
        """Whether nothing is left: a process that is killed may have started another one."""
        pids = [pid for pid in self.called() if pid != self.process.pid]
        for pid in [self.process.pid, *pids] if pids else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            self.process.wait()
        return not pids


class Cluster:
    """Nodes, and Folio on them, deployed as in production: by `folio serve` with RAY_ADDRESS."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._gcs_port, self._http_port = folder, free_port(), free_port()
        self._token = secrets.token_hex(32)
        (folder / "clock").mkdir()
        (folder / "clock/sitecustomize.py").write_text(
            f"import time\n_now = time.time\ntime.time = lambda: _now() + {CLOCK_S}\n"
        )
        self._numbers = itertools.count()
        self.nodes: list[Node] = []

    def add(self) -> Node:
        name = f"n{next(self._numbers)}"
        (self.folder / name).mkdir()
        is_head = not self.nodes
        port = self._http_port if is_head else free_port()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment = ENVIRONMENT | haproxy.environment(self.folder / name)
        ours = {
            MARK: f"{self.folder.name}/{name}",
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port),  # of all nodes but the head
            "PYTHONPATH": os.pathsep.join([str(ROOT)] if is_head else [str(self.folder / "clock"), str(ROOT)]),
        }
        self.nodes.append(Node(name, port, inherited | environment | ours))
        head = ["--head", f"--port={self._gcs_port}", "--include-dashboard=false"]
        self.nodes[-1].start(*(head if is_head else [f"--address=127.0.0.1:{self._gcs_port}"]))
        return self.nodes[-1]

    def deploy(self, *applications: dict[str, Any]) -> None:
        config = {
            "http_options": {"host": "127.0.0.1", "port": self._http_port},
            "proxy_location": "EveryNode",
            "applications": [{"import_path": "folio.app.main:build"} | application for application in applications],
        }
        file = self.folder / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config))
        environment = self.nodes[0].environment | {"RAY_ADDRESS": f"127.0.0.1:{self._gcs_port}"}
        with open(self.folder / "app.log", "wb") as log:
            command = [sys.executable, "-m", "folio.app.cli", "serve", "--config", str(file)]
            self._app = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)

    def running(self) -> bool:
        assert self._app.poll() is None, (self.folder / "app.log").read_text()[-5000:]
        return True

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, question: str = QUESTION, timeout_s: float = DEADLINE_S) -> httpx.Response:
    body = {"model": "builtin", "temperature": 0, "messages": [{"role": "user", "content": question}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s)


def is_right(answer: httpx.Response) -> bool:
    return answer.is_success and answer.json()["choices"][0]["message"]["content"].endswith("417 is 93.")


def is_whole(node: Node) -> bool:
    """It takes requests, and has an ingress and an engine replica of its own."""
    titles = ("haproxy -db", "ray::ServeReplica:folio:Ingress", "ray::ServeReplica:folio:EngineReplica")
    return all(node.called(title) for title in titles) and is_ready(node.url)


def engine(**settings: Any) -> dict[str, Any]:
    return {"engine": {"model": "builtin", "kv_memory_bytes": 64 << 20} | settings}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="fn-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            for _ in range(NUM_NODES):
                cluster.add()
            each = {"num_replicas": NUM_NODES, "max_replicas_per_node": 1, "max_surge_percent": 0}
            few = {"ray_actor_options": {"num_cpus": 0.1}}
            cluster.deploy(
                {
                    "name": "folio",
                    "route_prefix": "/",
                    "args": engine(),
                    "deployments": [{"name": "Ingress"} | each | few, {"name": "EngineReplica"} | each | few],
                },
                {
                    "name": "two",
                    "route_prefix": "/two",
                    "args": engine(tensor_parallel_size=2),
                    "deployments": [
                        {"name": "Ingress"} | few,
                        {
                            "name": "EngineReplica",
                            "placement_group_bundles": [RANK, RANK],
                            "placement_group_strategy": "PACK",
                        },
                    ],
                },
            )
            for node in cluster.nodes:
                until(lambda node=node: cluster.running() and is_whole(node), DEADLINE_S)  # type: ignore[misc]
            yield cluster
        finally:
            cluster.close()


def test_a_prompt_goes_to_the_node_that_has_it(cluster: Cluster) -> None:
    """Reports were compared with the router's clock: of a node a minute behind they were stale, and its cache was not
    looked for."""
    first, *others = cluster.nodes
    # Each replica has something of its own in its cache, and each ingress knows of all of them.
    # Short prompts go to any replica: little of them could be cached.
    questions = [f"{number}. {'A page is a unit of mapping. ' * 60}{QUESTION}" for number in range(4)]
    kept = {question: ask(first.url, question).json()["id"].partition(".")[2] for question in questions}

    def have_reports() -> bool:
        silent = re.findall(r"^ray_folio_router_silent_replicas\{.*\} (\S+)$", metrics(first), re.MULTILINE)
        return len(silent) >= NUM_NODES and set(map(float, silent)) == {0.0}

    until(have_reports, DEADLINE_S)
    for question, replica in kept.items():
        for node in [first, *others]:
            answer = ask(node.url, question).json()
            assert answer["id"].endswith(f".{replica}")
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def metrics(node: Node) -> str:
    return httpx.get(f"{node.url}/metrics", timeout=DEADLINE_S).text


def test_ranks_on_two_nodes(cluster: Cluster) -> None:
    """No node has room for both."""
    until(lambda: is_ready(f"{cluster.nodes[0].url}/two"), DEADLINE_S)
    assert is_right(ask(f"{cluster.nodes[0].url}/two"))
    leaders = [node.called("ray::ServeReplica:two:EngineReplica") for node in cluster.nodes]
    peers = [node.called("ray::RankActor") for node in cluster.nodes]
    assert sorted(map(len, leaders)) == sorted(map(len, peers)) == [0] * (NUM_NODES - 1) + [1]
    assert [bool(pids) for pids in leaders] != [bool(pids) for pids in peers]


def test_a_node_that_dies_under_load(cluster: Cluster) -> None:
    """What has not begun is answered by others; streams that have begun end, with an error if they must; and another
    node makes the fleet whole again."""
    first, last = cluster.nodes[0], cluster.nodes[-1]
    outcomes: list[str] = []
    enough = threading.Event()

    def clients(number: int) -> None:
        while not enough.is_set():
            outcomes.append(stream(first.url, number) if number % 2 else whole(first.url, number))

    threads = [threading.Thread(target=clients, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(outcomes) >= 8, DEADLINE_S)
        last.kill()
        killed_after = len(outcomes)
        until(lambda: len(outcomes) >= killed_after + 20, DEADLINE_S)
    finally:
        enough.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert set(outcomes) <= {"right", "broken off"}, outcomes
    assert outcomes.count("broken off") <= 2, outcomes  # two streams at a time
    cluster.nodes.remove(last)
    joined = cluster.add()
    until(lambda: is_whole(joined), DEADLINE_S)
    assert is_right(ask(joined.url))


def whole(url: str, number: int) -> str:
    answer = ask(url, f"{number}. {QUESTION}")
    return "right" if is_right(answer) else f"{answer.status_code} {answer.text}"


def stream(url: str, number: int) -> str:
    body = {"model": "builtin", "prompt": f"{number} " * 20, "max_tokens": 100, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
            lines.extend(line for line in answer.iter_lines() if line.startswith("data: "))
            if not answer.is_success:
                return f"{answer.status_code} {lines}"
    except httpx.RemoteProtocolError:  # the ingress went with the node
        return "broken off" if lines else "lost"
    if lines[-1] == "data: [DONE]":
        return "right"
    return "broken off" if "error" in lines[-1] and len(lines) > 1 else f"lost: {lines}"
