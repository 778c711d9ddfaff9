"""Twelve models in the memory of three: Folio's shelf, a static split, and one process at a time.

Twelve checkpoints (`benchmarks.shelf_models`), and memory for weights and KV caches of three of them: three times the
mean need, which is a model's weights as the kernels read them, and a KV cache for 8 sequences of 256 tokens. Requests
are the first ones of the twelve models that a trace of production traffic asks for most (`--trace`, ServeGen's
clients), with lengths divided by 8. Models are named by rank; which of them is how large is drawn at random. Requests
are due at the trace's times, compressed: as many requests are replayed in the time of a run as would take 60 % of the
device if each was computed alone, one after the other, by models that are there already. Times alone are measured
first, on servers of single models.

The same load generator replays the same requests, streamed over HTTP, against

- a static split: the models that cover most of these requests within the memory, each on a server of its own; others
  are not served. (A split in twelve would serve no model: no share holds the smallest one's weights.)
- one process at a time, as llama-swap does: `benchmarks.shelf_rivals` says why it is faster here
- Folio with `models:` and `device_memory_bytes`

Servers of the first two are `benchmarks.lean_server`, without Ray. All have the same settings of the engine, and every
checkpoint has been read once, so that files are in the page cache; Folio has answered one request of each model.

A request meets its targets (SLO) if its first token comes within 1 s plus five times what the model's mean prompt takes
alone, and the others within 50 ms plus three times what a token takes alone, on average. Requests that were refused or
not served miss them. Shares are also of all targets times 0.5, 2 and 4.

Then, on Folio: the first token of the 0.5B model asleep, over HTTP; one busy model among eleven that sleep against the
same one served alone by `engine:`; and two busy models, each with its share of what it reaches alone, added up.

`--only` measures some ways of serving, without the figures that compare. --quick: small models, shorter
runs, no busy models.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.fleet import shelf_folio, shelf_models
from benchmarks.fleet.shelf_models import (
    NUM_MODELS,
    BenchModel,
    ModelAsk,
    TracedRequest,
    asks_of,
    make_models,
    read_trace,
)
from benchmarks.fleet.shelf_outcome import NAMES, Outcome, draw, memory_curve, print_table
from benchmarks.rivals.lean_server import LeanServer, LeanServers, lean_servers
from benchmarks.rivals.shelf_rivals import OneAtATime, StaticSplit, best_split, connections
from benchmarks.serving import arrivals
from benchmarks.serving.latency import Targets
from benchmarks.serving.loops import closed_loop
from folio.app.cli.bench.load import Send, open_loop

HELD, QUICK_HELD = 3, 4  # the steps of small models take a larger part
LOAD = 0.6
TTFT_PLUS_S, TTFT_TIMES, TPOT_PLUS_S, TPOT_TIMES = 1.0, 5.0, 0.05, 3.0
# Of the requests that measure a model alone.
SHORT, LONG, NEW_TOKENS = 16, 128, 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """`replay_s`: of each way of serving; `repeats`: requests of each kind that measure a model alone."""

    replay_s: float = 120.0
    repeats: int = 5


QUICK = Sizes(replay_s=4.0, repeats=1)


@dataclass(frozen=True, slots=True)
class Alone:
    """A model's times when it is loaded and serves nothing else: `first_s` and `prompt_token_s` to the first token,
    then `token_s` for each one; `start_s` of its process; `weight_bytes` as the kernels read them."""

    first_s: float
    prompt_token_s: float
    token_s: float
    start_s: float
    weight_bytes: int

    def ttft_s(self, prompt_tokens: float) -> float:
        return self.first_s + prompt_tokens * self.prompt_token_s

    def request_s(self, request: TracedRequest) -> float:
        return self.ttft_s(request.prompt_tokens) + (request.output_tokens - 1) * self.token_s


async def measure_alone(server: LeanServer, model: BenchModel, repeats: int) -> Alone:
    """Short and long prompts in turn, after one of each to warm up; medians."""
    lengths = [(SHORT, NEW_TOKENS), (LONG, NEW_TOKENS)] * (repeats + 1)
    async with connections() as connect:
        asks = arrivals.asks(lengths, model.vocab_size, seed=1)
        records = (await closed_loop(connect(model.name, server.url), asks, 1))[2:]
    short_s, long_s = (statistics.median(record.ttft_s for record in records[i::2]) for i in (0, 1))
    token_s = max(long_s - short_s, 0.0) / (LONG - SHORT)
    return Alone(
        short_s - SHORT * token_s,
        token_s,
        statistics.median(record.tpot_s for record in records),
        server.start_s,
        (await server.memory_bytes())[0],
    )


def settings_of(model: BenchModel) -> dict[str, Any]:
    """For a server of this model alone."""
    return model.engine | {"kv_memory_bytes": model.kv_bytes}


def alone_times(servers: LeanServers, models: Sequence[BenchModel], repeats: int) -> dict[str, Alone]:
    alone = {}
    for model in (models[0], *models):  # the first one twice: the machine's first seconds are slower
        server = servers.start(model.name, settings_of(model))
        try:
            alone[model.name] = a = asyncio.run(measure_alone(server, model, repeats))
        finally:
            server.kill()
        print(
            f"{model.name} {model.shape:13s} {a.weight_bytes / 2**20:4.0f} MiB  starts in {a.start_s:.2f} s, first "
            f"token of {LONG} after {1e3 * a.ttft_s(LONG):.0f} ms, then {1e3 * a.token_s:.1f} ms each",
            flush=True,
        )
    return alone


def targets_of(
    models: Sequence[BenchModel], alone: Mapping[str, Alone], requests: Sequence[TracedRequest]
) -> dict[str, Targets]:
    targets = {}
    for model in models:
        mean_prompt = statistics.fmean(request.prompt_tokens for request in requests if request.model == model.traced)
        a = alone[model.name]
        targets[model.name] = Targets(
            TTFT_PLUS_S + TTFT_TIMES * a.ttft_s(mean_prompt), TPOT_PLUS_S + TPOT_TIMES * a.token_s
        )
    return targets


def window(
    requests: Sequence[TracedRequest], models: Sequence[BenchModel], alone: Mapping[str, Alone], replay_s: float
) -> list[TracedRequest]:
    """The first requests that together take `LOAD` of this time alone."""
    by_traced = {model.traced: alone[model.name] for model in models}
    left_s, chosen = LOAD * replay_s, []
    for request in requests:
        left_s -= by_traced[request.model].request_s(request)
        if left_s < 0:
            break
        chosen.append(request)
    return chosen


async def replay_static(servers: LeanServers, split: Sequence[BenchModel], asks: Sequence[ModelAsk]) -> Outcome:
    with ExitStack() as stack:
        running: dict[str, LeanServer] = {}
        for model in split:
            running[model.name] = await asyncio.to_thread(servers.start, model.name, settings_of(model))
            stack.callback(running[model.name].kill)
        async with connections() as connect:
            targets: dict[str, Send] = {name: connect(name, server.url) for name, server in running.items()}
            for model in split:
                await closed_loop(targets[model.name], arrivals.asks([(LONG, 4)] * 2, model.vocab_size, 2), 1)

            async def num_bytes() -> int:
                return sum([sum(await server.memory_bytes()) for server in running.values()])

            async with memory_curve(num_bytes) as curve:
                records = await open_loop(StaticSplit(targets), asks)
    return Outcome(asks, records, curve, {"models": [model.name for model in split]})


async def replay_swap(servers: LeanServers, models: Sequence[BenchModel], asks: Sequence[ModelAsk]) -> Outcome:
    settings = {model.name: settings_of(model) for model in models}
    async with connections() as connect:
        swap = OneAtATime(lambda name: servers.start(name, settings[name]), connect)

        async def num_bytes() -> int:
            return 0 if (server := swap.server) is None else sum(await server.memory_bytes())

        try:
            async with memory_curve(num_bytes) as curve:
                records = await open_loop(swap, asks)
        finally:
            await swap.close()
    return Outcome(asks, records, curve, {"starts_s": swap.starts})


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=shelf_models.TRACE, help="a CSV like servegen_models.csv")
    parser.add_argument("--only", nargs="+", choices=tuple(NAMES), default=list(NAMES))
    args = parser.parse_args()
    harness.needs("aiohttp", "ray")
    harness.note_missing(args.trace)
    sizes = QUICK if args.quick else Sizes()
    requests, source = read_trace(args.trace)
    models = make_models(requests, quick=args.quick)
    outcomes: dict[str, Outcome] = {}
    with lean_servers() as servers:
        alone = alone_times(servers, models, sizes.repeats)
        models = [replace(model, weight_bytes=alone[model.name].weight_bytes) for model in models]
        budget = round((QUICK_HELD if args.quick else HELD) * statistics.fmean(model.need_bytes for model in models))
        targets = targets_of(models, alone, requests)
        chosen = window(requests, models, alone, sizes.replay_s)
        asks = asks_of(chosen, models, sizes.replay_s)
        split = best_split(models, asks, budget)
        compression = (chosen[-1].at_s - chosen[0].at_s) / sizes.replay_s
        print(
            f"\n{len(asks)} requests to {len({ask.model for ask in asks})} models in {sizes.replay_s:g} s from "
            f"{source}, time ÷ {compression:.1f}\nbudget {budget / 2**20:.0f} MiB; a twelfth is "
            f"{budget / NUM_MODELS / 2**20:.0f} MiB, and the smallest weights are "
            f"{min(model.weight_bytes for model in models) / 2**20:.0f} MiB; the best static split is "
            + ", ".join(model.name for model in split),
            flush=True,
        )
        if "static" in args.only:
            outcomes["static"] = asyncio.run(replay_static(servers, split, asks))
        if "swap" in args.only:
            outcomes["swap"] = asyncio.run(replay_swap(servers, models, asks))
    figures: dict[str, float] = {}
    if "folio" in args.only:
        outcomes["folio"], figures = shelf_folio.measure(models, targets, asks, budget, quick=args.quick)
    finish(
        args,
        sizes,
        models,
        targets,
        outcomes,
        figures,
        {
            "source": source,
            "compression": compression,
            "budget_bytes": budget,
            "alone": {name: asdict(a) for name, a in alone.items()},
        },
    )


def finish(
    args: argparse.Namespace,
    sizes: Sizes,
    models: Sequence[BenchModel],
    targets: Mapping[str, Targets],
    outcomes: Mapping[str, Outcome],
    figures: dict[str, float],
    raw: dict[str, Any],
) -> None:
    by_way = {name: outcome.figures(models, targets) for name, outcome in outcomes.items()}
    print_table(by_way)
    if outcomes.keys() == NAMES.keys():
        for key in ("slo_attainment", "slo_attainment_of_models"):
            best_other = max(by_way[name][key] for name in ("static", "swap"))
            figures[f"{key}_vs_best_other"] = by_way["folio"][key] / best_other
    if "swap" in outcomes:
        figures |= {
            "swap_starts": len(outcomes["swap"].facts["starts_s"]),
            "swap_start_s": statistics.median(outcomes["swap"].facts["starts_s"]),
        }
    figures |= {f"{name}_{key}": value for name, row in by_way.items() for key, value in row.items()}
    figures |= {"requests": len(next(iter(outcomes.values())).asks), "time_compression": raw["compression"]}
    raw |= {
        "replay_s": sizes.replay_s,
        "models": [
            {"name": m.name, "shape": m.shape, "weight_bytes": m.weight_bytes, "kv_bytes": m.kv_bytes} for m in models
        ],
        "targets": {name: asdict(t) for name, t in targets.items()},
        "ways": {name: outcome.as_dict() for name, outcome in outcomes.items()},
    }
    harness.finish("shelf", args, figures, raw, draw)


if __name__ == "__main__":
    main()
