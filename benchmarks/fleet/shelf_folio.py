"""Folio's part of `benchmarks.shelf`: the replay, wakes of the largest model, and one and two busy models."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.fleet.shelf_models import FOLDER, LARGEST, MAX_NUM_SEQS, BenchModel, ModelAsk
from benchmarks.fleet.shelf_outcome import Outcome, memory_curve
from benchmarks.rivals.shelf_rivals import Connect, connections
from benchmarks.served import cluster
from benchmarks.serving import arrivals, latency
from benchmarks.serving.latency import Targets
from benchmarks.serving.loops import closed_loop
from folio.app.cli.bench.load import Ask, Clock, Record, Send, open_loop
from folio.app.shelf.status import ModelStatus

SHELF, ALONE, ALONE_PREFIX = "shelf", "alone", "/alone"
# Of a busy model: requests at once, and their lengths; the batch fills during the ramp.
BUSY_PROMPT, BUSY_NEW, RAMP_S = 64, 48, 0.5
WAKE_PROMPT, WAKE_NEW, PAUSE_S = 16, 4, 1.0
MOST_ASKS = 40
# Wakes of the largest model; runs with busy models, of so many seconds, after one that does not count.
WAKES, QUICK_WAKES, REPEATS, BUSY_S = 9, 2, 5, 8.0


class Shelf:
    """The application, in this process's cluster."""

    def __init__(self, url: str, models: Sequence[BenchModel], connect: Connect) -> None:
        self.models = models
        self.targets: dict[str, Send] = {model.name: connect(model.name, url) for model in models}

    async def __call__(self, ask: Ask, record: Record, clock: Clock) -> None:
        assert isinstance(ask, ModelAsk)
        await self.targets[ask.model](ask, record, clock)

    async def ask(self, model: BenchModel, prompt_tokens: int, new_tokens: int) -> Record:
        """One request alone. Raises `RuntimeError` if it is not answered whole."""
        asks = arrivals.asks([(prompt_tokens, new_tokens)], model.vocab_size, time.monotonic_ns())
        [record] = await closed_loop(self.targets[model.name], asks, 1)
        if not record.completed:
            raise RuntimeError(f"{model.name} did not answer: {record}")
        return record

    async def statuses(self) -> list[ModelStatus]:
        from ray import serve

        engines: Any = serve.get_deployment_handle("EngineReplica", SHELF)
        [hosted] = await asyncio.to_thread(lambda: engines.broadcast("hosted_models").results())
        return [model.status for model in hosted]

    async def num_bytes(self) -> int:
        """Weights and KV caches."""
        return sum(
            status.kv_bytes + status.weight_bytes * (status.state in ("waking", "awake"))
            for status in await self.statuses()
        )

    async def put_to_sleep(self, model: BenchModel) -> None:
        """Ask for other models until this one sleeps. Raises `RuntimeError` if it does not."""
        others = sorted((m for m in self.models if m is not model), key=lambda m: -m.weight_bytes)
        for other in itertools.islice(itertools.cycle(others), MOST_ASKS):
            if {status.name: status for status in await self.statuses()}[model.name].state == "asleep":
                return
            await self.ask(other, WAKE_PROMPT, WAKE_NEW)
        raise RuntimeError(f"{model.name} is awake after {MOST_ASKS} requests to others: {await self.statuses()}")


def shelf_args(models: Sequence[BenchModel], targets: Mapping[str, Targets], budget_bytes: int) -> dict[str, Any]:
    """`args` of the application."""
    return {
        "models": [
            {
                "name": model.name,
                "engine": model.engine,
                "slo": {"ttft_s": targets[model.name].ttft_s, "tpot_s": targets[model.name].tpot_s},
            }
            for model in models
        ],
        "device_memory_bytes": budget_bytes,
        "weights_dir": str(FOLDER / "weights"),
    }


def measure(
    models: Sequence[BenchModel],
    targets: Mapping[str, Targets],
    asks: Sequence[ModelAsk],
    budget_bytes: int,
    *,
    quick: bool,
) -> tuple[Outcome, dict[str, float]]:
    """The outcome of the replay, and the figures of the other parts; `quick` leaves out the busy models, for which
    another application starts."""
    from ray import serve

    from folio.app.config.args import AppArgs
    from folio.app.main import build

    with cluster(num_cpus=8) as url:
        serve.run(
            build(AppArgs.model_validate(shelf_args(models, targets, budget_bytes))), name=SHELF, route_prefix="/"
        )
        outcome, figures = asyncio.run(_replay(url, models, asks, QUICK_WAKES if quick else WAKES))
        if quick:
            return outcome, figures
        alone = {"engine": models[0].engine, "model_name": models[0].name}
        serve.run(build(AppArgs.model_validate(alone)), name=ALONE, route_prefix=ALONE_PREFIX)
        return outcome, figures | asyncio.run(_busy(url, models, budget_bytes))


async def _replay(
    url: str, models: Sequence[BenchModel], asks: Sequence[ModelAsk], num_wakes: int
) -> tuple[Outcome, dict[str, float]]:
    async with connections() as connect:
        shelf = Shelf(url, models, connect)
        for model in models:
            await shelf.ask(model, WAKE_PROMPT, WAKE_NEW)
        before = await shelf.statuses()
        async with memory_curve(shelf.num_bytes) as curve:
            records = await open_loop(shelf, asks)
        after = await shelf.statuses()
        wakes, evictions = (
            sum(getattr(status, key) for status in after) - sum(getattr(status, key) for status in before)
            for key in ("num_wakes", "num_evictions")
        )
        largest = next(model for model in models if model.shape == LARGEST)
        wakes_s = []
        for _ in range(num_wakes):
            await shelf.put_to_sleep(largest)
            await asyncio.sleep(PAUSE_S)
            wakes_s.append((await shelf.ask(largest, WAKE_PROMPT, WAKE_NEW)).ttft_s)
            print(f"first token of {largest.name} asleep: {wakes_s[-1]:.3f} s", flush=True)
    figures = {
        "folio_wakes": wakes,
        "folio_evictions": evictions,
        "wake_s_05b": statistics.median(wakes_s),
        "wake_s_05b_max": max(wakes_s),
    }
    return Outcome(asks, records, curve, {"wakes_s_05b": wakes_s}), figures


async def _busy(url: str, models: Sequence[BenchModel], budget_bytes: int) -> dict[str, float]:
    """Throughput of one model among sleeping ones and alone, then of two at once and of each, in turn."""
    first, second = next(
        pair for pair in itertools.combinations(models, 2) if sum(model.need_bytes for model in pair) <= budget_bytes
    )
    shares: dict[str, list[float]] = {"one": [], "two": []}
    async with connections() as connect:
        shelf = Shelf(url, models, connect)
        alone = connect(models[0].name, url + ALONE_PREFIX)
        seeds = itertools.count()

        async def rates(*targets: tuple[Send, BenchModel]) -> list[float]:
            return await asyncio.gather(*(busy_rate(target, model, BUSY_S, next(seeds)) for target, model in targets))

        for repeat in range(REPEATS + 1):
            [among] = await rates((shelf.targets[models[0].name], models[0]))
            [by_itself] = await rates((alone, models[0]))
            pair = [(shelf.targets[model.name], model) for model in (first, second)]
            singles = [(await rates(one))[0] for one in pair]
            both = await rates(*pair)
            one, two = among / by_itself, sum(a / b for a, b in zip(both, singles, strict=True))
            print(
                f"{f'run {repeat}/{REPEATS}' if repeat else 'warming up'}  one busy model {among:.1f} "
                f"tokens/s, alone {by_itself:.1f}; two {both[0]:.1f} and {both[1]:.1f}, each by itself "
                f"{singles[0]:.1f} and {singles[1]:.1f}: {two:.3f}",
                flush=True,
            )
            if repeat:
                shares["one"].append(one)
                shares["two"].append(two)
    return {
        "one_busy_vs_alone": statistics.median(shares["one"]),
        "two_busy_vs_device": statistics.median(shares["two"]),
    }


async def busy_rate(target: Send, model: BenchModel, seconds: float, seed: int) -> float:
    """Output tokens a second of a model with as many requests at once as it runs, after the ramp."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + RAMP_S + seconds
    records = await closed_loop(target, _until(deadline, loop.time, model, seed), MAX_NUM_SEQS)
    return latency.tokens_per_s(records, RAMP_S, RAMP_S + seconds)


def _until(deadline: float, now: Callable[[], float], model: BenchModel, seed: int) -> Iterator[Ask]:
    """Requests until this time."""
    for number in itertools.count():
        if now() >= deadline:
            return
        yield from arrivals.asks([(BUSY_PROMPT, BUSY_NEW)], model.vocab_size, seed * 10_000 + number)
