"""What a streamed token costs: processor time of Serve's proxy, the ingress and the replica together.

The built-in model on one thread behind a real Ray Serve, and clients that stream at once, each the same number of
tokens. Three ways: *whole* answers, *each step*, which sends every token by itself, and *paced*, the default, which
sends the first token at once and then as many together as the budget of items a second asks for. What streaming costs
is the processor time of these processes above that of whole answers, per token; the engine's thread and the clients are
not counted.

--quick: 16 clients instead of 32, once instead of three times.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from benchmarks.served import Served, processes_called, served

if TYPE_CHECKING:
    import httpx

NEW_TOKENS = 200
EACH_STEP = {"items_per_s": 1e9, "min_interval_s": 0.0, "max_interval_s": 0.0}
PACED: dict[str, float] = {}
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Run:
    """One crowd of clients: `cpu_s` of the server processes, `items` that arrived, and when the first did."""

    cpu_s: float
    seconds: float
    items: int
    first_s: float


def thread_s() -> dict[str, float]:
    """Processor time so far of each thread of the proxy and of all replicas."""
    seconds = {}
    for pid in processes_called("ray::ServeReplica") + processes_called("ray::ProxyActor"):
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            try:
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            seconds[thread.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def cpu_s(before: dict[str, float], after: dict[str, float]) -> float:
    """Of all threads but the busiest, which is the engine's."""
    spent = sorted(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
    return sum(spent[:-1])


def crowd(url: str, num_clients: int, *, stream: bool) -> Run:
    """All of them ask at once."""

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

    before, start = thread_s(), time.perf_counter()
    results = asyncio.run(all_of_them())
    seconds = time.perf_counter() - start
    first_s = statistics.median(first for _, first in results)
    return Run(cpu_s(before, thread_s()), seconds, sum(items for items, _ in results), first_s)


def measure(server: Served, num_clients: int, repeats: int, *, stream: bool) -> list[Run]:
    crowd(server.url, num_clients, stream=stream)
    return [crowd(server.url, num_clients, stream=stream) for _ in range(repeats)]


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "httpx")
    num_clients, repeats = (16, 1) if args.quick else (32, 3)
    engine = {"model": "builtin", "num_threads": 1, "prefix_cache": False, "max_num_seqs": num_clients}
    runs: dict[str, list[Run]] = {}
    with served("folio-streaming", {"engine": engine}) as server:
        for name, streaming in {"each step": EACH_STEP, "paced": PACED}.items():
            application: dict[str, Any] = {"engine": engine, "streaming": streaming}
            changed = Served(server.name, server.url, application)
            changed.deploy()
            if name == "each step":
                runs["whole"] = measure(changed, num_clients, repeats, stream=False)
            runs[name] = measure(changed, num_clients, repeats, stream=True)
    num_tokens = num_clients * NEW_TOKENS
    medians = {name: statistics.median(run.cpu_s for run in mode) for name, mode in runs.items()}
    print(f"\n{num_clients} clients, {NEW_TOKENS} tokens each; medians of {repeats}")
    print(f"{'':10} {'CPU s':>8} {'seconds':>8} {'items':>7} {'first item s':>13}")
    for name, mode in runs.items():
        seconds, first = (statistics.median(getattr(run, field) for run in mode) for field in ("seconds", "first_s"))
        print(f"{name:10} {medians[name]:8.2f} {seconds:8.2f} {mode[0].items:7} {first:13.3f}")
    figures: dict[str, float] = {}
    for name in ("each step", "paced"):
        key = name.replace(" ", "_")
        added = medians[name] - medians["whole"]
        figures[f"{key}_us_per_token"] = added / num_tokens * 1e6
        figures[f"{key}_us_per_item"] = added / runs[name][0].items * 1e6
        figures[f"{key}_tokens_per_item"] = num_tokens / runs[name][0].items
    raw = {name: [[run.cpu_s, run.seconds, run.items, run.first_s] for run in mode] for name, mode in runs.items()}
    harness.finish("streaming", args, figures, raw)


if __name__ == "__main__":
    main()
