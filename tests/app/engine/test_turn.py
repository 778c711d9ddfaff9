"""What requests tell the prefix cache: their kind of turn, and how long to keep their prefix."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.engine import LLM
from folio.app.engine.request.request import Sequence
from folio.app.engine.request.turn import Turn
from folio.app.engine.sampling.params import SamplingParams

HERMES = Turn("tools", ("<tool_call>",))
LLAMA = Turn("tools", ("<|python_tag|>",), "{[")


@pytest.mark.parametrize(
    ("turn", "text", "kind"),
    [
        (HERMES, 'I look it up. <tool_call>\n{"name": "f"}', "calls"),
        (HERMES, "The answer is 4.", "tools"),
        (LLAMA, '  {"name": "f", "parameters": {}}', "calls"),
        (LLAMA, "A set: {1, 2}", "tools"),
        (LLAMA, "", "tools"),
        (Turn("tools"), "{}", "tools"),
    ],
)
def test_a_turn_with_a_call_is_told_from_an_answer(turn: Turn, text: str, kind: str) -> None:
    assert turn.kind_of(text) == kind


def ended(llm: LLM, prompt: str, max_tokens: int = 40, **options: Any) -> Sequence:
    """The request's sequence, after its end."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    assert engine.model.tokenizer is not None
    engine.submit("r", engine.model.tokenizer.encode(prompt), params, **options)
    [sequence] = engine.requests["r"].sequences
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
    return sequence


def test_the_output_decides_whether_the_turn_was_a_call() -> None:
    with LLM("builtin", kv_memory_bytes=16 << 20) as llm:
        prompt = "The key of room 417 is 93. The key of room 417 is"
        for marker, kind in (("93", "calls"), ("<tool_call>", "tools")):
            assert ended(llm, prompt, turn=Turn("tools", (marker,))).use.kind == kind
        assert ended(llm, prompt, turn=Turn("chat")).use.kind == "chat"
        assert ended(llm, prompt).use.kind == "completion"


def test_the_setting_bounds_the_time_and_what_is_kept_is_evictable() -> None:
    """The quota holds for whole prefixes, and no request fails or waits because of it."""
    with LLM("builtin", kv_memory_bytes=4 << 20, max_cache_ttl_s=5.0, retain_quota=0.5) as llm:
        words = " ".join(f"word {i}" for i in range(60))
        assert ended(llm, words, cache_ttl_s=3.0).use.retain_s == 3
        assert ended(llm, words, cache_ttl_s=86_400.0).use.retain_s == 5
        assert ended(llm, words, cache_ttl_s=0.0).use.retain_s == 0
        for i in range(30):
            ended(llm, f"{i} {words}", max_tokens=2, cache_ttl_s=5.0, turn=Turn("chat"))
        llm.engine.check_integrity()
    with LLM("builtin", kv_memory_bytes=4 << 20, max_cache_ttl_s=0.0) as llm:
        assert ended(llm, words, cache_ttl_s=60.0).use.retain_s == 0
