"""Routing on a real Ray Serve with three replicas on this machine, and the simulator against it.

Conversations of several turns: every prompt begins with a common system prompt and repeats the conversation so far.
Arrivals, lengths and pauses are drawn once for all runs; so are the answers that prompts repeat, so that generated
tokens do not matter. Requests go over HTTP and are streamed.

**Router.** `prefix_aware` beside Serve's default router, in turns: time to first token, and the share of prompt tokens
that were cached.

**Simulator.** Two replicas with a core each. The simulator gets what HTTP and Serve add (idle requests), and the mean
of the step times that the replicas report during the run, because the speed of a machine changes between runs; it
predicts queues, batches, caches and routing. A router chooses at random between replicas of about equal cost, and one
such choice decides where the rest of a conversation goes: the prediction is the mean of ten simulations.

**Scaling and faults.** `KVAwareScaling` between one and three replicas while the load rises and falls, and SIGKILL for
one of three at the peak. Clients retry requests that were answered 503. A request is lost if it gets no answer, a
wrong status, or less than its tokens.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import checkpoints, harness
from benchmarks.served import Served, served
from benchmarks.serving.loops import SILENCE_S, connect
from benchmarks.simulator.cluster import Cluster
from benchmarks.simulator.device import Device
from benchmarks.simulator.outcome import Outcome
from benchmarks.simulator.traffic import Arrival
from folio.app.cli.bench.load import Ask, Clock, Record, Send, open_loop
from folio.app.engine.report import StepTimes
from folio.app.fleet.policies import PrefixAware
from folio.vmem import TokenChain

T = TypeVar("T")

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
UNIT, VOCABULARY = 16, 2048
SYSTEM_TOKENS, FIRST_TOKENS, ADDED_TOKENS, OUTPUT_TOKENS = 256, (100, 700), (40, 240), (8, 40)
THINKS_S, GOES_ON, LONGEST = 6.0, 0.75, 4000
CACHE_TOKENS, STEP_TOKENS, MAX_NUM_SEQS = 24_000, 512, 16
REPORT_PERIOD_S = 0.5
NUM_SIMULATIONS = 10
SERVE_DEFAULT = "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter"


def draw_turns(seed: int, duration_s: float, conversations_per_s: float) -> list[Ask]:
    """Requests of conversations that begin within `duration_s`, as a Poisson process."""
    rng = random.Random(seed)
    system = [random.Random(0).randrange(4, VOCABULARY) for _ in range(SYSTEM_TOKENS)]
    turns: list[Ask] = []
    begins_at = rng.expovariate(conversations_per_s)
    while begins_at < duration_s:
        at, prompt = begins_at, system + _tokens(rng, FIRST_TOKENS)
        while len(prompt) < LONGEST:
            turns.append(Ask(list(prompt), rng.randint(*OUTPUT_TOKENS), at))
            if rng.random() > GOES_ON:
                break
            prompt += [rng.randrange(4, VOCABULARY) for _ in range(turns[-1].max_tokens)]
            prompt += _tokens(rng, ADDED_TOKENS)
            at += 1.0 + rng.expovariate(1 / THINKS_S)
        begins_at += rng.expovariate(conversations_per_s)
    return sorted((turn for turn in turns if turn.at_s < duration_s), key=lambda turn: turn.at_s)


def _tokens(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(*bounds))]


def make_checkpoint(folder: Path) -> None:
    """Random weights, of which so many that HTTP and Serve add little to a step."""
    config = checkpoints.config_of(
        checkpoints.QWEN, vocab_size=VOCABULARY, num_hidden_layers=NUM_LAYERS, max_position_embeddings=8192
    )
    checkpoints.write_checkpoint(folder, config)


def serve_args(folder: Path) -> dict[str, Any]:
    token_bytes = 2 * 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM
    engine = {
        "model": str(folder),
        "num_threads": 1,
        "block_tokens": UNIT,
        "max_model_len": LONGEST + 200,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_memory_bytes": CACHE_TOKENS * token_bytes,
    }
    return {"engine": engine, "model_name": "chat", "routing": {"report_period_s": REPORT_PERIOD_S}}


# ---- clients ----


class Resending:
    """A target whose refused requests are sent again for a while.

    Attributes:
        num_resent: requests that were.
    """

    def __init__(self, target: Send) -> None:
        self._target, self.num_resent = target, 0

    async def __call__(self, ask: Ask, record: Record, clock: Clock) -> None:
        await self._target(ask, record, clock)
        self.num_resent += _is_retryable(record)
        while _is_retryable(record) and clock.now() - record.due_s < SILENCE_S:
            await asyncio.sleep(0.2)
            record.error = None
            record.events.clear()
            await self._target(ask, record, clock)


def _is_retryable(record: Record) -> bool:
    return record.status == 503 or (record.error is not None and "unavailable" in record.error)


async def send(server: Served, turns: Sequence[Ask]) -> list[Record]:
    async with connect([(server.name, server.url)]) as [target]:
        return await open_loop(target, turns)


def num_lost(records: Sequence[Record]) -> int:
    return sum(not record.completed for record in records)


def hit_share(records: Sequence[Record]) -> float:
    return sum(r.num_cached_tokens for r in records) / sum(r.num_prompt_tokens for r in records)


# ---- the three parts ----


def compare_routers(server: Served, turns: Sequence[Ask], repeats: int) -> dict[str, list[list[Record]]]:
    """Run both routers in turn."""
    runs: dict[str, list[list[Record]]] = {"prefix_aware": [], "Serve's default": []}
    for repeat in range(repeats):
        for name, records in runs.items():
            router: dict[str, Any] = {}
            if name != "prefix_aware":
                router["request_router_config"] = {"request_router_class": SERVE_DEFAULT}
            server.deploy(num_replicas=3, **router)  # other router: new replicas, with empty caches
            asyncio.run(send(server, turns[:3]))  # first steps
            records.append(asyncio.run(send(server, turns)))
            print(
                f"run {repeat + 1}/{repeats}  {name}: hit share {hit_share(records[-1]):.3f}, TTFT mean "
                f"{_mean_ttft_s(records[-1]):.3f} s, lost {num_lost(records[-1])}",
                flush=True,
            )
    return runs


def sim_vs_real(server: Served, duration_s: float, conversations_per_s: float) -> dict[str, Any]:
    """Predict a run that begins with empty caches from its step times. The application must be new."""
    server.deploy(num_replicas=2)
    added_s = _added_s(server)
    turns = draw_turns(12, duration_s, conversations_per_s)
    reports = server.reports()
    real = asyncio.run(_watched(send(server, turns), lambda: reports.extend(server.reports())))
    step = StepTimes(*np.mean([(r.step.fixed_s, r.step.token_s, r.step.attended_s) for r in reports], axis=0).tolist())
    device = Device(
        name="this machine, one core",
        fixed_s=step.fixed_s,
        token_s=step.token_s,
        attended_s=step.attended_s,
        decode_attended_s=step.attended_s,
        step_tokens=STEP_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        cache_tokens=reports[0].total_tokens // UNIT * UNIT,
        unit_tokens=UNIT,
    )
    arrivals = [_arrival(i, turn) for i, turn in enumerate(turns)]
    outcomes = [_simulated(device, arrivals, seed) for seed in range(NUM_SIMULATIONS)]
    simulated = (np.mean([outcome.ttft_s for outcome in outcomes], axis=0) + added_s).tolist()
    return {
        "step": {"fixed_s": step.fixed_s, "token_s": step.token_s, "attended_s": step.attended_s},
        "added_s": added_s,
        "requests": len(turns),
        "real_ttft_s": [record.ttft_s for record in real],
        "sim_ttft_s": simulated,
        "real_hit_share": hit_share(real),
        "sim_hit_share": statistics.mean(outcome.hit_share for outcome in outcomes),
        "lost": num_lost(real),
    }


def _simulated(device: Device, arrivals: Sequence[Arrival], seed: int) -> Outcome:
    """Two replicas, with a router that chooses between equal ones by this seed."""
    cluster = Cluster(
        device,
        2,
        lambda fleet, _: PrefixAware(fleet, seed=seed),
        num_routers=1,
        report_period_s=REPORT_PERIOD_S,
    )
    return cluster.run(arrivals)


def scale_and_kill(server: Served, phase_s: float, conversations_per_s: float) -> dict[str, Any]:
    """Low load, three times the capacity of one replica, low load again; one of three replicas is killed at the
    peak."""
    server.deploy(
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": 3,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2.0,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {
                "policy_function": "folio.app.serving.autoscaling:KVAwareScaling",
                "policy_kwargs": {"ttft_s": 1.0, "down_after_s": 10.0},
            },
        }
    )
    quiet, peak = conversations_per_s / 10, conversations_per_s
    turns = [
        *draw_turns(21, phase_s, quiet),
        *(replace(t, at_s=t.at_s + phase_s) for t in draw_turns(22, 2 * phase_s, peak)),
        *(replace(t, at_s=t.at_s + 3 * phase_s) for t in draw_turns(23, 2 * phase_s, quiet)),
    ]
    watcher = _Watcher(server, kills_at=2.2 * phase_s)
    records, num_resent = asyncio.run(_watched(_send_again(server, turns), watcher.look))
    server.wait_until(lambda: server.num_running == 1, 120.0)
    watcher.sizes.append((time.perf_counter() - watcher.start, server.num_running))
    sizes = [size for _, size in watcher.sizes]
    changes = [(at, b - a) for (_, a), (at, b) in zip(watcher.sizes, watcher.sizes[1:], strict=False) if a != b]
    return {
        "requests": len(records),
        "lost": num_lost(records),
        "resent": num_resent,
        "sizes": watcher.sizes,
        "most": max(sizes),
        "last": sizes[-1],
        "killed_at": watcher.killed_at,
        "changes": changes,
    }


class _Watcher:
    """Records the number of running replicas, and kills one of three."""

    def __init__(self, server: Served, kills_at: float) -> None:
        self._server = server
        self._kills_at = kills_at
        self.start = time.perf_counter()
        self.sizes: list[tuple[float, int]] = []
        self.killed_at: float | None = None

    def look(self) -> None:
        at = time.perf_counter() - self.start
        self.sizes.append((at, self._server.num_running))
        if self.killed_at is None and at > self._kills_at and self.sizes[-1][1] == 3:
            self._server.kill_one()
            self.killed_at = at


async def _send_again(server: Served, turns: Sequence[Ask]) -> tuple[list[Record], int]:
    """Records, and the number of requests that were sent again."""
    async with connect([(server.name, server.url)]) as [target]:
        resending = Resending(target)
        return await open_loop(resending, turns), resending.num_resent


async def _watched(sending: Coroutine[Any, Any, T], look: Callable[[], None]) -> T:
    """Send, and look at the replicas every half second."""
    task = asyncio.create_task(sending)
    while not task.done():
        await asyncio.to_thread(look)
        await asyncio.wait([task], timeout=0.5)
    return await task


def _added_s(server: Served) -> float:
    """The part of an idle server's time to first token that HTTP and Serve add."""
    records = asyncio.run(send(server, [Ask([5] * 32, 2, 0.5 * i) for i in range(24)]))[4:]
    steps = [r.step for r in server.reports()]
    step_s = statistics.mean(step.fixed_s + 16 * step.token_s for step in steps)  # half of the prompt is cached
    return statistics.median(record.ttft_s for record in records) - step_s


def _arrival(number: int, turn: Ask) -> Arrival:
    chain = TokenChain(UNIT)
    chain.extend(turn.prompt)
    return Arrival(number, f"t{number}", turn.at_s, len(turn.prompt), turn.max_tokens, chain.units, chain.digests, 0)


def _mean_ttft_s(records: Sequence[Record]) -> float:
    return statistics.mean(record.ttft_s for record in records)


def measure(quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Run all three parts. Returns figures and raw data."""
    validation_s, duration_s, repeats = (15.0, 8.0, 1) if quick else (240.0, 40.0, 3)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        with served("folio-chat", serve_args(Path(folder))) as server:
            validation = sim_vs_real(server, validation_s, 0.35)
            print(
                f"{validation['requests']} requests: TTFT mean simulated "
                f"{statistics.mean(validation['sim_ttft_s']):.3f} s, real "
                f"{statistics.mean(validation['real_ttft_s']):.3f} s; hit share simulated "
                f"{validation['sim_hit_share']:.3f}, real {validation['real_hit_share']:.3f}"
            )
            runs = compare_routers(server, draw_turns(31, duration_s, 0.35), repeats)
            scaling = scale_and_kill(server, 10.0 if quick else 25.0, 1.0)
            print(
                f"scaling: 1 → {scaling['most']} → {scaling['last']} replicas, {scaling['requests']} requests, "
                f"{scaling['resent']} sent again, {scaling['lost']} lost; one killed at {scaling['killed_at']} s"
            )
    ours, default = runs["prefix_aware"], runs["Serve's default"]
    real_s, sim_s = statistics.mean(validation["real_ttft_s"]), statistics.mean(validation["sim_ttft_s"])
    figures = {
        "sim_vs_real_ttft_error": abs(sim_s - real_s) / real_s,
        "sim_vs_real_hit_error": abs(validation["sim_hit_share"] - validation["real_hit_share"])
        / max(validation["real_hit_share"], 1e-9),
        "real_hit_share": statistics.median(map(hit_share, ours)),
        "real_hit_share_default": statistics.median(map(hit_share, default)),
        "real_ttft_vs_default": harness.median_ratio(
            [_mean_ttft_s(records) for records in ours], [_mean_ttft_s(records) for records in default]
        ),
        "real_scaled_to": scaling["most"],
        "real_lost": scaling["lost"] + validation["lost"] + sum(num_lost(records) for records in [*ours, *default]),
    }
    raw = {
        "validation": validation,
        "routers": {name: [[r.ttft_s for r in records] for records in each] for name, each in runs.items()},
        "scaling": scaling,
    }
    return figures, raw


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    figures, raw = measure(args.quick)
    harness.finish("routing_real", args, figures, raw)


if __name__ == "__main__":
    main()
