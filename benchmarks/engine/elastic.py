"""Elastic KV memory against a static pool of the same budget: the cost at saturation, the saving when idle.

The same engine twice: *elastic*, which creates pages on demand and releases idle ones, and *static*, whose floor is its
budget, so that all pages are created at the start and kept. Random weights in the shape of Qwen2.5-0.5B, on CUDA
of Llama-3-8B, with few layers: steps are short, so that the cost of mapping shows.

Saturation: more requests than fit at once, both in turn; the ratio of their output tokens per second. Load: waves of
1, 4, 16, 32, 16, 4, 1 requests at once, then none, while a thread samples the physical bytes of the KV cache (blocks of
its memfd, by the kernel's figures; on CUDA the engine's report), and of these the bytes of cached prefixes. Settings of
release are the defaults: idle pages are given back after half a second, cached prefixes after a minute, and the time
until memory is given back has that minute in it. Prompts do not repeat.

--quick runs each once, with fewer requests, and releases cached prefixes after 5 s; --tiny only shows that this program
works.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoints, harness
from benchmarks.picture import OURS, RIVALS, legend_below, picture
from folio.app.engine import LLM, SamplingParams

NUM_LAYERS = 4
SHAPES = {"cpu": None, "cuda": "llama-3-8b"}
TINY_SHAPE = "tiny"
# Memory counts as given back at this share of the peak.
IDLE_SHARE = 0.02
SAMPLE_S, REPORT_S = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Model and load.

    Attributes:
        shape: of `checkpoints.SHAPES`, with weights made on the device; `None`: Qwen2.5-0.5B's, from a checkpoint.
        token_bytes: keys and values of a token.
        num_requests, repeats: at saturation; `at_once` run at once if there is room.
        waves: requests at once while the curve is recorded.
        idle_s: time before and after the waves; in the second half of the former, memory of the start has been
            released, and in the last second of the latter all.
        prefix_cache_release_s: the engine's setting; `None`: its default.
    """

    device: str
    shape: str | None
    token_bytes: int
    num_requests: int
    repeats: int
    waves: Sequence[int]
    idle_s: tuple[float, float] = (2.0, 65.0)
    prefix_cache_release_s: float | None = None
    at_once: int = 32
    prompt_tokens: int = 256
    new_tokens: int = 48
    warm_up: bool = True


def sizes_of(args: argparse.Namespace) -> Sizes:
    waves = (1, 16, 1) if args.quick else (1, 4, 16, 32, 16, 4, 1)
    if args.tiny:
        load = {
            "idle_s": (0.7, 1.6),
            "prefix_cache_release_s": 0.5,
            "at_once": 4,
            "prompt_tokens": 24,
            "new_tokens": 3,
            "warm_up": False,
        }
        return Sizes("cpu", TINY_SHAPE, 2 * 2 * 2 * 16 * 2, 4, 1, (1, 2), **load)  # type: ignore[arg-type]
    idle: dict[str, Any] = {"idle_s": (2.0, 8.0), "prefix_cache_release_s": 5.0} if args.quick else {}
    if args.device == "cuda":
        token_bytes, repeats = NUM_LAYERS * 2 * 8 * 128 * 2, 2 if args.quick else 5
        return Sizes("cuda", SHAPES["cuda"], token_bytes, 96, repeats, waves, at_once=64, **idle)
    num_requests, repeats = (12, 1) if args.quick else (96, 5)
    short: dict[str, Any] = {"at_once": 8, "prompt_tokens": 96, "new_tokens": 12} if args.quick else {}
    return Sizes("cpu", SHAPES["cpu"], NUM_LAYERS * 2 * 2 * 64 * 2, num_requests, repeats, waves, **idle, **short)


class Sampler(threading.Thread):
    """Samples physical KV bytes: by the kernel's figures, or by the engine's report on CUDA; and cached bytes."""

    def __init__(self, llm: LLM, sizes: Sizes) -> None:
        super().__init__(daemon=True)
        self._read = kv_bytes if sizes.device == "cpu" else lambda: llm.engine.report().physical_bytes
        self.start_at = time.perf_counter()
        self._cached = lambda: llm.engine.report().cached_bytes
        self.points: list[tuple[float, int]] = []
        self.cached: list[tuple[float, int]] = []
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            at_s = time.perf_counter() - self.start_at
            if not self.cached or at_s - self.cached[-1][0] > REPORT_S:  # a report takes the memory's lock
                self.cached.append((at_s, self._cached()))
            self.points.append((at_s, self._read()))
            time.sleep(SAMPLE_S)

    def stop(self) -> None:
        self.stopping = True
        self.join()


def kv_bytes() -> int:
    """Physical bytes behind this process's KV caches: `st_blocks` of their memfds."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:folio-kv" in str(entry.readlink()):
                total += entry.stat().st_blocks * 512
        except OSError:  # the descriptor of the listing itself is closed by now
            continue
    return total


def make_prompts(sizes: Sizes, count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1000, (sizes.prompt_tokens,), generator=generator).tolist() for _ in range(count)]


def run(llm: LLM, sizes: Sizes, count: int, seed: int) -> float:
    """Output tokens a second of `count` prompts at once."""
    params = SamplingParams(max_tokens=sizes.new_tokens, temperature=0, ignore_eos=True)
    prompts = make_prompts(sizes, count, seed)
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    elapsed = time.perf_counter() - start
    return sum(len(c.token_ids) for c in completions) / elapsed


def write_model(folder: Path, sizes: Sizes) -> None:
    if sizes.shape is None:
        checkpoints.write_qwen(folder, NUM_LAYERS)
        return
    layers = {} if sizes.shape == TINY_SHAPE else {"num_hidden_layers": NUM_LAYERS}
    checkpoints.config_of(sizes.shape, dtype=torch.bfloat16, **layers).save_pretrained(folder)


def make_engine(folder: str, sizes: Sizes, *, static: bool = False, **settings: Any) -> LLM:
    """An engine whose budget holds a little more than half of the requests of a full load."""
    num_tokens = sizes.prompt_tokens + sizes.new_tokens
    budget = round(0.6 * sizes.at_once * num_tokens * sizes.token_bytes)
    choices: dict[str, Any] = {"kv_memory_bytes": budget} | settings
    if sizes.prefix_cache_release_s is not None:
        choices.setdefault("prefix_cache_release_s", sizes.prefix_cache_release_s)
    return LLM(
        folder,
        device=sizes.device,
        load_format="dummy" if sizes.shape else "auto",
        skip_tokenizer_init=True,
        warm_up=sizes.warm_up,
        max_num_seqs=sizes.at_once,
        max_model_len=2 * num_tokens,
        kv_memory_floor_bytes=budget if static else 0,
        **choices,
    )


def finish(llm: LLM) -> None:
    harness.note_engine(llm)
    llm.engine.check_integrity()
    llm.close()


def follow_load(llm: LLM, sizes: Sizes) -> tuple[Sampler, float, float]:
    """Physical and cached bytes over the waves, and the begin and end of the load."""
    sampler = Sampler(llm, sizes)
    sampler.start()
    time.sleep(sizes.idle_s[0])
    began = time.perf_counter() - sampler.start_at
    for i, count in enumerate(sizes.waves):
        run(llm, sizes, count, 1000 + i)
    ended = time.perf_counter() - sampler.start_at
    time.sleep(sizes.idle_s[1])
    sampler.stop()
    return sampler, began, ended


def main() -> None:
    parser = harness.arguments(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, on the CPU")
    args = parser.parse_args()
    args.quick |= args.tiny
    with tempfile.TemporaryDirectory() as folder:
        sizes = sizes_of(args)
        write_model(Path(folder), sizes)
        against_static(args, sizes, folder)


def against_static(args: argparse.Namespace, sizes: Sizes, folder: str) -> None:
    curves: dict[str, list[tuple[float, int]]] = {}
    spans: dict[str, tuple[float, float]] = {}
    engines = {name: make_engine(folder, sizes, static=name == "static") for name in ("elastic", "static")}
    seeds = {name: itertools.count() for name in engines}  # new prompts each time, because of the prefix cache

    def saturate(name: str) -> float:
        return run(engines[name], sizes, sizes.num_requests, next(seeds[name]))

    rates = harness.alternate({name: partial(saturate, name) for name in engines}, sizes.repeats)
    for llm in engines.values():
        finish(llm)
    for name in ("static", "elastic"):
        llm = make_engine(folder, sizes, static=name == "static")
        sampler, *span = follow_load(llm, sizes)
        curves[name], spans[name] = sampler.points, (span[0], span[1])
        cached = sampler.cached
        finish(llm)

    began, ended = spans["elastic"]
    peak = max(size for _, size in curves["elastic"])
    at = [t for t, _ in cached]
    after = [(t - ended, size, cached[bisect.bisect_right(at, t) - 1][1]) for t, size in curves["elastic"] if t > ended]
    idle = [size for t, size in curves["elastic"] if began / 2 < t < began]
    idle += [size for t, size, _ in after if t > sizes.idle_s[1] - 1]
    busy = {name: [size for t, size in curve if spans[name][0] < t < spans[name][1]] for name, curve in curves.items()}
    figures = {
        "saturated_vs_static": harness.median_ratio(rates["elastic"], rates["static"]),
        "idle_bytes_share": max(idle) / peak,
        "release_s": next((t for t, size, _ in after if size <= IDLE_SHARE * peak), float("inf")),
        "release_of_requests_s": next((t for t, size, of in after if size - of <= IDLE_SHARE * peak), float("inf")),
        "cached_bytes_share": max(of for t, _, of in after if t > 1) / peak,
        "mean_bytes_vs_static": statistics.mean(busy["elastic"]) / statistics.mean(busy["static"]),
        "saturated_tokens_per_s": statistics.median(rates["elastic"]),
    }
    print(
        f"\n{sizes.num_requests} requests of {sizes.prompt_tokens} + {sizes.new_tokens} tokens, "
        f"{sizes.repeats} runs each"
    )
    print(
        f"  saturated   elastic {statistics.median(rates['elastic']):7.1f} tok/s"
        f"   static {statistics.median(rates['static']):7.1f} tok/s   ratio {figures['saturated_vs_static']:.3f}"
    )
    print(
        f"  memory      peak {peak / 2**20:.1f} MiB, idle {max(idle) / 2**20:.2f} MiB, "
        f"given back {figures['release_s']:.2f} s after the last request, without cached prefixes "
        f"{figures['release_of_requests_s']:.2f} s, in use {figures['mean_bytes_vs_static']:.0%} of the static pool"
    )
    raw = {"tokens_per_s": rates, "curves": {name: thin(curve) for name, curve in curves.items()}, "spans": spans}
    harness.finish("elastic", args, figures, raw, draw)


def thin(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Only the points at which the value changes."""
    kept = [p for i, p in enumerate(curve) if i == 0 or p[1] != curve[i - 1][1] or i == len(curve) - 1]
    return [(round(t, 3), size) for t, size in kept]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Physical KV memory over time, elastic and static."""
    curves, spans = result["raw"]["curves"], result["raw"].get("spans", {})
    with picture(result, path, "KV memory follows the load") as (figure, [plot]):
        for name, label, colour in (
            ("static", "static pool of the same budget", RIVALS[0]),
            ("elastic", "Folio, elastic", OURS[0]),
        ):
            times, sizes = zip(*((t, size / 2**20) for t, size in curves[name]), strict=True)
            plot.step(times, sizes, where="post", color=colour, label=label)
        if "elastic" in spans:
            plot.axvspan(*spans["elastic"], color=OURS[2], alpha=0.25, label="requests are running")
        plot.set(xlabel="seconds", ylabel="physical KV memory, MiB", ylim=(0, None))
        legend_below(figure, plot, 3)


if __name__ == "__main__":
    main()
