"""Clients of a server on a GPU: processes with a loop each, because one is too slow for 256 streams, and what they saw.

Light to import: the processes are spawned.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.facts import record
from benchmarks.serving.loops import closed_loop, new_session
from folio.app.cli.bench.load import Ask, Clock, HttpTarget, Record

# Streams of a process.
_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Level:
    """A closed loop.

    Attributes:
        at_once: requests in flight.
        num_requests: in all, with different prompts.
        limit_s: after it, requests that have not ended count as failed.
    """

    at_once: int
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.at_once} at once, prompts of {self.prompt_tokens}"

    def asks(self, first_token: int, vocab_size: int) -> list[Ask]:
        """The same requests at each call, others than those of another level."""
        rng = random.Random(self.name)
        tokens = range(first_token, vocab_size)
        return [Ask(rng.choices(tokens, k=self.prompt_tokens), self.new_tokens) for _ in range(self.num_requests)]


class Clients:
    """Processes that send requests to a server.

    Args:
        model: the name that requests have.
    """

    def __init__(self, url: str, model: str, most_at_once: int) -> None:
        self._url, self._model = url, model
        self._most = max(1, most_at_once // _STREAMS)
        self._pool = ProcessPoolExecutor(self._most, multiprocessing.get_context("spawn"))

    def start(self) -> None:
        """Start all processes now, so that those of a level begin together."""
        list(self._pool.map(time.sleep, [0.2] * self._most))

    def run(self, level: Level, asks: Sequence[Ask]) -> tuple[list[Record], float, float]:
        """Records, seconds from the first request to the last answer, and the busiest client's share of a processor."""
        count = min(self._most, max(1, level.at_once // _STREAMS))
        parts = [
            self._pool.submit(
                _send, self._url, self._model, list(asks[i::count]), level.at_once // count, level.limit_s
            )
            for i in range(count)
        ]
        answers = [part.result() for part in parts]
        seconds = max(ended for _, _, ended, _ in answers) - min(began for _, began, _, _ in answers)
        records = [each for records, *_ in answers for each in records]
        return records, seconds, max(cpu_s for *_, cpu_s in answers) / seconds

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _send(
    url: str, model: str, asks: list[Ask], at_once: int, limit_s: float
) -> tuple[list[Record], float, float, float]:
    """In a client's process: records, when it began and ended, and its processor time."""
    deadline = time.monotonic() + limit_s

    async def run() -> list[Record]:
        async with new_session() as session:
            target = HttpTarget("folio", url, model, session)

            async def send(ask: Ask, record: Record, clock: Clock) -> None:
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await target(ask, record, clock)
                except TimeoutError:
                    record.error, record.ended_s = f"no end within {limit_s:.0f} s of this level", clock.now()

            return await closed_loop(send, asks, at_once)

    began, cpu_s = time.monotonic(), time.process_time()
    records = asyncio.run(run())
    return records, began, time.monotonic(), time.process_time() - cpu_s


def summarise(fact: str, records: Sequence[Record], seconds: float, **values: object) -> float:
    """Record TTFT, TPOT and tokens a second. Returns the last.

    Raises:
        RuntimeError: not all requests have completed; recorded all the same.
    """
    good = [r for r in records if r.completed and r.events]
    bad = {f"{r.status} {(r.error or 'incomplete')[:150]}" for r in records if not r.completed}
    if not good:
        raise RuntimeError(f"none of {len(records)} requests has completed: {sorted(bad)[:5]}")
    ttft_ms = sorted(1e3 * r.ttft_s for r in good)
    tpot_ms = [1e3 * r.tpot_s for r in good]
    gaps_ms = [1e3 * (after - before) for r in good for (before, _), (after, _) in pairwise(r.events)]
    rate, events = sum(r.num_tokens for r in good) / seconds, statistics.mean(len(r.events) for r in good)
    record(
        fact,
        f"{rate:.0f} tok/s, TTFT {statistics.median(ttft_ms):.0f} ms (most {ttft_ms[-1]:.0f}), TPOT "
        f"{statistics.median(tpot_ms):.2f} ms, longest gap {max(gaps_ms, default=0.0):.0f} ms, "
        f"{len(good)} of {len(records)} completed",
        tokens_per_s=rate,
        ttft_ms_p50=statistics.median(ttft_ms),
        ttft_ms_p95=ttft_ms[int(0.95 * (len(ttft_ms) - 1))],
        ttft_ms_max=ttft_ms[-1],
        tpot_ms_p50=statistics.median(tpot_ms),
        tpot_ms_max=max(tpot_ms),
        longest_gap_ms=max(gaps_ms, default=0.0),
        events_a_request=events,
        seconds=seconds,
        completed=len(good),
        of=len(records),
        cached_tokens=sum(r.num_cached_tokens for r in good),
        bad=sorted(bad)[:5],
        **values,
    )
    if bad:
        raise RuntimeError(f"{len(records) - len(good)} of {len(records)} requests have failed: {sorted(bad)[:5]}")
    return rate
