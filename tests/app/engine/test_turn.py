"""What requests tell the prefix cache: their kind of turn, and how long to keep their prefix."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.request.request import Sequence
from folio.app.engine.request.turn import Turn
from folio.app.engine.sampling.params import SamplingParams
from tests.app.engine.engines import MakeEngine, steps, tokens_of

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


def ended(engine: Engine, prompt: str, max_tokens: int = 40, **options: Any) -> Sequence:
    """The request's sequence, after its end."""
    tokenizer: Any = engine.model.tokenizer
    engine.submit("r", tokenizer.encode(prompt), SamplingParams(temperature=0, max_tokens=max_tokens), **options)
    [sequence] = engine.requests["r"].sequences
    tokens_of(list(steps(engine)))
    return sequence


def test_the_output_decides_whether_the_turn_was_a_call(make_engine: MakeEngine) -> None:
    engine = make_engine("builtin")
    prompt = "The key of room 417 is 93. The key of room 417 is"
    for marker, kind in (("93", "calls"), ("<tool_call>", "tools")):
        assert ended(engine, prompt, turn=Turn("tools", (marker,))).use.kind == kind
    assert ended(engine, prompt, turn=Turn("chat")).use.kind == "chat"
    assert ended(engine, prompt).use.kind == "completion"


def test_the_setting_bounds_the_time_and_what_is_kept_is_evictable(make_engine: MakeEngine) -> None:
    """The quota holds for whole prefixes, and no request fails or waits because of it."""
    words = " ".join(f"word {i}" for i in range(60))
    engine = make_engine("builtin", kv_memory_bytes=4 << 20, max_cache_ttl_s=5.0, retain_quota=0.5)
    for asked, kept in ((3.0, 3), (86_400.0, 5), (0.0, 0)):
        assert ended(engine, words, cache_ttl_s=asked).use.retain_s == kept
    for i in range(30):
        ended(engine, f"{i} {words}", max_tokens=2, cache_ttl_s=5.0, turn=Turn("chat"))
    engine = make_engine("builtin", kv_memory_bytes=4 << 20, max_cache_ttl_s=0.0)
    assert ended(engine, words, cache_ttl_s=60.0).use.retain_s == 0
