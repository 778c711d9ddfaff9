"""Savings by sharing: KV blocks (PagedAttention figure 15), throughput (figure 16), time to first token (TTFT).

**Blocks saved.** Requests are replayed one by one on the real `KVMemory`, 16 tokens a block, read through block tables,
the prefix cache off. A request of p prompt and o output tokens takes o steps: one computes the prompt, which all n
sequences then share, and each of the others appends a token to every sequence, so that shared last blocks are copied.
The share is blocks saved over blocks without sharing, both summed over all steps of all requests. The blocks owned by
sequences must equal a count by lineage.

    parallel    n samples, all of the request's output length. Only full blocks of the prompt stay shared, so lengths
                alone decide: (1 - 1/n) · P / (mean prompt + mean output · (1 + cv²) / 2 + 7.5) if prompts and outputs
                are independent, with P the mean prompt rounded down to blocks and cv the outputs' standard deviation
                over their mean. Lengths are synthetic (`workloads.py`); ShareGPT's outputs have a cv of 0.6, an
                assumption. Wider ones would save less: the formula is printed for a cv of 1, too.
    beam        All beams run to the output length. Which descends from which is *simulated*: in every step each beam
                has a next-token distribution, its log-probabilities are added to the beam's own, and the best of all
                candidates stay. A distribution is a softmax over independent logits with exponential tails, which is
                Poisson-Dirichlet(d, 0): the k-th probability falls like k^(-1/d), in the manner of Zipf, and the mean
                entropy is ψ(1) - ψ(1 - d) nats. The figure is for 1.5 nats; 1 and 2 are printed beside it. Beams draw
                independently. Beams of a real model read nearly the same text, have similar distributions, and stay
                separate for longer: *alike* is the share of steps in which all have one distribution. Independent
                beams are the upper bound, always alike the lower, and a model is between them.

**Prefix throughput.** The engine with the prefix cache over the same without: requests with one common prefix, 20 to 60
tokens of their own and 10 to 30 output tokens, much like the paper's translations, all at once. The prefix is new in
every run, so each run computes it once. Random weights in the shape of Qwen2.5-0.5B.

**TTFT.** Requests of a common prefix of 512 tokens and 16 of their own, one at a time: the first misses, the others
hit; medians over several prefixes. Then the cost of a look-up without a hit: the calls that the scheduler makes for
such a prompt, timed on the engine's memory, over the TTFT of a miss; and that TTFT with the cache on over off, in turn.

--quick replays fewer requests and keeps 2 of 24 layers: a hit is then mostly the vocabulary's matrix.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import checkpoints, harness, workloads
from benchmarks.picture import LIMIT, OURS, legend_below, picture, plain_numbers
from folio.app.engine import LLM, SamplingParams
from folio.vmem import HostBackend, KVMemory, LayerGroup, LayerSpec, SequenceMemory, StepDemand, plan_layout

Steps = Sequence[Sequence[int]]  # for each step, the parent of each of its sequences in the step before
Requests = list[tuple[int, Steps]]  # prompt tokens, and one step for each output token

SEED = 0
DATASETS = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}
BLOCK_TOKENS = 16
WIDTHS = (2, 4, 6)
ENTROPY_NATS = 1.5
SENSITIVITY = {  # of the widest beams: (entropy in nats, share of steps with one distribution)
    "entropy_1": (1.0, 0.0),
    "entropy_2": (2.0, 0.0),
    "alike_90_percent": (ENTROPY_NATS, 0.9),
    "alike_100_percent": (ENTROPY_NATS, 1.0),
}
CANDIDATES = 256  # tokens of a distribution; the rest would have 1 % of its mass
WIDER_CV = 1.0
PAPER = {  # of 2 and of 6 sequences
    ("parallel", "alpaca"): (0.061, 0.098),
    ("parallel", "sharegpt"): (0.162, 0.305),
    ("beam", "alpaca"): (0.376, 0.552),
    ("beam", "sharegpt"): (0.443, 0.663),
}
PAPER_SPEEDUP = {80: 1.67, 341: 3.58}  # by the prefix's number of tokens
OWN_TOKENS, NEW_TOKENS = (20, 60), (10, 30)
COMMON, OWN, REQUESTS_OF_PREFIX = 512, 16, 100
VOCABULARY, KV_BYTES = 151936, 1 << 30


# ---- blocks saved ----


class Replay:
    """Replays the sequences of one request after another in a real `KVMemory`.

    Attributes:
        owned_blocks, all_blocks: sums over steps, with sharing and without.
    """

    def __init__(self, most_sequences: int = 64, longest: int = workloads.LONGEST) -> None:
        backend = HostBackend(1 << 40)
        granularity = backend.granularity_bytes
        dim = granularity // BLOCK_TOKENS // (2 * torch.float32.itemsize)  # a block fills a page: no padding
        spec = LayerSpec(1, dim, dim)
        layout = plan_layout([spec], torch.float32, granularity_bytes=granularity, block_tokens=BLOCK_TOKENS)
        self.memory = KVMemory(
            backend,
            [LayerGroup((0,), layout)],
            budget_bytes=most_sequences * layout.num_blocks(longest) * layout.block_bytes,
            num_regions=1,
            max_tokens=longest,
            prefix_cache=False,
        )
        self.owned_blocks = self.all_blocks = 0

    def run(self, prompt: int, steps: Steps) -> None:
        sequences = [self.memory.create_sequence("block_table")]
        self._compute(sequences, prompt)
        for i, parents in enumerate(steps):
            sequences = self._descend(sequences, parents)
            if i == 0:
                self._count(sequences)
            if i + 1 < len(steps):  # no query attends to the last token
                self._compute(sequences, prompt + i + 1)
                self._count(sequences)
        for sequence in sequences:
            self.memory.free(sequence)

    def _compute(self, sequences: Sequence[SequenceMemory], num_tokens: int) -> None:
        demands = [StepDemand(sequence, sequence.num_tokens, num_tokens) for sequence in sequences]
        for sequence in sequences:
            self.memory.append(sequence, num_tokens)
        self.memory.ensure(demands)
        self.memory.launched()

    def _descend(self, sequences: Sequence[SequenceMemory], parents: Sequence[int]) -> list[SequenceMemory]:
        """A parent's first child takes its place, the others are forks; parents without a child are freed."""
        children: list[SequenceMemory] = []
        for i, parent in enumerate(parents):
            sequence = sequences[parent]
            is_first = parent not in parents[:i]
            children.append(sequence if is_first else self.memory.fork(sequence, sequence.num_tokens))
        for i, sequence in enumerate(sequences):
            if i not in parents:
                self.memory.free(sequence)
        return children

    def _count(self, sequences: Sequence[SequenceMemory]) -> None:
        self.owned_blocks += self.memory.report().groups[0].active_blocks
        self.all_blocks += sum(len(sequence.groups[0].block_ids) for sequence in sequences)


def count_blocks(prompt: int, steps: Steps) -> Iterator[tuple[int, int]]:
    """Blocks of each step, with sharing and without: sequences share a block if they had one ancestor when its last
    token was appended."""
    names = count()
    tables = [[next(names) for _ in range(-(-prompt // BLOCK_TOKENS))]] * len(steps[0])
    yield len(tables[0]), len(tables) * len(tables[0])
    for num_tokens, parents in enumerate([range(len(tables)), *steps[1:]][: len(steps) - 1], start=prompt):
        tables = [[*tables[parent][: num_tokens // BLOCK_TOKENS], next(names)] for parent in parents]
        yield len(set().union(*tables)), sum(map(len, tables))


def replay(requests: Requests) -> tuple[float, float]:
    """Share of blocks saved, and blocks copied per request."""
    replayed = Replay()
    for prompt, steps in requests:
        replayed.run(prompt, steps)
    copied = replayed.memory.report().copied_blocks
    replayed.memory.check_idle()
    replayed.memory.close()
    counted = [pair for prompt, steps in requests for pair in count_blocks(prompt, steps)]
    owned, total = (sum(column) for column in zip(*counted, strict=True))
    if (replayed.owned_blocks, replayed.all_blocks) != (owned, total):
        raise RuntimeError(f"{replayed.owned_blocks} of {replayed.all_blocks} blocks, counted were {owned} of {total}")
    return 1 - owned / total, copied / len(requests)


def expected_parallel(lengths: workloads.Lengths, width: int, cv: float | None = None) -> float:
    """The formula in the module's docstring, for outputs with another `cv` if one is given."""
    prompts, outputs = zip(*lengths, strict=True)
    mean = statistics.mean(outputs)
    cv = statistics.pstdev(outputs) / mean if cv is None else cv
    shared = statistics.mean(prompt // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)
    return (1 - 1 / width) * shared / (statistics.mean(prompts) + mean * (1 + cv**2) / 2 + (BLOCK_TOKENS - 1) / 2)


def discount_for(entropy_nats: float) -> float:
    """The d whose distributions have this mean entropy."""
    discounts = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    entropies = torch.digamma(torch.ones_like(discounts)) - torch.digamma(1 - discounts)
    return float(discounts[torch.searchsorted(entropies, entropy_nats)])


def beam_steps(rng: np.random.Generator, width: int, output: int, discount: float, alike: float) -> Steps:
    # The largest of many exponential logits are minus the logarithms of a Poisson process's arrivals.
    logits = -np.log(rng.exponential(size=(output, width, CANDIDATES)).cumsum(axis=-1)) / discount
    logits -= logits[..., :1]
    log_probs = (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))[..., :width]
    scores = log_probs[0, 0]
    steps = [[0] * width]
    for draws in log_probs[1:]:
        candidates = (scores[:, None] + (draws[:1] if rng.random() < alike else draws)).ravel()
        best = np.sort(np.argpartition(-candidates, width - 1)[:width])
        steps.append((best // width).tolist())
        scores = candidates[best]
    return steps


def kinship(steps: Steps) -> Iterator[tuple[int, int]]:
    """For every step but the first: number of parents with children, and steps since all beams had one ancestor."""
    since = np.zeros((len(steps[0]),) * 2, dtype=int)  # of each pair
    for parents in steps[1:]:
        since = np.where(np.equal.outer(parents, parents), 0, since[np.ix_(parents, parents)] + 1)
        yield len(set(parents)), int(since.max())


def measure_blocks(name: str, num_requests: int) -> dict[str, float]:
    """Measure the share of blocks saved. Beams are replayed for fewer requests: their share depends less on the lengths
    of the longest."""
    lengths: workloads.Lengths = getattr(workloads, name)(num_requests, SEED)
    figures: dict[str, float] = {}
    print(f"\n{name}: KV blocks saved by sharing, {num_requests} requests of synthetic lengths, a quarter with beams")
    for width in WIDTHS:
        prompts = ((prompt, [[0] * width] + [list(range(width))] * (output - 1)) for prompt, output in lengths)
        share, copied = replay(list(prompts))
        figures[f"parallel_{width}_saved_{name}"] = share
        text = f"formula {expected_parallel(lengths, width):.1%}"
        if name == "sharegpt":
            wider = figures[f"parallel_{width}_formula_at_cv_{WIDER_CV}"] = expected_parallel(lengths, width, WIDER_CV)
            text += f", at cv {WIDER_CV} {wider:.1%}"
        print(
            f"  parallel {width}{share:25.1%}   {text}; {copied:.1f} copies a request{paper(width, 'parallel', name)}"
        )
    lengths = getattr(workloads, name)(num_requests // 4, SEED)
    cases = {str(width): (width, ENTROPY_NATS, 0.0) for width in WIDTHS}
    cases |= {f"{WIDTHS[-1]}_{key}": (WIDTHS[-1], *case) for key, case in SENSITIVITY.items()}
    beams: dict[str, Requests] = {}
    for key, (width, nats, alike) in cases.items():
        rng, discount = np.random.default_rng([SEED, width]), discount_for(nats)
        beams[key] = [(prompt, beam_steps(rng, width, output, discount, alike)) for prompt, output in lengths]
    for key, requests in beams.items():
        share, copied = replay(requests)
        kin = [pair for _, steps in requests for pair in kinship(steps)]
        parents, since = (statistics.mean(column) for column in zip(*kin, strict=True))
        figures[f"beam_{key}_saved_{name}"] = share
        figures[f"beam_{key}_parents_{name}"] = parents
        print(
            f"  beam {key.replace('_', ' '):22s}{share:7.1%}   {parents:.2f} parents a step, one ancestor {since:.1f} "
            f"steps ago; {copied:.0f} copies a request{paper(len(requests[0][1][0]), 'beam', name)}"
        )
    for method in ("parallel", "beam"):
        figures[f"{method}_saved_{name}"] = figures[f"{method}_{WIDTHS[-1]}_saved_{name}"]
    return figures


def paper(width: int, method: str, name: str) -> str:
    ends = dict(zip((WIDTHS[0], WIDTHS[-1]), PAPER[method, name], strict=True))
    return f"; paper {ends[width]:.1%}" if width in ends else ""


# ---- throughput and time to first token ----


def tokens(seed: str, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=num_tokens)


def run_requests(llm: LLM, prefix_tokens: int, num_requests: int, runs: Iterator[int]) -> float:
    """Requests per second. Every run has other tokens, and the same lengths."""
    rng, seed = random.Random(SEED), f"{prefix_tokens} {next(runs)}"
    prefix = tokens(seed, prefix_tokens)
    prompts = [prefix + tokens(f"{seed} {i}", rng.randint(*OWN_TOKENS)) for i in range(num_requests)]
    most = [rng.randint(*NEW_TOKENS) for _ in range(num_requests)]
    start = time.perf_counter()
    completions = llm.generate(prompts, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in most])
    elapsed = time.perf_counter() - start
    assert [len(completion.token_ids) for completion in completions] == most
    return num_requests / elapsed


def measure_throughput(
    engines: dict[str, LLM], prefix_tokens: int, num_requests: int, repeats: int
) -> dict[str, list[float]]:
    before = engines["cache on"].engine.report()
    runs = {n: partial(run_requests, llm, prefix_tokens, num_requests, count()) for n, llm in engines.items()}
    rates = harness.alternate(runs, repeats)
    after = engines["cache on"].engine.report()
    hits = (after.hit_tokens - before.hit_tokens) / (after.queried_tokens - before.queried_tokens)
    on, off = (statistics.median(rates[name]) for name in ("cache on", "cache off"))
    print(
        f"prefix of {prefix_tokens} tokens, {num_requests} requests: {on:.2f} requests/s, without sharing {off:.2f}, "
        f"ratio {harness.median_ratio(rates['cache on'], rates['cache off']):.2f}; {hits:.0%} of prompt tokens shared; "
        f"paper {PAPER_SPEEDUP[prefix_tokens]}"
    )
    return rates


def first_token_s(llm: LLM, prompt: list[int], cached_tokens: int = 0) -> float:
    start = time.perf_counter()
    llm.engine.submit("ttft", prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    while not (deltas := llm.engine.step()):
        pass
    elapsed = time.perf_counter() - start
    assert deltas[0].token_ids
    assert deltas[0].num_cached_tokens == cached_tokens
    llm.engine.cancel("ttft")
    return elapsed


def first_tokens_s(llm: LLM, name: str, num_requests: int = REQUESTS_OF_PREFIX) -> list[float]:
    """Times to first token of requests with a common prefix, one after the other."""
    prefix = tokens(f"prefix {name}", COMMON)
    prompts = [prefix + tokens(f"own {name} {i}", OWN) for i in range(num_requests)]
    return [first_token_s(llm, prompts[0])] + [first_token_s(llm, prompt, COMMON) for prompt in prompts[1:]]


def first_fresh_s(llm: LLM, runs: Iterator[int]) -> float:
    return first_token_s(llm, tokens(f"fresh {next(runs)}", COMMON + OWN))


def miss_costs_s(memory: KVMemory, prompt: list[int]) -> tuple[float, float]:
    """Seconds of a look-up without a hit, and of all calls of the prefix cache in the one step of a prompt. The keys
    and values are never written, because no request reads them."""
    start = time.perf_counter()
    chain = memory.prefixes.chain()
    match = memory.prefixes.match(chain, prompt)  # hashes the prompt
    looked_up = time.perf_counter()
    sequence = memory.create_sequence(expected_tokens=len(prompt))
    memory.prefixes.match(chain, prompt)
    memory.share_prefix(sequence, chain, prompt)
    memory.prefixes.announce_prefill(sequence, len(prompt))
    admitted = time.perf_counter()
    memory.append(sequence, len(prompt))
    memory.ensure([StepDemand(sequence, 0, len(prompt))])
    memory.launched()
    computed = time.perf_counter()
    memory.prefixes.stage_prefix(sequence, prompt, 0, len(prompt))
    memory.prefixes.commit_prefixes()
    done = time.perf_counter()
    memory.free(sequence)
    assert not match.num_tokens
    return looked_up - start, admitted - start + done - computed


def measure_first_tokens(
    engines: dict[str, LLM], num_prefixes: int, pairs: int
) -> tuple[dict[str, float], dict[str, Any]]:
    llm = engines["cache on"]
    first_tokens_s(llm, "warm-up", 3)
    curves = [first_tokens_s(llm, str(i)) for i in range(num_prefixes)]
    misses = harness.alternate({n: partial(first_fresh_s, llm, count()) for n, llm in engines.items()}, pairs)
    costs = [miss_costs_s(llm.engine.memory, tokens(f"miss {i}", COMMON + OWN)) for i in range(20)]
    miss_s, second_s, *_, hundredth_s = (statistics.median(column) for column in zip(*curves, strict=True))
    hit_s = statistics.median(t for curve in curves for t in curve[1:])
    lookup_s, all_s = (statistics.median(column) for column in zip(*costs, strict=True))
    figures = {
        "ttft_hit_speedup": miss_s / hit_s,
        "ttft_second_speedup": miss_s / second_s,
        "ttft_hundredth_speedup": miss_s / hundredth_s,
        "ttft_miss_ms": miss_s * 1e3,
        "ttft_hit_ms": hit_s * 1e3,
        "ttft_zero_hits_ratio": harness.median_ratio(misses["cache on"], misses["cache off"]),
        "lookup_us": lookup_s * 1e6,
        "bookkeeping_us": all_s * 1e6,
        "lookup_share_of_ttft": all_s / miss_s,
    }
    print(
        f"\ntime to first token, {COMMON} common tokens and {OWN} own, {num_prefixes} prefixes\n"
        f"  first {miss_s * 1e3:.1f} ms, second {second_s * 1e3:.1f} ms, hundredth {hundredth_s * 1e3:.1f} ms; "
        f"median hit {hit_s * 1e3:.1f} ms, {miss_s / hit_s:.1f} times as fast\n"
        f"  a look-up without a hit {lookup_s * 1e6:.0f} us, with all bookkeeping {all_s * 1e6:.0f} us, "
        f"{all_s / miss_s:.2%} of the first\n"
        f"  nothing found, cache on over off {figures['ttft_zero_hits_ratio']:.3f}, {pairs} pairs"
    )
    return figures, {"ttft_s": curves, "zero_hits_ttft_s": misses}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    counts = {"alpaca": 24, "sharegpt": 8} if args.quick else {"alpaca": 1600, "sharegpt": 480}
    num_layers, num_requests, repeats, num_prefixes, pairs = (2, 3, 1, 1, 1) if args.quick else (24, 32, 3, 5, 15)
    figures: dict[str, float] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for copies of a few KiB, two threads that wait for each other are slower
    for name, number in counts.items():
        figures |= measure_blocks(name, number)
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.write_qwen(Path(folder), num_layers)
        settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 2048, "kv_memory_bytes": KV_BYTES}
        engines = {name: LLM(folder, prefix_cache=name == "cache on", **settings) for name in ("cache on", "cache off")}
        rates = {prefix: measure_throughput(engines, prefix, num_requests, repeats) for prefix in PAPER_SPEEDUP}
        first_tokens, raw = measure_first_tokens(engines, num_prefixes, pairs)
        for llm in engines.values():
            llm.engine.check_integrity()
            llm.close()
    figures |= {
        f"prefix_{prefix}_speedup": harness.median_ratio(r["cache on"], r["cache off"]) for prefix, r in rates.items()
    }
    figures |= first_tokens
    harness.finish("sharing", args, figures, raw | {"requests_per_s": rates}, draw)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Blocks saved by workload, method and width; and TTFT along requests with one prefix."""
    figures, curves = result["figures"], result["raw"]["ttft_s"]
    title = "What sharing saves: KV blocks, and time to first token"
    with picture(result, path, title, columns=2, height=4.2) as (figure, (left, right)):
        for j, width in enumerate(WIDTHS):
            shares = [figures[f"{method}_{width}_saved_{name}"] * 100 for method, name in PAPER]
            at = [i + (j - 1) * 0.28 for i in range(len(PAPER))]
            drawn = left.bar(at, shares, 0.26, color=OURS[2 - j], label=f"{width} sequences of a request")
            left.bar_label(drawn, fmt="%.0f", fontsize=8)
        for side, ends in zip((-0.28, 0.28), zip(*PAPER.values(), strict=True), strict=True):
            at = [i + side for i in range(len(PAPER))]
            label = "PagedAttention's paper (2 and 6)" if side < 0 else None
            left.scatter(at, [share * 100 for share in ends], marker="_", s=220, color=LIMIT, label=label, zorder=3)
        names = {"parallel": "samples", "beam": "beams"}
        left.set_xticks(range(len(PAPER)), [f"{names[method]},\n{DATASETS[name]}" for method, name in PAPER])
        left.grid(axis="x", visible=False)
        left.set(ylabel="KV blocks saved, %", title="Sequences of one request")
        medians = [statistics.median(column) * 1e3 for column in zip(*curves, strict=True)]
        right.semilogy(range(1, len(medians) + 1), medians, ".", color=OURS[0], label="Folio, median of prefixes")
        right.set(
            xlabel=f"number of the request with this {COMMON}-token prefix",
            ylabel="time to first token, ms",
            title="Requests with a common prefix",
        )
        plain_numbers(right)
        right.annotate("computed", (1, medians[0]), xytext=(8, -3), textcoords="offset points", fontsize=9)
        legend_below(figure, left, 2)


if __name__ == "__main__":
    main()
