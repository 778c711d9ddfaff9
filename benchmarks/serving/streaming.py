"""Streaming cost: processor time per streamed token, and latency that each hop adds to the first token.

The built-in model on one thread behind a real Ray Serve, through HAProxy and through Serve's proxy, each in a cluster
of its own, and clients that stream at once, each the same number of tokens. Three ways: *whole* answers, *each step*,
which sends every token by itself, and *paced*, the default, which sends the first token at once and later ones within
the budget of items per second. The cost of streaming is the processor time per token of all of the cluster's processes,
less that of whole answers and of idling. The engine's thread and the clients are not counted. Nothing else may run
meanwhile: the idle part is subtracted in proportion to the duration.

The first token is timed with one client at a time, by ways in with one hop fewer each: HTTP, HTTP straight to the
ingress (where HAProxy does the same), a handle of the ingress, one of the engine replica.

--quick: 16 clients instead of 32, once instead of three times, HAProxy only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from benchmarks.served import Served, served
from benchmarks.serving.usage import titles
from folio.app.engine.sampling.params import SamplingParams
from folio.app.fleet.messages import GenerateRequest

if TYPE_CHECKING:
    import httpx

NEW_TOKENS = 200
EACH_STEP = {"items_per_s": 1e9, "min_interval_s": 0.0, "max_interval_s": 0.0}
PACED: dict[str, float] = {}
TIMEOUT_S, IDLE_S = 300.0, 5.0
FIRST_TOKENS = 30  # requests one after the other, for each way in
EDGES = {"haproxy": "1", "proxy": "0"}
HOPS = ("edge", "ingress loop", "ingress rest", "replica loop", "replica rest", "controller", "ray")
_TITLES = {
    "ray::ServeReplica:folio-streaming:Ingress": "ingress",
    "ray::ServeReplica:folio-streaming:EngineReplica": "replica",
    "ray::ServeController": "controller",
    "ray::ProxyActor": "edge",
    "ray::HAProxyManager": "edge",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One crowd of clients: processor time by hop, number of items, and median time of the first."""

    hops: dict[str, float]
    seconds: float
    items: int
    first_s: float


class Meter:
    """Processor time of this cluster's processes since the last reading, by hop, without their idle load."""

    def __init__(self) -> None:
        self._idle: dict[str, float] = {}
        self._begin()
        time.sleep(IDLE_S)
        self._idle = {hop: spent / IDLE_S for hop, spent in self.spent().items()}

    def spent(self) -> dict[str, float]:
        """Seconds of each hop since the last reading. The ingress's busiest thread is its event loop; the replica's is
        the engine's thread, which is left out."""
        before, start = self._threads, self._start
        self._begin()
        used: defaultdict[str, list[float]] = defaultdict(list)
        for (kind, thread), seconds in self._threads.items():
            used[kind].append(seconds - before.get((kind, thread), 0.0))
        ingress, replica = (sorted(used.pop(kind, [])) for kind in ("ingress", "replica"))
        spent = {hop: sum(used[hop]) for hop in HOPS}
        spent |= {"ingress loop": sum(ingress[-1:]), "ingress rest": sum(ingress[:-1])}
        spent |= {"replica loop": sum(replica[-2:-1]), "replica rest": sum(replica[:-2])}
        return {hop: of_hop - self._idle.get(hop, 0.0) * (self._start - start) for hop, of_hop in spent.items()}

    def _begin(self) -> None:
        self._threads, self._start = thread_s(), time.perf_counter()


def thread_s() -> dict[tuple[str, str], float]:
    """Processor time of each thread of this process's children: (kind, thread id) → seconds."""
    seconds: dict[tuple[str, str], float] = {}
    for pid, title in titles(os.getpid()).items():
        kind = "edge" if "haproxy" in title.partition(" ")[0].rpartition("/")[2] else "ray"
        kind = next((hop for name, hop in _TITLES.items() if title.startswith(name)), kind)
        with suppress(OSError):  # ended meanwhile
            for task in Path(f"/proc/{pid}/task").iterdir():
                seconds[kind, task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def crowd(url: str, meter: Meter, num_clients: int, *, stream: bool) -> Run:
    """Send all requests at once."""

    async def one(client: httpx.AsyncClient, number: int) -> tuple[int, float]:
        body = {"model": "builtin", "prompt": f"Room {number}", "max_tokens": NEW_TOKENS, "ignore_eos": True}
        body |= {"stream": stream, "temperature": 1.0, "seed": number}
        items, first = 0, 0.0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                first = first or time.perf_counter() - start
                items += line.startswith("data: {")
        return items, first

    async def all_of_them() -> list[tuple[int, float]]:
        import httpx

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(num_clients))))

    meter.spent()
    start = time.perf_counter()
    results = asyncio.run(all_of_them())
    seconds = time.perf_counter() - start
    first_s = statistics.median(first for _, first in results)
    return Run(meter.spent(), seconds, sum(items for items, _ in results), first_s)


def measure(server: Served, num_clients: int, repeats: int, *, stream: bool) -> list[Run]:
    meter = Meter()
    crowd(server.url, meter, num_clients, stream=stream)
    return [crowd(server.url, meter, num_clients, stream=stream) for _ in range(repeats)]


def first_tokens(server: Served) -> dict[str, list[float]]:
    """Seconds to the first token by each way in, in turn."""
    import httpx

    body: dict[str, Any] = {"model": "builtin", "prompt": "A room", "max_tokens": 2, "ignore_eos": True}
    client = httpx.Client(timeout=TIMEOUT_S)

    def http(url: str) -> Callable[[], object]:
        def ask() -> None:
            with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())

        return ask

    def by_handle(handle: Any, call: object) -> Callable[[], object]:
        streaming = handle.options(stream=True, _by_reference=False)

        def ask() -> None:
            for _ in streaming.remote(call):
                times.append(time.perf_counter())

        return ask

    from folio.app.api.openai.bodies import CompletionRequest

    request = CompletionRequest.model_validate(body)
    call = GenerateRequest("bench", [1, 2, 3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
    ways = {"http": http(server.url)}
    if direct := direct_url():
        ways["http to ingress"] = http(direct)
    ways["handle of ingress"] = by_handle(server.ingress.generate_stream, request)
    ways["handle of replica"] = by_handle(server.engines.generate_stream, call)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(FIRST_TOKENS + 5):
        for way, ask in ways.items():
            times: list[float] = []
            start = time.perf_counter()
            ask()
            if number >= 5:
                seconds[way].append(times[0] - start)
    return seconds


def direct_url() -> str | None:
    """URL of the ingress replica's own HTTP port, where HAProxy is in front of it."""
    import ray
    from ray.serve.context import _get_global_client

    if os.environ["RAY_SERVE_ENABLE_HA_PROXY"] != "1":
        return None
    client: Any = _get_global_client()
    groups = ray.get(client._controller.get_target_groups.remote(from_proxy_manager=True))
    [target] = next(group.targets for group in groups if group.protocol == "HTTP")
    return f"http://127.0.0.1:{target.port}"


def answers(url: str) -> bool:
    """Whether the server accepts requests."""
    import httpx

    try:
        return httpx.get(f"{url}/ready", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def one_edge(num_clients: int, repeats: int) -> dict[str, Any]:
    """All runs in one cluster: ways of answering → runs, and seconds to the first token."""
    engine = {"model": "builtin", "num_threads": 1, "prefix_cache": False, "max_num_seqs": num_clients}
    runs: dict[str, list[Run]] = {}
    with served("folio-streaming", {"engine": engine}) as server:
        for name, streaming in {"each step": EACH_STEP, "paced": PACED}.items():
            application: dict[str, Any] = {"engine": engine, "streaming": streaming}
            changed = Served(server.name, server.url, application)
            changed.deploy()
            changed.wait_until(lambda: answers(server.url))  # HAProxy knows a little later
            if name == "each step":
                firsts = first_tokens(changed)
                runs["whole"] = measure(changed, num_clients, repeats, stream=False)
            runs[name] = measure(changed, num_clients, repeats, stream=True)
    return {"runs": {name: [asdict(run) for run in mode] for name, mode in runs.items()}, "first_s": firsts}


def in_a_process(edge: str, *arguments: str) -> dict[str, Any]:
    """`one_edge` with this edge, in a process of its own because Ray reads the setting at import."""
    environment = os.environ | {"RAY_SERVE_ENABLE_HA_PROXY": EDGES[edge]}
    command = [sys.executable, "-m", "benchmarks.streaming", "--inside", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    if process.returncode:
        sys.exit(f"the run behind {edge} failed; see above")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def medians_of(runs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Way of answering → medians of the seconds of each hop, and of all."""
    medians = {}
    for name, mode in runs.items():
        medians[name] = {hop: statistics.median(run["hops"][hop] for run in mode) for hop in HOPS}
        medians[name]["all"] = statistics.median(sum(run["hops"].values()) for run in mode)
    return medians


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--edge", choices=tuple(EDGES), help="only this one")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    harness.needs("ray", "httpx")
    num_clients, repeats = (16, 1) if args.quick else (32, 3)
    if args.inside:
        print(json.dumps(one_edge(num_clients, repeats)))
        return
    edges = [args.edge] if args.edge else list(EDGES)[: 1 if args.quick else 2]
    raw = {edge: in_a_process(edge, *(["--quick"] if args.quick else [])) for edge in edges}
    figures: dict[str, float] = {}
    num_tokens = num_clients * NEW_TOKENS
    for edge, result in raw.items():
        medians = medians_of(result["runs"])
        print(f"\n{edge}: {num_clients} clients, {NEW_TOKENS} tokens each; medians of {repeats}, us of a token")
        print(f"{'':10} {'tok/s':>7} {'items':>6} {'first s':>8}" + "".join(f" {hop:>12}" for hop in (*HOPS, "all")))
        suffix = "" if edge == "haproxy" else f"_{edge}"
        for name, mode in result["runs"].items():
            seconds, first = (statistics.median(run[field] for run in mode) for field in ("seconds", "first_s"))
            added = {hop: medians[name][hop] - (name != "whole") * medians["whole"][hop] for hop in (*HOPS, "all")}
            us = {hop: 1e6 * spent / num_tokens for hop, spent in added.items()}
            items = mode[0]["items"]
            print(
                f"{name:10} {num_tokens / seconds:7.0f} {items:6} {first:8.3f}"
                + "".join(f" {v:12.1f}" for v in us.values())
            )
            if name == "whole":
                continue
            key = name.replace(" ", "_")
            figures[f"{key}_us_per_token{suffix}"] = us["all"]
            figures |= {f"{key}_{hop.replace(' ', '_')}_us{suffix}": us[hop] for hop in HOPS}
            figures[f"{key}_tokens_per_item{suffix}"] = num_tokens / items
        for way, times in result["first_s"].items():
            figures[f"ttft_ms_{way.replace(' ', '_')}{suffix}"] = 1e3 * statistics.median(times)
            print(f"first token by {way}: {1e3 * statistics.median(times):.2f} ms")
    if "each_step_us_per_token" in figures:
        figures["us_per_token_all_processes"] = max(figures["each_step_us_per_token"], figures["paced_us_per_token"])
    harness.finish("streaming", args, figures, raw)


if __name__ == "__main__":
    main()
