"""An idle model's memory: bytes held against bytes of cached tokens after ragged requests have ended.

The test of kvcached's issue 359: with prefix caching, an instance that had become idle held several times the memory of
the tokens that it kept, because every page with one cached block stays, and sequences that decode side by side spread
over pages. Requests with prompts of 16 to 512 and outputs of 16 to 256 tokens, 96 at once, pass through a KV memory
that evicts; when the last one has ended:

- bytes held after a second, over bytes of the cached tokens (`held_vs_cached`: 1 has no waste)
- the same after the budget was cut to 16,000 tokens, as for another model that wakes, and how many tokens then are
  still cached, of these 16,000
- the curve of both until cached prefixes are released, after a minute by default

The model has the KV cache of Qwen2.5-0.5B (on CUDA of Qwen3-4B, as in the issue), and small layers, so that steps
are short; the geometry of blocks and pages is what the engine chooses.

--quick: 96 requests instead of 288, a sixteenth of the lengths and of the tokens that stay, and release after 15 s.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen2Config

from benchmarks import harness
from benchmarks.elastic import kv_bytes
from benchmarks.facts import record
from folio.app.engine import LLM, SamplingParams

AT_ONCE = 96
PROMPTS, OUTPUTS = (16, 512), (16, 256)
# Of the tokens that `AT_ONCE` mean requests have at their end; the rest waits or is evicted.
BUDGET = 0.75
SAMPLE_S, SETTLES_S = 0.1, 1.0
# Layers, KV heads and their dimension.
KV_SHAPES = {"cpu": (24, 2, 64), "cuda": (36, 8, 128)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """`kept_tokens`: the budget while idle; lengths are divided by `shortened`; `release_s`: of cached prefixes."""

    num_requests: int = 288
    kept_tokens: int = 16_000
    shortened: int = 1
    release_s: float = 60.0


QUICK = Sizes(num_requests=96, kept_tokens=1_000, shortened=16, release_s=15.0)


@dataclass(frozen=True, slots=True)
class Held:
    """Physical KV memory, by the kernel's figures where it is files, and the cached tokens' part of it."""

    held_bytes: int
    cached_tokens: int
    token_bytes: int

    @staticmethod
    def of(llm: LLM, device: str, token_bytes: int) -> Held:
        report = llm.engine.report()
        held = kv_bytes() if device == "cpu" else report.physical_bytes
        [group] = report.groups  # of whose blocks only whole ones are cached
        return Held(held, group.cached_blocks * group.block_tokens, token_bytes)

    @property
    def ratio(self) -> float:
        return self.held_bytes / (self.cached_tokens * self.token_bytes)


def make_engine(folder: Path, device: str, sizes: Sizes) -> tuple[LLM, int]:
    """The engine and the bytes of a token."""
    layers, heads, head_dim = KV_SHAPES[device]
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    token_bytes = 2 * 2 * layers * heads * head_dim
    mean_tokens = (sum(PROMPTS) + sum(OUTPUTS)) / 2 / sizes.shortened
    llm = LLM(
        folder,
        device=device,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=AT_ONCE,
        max_model_len=PROMPTS[1] + OUTPUTS[1],
        kv_memory_bytes=round(BUDGET * AT_ONCE * mean_tokens * token_bytes),
        prefix_cache_release_s=sizes.release_s,
    )
    harness.note_engine(llm)
    return llm, token_bytes


def ragged(sizes: Sizes) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(3)
    prompts = rng.integers(PROMPTS[0], PROMPTS[1], sizes.num_requests, endpoint=True) // sizes.shortened
    outputs = rng.integers(OUTPUTS[0], OUTPUTS[1], sizes.num_requests, endpoint=True) // sizes.shortened
    return (
        [rng.integers(2048, size=length).tolist() for length in prompts],
        [SamplingParams(max_tokens=int(length), temperature=0, ignore_eos=True) for length in outputs],
    )


def main() -> None:
    args = harness.arguments(__doc__, devices=("cpu", "cuda")).parse_args()
    sizes = QUICK if args.quick else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        llm, token_bytes = make_engine(Path(folder), args.device, sizes)
        prompts, params = ragged(sizes)
        began = time.perf_counter()
        llm.generate(prompts, params)
        seconds, ended = time.perf_counter() - began, time.perf_counter()
        evicted = llm.engine.report().evicted_blocks
        curve: list[tuple[float, int, int]] = []

        def follow(until_s: float) -> Held:
            while True:
                held, at_s = Held.of(llm, args.device, token_bytes), time.perf_counter() - ended
                curve.append((round(at_s, 2), held.held_bytes, held.cached_tokens * token_bytes))
                if at_s >= until_s:
                    return held
                time.sleep(SAMPLE_S)

        full = follow(SETTLES_S)
        llm.engine.set_budget(sizes.kept_tokens * token_bytes, llm.engine.report().budget_revision + 1)
        cut = follow(2 * SETTLES_S)
        last = follow(2 * SETTLES_S + 1.1 * sizes.release_s)
        llm.engine.check_integrity()
        block_tokens = llm.engine.report().groups[0].block_tokens
        llm.close()
    figures = {
        "held_vs_cached": full.ratio,
        "held_mib": full.held_bytes / 2**20,
        "held_vs_cached_cut": cut.ratio,
        "held_mib_cut": cut.held_bytes / 2**20,
        "kept_share_cut": cut.cached_tokens / sizes.kept_tokens,
        "held_mib_released": last.held_bytes / 2**20,
        "evicted_blocks": evicted,
        "block_tokens": block_tokens,
    }
    record(
        f"{sizes.num_requests} requests in {seconds:.0f} s, blocks of {block_tokens} tokens, {evicted} evicted",
        f"{full.held_bytes / 2**20:.1f} MiB held for {full.cached_tokens} cached tokens ({full.ratio:.3f} times their "
        f"bytes), within {sizes.kept_tokens} tokens {cut.held_bytes / 2**20:.1f} MiB for {cut.cached_tokens} "
        f"({cut.ratio:.3f} times), at last {last.held_bytes / 2**20:.1f} MiB",
        **figures,
    )
    raw: dict[str, Any] = {"curve": curve, "token_bytes": token_bytes}
    harness.finish("shelf_idle", args, figures, raw)


if __name__ == "__main__":
    main()
