"""Dashboard viewers: processor time that each costs the server.

A real Ray Serve application with the built-in model. Viewers read the dashboard's events, as its page does, from an
idle server whose cache holds blocks. In turn no viewer, 1 and 16 watch; the cost is the processor time of all of the
cluster's processes, less that of the neighbouring run without viewers.

--quick: 5 s a run instead of 20, once instead of three times.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks import harness
from benchmarks.served import served
from benchmarks.serving.streaming import answers, thread_s

CROWDS = (1, 16)
TIMEOUT_S, SETTLING_S = 60.0, 2.0
NUM_PROMPTS, PROMPT = 20, "The quick brown fox jumps over the lazy dog. "


def core_share(url: str, num_viewers: int, seconds: float) -> float:
    """Processor time of the server's processes, in cores, while so many viewers watch."""
    import httpx

    async def view(client: httpx.AsyncClient, seen: asyncio.Event) -> None:
        async with client.stream("GET", f"{url}/dashboard/events") as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    seen.set()
        raise RuntimeError("the stream of events ended while it was measured")

    async def measured() -> float:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
            events = [asyncio.Event() for _ in range(num_viewers)]
            async with asyncio.TaskGroup() as group:
                views = [group.create_task(view(client, seen)) for seen in events]
                for seen in events:
                    await seen.wait()
                await asyncio.sleep(SETTLING_S)
                before, start = thread_s(), time.perf_counter()
                await asyncio.sleep(seconds)
                after, elapsed = thread_s(), time.perf_counter() - start
                for task in views:
                    task.cancel()
        return sum(spent - before.get(thread, 0.0) for thread, spent in after.items()) / elapsed

    return asyncio.run(measured())


def fill_cache(url: str) -> None:
    """Leave blocks in the prefix cache, which the dashboard draws."""
    import httpx

    for number in range(NUM_PROMPTS):
        body = {"model": "builtin", "prompt": f"{number} {PROMPT * 20}", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status()


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "httpx")
    seconds, repeats = (5.0, 1) if args.quick else (20.0, 3)
    shares: dict[int, list[float]] = {num_viewers: [] for num_viewers in (0, *CROWDS)}
    with served("folio-viewers", {"engine": {"model": "builtin"}}) as server:
        server.deploy()
        server.wait_until(lambda: answers(server.url))  # HAProxy knows the replica a little later
        fill_cache(server.url)
        for _ in range(repeats):
            for num_viewers, of_crowd in shares.items():
                of_crowd.append(core_share(server.url, num_viewers, seconds))
    figures = {"idle_core_share": statistics.median(shares[0])}
    print(f"all processes, nobody watching: {figures['idle_core_share']:.2%} of a core")
    for num_viewers in CROWDS:
        added = [with_them - alone for with_them, alone in zip(shares[num_viewers], shares[0], strict=True)]
        figures[f"core_share_{num_viewers}"] = statistics.median(added)
        figures[f"core_share_of_each_of_{num_viewers}"] = statistics.median(added) / num_viewers
        print(f"{num_viewers:2} viewers: {statistics.median(added):.2%} more, {min(added):.2%} to {max(added):.2%}")
    harness.finish("viewers", args, figures, {str(num_viewers): of_crowd for num_viewers, of_crowd in shares.items()})


if __name__ == "__main__":
    main()
