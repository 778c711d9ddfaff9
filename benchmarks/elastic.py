"""Memory that follows the load, against a static pool of the same budget: the cost when full, the saving when idle.

The same engine twice: *elastic*, which takes pages as it needs them and gives idle ones back, and *static*, whose floor
is its budget, so that everything is taken at the start and kept. Random weights in the shape of Qwen2.5-0.5B with few
layers: steps are short, so that whatever mapping costs shows.

Saturation: more requests than fit at once, both in turn; the ratio of their output tokens per second. Load: waves of
1, 4, 16, 32, 16, 4, 1 requests at once, then none, while a thread notes the physical bytes of the KV cache (blocks of
the memfd behind it, as the kernel counts them). Idle bytes and the time to give back are read off that curve. Cached
prefixes go back as soon as other idle pages here (`prefix_cache_release_s` 0.5, not 60), and no prompt comes twice.

--quick runs each once, with fewer requests.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from app.engine import LLM, SamplingParams
from benchmarks import harness
from benchmarks.throughput import make_checkpoint

NUM_LAYERS = 4
PROMPT_TOKENS, NEW_TOKENS = 256, 48
AT_ONCE = 32
WAVES, QUICK_WAVES = (1, 4, 16, 32, 16, 4, 1), (1, 16, 1)
IDLE_BEFORE_S, IDLE_AFTER_S = 2.0, 3.0  # before: what starting took has gone back in the second half
# "Given back" is when at most this share of the peak is left.
IDLE_SHARE = 0.02
SAMPLE_S = 0.005


class Sampler(threading.Thread):
    """Notes physical KV bytes over time, as the kernel sees them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_at = time.perf_counter()
        self.points: list[tuple[float, int]] = []
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            self.points.append((time.perf_counter() - self.start_at, kv_bytes()))
            time.sleep(SAMPLE_S)

    def stop(self) -> list[tuple[float, int]]:
        self.stopping = True
        self.join()
        return self.points


def kv_bytes() -> int:
    """Physical bytes behind this process's KV caches: `st_blocks` of their memfds."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:folio-kv" in str(entry.readlink()):
                total += entry.stat().st_blocks * 512
        except OSError:  # the descriptor that lists the folder is gone by now
            continue
    return total


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1000, (PROMPT_TOKENS,), generator=generator).tolist() for _ in range(count)]


def run(llm: LLM, prompts: list[list[int]]) -> float:
    """Output tokens a second, all prompts at once."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start
    return sum(len(c.token_ids) for c in completions) / elapsed


def make_engine(folder: str, *, static: bool) -> LLM:
    """A budget that a little more than half of the requests of a full load fill."""
    token_bytes = NUM_LAYERS * 2 * 2 * 64 * 2
    budget = round(0.6 * AT_ONCE * (PROMPT_TOKENS + NEW_TOKENS) * token_bytes)
    return LLM(
        folder,
        skip_tokenizer_init=True,
        max_num_seqs=AT_ONCE,
        max_model_len=2 * (PROMPT_TOKENS + NEW_TOKENS),
        kv_memory_bytes=budget,
        kv_memory_floor_bytes=budget if static else 0,
        prefix_cache_release_s=0.5,
    )


def follow_load(llm: LLM, waves: Sequence[int]) -> tuple[list[tuple[float, int]], float, float]:
    """The curve of physical bytes over the waves, and when the load began and ended."""
    sampler = Sampler()
    sampler.start()
    time.sleep(IDLE_BEFORE_S)
    began = time.perf_counter() - sampler.start_at
    for i, count in enumerate(waves):
        run(llm, make_prompts(count, 1000 + i))
    ended = time.perf_counter() - sampler.start_at
    time.sleep(IDLE_AFTER_S)
    return sampler.stop(), began, ended


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    num_requests, repeats = (AT_ONCE, 1) if args.quick else (3 * AT_ONCE, 5)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), NUM_LAYERS)
        curves: dict[str, list[tuple[float, int]]] = {}
        rates: dict[str, list[float]] = {}
        spans: dict[str, tuple[float, float]] = {}
        engines = {name: make_engine(folder, static=name == "static") for name in ("elastic", "static")}
        seeds = {name: itertools.count() for name in engines}  # new prompts each time, or the prefix cache had them

        def saturate(name: str) -> float:
            return run(engines[name], make_prompts(num_requests, next(seeds[name])))

        rates = harness.alternate({name: partial(saturate, name) for name in engines}, repeats)
        for llm in engines.values():
            llm.engine.check_integrity()
            llm.close()
        for name in ("static", "elastic"):
            llm = make_engine(folder, static=name == "static")
            curves[name], *span = follow_load(llm, QUICK_WAVES if args.quick else WAVES)
            spans[name] = (span[0], span[1])
            llm.engine.check_integrity()
            llm.close()

    began, ended = spans["elastic"]
    peak = max(size for _, size in curves["elastic"])
    given_back = next((t for t, size in curves["elastic"] if t > ended and size <= IDLE_SHARE * peak), float("inf"))
    idle = [size for t, size in curves["elastic"] if began / 2 < t < began or t > ended + IDLE_AFTER_S / 2]
    figures = {
        "saturated_vs_static": harness.median_ratio(rates["elastic"], rates["static"]),
        "idle_bytes_share": max(idle) / peak,
        "release_s": given_back - ended,
        "mean_bytes_vs_static": statistics.mean(s for _, s in curves["elastic"])
        / statistics.mean(s for _, s in curves["static"]),
        "saturated_tokens_per_s": statistics.median(rates["elastic"]),
    }
    print(
        f"\n{num_requests} requests of {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {repeats} runs each, {NUM_LAYERS} layers"
    )
    print(
        f"  saturated   elastic {statistics.median(rates['elastic']):7.1f} tok/s"
        f"   static {statistics.median(rates['static']):7.1f} tok/s   ratio {figures['saturated_vs_static']:.3f}"
    )
    print(
        f"  memory      peak {peak / 2**20:.1f} MiB, idle {max(idle) / 2**20:.2f} MiB, "
        f"given back {figures['release_s']:.2f} s after the last request, "
        f"on average {figures['mean_bytes_vs_static']:.0%} of the static pool"
    )
    draw(curves, spans, harness.results_folder(args) / f"elastic{'-quick' if args.quick else ''}.png")
    harness.finish("elastic", args, figures, {"tokens_per_s": rates, "curves": {n: thin(c) for n, c in curves.items()}})


def thin(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Only the points where something changes."""
    kept = [p for i, p in enumerate(curve) if i == 0 or p[1] != curve[i - 1][1] or i == len(curve) - 1]
    return [(round(t, 3), size) for t, size in kept]


def draw(curves: dict[str, list[tuple[float, int]]], spans: dict[str, tuple[float, float]], path: Path) -> None:
    pyplot = harness.pyplot()
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for name, color in (("static", "#b0b0b0"), ("elastic", "#2a6f97")):
        axes.plot(*zip(*((t, size / 2**20) for t, size in curves[name]), strict=True), color=color, label=name)
    axes.axvspan(*spans["elastic"], color="#2a6f97", alpha=0.08, label="load")
    axes.set_xlabel("seconds")
    axes.set_ylabel("physical KV memory, MiB")
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
