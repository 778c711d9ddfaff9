"""`folio serve` on a GPU with Llama-3-8B's shape (jobs of `benchmarks.gpu_day`).

--measure served: the command itself, a process behind HAProxy, with random weights in bfloat16. The phases of its
start; TTFT, TPOT and tokens a second over HTTP by requests at once and length of prompts; a prefix hit; an answer that
follows a schema; late compilations, which must be 0; memory by part; time that steps waited for mappings; then the
replica gets SIGKILL: seconds to the next answer; then Ctrl-C.

--measure bare: the same requests on the engine without a server, and how much of its tokens a second HTTP keeps: beside
the facts of the first part, which was just before.

Each part of either is limited in time and fails alone. --fake is small and on the CPU, and measures nothing.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.facts import record
from benchmarks.gpu.clients import Clients, Level, summarise
from benchmarks.gpu.parts import NO_RAY, Parts, arguments, record_gpu
from benchmarks.served import free_port
from benchmarks.serving.usage import titles
from folio.app.cli.bench.load import Ask
from folio.app.cli.start.env import ENVIRONMENT

# Without the time to end: the jobs' limits are 15 s later.
LIMITS_S = {"served": 225.0, "bare": 85.0}
START_S, REPLACED_S, STOP_S, STACKS_S, ANSWER_S = 130.0, 75.0, 12.0, 2.0, 10.0
REPLICA = "ray::ServeReplica:folio:EngineReplica"
MODEL = "llama"
LEVELS = (
    Level(1, 3, 128, 128, 20),
    Level(16, 48, 128, 128, 20),
    Level(64, 192, 128, 128, 25),
    Level(256, 512, 128, 128, 30),
    Level(64, 64, 4000, 128, 35),
    Level(1, 2, 4000, 128, 20),
    Level(16, 16, 4000, 128, 25),
    Level(256, 256, 4000, 64, 60),
)
FAKE_LEVELS = (Level(1, 2, 16, 8, 60), Level(64, 64, 16, 4, 90), Level(2, 2, 200, 8, 60))
COMPARED = (64, 256)  # requests at once at which HTTP should keep this share of the engine's tokens
LEAST_SHARE = 0.95
SCHEMA = {
    "type": "object",
    "properties": {"fits": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["fits", "size"],
    "additionalProperties": False,
}
# Processes report metrics every 10 s, and a page is a second old.
_METRICS_S, _PAGE_S = 12.0, 15.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TOLD = re.compile(r"device memory: .*|ready after .*|captured \d+ of .*|.*\bnum_gpus\b.*|.*\blate\b.*")
_TROUBLE, _MOST_TROUBLE = re.compile(r"\b(?:WARNING|ERROR)\b.*"), 40


def engine_settings(folder: Path, fake: bool) -> dict[str, Any]:
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "kv_memory_bytes": 128 << 20} if fake else {}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu" if fake else "cuda",
        "max_model_len": 512 if fake else 4608,
    } | sizes


class FolioServe:
    """The command, and what it says. `start` is to be called once.

    Attributes:
        url: where it listens.
        lines: the last ones of its output.
    """

    def __init__(self, folder: Path, engine: Mapping[str, Any]) -> None:
        port = free_port()
        self.url, self.lines = f"http://127.0.0.1:{port}", deque[str](maxlen=400)
        application = {
            "name": "folio",
            "route_prefix": "/",
            "import_path": "folio.app.main:build",
            "args": {"engine": dict(engine), "model_name": MODEL},
            "deployments": [
                {"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}},
                {"name": "EngineReplica", "num_replicas": 1},
            ],
        }
        config = folder / "serve.yaml"  # JSON is YAML
        config.write_text(
            json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]})
        )
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "folio.app.cli", "serve", "--config", str(config)],
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # SIGINT is for the command alone, which ends the rest
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Print the output; record what the engine says of its start, and warnings and errors."""
        assert self.process.stdout is not None
        num_troubles = 0
        for line in self.process.stdout:
            line = _COLOUR.sub("", line.rstrip())
            print(line, flush=True)
            self.lines.append(line[:400])
            after_s = round(time.monotonic() - self._began, 2)
            if found := _TOLD.search(line):
                record("log", found[0][:300], after_s=after_s)
            elif (found := _TROUBLE.search(line)) and num_troubles < _MOST_TROUBLE:
                num_troubles += 1
                record("log", line=found[0][:400], after_s=after_s)

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait until requests are served, and record when each process came. Raises `RuntimeError`."""
        from benchmarks.serving.start import TITLES

        at_s: dict[str, float] = {}
        while not self.is_ready():
            for title in titles(self.process.pid).values():
                for event, part in TITLES.items():
                    if part in title:
                        at_s.setdefault(event, round(time.monotonic() - self._began, 2))
            if self.process.poll() is not None or time.monotonic() - self._began > limit_s:
                ended = "" if self.process.poll() is None else f"it ended with status {self.process.returncode}; "
                record("output of folio serve", lines=list(self.lines)[-40:])
                raise RuntimeError(f"not ready after {time.monotonic() - self._began:.0f} s; {ended}seen: {at_s}")
            time.sleep(0.1)
        at_s["answers"] = round(time.monotonic() - self._began, 2)
        shown = ", ".join(f"{event} {seconds:.1f}" for event, seconds in sorted(at_s.items(), key=lambda item: item[1]))
        record("start", f"seconds to the first sight of each process: {shown}", at_s=at_s)

    def is_ready(self) -> bool:
        with suppress(OSError, HTTPException):
            return get(self.url + "/ready") is not None
        return False

    def stop(self) -> None:
        """Send Ctrl-C and wait. Raises `RuntimeError`."""
        running = titles(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # its fault handler prints where it hangs
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STACKS_S)
            raise RuntimeError(f"folio serve has not ended {STOP_S:.0f} s after SIGINT") from None
        left = [title for pid, title in titles(os.getpid()).items() if pid in running]
        record(
            "stop",
            f"status {status} {time.monotonic() - began:.1f} s after SIGINT; {len(left)} processes left",
            status=status,
            left=left,
        )


def get(url: str, limit_s: float = ANSWER_S) -> bytes:
    with urllib.request.urlopen(url, timeout=limit_s) as answer:
        content: bytes = answer.read()
        return content


class Measured:
    """The parts of --measure served, over a server that runs."""

    def __init__(self, server: FolioServe, clients: Clients, first_token: int, vocab_size: int, fake: bool) -> None:
        self._server, self._clients, self._fake = server, clients, fake
        self._tokens = first_token, vocab_size
        self._load_began, self._exposed_us = 0.0, 0

    def level(self, level: Level) -> None:
        records, seconds, busy = self._clients.run(level, level.asks(*self._tokens))
        summarise(f"HTTP, {level.name}", records, seconds, busiest_client=round(busy, 2))

    def warm_up(self) -> None:
        """Requests of the client's own first connections; the server has warmed up by itself."""
        self._clients.start()
        level = Level(2, 4, 32, 8, 60)
        self._clients.run(level, level.asks(*self._tokens))
        self._load_began, self._exposed_us = time.monotonic(), self._memory()["exposed_us"]

    def mapping(self) -> None:
        """Time in which steps waited for mappings, of the time of all levels."""
        seconds, memory = time.monotonic() - self._load_began, self._memory()
        share = (memory["exposed_us"] - self._exposed_us) / 1e6 / seconds
        record("exposed mapping", f"{share:.2%} of {seconds:.0f} s of load", share=share, memory=memory)

    def _memory(self) -> dict[str, Any]:
        """The replica's report of its KV memory."""
        answer = json.loads(get(f"{self._server.url}/v1/load/memory"))
        for found in _dicts(answer):
            if "exposed_us" in found:
                return {key: value for key, value in found.items() if isinstance(value, int | float)}
        raise RuntimeError(f"no report of memory: {str(answer)[:300]}")

    def prefix(self) -> None:
        long = max(FAKE_LEVELS if self._fake else LEVELS, key=lambda level: level.prompt_tokens)
        [ask, *_] = Level(1, 1, long.prompt_tokens, 8, 30).asks(*self._tokens)
        ask = Ask([self._tokens[0], *ask.prompt], ask.max_tokens)  # unlike the prompts of a level
        (first, second), *_ = self._clients.run(Level(1, 2, len(ask.prompt), 8, 30), [ask, ask])
        shown = f"{second.num_cached_tokens} of {second.num_prompt_tokens} tokens cached"
        shown += f"; TTFT {1e3 * first.ttft_s:.1f} ms, then {1e3 * second.ttft_s:.1f}"
        record("prefix hit", shown, cached_tokens=second.num_cached_tokens, prompt_tokens=second.num_prompt_tokens)
        if not second.num_cached_tokens > 0.5 * len(ask.prompt) or first.num_cached_tokens:
            raise RuntimeError(f"cached tokens: {first.num_cached_tokens}, then {second.num_cached_tokens}")

    def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "parcel", "schema": SCHEMA}}
        prompt = list(range(self._tokens[0], self._tokens[0] + 16))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "temperature": 0, "response_format": form}
        text = self._post("/v1/completions", body)["choices"][0]["text"]
        record("schema", f"{text}", text=text)
        answer = json.loads(text)
        if not (
            set(answer) == {"fits", "size"} and type(answer["fits"]) is bool and answer["size"] in ("small", "large")
        ):
            raise RuntimeError(f"the answer does not follow the schema: {text!r}")

    def metrics(self) -> None:
        """Late compilations, phases of the start and memory by part, of the page of metrics."""
        time.sleep(_METRICS_S)
        ends_at = time.monotonic() + _PAGE_S
        while "folio_ready_seconds" not in (page := get(f"{self._server.url}/metrics").decode()):
            if time.monotonic() > ends_at:
                raise RuntimeError(f"no figures of the engine on the page of metrics: {page[:300]!r}")
            time.sleep(1.0)
        lines = [line for line in page.splitlines() if "folio_" in line]
        lines = [line for line in lines if not line.startswith("#") and "_bucket" not in line]
        short = [re.sub(r"\b(?!(?:model|kind|phase|time|way|state|le)=)\w+=\"[^\"]*\",?", "", line) for line in lines]
        record("metrics", lines=sorted(set(short))[:300])
        values = {name: _sum(lines, name) for name in ("late_compilations_total", "failed_steps_total")}
        phases = {
            m[1]: float(m[2])
            for m in re.finditer(r'folio_ready_seconds\{.*?phase="(\w+)".*?\} (\S+)', "\n".join(lines))
        }
        record(
            "phases of the engine's start",
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items() if seconds >= 0.05),
            phases=phases,
        )
        parts = re.findall(r'folio_(\w+_bytes)\{.*?(?:kind|part)="([^"]+)".*?\} (\S+)', "\n".join(lines))
        record(
            "memory by part",
            ", ".join(f"{kind} {float(size) / 2**30:.2f}" for _, kind, size in parts if float(size) >= 2**24) + " GiB",
            parts=parts,
        )
        record("late compilations", f"{values['late_compilations_total']:.0f}", **values)
        if not phases or any(values.values()):
            raise RuntimeError(f"phases {phases}, and of these all must be 0: {values}")

    def replace(self) -> None:
        """Kill the replica beside requests in flight, and ask until an answer comes."""
        [pid, *others] = [pid for pid, title in titles(self._server.process.pid).items() if title.startswith(REPLICA)]
        level = Level(4, 4, 32, 200, 30)
        streams: list[Any] = []
        load = threading.Thread(target=lambda: streams.extend(self._clients.run(level, level.asks(*self._tokens))[0]))
        load.start()
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        load.join()
        in_flight = [f"{r.status} {(r.error or ('complete' if r.completed else 'cut'))[:100]}" for r in streams]
        failures: dict[str, int] = {}
        while True:
            reason = self._answer()
            if not reason:
                break
            failures[reason] = failures.get(reason, 0) + 1
            if time.monotonic() - began > REPLACED_S:
                raise RuntimeError(f"no answer {REPLACED_S:.0f} s after SIGKILL of the replica: {failures}")
            time.sleep(0.25)
        seconds = time.monotonic() - began
        record(
            "replica killed",
            f"the next answer came {seconds:.1f} s after SIGKILL; streams in flight: {sorted(set(in_flight))}",
            seconds=seconds,
            failures=failures,
            in_flight=in_flight,
            others=len(others),
        )

    def _answer(self) -> str:
        """Ask for two tokens; returns why there are none."""
        try:
            self._post("/v1/completions", {"model": MODEL, "prompt": [self._tokens[0]] * 8, "max_tokens": 2})
        except (OSError, HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"[:100]
        return ""

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._server.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
            return json.loads(answer.read())


def _dicts(value: Any) -> list[dict[str, Any]]:
    """All JSON objects within a JSON value, outer ones first."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return ([value] if isinstance(value, dict) else []) + [found for each in inner for found in _dicts(each)]


def _sum(lines: list[str], name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in lines if f"folio_{name}" in line)


def measure_served(parts: Parts, folder: Path, fake: bool) -> None:
    from benchmarks.gpu import models as gpu_models

    parts.run("ray", record_ray)
    vocab_size = gpu_models.write_model(folder, "tiny" if fake else "llama-3-8b")
    levels = FAKE_LEVELS if fake else LEVELS
    server = FolioServe(folder, engine_settings(folder, fake))
    clients = Clients(server.url, MODEL, max(level.at_once for level in levels))
    limit_s = START_S * (1 + fake)
    if parts.run("start", lambda: server.wait_until_ready(limit_s)):
        record_gpu("server ready")
        measured = Measured(server, clients, gpu_models.FIRST_WORD, vocab_size, fake)
        parts.run("first requests", measured.warm_up)
        for level in levels:
            parts.run(f"HTTP, {level.name}", partial(measured.level, level), at_least_s=level.limit_s)
        for name in ("mapping", "prefix", "schema"):
            parts.run(name, getattr(measured, name))
        parts.run("metrics", measured.metrics, at_least_s=_METRICS_S)
        record_gpu("after the load")
        parts.run("replica killed", measured.replace, at_least_s=40)
    clients.close()
    parts.run("stop", server.stop, at_least_s=0)
    record("output of folio serve", lines=list(server.lines)[-40:])


def measure_bare(parts: Parts, folder: Path, fake: bool) -> None:
    from benchmarks.gpu import models as gpu_models
    from benchmarks.serving.bare import bare_engine

    vocab_size = gpu_models.write_model(folder, "tiny" if fake else "llama-3-8b")
    record_gpu("before the bare engine")
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # as in the server's processes
        os.environ.setdefault(name, ENVIRONMENT[name])
    began, path = time.monotonic(), os.environ.get(facts.FILE_VARIABLE)
    over_http = {fact["fact"]: fact for fact in (facts.read(Path(path)) if path else []) if "tokens_per_s" in fact}
    with bare_engine(engine_settings(folder, fake)) as engine:
        record("ready", f"{time.monotonic() - began:.1f} s", seconds=time.monotonic() - began)

        def run(level: Level) -> None:
            asks = level.asks(gpu_models.FIRST_WORD, vocab_size)
            start = time.monotonic()
            records = engine.closed_loop(asks, level.at_once)
            rate = summarise(f"bare, {level.name}", records, time.monotonic() - start)
            found = over_http.get(f"HTTP, {level.name}")
            if found is None:
                record(f"HTTP / bare, {level.name}", "no figure over HTTP")
            else:
                share = found["tokens_per_s"] / rate
                aim = f" (aim {LEAST_SHARE})" if level.at_once in COMPARED else ""
                record(f"HTTP / bare, {level.name}", f"{share:.3f} of the tokens a second{aim}", share=share)

        for level in FAKE_LEVELS if fake else LEVELS:
            parts.run(f"bare, {level.name}", partial(run, level), at_least_s=level.limit_s)


def record_ray() -> None:
    """Record which GPUs Ray finds by itself, and whether HAProxy can be used."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Gpus

    from folio.app.http import haproxy

    found, library = Gpus.get_current_node_num_accelerators(), ctypes.util.find_library("nvidia-ml")
    try:
        haproxy.check_haproxy(has_tls=False)
        proxy = "usable"
    except haproxy.NoHAProxyError as error:
        proxy = str(error)
    shown = (
        f"Ray finds {found} GPUs ({Gpus.get_current_node_accelerator_type()}); libnvidia-ml: {library or 'not found'}"
    )
    record("ray", f"{shown}; HAProxy: {proxy}", gpus=found, library=library, haproxy=proxy)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", choices=("served", "bare"), required=True)
    args = parser.parse_args()
    parts = Parts(LIMITS_S[args.measure] * (1 + args.fake))
    with tempfile.TemporaryDirectory() as folder:
        if args.measure == "bare":
            parts.run("bare engine", lambda: measure_bare(parts, Path(folder), args.fake))
        elif importlib.util.find_spec("ray") is None:
            sys.exit(NO_RAY)
        else:
            parts.run("served", lambda: measure_served(parts, Path(folder), args.fake))
    parts.finish()


if __name__ == "__main__":
    main()
