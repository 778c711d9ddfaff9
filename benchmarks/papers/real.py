"""PagedAttention's §6 on this machine: SmolLM2-135M, the default model, on the whole engine in this process.

The KV cache holds as many tokens as the paper's (`outcome.CAPACITY`), so that as many requests fit as there. Prompts
are pieces of this repository's prose, answers have the datasets' lengths, whatever the model would say.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import harness
from benchmarks.papers.held import Observer
from benchmarks.papers.outcome import BLOCK_TOKENS, CAPACITY, FOLIO, LONGEST, Outcome, Run, described, outcome
from benchmarks.papers.requests import PREFIX_TOKENS, Kind, arrivals
from benchmarks.papers.reserved import reserve
from benchmarks.papers.sweep import AT_ONCE, BASIC, BLOCK_SIZES, BLOCKS_SEED, CHAT, ORCAS, ORDER, SEVERAL, WIDTHS
from benchmarks.quality.text import prose
from benchmarks.simulator.traffic import Arrival
from folio.app.engine import LLM, SamplingParams

NUM_WORDS, MOST_SEQUENCES = 20_000, 256
# Memory of a baseline, of the capacity: its reservations alone decide.
ROOM = 2


@contextmanager
def engine(model: Path, *, shares: bool, block_tokens: int = BLOCK_TOKENS) -> Iterator[LLM]:
    """An engine for runs of Folio (`shares`), or of baselines, whose memory has room for whatever they reserve."""
    with LLM(
        model,
        block_tokens=block_tokens,
        max_model_len=LONGEST,
        max_num_seqs=MOST_SEQUENCES,
        prefix_cache=False,  # nothing is shared between these requests, and hashing prompts takes time
        kv_memory_bytes=4 << 30,
        kv_idle_release_s=60.0,
    ) as llm:
        harness.note_engine(llm)
        [group] = llm.engine.memory.groups
        blocks = (1 if shares else ROOM) * CAPACITY // group.layout.block_tokens
        llm.engine.set_kv_budget(blocks * group.layout.block_bytes)
        llm.generate([list(range(100, 400))] * 4, SamplingParams(max_tokens=8, ignore_eos=True))
        yield llm


class Text:
    """Prompts of given lengths, cut from prose; those of one `PREFIX_TOKENS` kind begin with the same tokens."""

    def __init__(self, llm: LLM, seed: int) -> None:
        tokenizer = llm.engine.model.tokenizer
        assert tokenizer is not None
        self._tokens: list[int] = tokenizer.encode(prose(NUM_WORDS))
        self._random = random.Random(seed)

    def prompt(self, dataset: str, num_tokens: int) -> list[int]:
        prefix = self._tokens[: PREFIX_TOKENS.get(dataset, 0)]
        start = self._random.randrange(len(self._tokens) - num_tokens)
        return prefix + self._tokens[start : start + num_tokens - len(prefix)]


def serve(llm: LLM, run: Run, num_requests: int) -> Outcome:
    """Serve this many requests of a run as they arrive, until all have ended. Throughput is that of the whole run if
    all arrive at once."""
    core = llm.engine
    admission = None if run.system == FOLIO else reserve(core.scheduler, core.memory, run.system, CAPACITY, LONGEST)
    coming = arrivals(run.kind, run.rate, num_requests / run.rate * 2, BLOCK_TOKENS, run.seed)[:num_requests]
    text = Text(llm, run.seed)
    prompts = [text.prompt(run.kind.dataset, arrival.num_tokens) for arrival in coming]
    is_at_once = run.rate >= AT_ONCE
    duration_s = math.inf if is_at_once else coming[-1].at
    window_s = (0.0 if is_at_once else 0.2 * duration_s, duration_s)
    seen = Observer(core.scheduler, core.memory, admission, CAPACITY, window_s)
    before = sum(core.scheduler.begun.num_preempted.values())
    ends: dict[str, float] = {}
    due, begun_at = list(zip(coming, prompts, strict=True))[::-1], time.perf_counter()
    while due or core.has_work:
        now = time.perf_counter() - begun_at
        while due and due[-1][0].at <= now:
            arrival, prompt = due.pop()
            core.submit(arrival.request_id, prompt, _params(run, arrival))
        if not core.has_work:
            time.sleep(max(due[-1][0].at - now, 0.0))
            continue
        deltas = core.step()
        after = time.perf_counter() - begun_at
        seen.note(now, after)
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            if delta.finished:
                ends[delta.request_id] = after  # of its last sequence in the end
    core.check_integrity()
    times = [(arrival.at, ends[arrival.request_id], arrival.num_output_tokens) for arrival in coming]
    preempted = sum(core.scheduler.begun.num_preempted.values()) - before
    ended_s = max(ends.values())
    return outcome(times, min(duration_s, ended_s), ended_s, seen, preempted)


def _params(run: Run, arrival: Arrival) -> SamplingParams:
    most, count = arrival.num_output_tokens, run.kind.num_sequences
    if run.kind.beams:
        return SamplingParams(max_tokens=most, n=count, use_beam_search=True, ignore_eos=True)
    return SamplingParams(max_tokens=most, n=count, temperature=float(count > 1), seed=arrival.number, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the real engine.

    Attributes:
        num_requests: of a run; with several sequences or a conversation's window a run takes longer.
        shares_of_most: rates, over the most requests a second that Folio reaches.
        repeats: equal runs at the rates above the first.
    """

    kind: Kind
    systems: tuple[str, ...]
    num_requests: int
    shares_of_most: tuple[float, ...] = ()
    repeats: int = 1


# At first every system with all requests at once.
LOADS = (
    Load(BASIC[0], ORDER, 40, (0.4, 0.8, 1.2), repeats=2),
    Load(BASIC[1], ORDER, 200, (0.3, 0.6, 0.9, 1.2), repeats=2),
    *(Load(kind, ("oracle", FOLIO), 40, (0.8,)) for kind in SEVERAL),
    Load(CHAT, (*ORCAS, FOLIO), 16),
)
BLOCKS = {BASIC[0]: 24, BASIC[1]: 96}


def prompts_s(llm: LLM, run: Run, num_requests: int) -> float:
    """Seconds in which the prompts alone of a run are computed, all at once."""
    text, coming = Text(llm, run.seed), arrivals(run.kind, run.rate, 2 * run.duration_s, BLOCK_TOKENS, run.seed)
    prompts = [text.prompt(run.kind.dataset, arrival.num_tokens) for arrival in coming[:num_requests]]
    begun_at = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    return time.perf_counter() - begun_at


def measure(model: Path, *, quick: bool) -> tuple[dict[Run, Outcome], dict[str, float]]:
    """All runs on this machine, and other figures; systems in turn, Folio first, so that its throughput gives the
    rates."""
    outcomes: dict[Run, Outcome] = {}
    prompts_share = math.nan
    with engine(model, shares=True) as ours, engine(model, shares=False) as theirs:
        for load in LOADS:
            count = max(load.num_requests // 20, 2) if quick else load.num_requests
            if quick and 1 < load.kind.num_sequences < WIDTHS[-1]:
                continue
            at_once = Run(FOLIO, load.kind, AT_ONCE, count / AT_ONCE)
            outcomes[at_once] = serve(ours, at_once, count)
            print(f"real {described(at_once, outcomes[at_once])}", flush=True)
            most = outcomes[at_once].throughput
            if load.kind == CHAT:
                prompts_share = prompts_s(ours, at_once, count) * most / count
            runs = [replace(at_once, system=system) for system in load.systems if system != FOLIO]
            for at, rate in enumerate(() if quick else [most * share for share in load.shares_of_most]):
                for repeat in range(load.repeats if at else 1):
                    # In turn, each time another first, so that no system's runs follow each other.
                    first = repeat % len(load.systems)
                    systems = load.systems[first:] + load.systems[:first]
                    runs += [Run(system, load.kind, rate, count / rate, repeat=repeat) for system in systems]
            for run in runs:
                outcomes[run] = serve(ours if run.system == FOLIO else theirs, run, count)
                print(f"real {described(run, outcomes[run])}", flush=True)
    for size in BLOCK_SIZES[::4] if quick else BLOCK_SIZES:
        with engine(model, shares=True, block_tokens=size) as llm:
            for kind, num_requests in BLOCKS.items():
                count = num_requests // 12 if quick else num_requests
                run = Run(FOLIO, kind, AT_ONCE, count / AT_ONCE, size, BLOCKS_SEED)
                outcomes[run] = seen = serve(llm, run, count)
                print(f"real {described(run, seen)}", flush=True)
    return outcomes, {"real_prompts_share_chat": prompts_share}
