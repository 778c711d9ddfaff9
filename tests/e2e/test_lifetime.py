"""The wheel in an environment of its own, beside a project that has a folder `app/` as many have; and its `folio serve`
as others find it: what listens, which programs may join, the README, and its end after its raylet's death."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from benchmarks.served import free_port
from tests.docs.blocks import ROOT
from tests.e2e.pages import FIRST_PAGES, Runner
from tests.processes import until

pytestmark = pytest.mark.third_day(2)
DEADLINE_S = 240
# Without a path to the checkout.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
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

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def named(self, title: str) -> psutil.Process:
        [found] = [process for process in self.family() if title in " ".join(process.cmdline())]
        return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without compiled kernels, which those of the checkout replace: their compilation takes minutes."""
    source = tmp_path_factory.mktemp("source")
    for name in ("folio", "app", "vmem", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source)]
    no_compiler = os.environ | {"PATH": str(Path(sys.executable).parent)}
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, env=no_compiler)
    [made] = (source / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the libraries of this one but not with its Folio."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in ("app", "vmem", "kernels"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("MINE = True")
    return folder


@pytest.fixture(scope="module")
def command(request: pytest.FixtureRequest, python: Path, project: Path) -> Iterator[Command]:
    """`folio serve` of the wheel in the project's folder, with the toy where there is no package index."""
    with suppress(pytest.skip.Exception):
        request.getfixturevalue("smollm2")
    port, log = free_port(), project / "log"
    arguments = ["serve", "--port", str(port), "--replicas", "1", "--kv-memory", "256MiB", "--grace-s", "30"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python.with_name("folio"), *arguments],
            cwd=project,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = Command(process, f"http://127.0.0.1:{port}", log)

    def greets() -> bool:
        assert process.poll() is None, started.said()
        return "Folio is ready" in started.said()

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


def test_it_has_one_name(wheel: Path) -> None:
    """Regression: it installed `app`, `vmem` and `kernels`, which a project's own folders hid."""
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in files} == {"folio"}
    for name in ("app/models/builtin/model/model.safetensors", "app/cli/default.yaml", "kernels/cpu/csrc/chain.cpp"):
        assert f"folio/{name}" in files


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
    titles = sorted(process.cmdline()[0].strip().partition(".")[0] for process, _ in reached)  # without the method
    assert titles == ["ray::ServeReplica:folio:EngineReplica", "ray::ServeReplica:folio:Ingress"]
    assert sum(map(len, sockets.values())) > 10
    for _, port in reached:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_other_programs_of_the_machine_join(command: Command, python: Path, project: Path) -> None:
    [(_, port)] = listening(command.named("gcs/gcs_server"))
    environment = ENVIRONMENT | {"RAY_ADDRESS": f"LOCALHOST:{port}", "RAY_AUTH_MODE": "token"}
    ran = subprocess.run([python, "-c", JOINS], cwd=project, env=environment, capture_output=True, timeout=DEADLINE_S)
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


def test_the_first_pages(smollm2: Path, command: Command, python: Path, project: Path) -> None:
    """Their answers are those of the model that `folio pull` fetches, which is served by default."""
    ray_variables = dict(re.findall(r"(RAY_[A-Z_]+)=(\S+)", command.said()))
    runner = Runner(command.url.removeprefix("http://"), ray_variables, project, python=python, path=project)
    try:
        own = "import app, vmem, kernels, folio; print(app.MINE and vmem.MINE and kernels.MINE, folio.__file__)"
        imported = subprocess.check_output([python, "-c", own], cwd=project, env=ENVIRONMENT, text=True)
        assert imported == f"True {next(python.parents[1].glob('lib/*/site-packages'))}/folio/__init__.py\n"
        for page in FIRST_PAGES:
            runner.run_page(page)
    finally:
        runner.close()


def test_it_serves_and_ends_after_its_raylets_death(command: Command) -> None:
    """Regression: probes of `/ready` made the ingress give up its only replica, 503 for ever, and SIGTERM did not end
    the command. Also log probabilities, which come by reference, are answered. The last test: nothing is left."""
    body = {"prompt": "A page is", "max_tokens": 2, "temperature": 0}
    body["model"] = httpx.get(f"{command.url}/v1/models", timeout=DEADLINE_S).json()["data"][0]["id"]
    family, outcomes = command.family(), Counter[int]()
    command.named("raylet/raylet").kill()

    def ask() -> None:
        outcomes[httpx.get(f"{command.url}/ready", timeout=DEADLINE_S).status_code] += 1
        for more in ({}, {"logprobs": 1}):
            answer = httpx.post(f"{command.url}/v1/completions", json=body | more, timeout=DEADLINE_S)
            outcomes[answer.status_code] += 1

    def is_told() -> bool:
        ask()
        said = command.said()
        return "raylet on this machine has ended" in said and "has been marked dead" in said

    until(is_told, DEADLINE_S)
    for _ in range(10):
        ask()
    assert outcomes.keys() == {200}, outcomes
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(60) == 0
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
