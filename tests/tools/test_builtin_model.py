"""The built-in model: its corpus is right, and its checkpoint answers as the README states."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from folio.app.engine import LLM, SamplingParams
from folio.app.models.builtin import BUILTIN_FOLDER
from tools.builtin_model import corpus, openings
from tools.builtin_model.corpus import Turn

HERE = Path(__file__).parent
# An intent, and a message that was written without looking at the corpus.
OPENINGS = [tuple(line.split("\t")) for line in (HERE / "openings.tsv").read_text().splitlines()]


def answers(turns: list[Turn], max_tokens: int = 48) -> list[str]:
    """Greedy answers of the model, 32 at once."""
    prompts: list[str | list[int]] = [f"<|user|>{turn.question}<|end|><|assistant|>" for turn in turns]
    with LLM("builtin", max_num_batched_tokens=256, max_num_seqs=32, kv_memory_bytes=256 << 20) as llm:
        completions = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0))
        llm.engine.check_integrity()
    return [completion.text for completion in completions]


def num_right(turns: list[Turn]) -> int:
    return sum(text == turn.answer for text, turn in zip(answers(turns), turns, strict=True))


def test_answers_follow_from_questions() -> None:
    rng = random.Random(0)
    for turn in corpus.look_up_conversation(rng, 30, 20):
        for piece in turn.answer.removeprefix("The key of ").rstrip(".").split(", "):
            room, key = piece.removeprefix("room ").split(" is ")
            assert room in turn.question
            assert key.isdigit()
    for _ in range(200):
        left, sign, right, _, result = corpus.arithmetic_turn(rng).answer.rstrip(".").split()
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    for _ in range(200):
        text, *_ = corpus.story_conversation(rng, 4, 1)
        told, asked = text.question, text.answer
        if asked.startswith("{"):
            assert all(str(value) in told for value in json.loads(asked).values())
        else:
            assert asked in told


def test_what_a_schema_dictates_is_not_learned() -> None:
    rng = random.Random(2)
    for _ in range(200):
        turn = corpus.schema_turn(rng)
        fields = json.loads(turn.answer)
        dictated = "".join(turn.answer[first:last] for first, last in turn.given)
        assert all(f'"{key}": ' in dictated for key in fields)
        assert len(turn.given) == len(fields)


@pytest.mark.parametrize(("number", "words"), [(0, "zero"), (13, "thirteen"), (40, "forty"), (42, "forty-two")])
def test_numbers_in_words(number: int, words: str) -> None:
    assert corpus.in_words(number) == words


def test_held_out_problems_are_never_trained_on() -> None:
    rng = random.Random(1)
    trained = {corpus.arithmetic_turn(rng).answer for _ in range(5000)}
    held_out = {corpus.arithmetic_turn(rng, held_out=True).answer for _ in range(500)}
    assert len(held_out) > 300
    assert not trained & held_out


def test_the_held_out_openings_are_in_no_pattern() -> None:
    """Word for word, without case, punctuation and apostrophes."""
    patterns = [line for text in openings.PATTERNS.values() for line in text.strip().splitlines()]
    patterns += [line for text, _ in openings.MATTERS.values() for line in text.strip().splitlines()]
    for called in [*(names for names, _ in openings.CONCEPTS.values()), openings.SUBJECT]:
        patterns += [line.replace("{x}", f"({called})") for line in openings.ABOUT.strip().splitlines()]
    patterns += [line for line in openings.UNKNOWN.strip().splitlines() if "{about}" not in line]
    known = [as_expression(pattern) for pattern in patterns]
    trained_on = {bare(message) for messages in openings.messages().values() for message in messages}
    for _, message in OPENINGS:
        plain = bare(message)
        assert plain not in trained_on, message
        assert not any(expression.fullmatch(plain) for expression in known), message
    assert len(OPENINGS) >= 200


def bare(text: str) -> str:
    return " ".join(re.sub(r"[?!.,:;]+", " ", text.lower().replace("'", "")).split())


def as_expression(pattern: str) -> re.Pattern[str]:
    text = re.sub(r"[?!.,:;]+", " ", pattern.lower().replace("'", ""))
    text = re.sub(r"[+*\\\[\]^$/]", r"\\\g<0>", text)
    text = re.sub(r"\{(\w+)\}", lambda kind: as_words(kind[1]), text)
    return re.compile(re.sub(r" +", " *", f" {text} "))


def as_words(kind: str) -> str:
    words = sorted(openings.KINDS.get(kind, ()), key=len, reverse=True)
    return "(" + "|".join(re.escape(word.lower()) for word in words) + ")" if words else r"\w+"


def test_the_checkpoint_is_small() -> None:
    assert sum(f.stat().st_size for f in BUILTIN_FOLDER.iterdir()) < 12 << 20


@pytest.mark.parametrize("num_rooms", [10, 50, 200])
def test_look_up_needs_the_whole_context(num_rooms: int) -> None:
    """16 requests at once over up to 1,900 tokens of context, in chunks of 256."""
    rng = random.Random(num_rooms)
    assert num_right([corpus.look_up_conversation(rng, num_rooms, 1)[0] for _ in range(16)]) >= 14


@pytest.mark.nightly
def test_openings_are_answered() -> None:
    """Of those that no pattern contains; the README has the share that the checkpoint reaches."""
    turns = [Turn(message, openings.answer_to(intent)) for intent, message in OPENINGS]
    assert num_right(turns) >= 0.82 * len(turns)


@pytest.mark.nightly
def test_sums_that_training_left_out_are_right() -> None:
    rng = random.Random(2)
    turns = [corpus.arithmetic_turn(rng, held_out=True) for _ in range(200)]
    assert num_right(turns) >= 0.9 * len(turns)
