"""Speculation, prefix caching, eviction and preemption with real text: what they find, whether tokens stay the same.

In float32, where a row's result does not depend on the other rows of its step. Each prompt is answered greedily and
with a seed; a share of equal outputs below 1 is a defect. Eviction gives up cached content only, so it changes no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.quality.text import prose
from folio.app.engine import LLM, SamplingParams

Outputs = list[list[int]]
PASSAGE_WORDS, PRESSED_SHARE, TEMPERATURE = 120, 0.5, 0.7
SETTINGS: dict[str, Any] = {"dtype": "float32", "prefix_cache": False}
SOURCE = "benchmarks/harness.py"  # the code of which requests are about
ASKED = {
    "copy": "Write this text again, word for word:",
    "summary": "Summarise this text:",
    "code": "Rename the first function of this Python code, and write all of the code again:",
    "free": "Write a story that begins with these words:",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurement: requests, and new tokens of each."""

    requests: int = 8
    new_tokens: int = 96


def prompts(tokenizer: Any, count: int, kind: str) -> list[list[int]]:
    """Requests of a kind about successive passages of the documentation, or of code, as a chat."""
    words = ((ROOT / SOURCE).read_text() if kind == "code" else prose(PASSAGE_WORDS * count)).split(" ")
    size = len(words) // count
    used = 8 if kind == "free" else size
    passages = [" ".join(words[i * size : i * size + used]) for i in range(count)]
    messages = ([{"role": "user", "content": f"{ASKED[kind]}\n\n{passage}"}] for passage in passages)
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


def measure(model: str, sizes: Sizes) -> dict[str, float]:
    """All figures of this module for a model."""
    with LLM(model, **SETTINGS) as plain:
        tokenizer = plain.engine.model.tokenizer
        asked = {kind: prompts(tokenizer, sizes.requests, kind) for kind in ASKED}
        expected = {kind: _outputs(plain, asked[kind], sizes.new_tokens) for kind in ASKED}
    figures = {}
    for kind in ASKED:
        figures |= _speculation(model, kind, asked[kind], expected[kind], sizes)
    pressed = asked["summary"], expected["summary"], sizes
    return figures | _prefixes(model, *pressed) | _eviction(model, *pressed) | _preemption(model, *pressed)


def _speculation(model: str, kind: str, asked: Outputs, expected: Outputs, sizes: Sizes) -> dict[str, float]:
    """One request after the other, with n-gram drafts."""
    with LLM(model, speculation="ngram", **SETTINGS) as llm:
        found = [output for i in range(len(asked)) for output in _outputs(llm, asked[i : i + 1], sizes.new_tokens, i)]
        speculation = llm.engine.speculation
        assert speculation is not None
        counts = speculation.counts
    return {
        f"ngram_{kind}_acceptance": counts.accepted_tokens / max(counts.draft_tokens, 1),
        f"ngram_{kind}_accepted_share": counts.accepted_tokens / sum(map(len, found)),
        f"ngram_{kind}_tokens_equal": _equal(found, expected),
    }


def _prefixes(model: str, asked: Outputs, expected: Outputs, sizes: Sizes) -> dict[str, float]:
    """The same requests a second time: all but the last tokens of each prompt should be found."""
    with LLM(model, **SETTINGS | {"prefix_cache": True}) as llm:
        _outputs(llm, asked, sizes.new_tokens)
        before = llm.engine.report()
        found = _outputs(llm, asked, sizes.new_tokens)
        after = llm.engine.report()
    return {
        "prefix_hit_share": (after.hit_tokens - before.hit_tokens) / (after.queried_tokens - before.queried_tokens),
        "prefix_tokens_equal": _equal(found, expected),
    }


def _eviction(model: str, asked: Outputs, expected: Outputs, sizes: Sizes) -> dict[str, float]:
    """The same requests twice, one after the other, with memory for a part of their tokens."""
    pool = _pool_bytes(model, asked, sizes)
    with LLM(
        model, **SETTINGS | {"prefix_cache": True}, kv_memory_bytes=pool, max_model_len=_most(asked, sizes)
    ) as llm:
        for _ in range(2):
            found = [out for i in range(len(asked)) for out in _outputs(llm, asked[i : i + 1], sizes.new_tokens, i)]
        evicted = llm.engine.report().evicted_blocks
    return {"evicted_blocks": float(evicted), "eviction_tokens_equal": _equal(found, expected)}


def _preemption(model: str, asked: Outputs, expected: Outputs, sizes: Sizes) -> dict[str, float]:
    """All requests at once, with memory for a part of their tokens."""
    pool, most = _pool_bytes(model, asked, sizes), _most(asked, sizes)
    figures = {}
    for way in ("swap", "recompute"):
        with LLM(model, preemption=way, max_model_len=most, kv_memory_bytes=pool, **SETTINGS) as llm:
            found = _outputs(llm, asked, sizes.new_tokens)
            figures[f"preempted_by_{way}"] = float(llm.engine.scheduler.begun.num_preempted[way])
        figures[f"{way}_tokens_equal"] = _equal(found, expected)
    return figures


def _pool_bytes(model: str, asked: Outputs, sizes: Sizes) -> int:
    """Memory for a part of the tokens of all requests."""
    with LLM(model, **SETTINGS) as llm:
        report = llm.engine.report()
    tokens = int(PRESSED_SHARE * sum(len(prompt) + sizes.new_tokens for prompt in asked))
    return report.anchor_bytes + sum(g.block_bytes * (tokens // g.block_tokens + 1) for g in report.groups)


def _most(asked: Outputs, sizes: Sizes) -> int:
    return max(map(len, asked)) + sizes.new_tokens


def _outputs(llm: LLM, asked: Sequence[list[int]], new_tokens: int, first: int = 0) -> Outputs:
    """Two outputs for each prompt, the greedy one and one with a seed, that of its number."""
    params = []
    for seed in range(first, first + len(asked)):
        params.append(SamplingParams(max_tokens=new_tokens, temperature=0))
        params.append(SamplingParams(max_tokens=new_tokens, temperature=TEMPERATURE, seed=seed))
    return [completion.token_ids for completion in llm.generate([p for p in asked for _ in range(2)], params)]


def _equal(found: Outputs, expected: Outputs) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
