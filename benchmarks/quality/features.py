"""Speculation, prefix caching and preemption with real text: what they find, and whether the tokens stay the same.

The last bits of a step may depend on the number of its rows, and with them, now and then, a token: the figure is the
share of outputs that are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.text import prose
from folio.app.engine import LLM, SamplingParams

Outputs = list[list[int]]
PASSAGE_WORDS, PRESSED_SHARE = 120, 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of the measurement: requests, and new tokens of each."""

    requests: int = 16
    new_tokens: int = 96


def prompts(tokenizer: Any, count: int, ask: str) -> list[list[int]]:
    """Requests about successive passages of the documentation, as a chat."""
    words = prose(PASSAGE_WORDS * count).split(" ")
    size = len(words) // count
    passages = [" ".join(words[i * size : (i + 1) * size]) for i in range(count)]
    messages = ([{"role": "user", "content": f"{ask}\n\n{passage}"}] for passage in passages)
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


def measure(model: str, sizes: Sizes) -> dict[str, float]:
    """All figures of this module for a model."""
    plain = LLM(model, prefix_cache=False)
    tokenizer = plain.engine.model.tokenizer
    copied = prompts(tokenizer, sizes.requests, "Write this text again, word for word:")
    asked = prompts(tokenizer, sizes.requests, "Summarise this text:")
    alone = [_outputs(plain, [prompt], sizes.new_tokens)[0] for prompt in copied]
    together = _outputs(plain, asked, sizes.new_tokens)
    plain.close()
    return (
        _speculation(model, copied, alone, sizes)
        | _prefixes(model, asked, sizes)
        | _preemption(model, asked, together, sizes)
    )


def _speculation(model: str, asked: Outputs, expected: Outputs, sizes: Sizes) -> dict[str, float]:
    """One request after the other, with n-gram drafts: texts that repeat their prompts."""
    with LLM(model, prefix_cache=False, speculation="ngram") as llm:
        found = [_outputs(llm, [prompt], sizes.new_tokens)[0] for prompt in asked]
        speculation = llm.engine.speculation
        assert speculation is not None
        counts = speculation.counts
    return {
        "ngram_acceptance": counts.accepted_tokens / max(counts.draft_tokens, 1),
        "ngram_accepted_share": counts.accepted_tokens / sum(map(len, found)),
        "ngram_tokens_equal": _equal(found, expected),
    }


def _prefixes(model: str, asked: Outputs, sizes: Sizes) -> dict[str, float]:
    """The same requests a second time: all but the last tokens of each prompt should be found."""
    with LLM(model) as llm:
        first = _outputs(llm, asked, sizes.new_tokens)
        before = llm.engine.report()
        second = _outputs(llm, asked, sizes.new_tokens)
        after = llm.engine.report()
    return {
        "prefix_hit_share": (after.hit_tokens - before.hit_tokens) / (after.queried_tokens - before.queried_tokens),
        "prefix_tokens_equal": _equal(second, first),
    }


def _preemption(model: str, asked: Outputs, expected: Outputs, sizes: Sizes) -> dict[str, float]:
    """All requests at once, with memory for a part of their tokens."""
    with LLM(model, prefix_cache=False) as llm:
        report = llm.engine.report()
    tokens = int(PRESSED_SHARE * sum(len(prompt) + sizes.new_tokens for prompt in asked))
    pool = report.anchor_bytes + sum(g.block_bytes * (tokens // g.block_tokens + 1) for g in report.groups)
    most = max(map(len, asked)) + sizes.new_tokens
    figures = {}
    for way in ("swap", "recompute"):
        with LLM(model, prefix_cache=False, preemption=way, max_model_len=most, kv_memory_bytes=pool) as llm:
            found = _outputs(llm, asked, sizes.new_tokens)
            figures[f"preempted_by_{way}"] = float(llm.engine.scheduler.begun.num_preempted[way])
        figures[f"{way}_tokens_equal"] = _equal(found, expected)
    return figures


def _outputs(llm: LLM, asked: Sequence[list[int]], new_tokens: int) -> Outputs:
    params = SamplingParams(max_tokens=new_tokens, temperature=0)
    return [completion.token_ids for completion in llm.generate(list(asked), params)]


def _equal(found: Outputs, expected: Outputs) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)
