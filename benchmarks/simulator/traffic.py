"""Simulated traffic: traces of real traffic, and synthetic conversations."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import harness, workloads

MOONCAKE_TRACE = harness.ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"
# Of the trace: tokens of a prompt per hash, and resolution of its times.
MOONCAKE_UNIT, MOONCAKE_TICK_S = 512, 2.999

# Of synthetic conversations similar to the Mooncake trace: requests a second, tokens of the common prefix, mean tokens
# of first prompts beyond it, of later additions and of outputs, mean seconds until the next turn, and its probability.
_RATE, _SYSTEM = 3.4, 512
_FIRST, _ADDED, _OUTPUT, _THINKS_S, _GOES_ON = 9400.0, 3600.0, 343.0, 60.0, 0.36
_LONGEST = 120_000

# Of agents' sessions, at 16 replicas: sessions a second; kinds of agents, the most popular first, and the most and
# least tokens of their instructions; mean tokens of a task and of a tool's result; mean turns.
SESSIONS_PER_S, _KINDS, _INSTRUCTIONS = 1.3, 8, (6144, 2048)
_TASK, _RETURNED, _TURNS = 8000.0, 5000.0, 8.0
# Tokens of an answer: the mean of Mooncake's tool and agent requests (arXiv 2407.00079, section 4.2).
_CALL = 182.0
# Kinds of requests (`PrefixUse`): with tools, by how their output ends.
CALL, ANSWER = "calls", "tools"
# Mean seconds of tools: a search, and generation of images or speech, with the share of the latter. Assumed, of the
# order that InferCept (ICML 2024) reports; not checked against its table.
_FAST_S, _SLOW_S, _SLOW_SHARE = 0.69, 18.6, 0.3


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request of a trace.

    Attributes:
        at: seconds from the beginning.
        units, digests: of the prompt's whole units, as in `TokenChain`.
        tail: the token that fills the rest of the prompt: equal rests have equal tokens.
        session: its conversation, if known.
        kind: of request, see `PrefixUse`.
        follows, pause_s: it arrives this long after the end of the request with this number; `at` is then its time if
            requests took none.
        num_sequences: samples or beams.
        beams: which beam descends from which (`descent.Steps`); empty: they are samples.
    """

    number: int
    request_id: str
    at: float
    num_tokens: int
    num_output_tokens: int
    units: Sequence[bytes]
    digests: Sequence[bytes]
    tail: int
    session: str | None = None
    kind: str = ""
    follows: int | None = None
    pause_s: float = 0.0
    num_sequences: int = 1
    beams: Sequence[Sequence[int]] = ()


def mooncake(path: Path, count: int | None = None, *, as_stamped: bool = False) -> list[Arrival]:
    """The conversations of the Mooncake trace (Qin et al., FAST 2025): `FAST25-release/traces/conversation_trace.jsonl`
    of github.com/kvcache-ai/Mooncake (Apache-2.0).

    The trace's clock ticks every three seconds, with up to 28 requests in a tick. They arrive at random times within
    the tick.

    Args:
        as_stamped: all requests of a tick arrive at once.
    """
    with path.open() as file:
        rows = [json.loads(line) for line in itertools.islice(file, count)]
    rng, times = random.Random(0), []
    for stamp_ms, tick in itertools.groupby(rows, key=lambda row: row["timestamp"]):
        times += sorted(stamp_ms / 1000 + (0.0 if as_stamped else rng.uniform(0, MOONCAKE_TICK_S)) for _ in tick)
    return [
        arrival_of(
            number,
            at,
            row["input_length"],
            row["output_length"],
            row["hash_ids"][: row["input_length"] // MOONCAKE_UNIT],
            row["hash_ids"][-1] + 1,
        )
        for number, (at, row) in enumerate(zip(times, rows, strict=True))
    ]


def conversations(count: int, seed: int) -> list[Arrival]:
    """Synthetic conversations, with means like the Mooncake trace's."""
    rng = random.Random(seed)
    ids = itertools.count(_SYSTEM // MOONCAKE_UNIT)
    drawn: list[tuple[float, int, int, list[int]]] = []
    begins_at = 0.0
    while len(drawn) < 2 * count:  # the last conversations would lack their ends
        begins_at += rng.expovariate(_RATE * (1 - _GOES_ON))
        at, blocks = begins_at, list(range(_SYSTEM // MOONCAKE_UNIT))
        num_tokens, num_output_tokens = _SYSTEM + lognormal(rng, _FIRST, 1.1), lognormal(rng, _OUTPUT, 0.8)
        while num_tokens < _LONGEST:
            blocks = blocks + [next(ids) for _ in range(num_tokens // MOONCAKE_UNIT - len(blocks))]
            drawn.append((at, num_tokens, num_output_tokens, blocks))
            if rng.random() >= _GOES_ON:
                break
            at += num_output_tokens * 0.03 + rng.expovariate(1 / _THINKS_S)
            num_tokens += num_output_tokens + lognormal(rng, _ADDED, 1.1)
            num_output_tokens = lognormal(rng, _OUTPUT, 0.8)
    drawn.sort(key=lambda request: request[0])
    return [arrival_of(i, *request, tail=next(ids) + 1) for i, request in enumerate(drawn[:count])]


def agents(count: int, factor: float, seed: int) -> list[Arrival]:
    """Synthetic sessions of agents that call tools, pause until these return, and repeat the whole conversation; about
    `count` requests. They are drawn from the distributions above: the mean answer is published, the pauses are assumed.

    Args:
        factor: of the rate of sessions; a session itself is no faster.
    """
    rng, ids = random.Random(seed), itertools.count(1)
    kinds = [[next(ids) for _ in range(n // MOONCAKE_UNIT)] for n in _evenly(*_INSTRUCTIONS, _KINDS)]
    drawn: list[tuple[float, int, int, list[int], int, float]] = []  # the last two: session, pause
    begins_at, session = 0.0, 0
    while len(drawn) < count:
        begins_at += rng.expovariate(SESSIONS_PER_S * factor)
        at, pause_s, session = begins_at, 0.0, session + 1
        blocks = rng.choices(kinds, [1 / rank for rank in range(1, _KINDS + 1)])[0]
        num_tokens = len(blocks) * MOONCAKE_UNIT + lognormal(rng, _TASK, 1.0)
        while num_tokens < _LONGEST:
            blocks = blocks + [next(ids) for _ in range(num_tokens // MOONCAKE_UNIT - len(blocks))]
            num_output_tokens = lognormal(rng, _CALL, 0.8)
            drawn.append((at, num_tokens, num_output_tokens, blocks, session, pause_s))
            if rng.random() < 1 / _TURNS:
                break
            pause_s = lognormal(rng, 1000 * (_SLOW_S if rng.random() < _SLOW_SHARE else _FAST_S), 0.5) / 1000
            at += pause_s
            num_tokens += num_output_tokens + lognormal(rng, _RETURNED, 1.1)
    drawn.sort(key=lambda request: request[0])
    last: dict[int, int] = {}  # of each session, the number of its last request
    arrivals = []
    for number, (at, num_tokens, num_output_tokens, blocks, of, pause_s) in enumerate(drawn):
        arrival = arrival_of(number, at, num_tokens, num_output_tokens, blocks, next(ids) + 1)
        arrivals.append(replace(arrival, session=f"s{of}", follows=last.get(of), pause_s=pause_s))
        last[of] = number
    answers = set(last.values())  # the last turn of a session calls no tool
    return [replace(arrival, kind=ANSWER if arrival.number in answers else CALL) for arrival in arrivals]


def azure(path: Path) -> list[Arrival]:
    """Code completions of the Azure trace (Patel et al., "Splitwise", ISCA 2024), without common prefixes."""
    rows = list(workloads.read_azure(path))
    return [arrival_of(i, at - rows[0][0], max(n, 1), output, [], i + 1) for i, (at, n, output) in enumerate(rows)]


def completions(count: int, seed: int) -> list[Arrival]:
    """Requests with lengths like the Azure trace's, 2.6 per second on average, at a rate between a third and three
    times that, which changes every few minutes."""
    rng = random.Random(seed)
    lengths, _ = workloads.azure(None, count, seed)
    arrivals, at, rate, changes_at = [], 0.0, 2.6, 0.0
    for i, (num_tokens, num_output_tokens) in enumerate(lengths):
        if at >= changes_at:
            rate, changes_at = 2.6 * 3 ** rng.uniform(-1, 0.7), at + rng.uniform(60, 300)
        at += rng.expovariate(rate)
        arrivals.append(arrival_of(i, at, num_tokens, num_output_tokens, [], i + 1))
    return arrivals


def faster(arrivals: Iterable[Arrival], factor: float) -> Iterator[Arrival]:
    """The same arrivals in a shorter time."""
    for arrival in arrivals:
        yield replace(arrival, at=arrival.at / factor)


def in_bursts(arrivals: Iterable[Arrival], period_s: float, share: float) -> Iterator[Arrival]:
    """Move the arrivals of each period into this share of it, at its beginning."""
    for arrival in arrivals:
        begins_at = arrival.at // period_s * period_s
        yield replace(arrival, at=begins_at + (arrival.at - begins_at) * share)


def arrival_of(
    number: int, at: float, num_tokens: int, num_output_tokens: int, blocks: Sequence[int], tail: int
) -> Arrival:
    """Args as `Arrival`'s; `blocks`: numbers that stand for its whole units and all before them."""
    units = [_unit(i) for i in blocks]
    return Arrival(number, f"r{number}", at, num_tokens, max(num_output_tokens, 1), units, units, tail)


def _unit(block: int) -> bytes:
    """A unit's digest, which also stands for its tokens. No prompt's tokens begin like it."""
    return b"\xff" + block.to_bytes(5, "big") + bytes(10)


def block_of(key: bytes) -> int:
    """The block of a unit's key (inverse of `folio.vmem.key_of`)."""
    return int.from_bytes(key[1:6], "big")


def _evenly(first: int, last: int, count: int) -> list[int]:
    return [first + (last - first) * i // (count - 1) for i in range(count)]


def lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    return max(round(rng.lognormvariate(0, sigma) * mean / 2.718281828 ** (sigma**2 / 2)), 1)
