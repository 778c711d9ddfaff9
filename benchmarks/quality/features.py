"""Speculation, prefix caching, eviction and preemption with real text: what they find, whether tokens stay the same.

In float32, where a row's result does not depend on the other rows of its step. Each prompt is answered greedily and
with a seed; a share of equal outputs below 1 is a defect. Eviction gives up cached content only, so it changes no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.quality.text import prose
from folio.app.engine import LLM, SamplingParams
from folio.vmem import MemoryReport

Outputs = list[list[int]]
PASSAGE_WORDS, PRESSED_SHARE, TEMPERATURE = 120, 0.5, 0.7
SETTINGS: dict[str, Any] = {"dtype": "float32", "prefix_cache": False}
PRESSED = "summary"  # the requests of prefix caching, eviction and preemption
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

    requests: int = 4
    new_tokens: int = 48


def prompts(tokenizer: Any, count: int, kind: str) -> list[list[int]]:
    """Requests of a kind about successive passages of the documentation, or of code, as a chat."""
    words = ((ROOT / SOURCE).read_text() if kind == "code" else prose(PASSAGE_WORDS * count)).split(" ")
    size = len(words) // count
    used = 8 if kind == "free" else size
    passages = [" ".join(words[i * size : i * size + used]) for i in range(count)]
    messages = ([{"role": "user", "content": f"{ASKED[kind]}\n\n{passage}"}] for passage in passages)
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


def measure(model: str, sizes: Sizes, drafts: Mapping[str, Path]) -> dict[str, float]:
    """All figures of this module for a model, with draft models by name."""
    with LLM(model, **SETTINGS) as plain:
        tokenizer = plain.engine.model.tokenizer
        asked = {kind: prompts(tokenizer, sizes.requests, kind) for kind in ASKED}
        expected = {kind: _outputs(plain, asked[kind], sizes.new_tokens) for kind in ASKED}
        memory = _Memory.of(plain.engine.report(), asked[PRESSED], expected[PRESSED])
    pressed = asked[PRESSED], expected[PRESSED], sizes
    figures: dict[str, float] = {}
    for name, settings in _proposers(drafts).items():
        figures |= _speculation(name, model, settings, asked, expected, sizes)
    return (
        figures | _prefixes(model, *pressed) | _eviction(model, *pressed, memory) | _preemption(model, *pressed, memory)
    )


def _proposers(drafts: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Settings by the name of what proposes draft tokens."""
    by_model = {f"draft_{name}": {"speculation": "draft", "draft_model": str(path)} for name, path in drafts.items()}
    return {"ngram": {"speculation": "ngram"}} | by_model


def _speculation(
    name: str,
    model: str,
    settings: Mapping[str, Any],
    asked: Mapping[str, Outputs],
    expected: Mapping[str, Outputs],
    sizes: Sizes,
) -> dict[str, float]:
    """One request after the other, with draft tokens."""
    figures: dict[str, float] = {}
    with LLM(model, **settings, **SETTINGS) as llm:
        speculation = llm.engine.speculation
        assert speculation is not None
        drafted = accepted = 0
        for kind in ASKED:
            found = _one_by_one(llm, asked[kind], sizes.new_tokens)
            counts = speculation.counts
            drafts, right = counts.draft_tokens - drafted, counts.accepted_tokens - accepted
            drafted, accepted = counts.draft_tokens, counts.accepted_tokens
            figures |= {
                f"{name}_{kind}_acceptance": right / max(drafts, 1),
                f"{name}_{kind}_accepted_share": right / sum(map(len, found)),
                f"{name}_{kind}_tokens_equal": _equal(found, expected[kind]),
            }
    return figures


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


def _eviction(model: str, asked: Outputs, expected: Outputs, sizes: Sizes, memory: _Memory) -> dict[str, float]:
    """The same requests twice, one after the other."""
    with LLM(model, **SETTINGS | {"prefix_cache": True}, **memory.settings()) as llm:
        _one_by_one(llm, asked, sizes.new_tokens)
        found = _one_by_one(llm, asked, sizes.new_tokens)
        evicted = llm.engine.report().evicted_blocks
    return {"evicted_blocks": float(evicted), "eviction_tokens_equal": _equal(found, expected)}


def _preemption(model: str, asked: Outputs, expected: Outputs, sizes: Sizes, memory: _Memory) -> dict[str, float]:
    """All requests at once."""
    figures: dict[str, float] = {}
    for way in ("swap", "recompute"):
        with LLM(model, preemption=way, **SETTINGS, **memory.settings()) as llm:
            found = _outputs(llm, asked, sizes.new_tokens)
            figures[f"preempted_by_{way}"] = float(llm.engine.scheduler.begun.num_preempted[way])
        figures[f"{way}_tokens_equal"] = _equal(found, expected)
    return figures


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory for a part of the tokens of all outputs."""

    kv_memory_bytes: int
    max_model_len: int

    @classmethod
    def of(cls, report: MemoryReport, asked: Outputs, expected: Outputs) -> _Memory:
        lengths = [len(asked[i // 2]) + len(output) for i, output in enumerate(expected)]
        tokens = int(PRESSED_SHARE * sum(lengths))
        size = sum(g.block_bytes * (tokens // g.block_tokens + 1) for g in report.groups)
        return cls(report.anchor_bytes + size, max(lengths) + 1)

    def settings(self) -> dict[str, int]:
        return asdict(self)


def _one_by_one(llm: LLM, asked: Outputs, new_tokens: int) -> Outputs:
    return [output for i in range(len(asked)) for output in _outputs(llm, asked[i : i + 1], new_tokens, i)]


def _outputs(llm: LLM, asked: Sequence[list[int]], new_tokens: int, first: int = 0) -> Outputs:
    """Two outputs for each prompt, the greedy one and one with a seed, that of its number."""
    params = []
    for seed in range(first, first + len(asked)):
        params.append(SamplingParams(max_tokens=new_tokens, temperature=0))
        params.append(SamplingParams(max_tokens=new_tokens, temperature=TEMPERATURE, seed=seed))
    return [completion.token_ids for completion in llm.generate([p for p in asked for _ in range(2)], params)]


def _equal(found: Outputs, expected: Outputs) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
