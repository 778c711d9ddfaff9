"""Start-up: from the command that serves a model to its first token, and from Ctrl-C to its end.

The command starts as a user starts it, with the default configuration on a free port. The model is SmolLM2, which
`folio serve` serves by default where it is pulled; it is pulled here, if it is not there. A first start, not counted,
fills the system's file cache and compiles the CPU kernels where they are missing. A client streams a chat every 50 ms
from the beginning; the first token of the first answer ends the measurement. Then the command gets SIGINT.

Phases are what can be seen from outside, in this order: the first process of Ray (the command's own imports end), the
process of Serve's controller, the start of the process that becomes the engine replica, the replica's name on it (its
imports end), the line "Folio is ready", the first token. Processor time up to the first token is by kind of process
(`benchmarks.usage`): on two cores half of the sum is the least possible time.

--quick: one start instead of five after the first.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Protocol

from benchmarks import harness
from benchmarks.real_models import fetched
from benchmarks.served import free_port
from benchmarks.serving.usage import Meter
from folio.app.models.named import SMOLLM2

START_TIMEOUT_S, END_TIMEOUT_S = 300.0, 120.0
BETWEEN_ASKS_S, ANSWER_TIMEOUT_S = 0.05, 60.0
READY = "Folio is ready"
# Events, each with a part of the title of the process whose appearance it is.
TITLES = {
    "ray": "gcs_server",
    "controller": "ray::ServeController",
    "ingress": "ray::ServeReplica:folio:Ingress",
    "replica": "ray::ServeReplica:folio:EngineReplica",
    "haproxy": "/haproxy -db ",
}
# In order, by the event that ends each.
PHASES = {
    "ray": "imports of the command, until Ray's first process",
    "controller": "Ray, and the imports of Serve's controller",
    "worker": "deployment, until the engine replica's process starts",
    "replica": "imports of the engine replica",
    "ready": "engine, ingress and proxy, until the command says that it is ready",
    "first_token": "first answer",
}
BODY = {
    "model": SMOLLM2,
    "stream": True,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


class Seen(Protocol):
    """Notes an event that happens now, or happened some seconds ago."""

    def __call__(self, event: str, ago_s: float = 0.0) -> None: ...


@dataclass(frozen=True, slots=True)
class Start:
    """One start. `at_s`: seconds since the command's start at which each event was seen; `cpu_s`: processor seconds up
    to the first token, by kind of process; `stop_s`: from SIGINT to the end of all processes."""

    at_s: dict[str, float]
    cpu_s: dict[str, float]
    stop_s: float


def command(port: int) -> list[str]:
    """The command that serves, as a user gives it."""
    return [
        sys.executable,
        "-m",
        "folio.app.cli",
        "serve",
        SMOLLM2,
        "--config",
        "serve_config.yaml",
        "--port",
        str(port),
    ]


def first_token(port: int) -> bool:
    """Whether the server streams a token; `False` where it does not answer yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return False
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:  # no replica within the time that a request waits for one
                return False
            if event["choices"][0]["delta"].get("content"):
                return True
        return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def watch_titles(pid: int, seen: Seen, over: threading.Event) -> None:
    """Report the first appearance of each of `TITLES` among the descendants of a process."""
    import psutil

    missing = dict(TITLES)
    while missing and not over.wait(BETWEEN_ASKS_S):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                for event in [event for event, part in missing.items() if part in title]:
                    seen(event)
                    if event == "replica":
                        seen("worker", time.time() - process.create_time())
                    del missing[event]


def watch_output(output: IO[str], log: list[str], seen: Seen, said: threading.Event) -> None:
    """Report the line that says that the server is ready; keep all lines."""
    for line in output:
        log.append(line)
        if READY in line:
            seen("ready")
            said.set()


def start(port: int) -> Start:
    """Start the command, ask, stop it. Raises `RuntimeError` with its output if it ends or does not answer."""
    import psutil

    at_s: dict[str, float] = {}
    log: list[str] = []
    over, said = threading.Event(), threading.Event()
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode each process compiles Folio's modules, a second
    meter = Meter(None)
    began = time.perf_counter()

    def seen(event: str, ago_s: float = 0.0) -> None:
        at_s[event] = time.perf_counter() - began - ago_s

    server = subprocess.Popen(
        command(port),
        cwd=harness.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # SIGINT is for the command alone, which ends the rest
    )
    assert server.stdout is not None
    threads = [
        threading.Thread(target=watch_titles, args=(server.pid, seen, over), daemon=True),
        threading.Thread(target=watch_output, args=(server.stdout, log, seen, said), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        while not first_token(port):
            if server.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                raise RuntimeError(f"no token after {time.perf_counter() - began:.0f} s:\n{''.join(log)[-4000:]}")
            time.sleep(BETWEEN_ASKS_S)
        seen("first_token")
        cpu_s = meter.read().cpu_s
        if not said.wait(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"answers, but has not said that it is ready:\n{''.join(log)[-4000:]}")
        processes = psutil.Process(server.pid).children(recursive=True)
        stopped = time.perf_counter()
        server.send_signal(signal.SIGINT)
        server.wait(END_TIMEOUT_S)
        psutil.wait_procs(processes, END_TIMEOUT_S)
        return Start(at_s, cpu_s, time.perf_counter() - stopped)
    finally:
        over.set()
        server.kill()
        server.wait()


def phases(run: Start) -> dict[str, float]:
    """Seconds of each phase. What comes after "ready" can be less than nothing: the client asks before."""
    ends = [run.at_s[phase] for phase in PHASES]
    return {phase: end - begin for phase, end, begin in zip(PHASES, ends, [0.0, *ends], strict=False)}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "psutil")
    if fetched(SMOLLM2) is None:
        sys.exit(1)
    runs: list[Start] = []
    for number in range(2 if args.quick else 6):
        run = start(free_port())
        name = f"start {number}" if number else "first start, not counted"
        print(f"{name}: {run.at_s['first_token']:.1f} s to the first token; ended {run.stop_s:.1f} s after SIGINT")
        if number:
            runs.append(run)
    medians = {phase: statistics.median(phases(run)[phase] for run in runs) for phase in PHASES}
    kinds = sorted({kind for run in runs for kind in run.cpu_s})
    cpu_s = {kind: statistics.median(run.cpu_s.get(kind, 0.0) for run in runs) for kind in kinds}
    print(f"\nmedians of {len(runs)}")
    for phase, meaning in PHASES.items():
        print(f"  {medians[phase]:6.2f} s  {meaning}")
    print("processor time until the first token")
    for kind, seconds in sorted(cpu_s.items(), key=lambda item: -item[1]):
        print(f"  {seconds:6.2f} s  {kind}")
    figures = {
        "serve_to_first_token_s": statistics.median(run.at_s["first_token"] for run in runs),
        "serve_to_first_token_s_max": max(run.at_s["first_token"] for run in runs),
        "serve_to_ready_s": statistics.median(run.at_s["ready"] for run in runs),
        "cpu_s": statistics.median(sum(run.cpu_s.values()) for run in runs),
        "stop_s": statistics.median(run.stop_s for run in runs),
    }
    figures |= {f"{phase}_s": seconds for phase, seconds in medians.items()}
    figures |= {f"cpu_s_{kind}": seconds for kind, seconds in cpu_s.items()}
    harness.finish("start", args, figures, [asdict(run) for run in runs])


if __name__ == "__main__":
    main()
