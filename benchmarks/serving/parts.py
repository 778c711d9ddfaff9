"""Faults of single parts under load: HAProxy, ingress, engine replica.

`python -m benchmarks.faults --parts`. A server as `folio serve` starts it: one HAProxy, one ingress, one engine
replica. Clients send a short request five times a second, each over a connection of its own, and keep two streams in
flight. A part gets SIGKILL; outcomes are recorded until no request has failed for a while, or the server has ended.

--quick: engine replica and ingress only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.served import free_port

WELL_S = 20.0  # without a failure: the fault is over
SILENCE_S = 3.0  # without an answer is a failure
# For each server, the parts killed in this order: title of the process, and least time to watch. The last part of a
# server is fatal to it; without its GCS, or without its raylet, a cluster seems well for a minute.
SERVERS: list[dict[str, tuple[str, float]]] = [
    {
        "engine replica": ("ray::ServeReplica:folio:EngineReplica", WELL_S),
        "ingress": ("ray::ServeReplica:folio:Ingress", WELL_S),
        "controller": ("ray::ServeController", WELL_S),
        "HAProxy": ("/haproxy -db ", WELL_S),
        "HAProxy manager": ("ray::HAProxyManager", WELL_S),
        "GCS": ("gcs_server", 100.0),
    },
    {"raylet": ("raylet/raylet", 100.0)},
    {"folio serve": ("folio.app.cli serve", WELL_S)},
]
BETWEEN_REQUESTS_S, NUM_STREAMS = 0.2, 2
START_TIMEOUT_S, PATIENCE_S, LONGEST_S = 300.0, 30.0, 150.0


@dataclass
class Seen:
    """Clients' observations since a part was killed.

    Attributes:
        requests, streams: number of each outcome.
        last_answered_s: seconds after the kill at which the last answer came.
        out_s: seconds after the kill of the last failure, or of the last moment of silence.
        ended_after_s: seconds until the server's process had ended; `None`: it runs.
    """

    requests: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    last_answered_s: float = 0.0
    out_s: float = 0.0
    ended_after_s: float | None = None


class Clients:
    """Clients that send requests until they are closed. `restart` at a kill."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._sending: set[asyncio.Task[None]] = set()
        self._running = [
            asyncio.create_task(self._ask()),
            *(asyncio.create_task(self._read()) for _ in range(NUM_STREAMS)),
        ]
        self.restart()

    def restart(self) -> None:
        self.seen, self.since = Seen(), time.monotonic()

    async def close(self) -> None:
        tasks = [*self._running, *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            task = asyncio.create_task(self._request())
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            await asyncio.sleep(BETWEEN_REQUESTS_S)

    async def _request(self) -> None:
        import httpx

        body = {"model": "folio", "prompt": "A page is", "max_tokens": 2, "temperature": 0}
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                answer = await client.post(f"{self._url}/v1/completions", json=body)
            is_told = answer.status_code in (429, 503)
            outcome = (
                "answered" if answer.status_code == 200 else f"{answer.status_code}{'' if is_told else answer.text}"
            )
            self._note(self.seen.requests, outcome)
        except httpx.HTTPError as error:
            self._note(self.seen.requests, _kind(error))

    async def _read(self) -> None:
        import httpx

        body = {"model": "folio", "prompt": "A page is", "max_tokens": 300, "ignore_eos": True, "stream": True}
        while True:
            last = ""
            try:
                async with (
                    httpx.AsyncClient(timeout=PATIENCE_S) as client,
                    client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
                ):
                    if answer.status_code != 200:
                        self._note(self.seen.streams, str(answer.status_code))
                    else:
                        async for line in answer.aiter_lines():
                            last = line or last
                        outcome = (
                            "error event" if '"error"' in last else "cut" if last != "data: [DONE]" else "answered"
                        )
                        self._note(self.seen.streams, outcome)
            except httpx.HTTPError as error:
                self._note(self.seen.streams, "cut" if last else _kind(error))
            await asyncio.sleep(BETWEEN_REQUESTS_S)

    def _note(self, counts: Counter[str], outcome: str) -> None:
        counts[outcome] += 1
        now_s = time.monotonic() - self.since
        if outcome == "answered":
            self.seen.last_answered_s = now_s
        else:
            self.seen.out_s = now_s


def _kind(error: Exception) -> str:
    """A name for the failure of a connection."""
    import httpx

    if isinstance(error, httpx.ConnectError):
        return "refused"
    return "no answer" if isinstance(error, httpx.TimeoutException) else "dropped"


def run(args: argparse.Namespace) -> None:
    """Args: of `benchmarks.faults`."""
    rows: dict[str, Seen] = {}
    for parts in SERVERS[:1] if args.quick else SERVERS:
        asyncio.run(_kill_all(dict(list(parts.items())[:2]) if args.quick else parts, rows))
    columns = f"{'requests that failed':40}{'streams that broke':30}{'out for':>11}  server ended after"
    print(f"{'killed':16}{'answered':>9}  {columns}")
    for name, seen in rows.items():
        failed, broken = (
            ", ".join(f"{what} {n}" for what, n in counts.items() if what != "answered")
            for counts in (seen.requests, seen.streams)
        )
        ended = "" if seen.ended_after_s is None else f"{seen.ended_after_s:.0f} s"
        print(f"{name:16}{seen.requests['answered']:9}  {failed:40}{broken:30}{seen.out_s:9.1f} s  {ended}")
    figures = {f"{name.replace(' ', '_')}_s": seen.out_s for name, seen in rows.items()}
    harness.finish("parts", args, figures, {name: vars(seen) for name, seen in rows.items()})


async def _kill_all(parts: dict[str, tuple[str, float]], rows: dict[str, Seen]) -> None:
    import psutil

    port = free_port()
    engine = {"model": "builtin", "kv_memory_bytes": 128 << 20}
    application = {
        "name": "folio",
        "route_prefix": "/",
        "import_path": "folio.app.main:build",
        "args": {"engine": engine, "model_name": "folio"},
        "deployments": [{"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}}],
    }
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        config = Path(folder) / "config.yaml"
        http_options = {"host": "127.0.0.1", "port": port}
        config.write_text(json.dumps({"http_options": http_options, "applications": [application]}))
        command = [sys.executable, "-m", "folio.app.cli", "serve", "--config", str(config)]
        server = subprocess.Popen(command, cwd=harness.ROOT, stdout=log, stderr=log)
        family = psutil.Process(server.pid)
        started: dict[int, psutil.Process] = {}
        try:
            await _wait_until_ready(f"http://127.0.0.1:{port}", server, Path(folder) / "log")
            for name, (title, watch_s) in parts.items():
                clients = Clients(f"http://127.0.0.1:{port}")
                await asyncio.sleep(WELL_S / 2)
                started |= {process.pid: process for process in [*family.children(recursive=True), family]}
                killed = next(process for process in started.values() if _is_called(process, title))
                clients.restart()
                killed.kill()
                rows[name] = await _watch(clients, server, watch_s)
                await clients.close()
                print(f"{name}: {rows[name]}", flush=True)
        finally:
            with suppress(psutil.NoSuchProcess):
                started |= {process.pid: process for process in family.children(recursive=True)}
            for process in started.values():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            server.kill()
            server.wait()


def _is_called(process: Any, title: str) -> bool:
    """Whether a living process has this title."""
    import psutil

    try:
        return title in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


async def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start: {log.read_text()[-2000:]}")
            await asyncio.sleep(0.5)


async def _watch(clients: Clients, server: subprocess.Popen[bytes], at_least_s: float) -> Seen:
    """Wait until no request has failed for a while, or the server has ended."""
    while True:
        await asyncio.sleep(0.1)
        seen, now_s = clients.seen, time.monotonic() - clients.since
        if server.poll() is not None and seen.ended_after_s is None:
            seen.ended_after_s = now_s
        if now_s - seen.last_answered_s > SILENCE_S:
            seen.out_s = now_s
        is_well = now_s - seen.out_s > WELL_S
        is_over = seen.ended_after_s is not None and now_s - seen.last_answered_s > WELL_S
        if now_s > at_least_s and (is_well or is_over or now_s > LONGEST_S):
            return seen
