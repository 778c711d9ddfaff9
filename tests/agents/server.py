"""`folio serve` with the scripted and the real model on two replicas, one of which can be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from folio.app.models.named import SMOLLM2
from tests.agents.script import Step, write_checkpoint
from tests.processes import until

ROOT = Path(__file__).parents[2]
_START_S = 600.0


class Server:
    """A server that runs."""

    def __init__(self, port: int) -> None:
        self.port = port

    def await_replicas(self) -> None:
        """Wait until both replicas answer."""
        until(self.is_whole, _START_S)

    def is_whole(self) -> bool:
        """Whether both replicas answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/dashboard/state", timeout=10) as answer:
                return len(json.load(answer)["replicas"]) == 2
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def served(folder: Path, errands: Mapping[str, tuple[Step, Step]], real: bool) -> Iterator[Server]:
    """A server until the block ends. `folder`: for its files. `real`: with the real model."""
    write_checkpoint(folder / "scripted", errands, [path.read_text() for path in ROOT.glob("docs/**/*.md")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server(free.getsockname()[1])
    models = {"scripted": str(folder / "scripted")} | ({SMOLLM2: SMOLLM2} if real else {})
    config, log = folder / "folio.yaml", folder / "server.log"
    config.write_text(json.dumps(_configuration(models, server.port)))  # JSON is YAML
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("w") as out:
        command = [sys.executable, "-m", "folio.app.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        try:
            until(lambda: server.is_whole() or process.poll() is not None, _START_S, log.read_text)
            assert process.poll() is None, log.read_text()
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


def _configuration(models: Mapping[str, str], port: int) -> dict[str, Any]:
    """Prefixes stay cached however long an agent takes for its next turn."""
    shelf = [
        {"name": name, "keep": "always", "engine": {"model": model, "prefix_cache_release_s": 3600}}
        for name, model in models.items()
    ]
    deployments = [
        {"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}},
        {"name": "EngineReplica", "num_replicas": 2},
    ]
    args = {"device_memory_bytes": 4 << 30, "models": shelf}
    application = {"name": "folio", "route_prefix": "/", "import_path": "folio.app.main:build", "args": args}
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application | {"deployments": deployments}],
    }


def kill(replica: str) -> None:
    """Kill the replica of this name: the process that writes its log."""
    log = f"replica_folio_EngineReplica_{replica}.log"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(file.readlink().name == log for file in (folder / "fd").iterdir()):
                return os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            pass  # it has ended
    raise ProcessLookupError(f"no process has {log} open")
