"""The built-in model: its corpus is right, and its checkpoint answers as the README states."""

from __future__ import annotations

import random

import pytest

from app.builtin import BUILTIN_FOLDER, corpus
from app.engine import LLM, SamplingParams


def test_answers_follow_from_questions() -> None:
    rng = random.Random(0)
    for turn in corpus.look_up_conversation(rng, 30, 20):
        for piece in turn.answer.removeprefix("The key of ").rstrip(".").split(", "):
            room, key = piece.removeprefix("room ").split(" is ")
            assert room in turn.question
            assert key.isdigit()
    for _ in range(200):
        turn = corpus.arithmetic_turn(rng)
        left, right = (int(word) for word in turn.question.rstrip("?.").split() if word.isdigit())
        expected = left - right if ("minus" in turn.question or "-" in turn.question) else left + right
        assert turn.answer == f"The answer is {expected}."


def test_held_out_problems_are_never_trained_on() -> None:
    def problem(turn: corpus.Turn) -> tuple[str, ...]:
        """Operands and sum or difference: the wording does not matter."""
        return (*(word for word in turn.question.rstrip("?.").split() if word.isdigit()), turn.answer)

    rng = random.Random(1)
    trained = {problem(corpus.arithmetic_turn(rng)) for _ in range(5000)}
    held_out = {problem(corpus.arithmetic_turn(rng, held_out=True)) for _ in range(500)}
    assert len(held_out) > 300
    assert not trained & held_out


def test_the_checkpoint_is_small() -> None:
    assert sum(f.stat().st_size for f in BUILTIN_FOLDER.iterdir()) < 12 << 20


@pytest.mark.parametrize("num_rooms", [10, 50, 200])
def test_look_up_needs_the_whole_context(num_rooms: int) -> None:
    """16 requests at once over up to 1,900 tokens of context, in chunks of 256: at least 14 right answers."""
    rng = random.Random(num_rooms)
    turns = [corpus.look_up_conversation(rng, num_rooms, 1)[0] for _ in range(16)]
    prompts: list[str | list[int]] = [f"<|user|>{turn.question}<|end|><|assistant|>" for turn in turns]
    with LLM("builtin", max_num_batched_tokens=256, kv_memory_bytes=256 << 20) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0))
        llm.engine.check_integrity()
    right = sum(c.text == turn.answer for c, turn in zip(completions, turns, strict=True))
    assert right >= 14
