"""`folio serve` as others find it: what listens, which programs may join, and its end after its raylet's death."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from benchmarks.served import free_port
from tests.processes import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240
# Another program on the machine: joins the cluster and calls Folio by handle.
JOINS = """
import ray
ray.init(log_to_driver=False)
from ray import serve
print(serve.get_app_handle("folio").load.remote().result().num_replicas)
"""


@dataclass(frozen=True)
class Command:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def named(self, title: str) -> psutil.Process:
        [found] = [process for process in self.family() if title in " ".join(process.cmdline())]
        return found


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder, port = tmp_path_factory.mktemp("command"), free_port()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "folio.app.cli", "serve", "--port", str(port), "--replicas", "1", "--grace-s", "30"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    started = Command(process, f"http://127.0.0.1:{port}", log)

    def greets() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        return "Folio is ready" in log.read_text(errors="replace")

    family: list[psutil.Process] = []
    try:
        until(greets, DEADLINE_S)
        until(lambda: httpx.get(f"{started.url}/ready", timeout=DEADLINE_S).status_code == 200, DEADLINE_S)
        family = started.family()
        yield started
    finally:
        for survivor in family:
            if survivor.is_running():
                survivor.kill()
        process.kill()
        process.wait()


def listening(process: psutil.Process) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    found = []
    for connection in process.net_connections(kind="inet"):
        if connection.status == psutil.CONN_LISTEN:
            address = ipaddress.ip_address(connection.laddr.ip)
            found.append((getattr(address, "ipv4_mapped", None) or address, connection.laddr.port))
    return found


def test_other_machines_reach_two_ports_that_ask_for_rays_token(command: Command) -> None:
    """Regression: GCS, raylet, agents, controller and all workers listened on every address. Serve leaves no choice for
    calls between deployments, which are pickles."""
    sockets = {process: listening(process) for process in command.family()}
    reached = [
        (process, port) for process, found in sockets.items() for address, port in found if not address.is_loopback
    ]
    titles = sorted(process.cmdline()[0].strip() for process, _ in reached)
    assert titles == ["ray::ServeReplica:folio:EngineReplica", "ray::ServeReplica:folio:Ingress"]
    assert sum(map(len, sockets.values())) > 10
    for _, port in reached:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_other_programs_of_the_machine_join(command: Command) -> None:
    [(_, port)] = listening(command.named("gcs/gcs_server"))
    environment = {"RAY_ADDRESS": f"LOCALHOST:{port}", "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", JOINS], env=dict(os.environ) | environment, capture_output=True, timeout=DEADLINE_S
    )
    assert (ran.returncode, ran.stdout.split()) == (0, [b"1"]), ran.stderr.decode()


def test_unknown_hosts_and_pages_are_refused_behind_haproxy(command: Command) -> None:
    statuses = [
        httpx.get(f"{command.url}/v1/models", headers=headers, timeout=DEADLINE_S).status_code
        for headers in (
            {"host": "evil.example"},
            {"host": "LOCALHOST.:99"},
            {"host": "[::1]:1"},
            {"origin": "http://evil.example"},
            {"origin": command.url},
        )
    ]
    assert statuses == [403, 200, 200, 403, 200]


def test_it_serves_and_ends_after_its_raylets_death(command: Command) -> None:
    """Regression: probes of `/ready` made the ingress give up its only replica, 503 for ever, and SIGTERM did not end
    the command. Also log probabilities, which come by reference, are answered. The last test: nothing is left."""
    body = {"model": "builtin", "prompt": "A page is", "max_tokens": 2, "temperature": 0}
    family, outcomes = command.family(), Counter[int]()
    command.named("raylet/raylet").kill()

    def ask() -> None:
        outcomes[httpx.get(f"{command.url}/ready", timeout=DEADLINE_S).status_code] += 1
        for more in ({}, {"logprobs": 1}):
            answer = httpx.post(f"{command.url}/v1/completions", json=body | more, timeout=DEADLINE_S)
            outcomes[answer.status_code] += 1

    def is_told() -> bool:
        ask()
        said = command.log.read_text(errors="replace")
        return "raylet on this machine has ended" in said and "has been marked dead" in said

    until(is_told, DEADLINE_S)
    for _ in range(10):
        ask()
    assert outcomes.keys() == {200}, outcomes
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(60) == 0
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
