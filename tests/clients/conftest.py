"""One server for all tests of clients, and the record of what worked. Without `--server-python` or `--server-url`
the tests are skipped: `make clients` gives it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.clients.client import MODEL, Client
from tests.processes import until

ROOT = Path(__file__).parents[2]
NODE = Path(__file__).with_name("node")
_START_S = 300.0
_RECORD = pytest.StashKey[dict[str, dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("clients")
    group.addoption("--server-python", help="interpreter that has Folio, to start a server for the clients")
    group.addoption("--server-url", help="instead: a server that runs, with the model of scripted_model.py")
    group.addoption("--record", type=Path, help="file for what worked, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RECORD] = {}


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the server listens, without a path."""
    config = request.config
    if running := config.getoption("--server-url", None):
        yield running
    elif python := config.getoption("--server-python", None):
        yield from _served(Path(python).absolute(), tmp_path_factory.mktemp("server"))
    else:
        pytest.skip("needs a server: run by `make clients`")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's tokenizer, for load tools that count tokens."""
    from tests.clients.scripted_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, no telemetry, no real keys and no proxy between client and server."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record the outcome of `test_FEATURE…` for the client of its module."""
    report = yield
    client = getattr(getattr(item, "module", None), "CLIENT", None)
    if isinstance(client, Client) and (report.when == "call" or report.outcome != "passed"):
        feature = item.name.removeprefix("test_").partition("[")[0].partition("_")[0]
        outcomes = _entry(item.config, client)["outcomes"]
        if outcomes.get(feature) in (None, "passed"):
            outcomes[feature] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Put the record over the file's; clients that were skipped keep what the file has."""
    path = session.config.getoption("--record", None)
    if path is not None:
        ran = {n: e for n, e in session.config.stash[_RECORD].items() if "skipped" not in e["outcomes"].values()}
        record = (json.loads(path.read_text()) if path.exists() else {}) | ran
        path.write_text(json.dumps(dict(sorted(record.items())), indent=1, ensure_ascii=False) + "\n")


def _entry(config: pytest.Config, client: Client) -> dict[str, Any]:
    new = {
        "versions": {name: _version(name) for name in client.packages},
        "day": datetime.now(UTC).date().isoformat(),
        "outcomes": {},
        "absent": dict(client.absent),
        "notes": dict(client.notes),
    }
    return config.stash[_RECORD].setdefault(client.name, new)


def _version(package: str) -> str:
    if package.startswith("npm:"):
        versions = json.loads((NODE / "package.json").read_text())["dependencies"]
        return versions[package.removeprefix("npm:")].rpartition("@")[2]  # of an alias, what it stands for
    return importlib.metadata.version(package)


def _served(python: Path, folder: Path) -> Iterator[str]:
    """`folio serve` with the scripted model until the tests end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(
        [python, "-m", "tests.clients.scripted_model", folder / MODEL], check=True, cwd=ROOT, env=environment
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "folio.yaml"
    config.write_text(json.dumps(_configuration(folder / MODEL, port)))  # JSON is YAML
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    with log.open("w") as out:
        command = [python, "-m", "folio.app.cli", "serve", "--config", config]
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        try:
            until(lambda: _is_ready(url) or server.poll() is not None, _START_S, log.read_text)
            assert server.poll() is None, log.read_text()
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=90)


def _configuration(model: Path, port: int) -> dict[str, Any]:
    engine = {"model": str(model), "pooling": "last", "kv_memory_bytes": 256 << 20, "max_num_batched_tokens": 512}
    deployments = [
        {"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}},
        {"name": "EngineReplica", "num_replicas": 1},
    ]
    application = {
        "name": "folio",
        "route_prefix": "/",
        "import_path": "folio.app.main:build",
        "args": {"engine": engine},
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application | {"deployments": deployments}],
    }


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
