"""Serving over HTTP: Folio against its bare engine and other OpenAI-compatible servers under the same load.

Random weights in the shape of Qwen2.5-0.5B, bfloat16 or `--dtype`, greedy, no EOS, so that a step has its real cost.
Folio is a Ray Serve application on this machine; the bare engine is an `AsyncEngine` in a process of its own, with the
same settings; each idles while the other is measured.

- one request at a time: time to first token through HTTP less the bare engine's
- 16 at once, streams: output tokens a second through HTTP over the bare engine's, in pairs, since machines drift
- Poisson arrivals at several rates, and a trace of real traffic replayed: latencies and goodput of every server
- four times the load that Folio has the capacity for: completed requests, and the time of refusals
- the first two once more with Serve's proxy instead of HAProxy, except with --quick

`--target NAME=URL` (repeatable) adds a server that has the same checkpoint, which `--checkpoint FOLDER` leaves there.
The load generator is this process, on the same cores: its processor time is
reported. `--soak MINUTES` runs 0.7 of the capacity for this time instead, and fits a line to the memory of the
processes.
--quick keeps 2 of 24 layers and a part of the vocabulary, and does each once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, harness, workloads
from benchmarks.served import served
from benchmarks.serving import arrivals, latency
from benchmarks.serving.bare import BareEngine, bare_engine
from benchmarks.serving.latency import Summary, Targets
from benchmarks.serving.loops import closed_loop, connect
from benchmarks.serving.requests import CHAT_OUTPUT, VOCABULARY, chat, mixed, ordinary
from benchmarks.serving.usage import Meter, Usage
from folio.app.cli.bench.load import HttpTarget, Record, open_loop
from folio.app.http import haproxy

FOLIO, ENGINE = "folio", "EngineReplica"
AT_ONCE = 16
SINGLE_PROMPT, SINGLE_NEW = 32, 4
# More requests at once than the engine runs, so that it never waits for a client.
MAX_NUM_SEQS, MAX_QUEUED, SATURATING = 16, 24, 20
MAX_MODEL_LEN, LONGEST_OF_TRACE = 2048, 768
KV_MEMORY_BYTES = 1 << 30
# The index of the prefix cache grows until the cache is full; the line is fitted afterwards.
SOAK_KV_MEMORY_BYTES = 1 << 28
OVERLOAD, TRACE_LOAD, SOAK_LOAD = 4.0, 0.7, 0.7
# At the start of a run under full load the batch is still filling.
RAMP_SHARE = 0.2
WATCH_PERIOD_S, PAUSE_S = 2.0, 0.05
TRACE = workloads.AZURE_TRACE


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurements.

    `vocab_size`: the model's; `pairs`: single requests; `repeats`: runs at full load of each, after one to warm up;
    `capacity_rounds`: requests that measure the capacity, in multiples of those at once; `loads`: Poisson rates as
    shares of the capacity; `trace_probe`: requests of the trace that determine its rate.
    """

    num_layers: int = 24
    vocab_size: int = checkpoints.QWEN_VOCABULARY
    pairs: int = 40
    repeats: int = 9
    requests: int = 16
    new_tokens: int = 32
    capacity_rounds: int = 8
    loads: tuple[float, ...] = (0.3, 0.6, 0.8, 0.95)
    load_s: float = 30.0
    trace_probe: int = 24
    trace_s: float = 40.0
    overload_s: float = 60.0
    overloads: int = 4


QUICK = Sizes(
    num_layers=2,
    vocab_size=VOCABULARY,
    pairs=5,
    repeats=1,
    capacity_rounds=2,
    loads=(0.9,),
    load_s=3.0,
    trace_probe=20,
    trace_s=3.0,
    overload_s=3.0,
    overloads=1,
)


def rate_of(records: Sequence[Record]) -> float:
    """Output tokens per second over the whole run. Raises `RuntimeError` if an answer is incomplete."""
    if bad := [record for record in records if not record.completed]:
        raise RuntimeError(f"{len(bad)} of {len(records)} requests were not answered whole: {bad[0]}")
    return sum(r.num_tokens for r in records) / max(r.ended_s or 0.0 for r in records)


async def added_ttft(target: HttpTarget, bare: BareEngine, pairs: int) -> dict[str, list[float]]:
    """Times to first token of single requests, the same for both, in turn."""
    ttft_s: dict[str, list[float]] = {"http": [], "bare": []}
    for ask in arrivals.asks([(SINGLE_PROMPT, SINGLE_NEW)] * (pairs + 2), VOCABULARY, seed=11):
        [http] = await closed_loop(target, [ask], 1)
        await asyncio.sleep(PAUSE_S)
        [alone] = await asyncio.to_thread(bare.closed_loop, [ask], 1)
        await asyncio.sleep(PAUSE_S)
        rate_of([http, alone])
        ttft_s["http"].append(http.ttft_s)
        ttft_s["bare"].append(alone.ttft_s)
    return {name: values[2:] for name, values in ttft_s.items()}


async def kept_throughput(target: HttpTarget, bare: BareEngine, sizes: Sizes) -> dict[str, Any]:
    """Tokens per second of both in turn, for the same requests; and the processor time of HTTP, by kind of process."""
    rates: dict[str, list[float]] = {"http": [], "bare": []}
    meter = Meter(skip=bare.pid)
    cpu_s: dict[str, float] = {}
    generator_share, num_tokens = [], 0
    for repeat in range(sizes.repeats + 1):
        asks = mixed(sizes.requests, sizes.new_tokens, seed=100 + repeat)
        alone = 0.0
        if repeat % 2:  # alternate the order
            alone = rate_of(await asyncio.to_thread(bare.closed_loop, asks, AT_ONCE))
        before, generator_s, start = meter.read(), time.thread_time(), time.perf_counter()
        records = await closed_loop(target, asks, AT_ONCE)
        wall_s = time.perf_counter() - start
        generator_s, used_s = time.thread_time() - generator_s, meter.read().cpu_since(before)
        http = rate_of(records)
        alone = alone or rate_of(await asyncio.to_thread(bare.closed_loop, asks, AT_ONCE))
        name = f"run {repeat}/{sizes.repeats}" if repeat else "warming up"
        print(f"{name}  HTTP {http:.1f}, bare {alone:.1f} tokens/s", flush=True)
        if repeat:
            rates["http"].append(http)
            rates["bare"].append(alone)
            generator_share.append(generator_s / wall_s)
            num_tokens += sum(r.num_tokens for r in records)
            cpu_s = {kind: cpu_s.get(kind, 0.0) + used for kind, used in used_s.items()}
    return {
        "rates": rates,
        "cpu_us_per_token": {kind: 1e6 * used / num_tokens for kind, used in cpu_s.items()},
        "generator_cpu_share": statistics.median(generator_share),
    }


async def capacity(
    target: HttpTarget, sizes: Sizes, seed: int, lengths: Callable[[int, int], workloads.Lengths] = ordinary
) -> float:
    """Output tokens per second with more requests than the engine runs at once, from the time when as many as it runs
    have begun to answer until the last one is sent."""
    asks = arrivals.asks(lengths(sizes.capacity_rounds * SATURATING, seed), VOCABULARY, seed)
    records = await closed_loop(target, asks, SATURATING)
    rate_of(records)
    begin_s, end_s = sorted(record.events[0][0] for record in records)[MAX_NUM_SEQS - 1], records[-1].due_s
    if begin_s >= end_s:
        raise RuntimeError(
            f"the last request was sent before {MAX_NUM_SEQS} had begun to answer: raise capacity_rounds"
        )
    return latency.tokens_per_s(records, begin_s, end_s)


async def sweep(
    targets: Sequence[HttpTarget], tokens_per_s: float, sizes: Sizes, goal: Targets
) -> dict[str, list[Summary]]:
    """Poisson arrivals at rising rates, the same for every server, in turn."""
    summaries: dict[str, list[Summary]] = {target.name: [] for target in targets}
    for number, load in enumerate(sizes.loads):
        at_s = arrivals.poisson(load * tokens_per_s / CHAT_OUTPUT, sizes.load_s, seed=200 + number)
        asks = arrivals.asks(chat(len(at_s), seed=300 + number), VOCABULARY, 400 + number, at_s)
        for target in targets:
            records = await open_loop(target, asks)
            summaries[target.name].append(Summary.of(records, sizes.load_s, goal))
            print(f"{target.name} at {load:.2f} of the capacity: {len(asks)} requests", flush=True)
    return summaries


async def replayed(
    targets: Sequence[HttpTarget], path: Path | None, sizes: Sizes, goal: Targets
) -> tuple[dict[str, list[Summary]], str]:
    """A trace, replayed at a share of the first server's capacity for such requests."""
    like, _ = arrivals.replay(path, sizes.trace_probe, 1.0, LONGEST_OF_TRACE, seed=500)
    lengths = [(prompt, output) for _, prompt, output in like]
    probe = await closed_loop(targets[0], arrivals.asks(lengths, VOCABULARY, 501), SATURATING)
    rate = TRACE_LOAD * len(probe) / max(r.ended_s or 0.0 for r in probe)
    rows, source = arrivals.replay(path, rate, sizes.trace_s, LONGEST_OF_TRACE, seed=502)
    asks = arrivals.asks([row[1:] for row in rows], VOCABULARY, 503, [row[0] for row in rows])
    print(f"replaying {source}")
    runs = {target.name: [Summary.of(await open_loop(target, asks), sizes.trace_s, goal)] for target in targets}
    return runs, source


async def overload(target: HttpTarget, before: float, sizes: Sizes, skip: int) -> dict[str, Any]:
    """A load far above the capacity. The capacity is measured again after each run, because machines drift.

    Args:
        before: the capacity, just measured.
    """
    meter = Meter(skip)
    capacities, rates, records = [before], [], []
    generator_s = 0.0
    await asyncio.sleep(1.0)
    idle = meter.read()
    for number in range(sizes.overloads):
        at_s = arrivals.poisson(OVERLOAD * before / CHAT_OUTPUT, sizes.overload_s, seed=600 + number)
        asks = arrivals.asks(ordinary(len(at_s), seed=610 + number), VOCABULARY, 620 + number, at_s)
        begun_s = time.thread_time()
        run = await open_loop(target, asks)
        generator_s += time.thread_time() - begun_s
        rates.append(latency.tokens_per_s(run, RAMP_SHARE * sizes.overload_s, sizes.overload_s))
        records += run
        capacities.append(await capacity(target, sizes, seed=630 + number))
    await asyncio.sleep(1.0)
    later = meter.read()
    refused = [record for record in records if record.refused]
    return {
        "capacity_tokens_per_s": capacities,
        "tokens_per_s": rates,
        "requests": len(records),
        "completed": sum(r.completed for r in records),
        "refused": len(refused),
        "failed": sum(r.failed for r in records),
        "lost": sum(r.lost for r in records),
        "reject_ms": sorted(1e3 * r.answered_s for r in refused),
        "retry_after_s": sorted(r.retry_after_s for r in refused if r.retry_after_s is not None),
        "statuses": {status: sum(r.status == status for r in records) for status in {r.status for r in records}},
        "cpu_s": later.cpu_since(idle),
        "generator_cpu_s": generator_s,
        "private_mib": [idle.private_mib, later.private_mib],
    }


async def soak(target: HttpTarget, minutes: float, tokens_per_s: float, skip: int) -> dict[str, Any]:
    """A constant load for a long time; memory of the processes over time, and its growth."""
    duration_s = 60 * minutes
    at_s = arrivals.poisson(SOAK_LOAD * tokens_per_s / CHAT_OUTPUT, duration_s, seed=700)
    asks = arrivals.asks(chat(len(at_s), seed=701), VOCABULARY, 702, at_s)
    seen: list[Usage] = []
    watching = asyncio.create_task(Meter(skip).watch(WATCH_PERIOD_S, seen))
    try:
        records = await open_loop(target, asks)
    finally:
        watching.cancel()
    settled = seen[len(seen) // 3 :]
    kinds = settled[-1].private_mib.keys()
    series = {kind: [(u.at_s - settled[0].at_s, u.private_mib.get(kind, 0.0)) for u in settled] for kind in kinds}
    return {
        "requests": len(records),
        "refused": sum(r.refused for r in records),
        "failed": sum(r.failed for r in records),
        "lost": sum(r.lost for r in records),
        "private_mib": series,
        "mib_per_minute": {kind: latency.slope_per_minute(points) for kind, points in series.items()},
    }


async def run_all(
    args: argparse.Namespace, sizes: Sizes, servers: Sequence[tuple[str, str]], bare: BareEngine
) -> tuple[dict[str, float], dict[str, Any]]:
    """Run every part for these servers, Folio first. Returns figures and raw data."""
    goal = Targets(args.ttft_s, args.tpot_s)
    raw: dict[str, Any] = {"targets": asdict(goal), "dtype": args.dtype, "layers": sizes.num_layers}
    async with connect(servers) as targets:
        figures = await beside_bare(targets[0], bare, sizes, raw)
        tokens_per_s = await capacity(targets[0], sizes, seed=1)
        print(
            f"\ncapacity of {targets[0].name}: {tokens_per_s:.1f} tokens/s, {tokens_per_s / CHAT_OUTPUT:.2f} requests/s"
        )
        figures["capacity_tokens_per_s"] = tokens_per_s
        if args.soak is not None:
            raw["soak"] = await soak(targets[0], args.soak, tokens_per_s, bare.pid)
            return figures | soak_figures(raw["soak"]), raw
        raw["overload"] = await overload(targets[0], tokens_per_s, sizes, bare.pid)
        figures |= overload_figures(raw["overload"])
        summaries = await sweep(targets, await capacity(targets[0], sizes, 2, chat), sizes, goal)
        of_trace, source = await replayed(targets, args.trace, sizes, goal)
        raw["loads"] = {name: [s.as_dict() for s in runs] for name, runs in summaries.items()}
        raw["trace"] = {"source": source} | {name: s.as_dict() for name, [s] in of_trace.items()}
        print("\nPoisson arrivals")
        latency.print_table(summaries)
        print(source)
        latency.print_table(of_trace)
        ours = [*summaries[targets[0].name], *of_trace[targets[0].name]]
        figures["lost"] += sum(s.lost + s.failed for s in ours)
        figures["goodput_share_at_highest_load"] = ours[-2].good_share
    return figures, raw


async def beside_bare(target: HttpTarget, bare: BareEngine, sizes: Sizes, raw: dict[str, Any]) -> dict[str, float]:
    """Cost of HTTP against the bare engine."""
    kept = await kept_throughput(target, bare, sizes)
    ttft_s = await added_ttft(target, bare, sizes.pairs)
    added = [http - alone for http, alone in zip(ttft_s["http"], ttft_s["bare"], strict=True)]
    raw |= {"ttft_s": ttft_s, "throughput": kept}
    rates, cpu_us = kept["rates"], kept["cpu_us_per_token"]
    edge_us = sum(used for kind, used in cpu_us.items() if kind != ENGINE)
    figures = {
        "ttft_added_ms": 1e3 * statistics.median(added),
        "ttft_bare_ms": 1e3 * statistics.median(ttft_s["bare"]),
        "throughput_kept": harness.median_ratio(rates["http"], rates["bare"]),
        "http_tokens_per_s": statistics.median(rates["http"]),
        "bare_tokens_per_s": statistics.median(rates["bare"]),
        "edge_cpu_us_per_token": edge_us,
        "server_cpu_share": edge_us / sum(cpu_us.values()),
        "generator_cpu_share": kept["generator_cpu_share"],
    }
    print(f"\nTTFT through HTTP {1e3 * statistics.median(ttft_s['http']):.1f} ms, {figures['ttft_added_ms']:.1f} more")
    print(f"throughput kept: {figures['throughput_kept']:.3f}")
    for kind, used in sorted(cpu_us.items(), key=lambda item: -item[1]):
        print(f"  {kind:16s}{used:9.0f} us of processor time a token")
    print(f"  {'generator':16s}{figures['generator_cpu_share']:9.1%} of a core")
    return figures


async def only_beside_bare(url: str, bare: BareEngine, sizes: Sizes, raw: dict[str, Any]) -> dict[str, float]:
    """`beside_bare` for a server with another proxy."""
    async with connect([(FOLIO, url)]) as [target]:
        return await beside_bare(target, bare, sizes, raw)


@contextmanager
def without_haproxy() -> Iterator[None]:
    """Within this context, clusters start with Serve's proxy."""
    os.environ[haproxy.SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[haproxy.SWITCH]


def overload_figures(run: dict[str, Any]) -> dict[str, float]:
    rejected, mib = run["reject_ms"], run["private_mib"]
    growth = {kind: mib[1][kind] - mib[0].get(kind, 0.0) for kind in mib[1]}
    capacities = [statistics.mean(pair) for pair in itertools.pairwise(run["capacity_tokens_per_s"])]
    print(
        f"\n{OVERLOAD:g} times the capacity: {_rounded(run['tokens_per_s'])} tokens/s; capacity before and after "
        f"{_rounded(run['capacity_tokens_per_s'])}; of {run['requests']} requests {run['completed']} completed, "
        f"{run['refused']} refused, {run['failed']} failed, {run['lost']} lost"
    )
    print("  private memory grew by " + ", ".join(f"{kind} {by:.1f} MiB" for kind, by in growth.items()))
    figures = {
        "overload_kept": statistics.mean(r / c for r, c in zip(run["tokens_per_s"], capacities, strict=True)),
        "overload_refused": run["refused"],
        "overload_private_growth_mib": sum(growth.values()),
        "lost": run["lost"] + run["failed"],
    }
    if rejected:  # otherwise unknown
        figures["reject_ms_p50"] = harness.percentile(rejected, 50)
        figures["reject_ms_p99"] = harness.percentile(rejected, 99)
        figures["rejects_with_retry_after"] = len(run["retry_after_s"]) / len(rejected)
        print(f"  refused in {figures['reject_ms_p50']:.1f} ms, p99 {figures['reject_ms_p99']:.1f} ms")
    return figures


def _rounded(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.1f}" for rate in rates)


def soak_figures(run: dict[str, Any]) -> dict[str, float]:
    for kind, slope in run["mib_per_minute"].items():
        at = run["private_mib"][kind]
        print(f"  {kind:16s}{at[0][1]:9.1f} MiB to {at[-1][1]:.1f}, {slope:+.3f} MiB a minute")
    return {
        "soak_requests": run["requests"],
        "soak_refused": run["refused"],
        "lost": run["lost"] + run["failed"],
        "soak_mib_per_minute": sum(run["mib_per_minute"].values()),
    }


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__)
    parser.add_argument("--checkpoint", help="make the checkpoint in this folder, unless it is there, and leave it")
    parser.add_argument("--target", action="append", default=[], metavar="NAME=URL", help="a server, without /v1")
    parser.add_argument(
        "--layers", type=int, help="layers of the model; fewer where the noise of slow steps hides the cost of HTTP"
    )
    parser.add_argument("--num-threads", type=int, help="threads of Folio's engine, by default one for each core")
    parser.add_argument(
        "--dtype", default="auto", help="dtype of Folio's engine; float32 for processors without fast bfloat16"
    )
    parser.add_argument("--trace", type=Path, default=TRACE, help="an Azure LLM inference or Mooncake trace")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--ttft-s", type=float, default=1.0, help="TTFT target of a good request")
    parser.add_argument("--tpot-s", type=float, default=0.25, help="TPOT target of a good request")
    args = parser.parse_args()
    if bad := [target for target in args.target if "=" not in target]:
        parser.error(f"--target is {bad[0]!r}; it must be NAME=URL")
    return args


def main() -> None:
    args = parse()
    harness.needs("aiohttp", "psutil", "ray")
    harness.note_missing(args.trace)
    sizes = QUICK if args.quick else Sizes()
    if args.layers is not None:
        sizes = replace(sizes, num_layers=args.layers)
    others = [(name, url.rstrip("/")) for name, _, url in (target.partition("=") for target in args.target)]
    # As in `make serve`: by default all other processes have priority over Ray's workers.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray reads it so
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.checkpoint or temporary)
        if not (folder / "config.json").exists():
            config = {"num_hidden_layers": sizes.num_layers, "vocab_size": sizes.vocab_size}
            checkpoints.write_checkpoint(folder, checkpoints.config_of(checkpoints.QWEN, **config))
        settings = {
            "model": str(folder),
            "dtype": args.dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_queued_requests": MAX_QUEUED,
            "kv_memory_bytes": KV_MEMORY_BYTES if args.soak is None else SOAK_KV_MEMORY_BYTES,
            "num_threads": args.num_threads,
        }
        application = {"engine": settings, "model_name": FOLIO}
        with bare_engine(settings) as bare:
            with served("folio", application) as server:
                server.deploy()
                figures, raw = asyncio.run(run_all(args, sizes, [(FOLIO, server.url), *others], bare))
                [report] = server.reports()
                figures["left_running"] = report.num_running + report.num_waiting
            if not args.quick and args.soak is None:
                with without_haproxy(), served("folio", application) as server:
                    server.deploy()
                    raw["serve_proxy"] = {}
                    more = asyncio.run(only_beside_bare(server.url, bare, sizes, raw["serve_proxy"]))
                    figures |= {f"serve_proxy_{name}": value for name, value in more.items()}
    if args.soak is not None:
        harness.finish("serving-soak", args, figures, raw)
    else:
        harness.finish("serving", args, figures, raw, latency.draw)


if __name__ == "__main__":
    main()
