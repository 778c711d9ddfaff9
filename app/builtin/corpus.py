"""Training corpus of the built-in model, generated from a seed.

A *turn* is one question with its answer, a *conversation* a list of turns. The answer follows from the question or from
an earlier turn, so accuracy is exact match.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from app.builtin.facts import FACTS

_WORDS = (
    "red blue green sun moon star tree leaf rain snow wind fire stone sand river lake hill road door lamp "
    "book page bird fish bear wolf fox deer bread salt milk tea gold iron wood glass rope ship wheel drum"
)
WORDS = _WORDS.split()
FILLERS = (
    "The corridor is quiet.",
    "Someone opened a window.",
    "It is raining in the yard.",
    "The lamp in the hall is on.",
    "A clock ticks on the wall.",
    "The stairs were painted green.",
)
ROOMS = range(100, 1000)
HELD_OUT_PERCENT = 10


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its only right answer; `task` groups the accuracy report."""

    task: str
    question: str
    answer: str


def is_held_out(*operands: int) -> bool:
    """True if an arithmetic problem is reserved for the evaluation, by a hash that is equal in every process."""
    return zlib.crc32(repr(operands).encode()) % 100 < HELD_OUT_PERCENT


def facts_turn(rng: random.Random) -> Turn:
    questions, answer = rng.choice(FACTS)
    return Turn("facts", rng.choice(questions), answer)


def arithmetic_turn(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Addition or subtraction of numbers below 100 whose result is not negative."""
    while True:
        left, right, plus = rng.randrange(100), rng.randrange(100), rng.random() < 0.5
        if (plus or left >= right) and is_held_out(left, right, int(plus)) == held_out:
            break
    if plus:
        question = rng.choice(("What is {} plus {}?", "What is {} + {}?", "Add {} and {}.")).format(left, right)
        return Turn("arithmetic", question, f"The answer is {left + right}.")
    question = rng.choice(("What is {} minus {}?", "What is {} - {}?")).format(left, right)
    return Turn("arithmetic", question, f"The answer is {left - right}.")


def sort_turn(rng: random.Random) -> Turn:
    numbers = rng.sample(range(100), rng.randint(2, 10))
    unsorted, ordered = (" ".join(map(str, row)) for row in (numbers, sorted(numbers)))
    return Turn("sort", f"Sort these numbers: {unsorted}", f"Sorted: {ordered}")


def reverse_turn(rng: random.Random) -> Turn:
    words = rng.sample(WORDS, rng.randint(2, 10))
    return Turn("reverse", f"Reverse: {' '.join(words)}", f"Reversed: {' '.join(reversed(words))}")


def copy_turn(rng: random.Random, num_items: int) -> Turn:
    """Repeat a list of distinct items; up to 900 numbers and 40 words."""
    items = rng.sample([str(n) for n in ROOMS] + WORDS, num_items)
    return Turn("copy", f"Repeat: {' '.join(items)}", f"Repeated: {' '.join(items)}")


class Rooms:
    """Look-up task: a text about the keys of rooms, and questions about it."""

    def __init__(self, rng: random.Random, num_rooms: int) -> None:
        self._rng = rng
        self._keys = {room: rng.randrange(10, 100) for room in rng.sample(ROOMS, num_rooms)}

    def text(self) -> str:
        sentences = []
        for room, key in self._keys.items():
            if self._rng.random() < 0.04:
                sentences.append(self._rng.choice(FILLERS))
            sentences.append(f"The key of room {room} is {key}.")
        return " ".join(sentences)

    def turn(self) -> Turn:
        room, key = self._rng.choice(list(self._keys.items()))
        question = self._rng.choice(("What is the key of room {}?", "what is the key of room {}?")).format(room)
        return Turn("look-up", question, f"The key of room {room} is {key}.")

    def list_turn(self) -> Turn:
        """Several look-ups in one answer."""
        rooms = self._rng.sample(list(self._keys), self._rng.randint(1, min(12, len(self._keys))))
        answer = ", ".join(f"room {room} is {self._keys[room]}" for room in rooms)
        return Turn("list", f"List the keys of rooms {' '.join(map(str, rooms))}", f"The key of {answer}.")


SHORT_TURNS = (facts_turn, arithmetic_turn, arithmetic_turn, sort_turn, reverse_turn)


def look_up_conversation(rng: random.Random, num_rooms: int, num_questions: int) -> list[Turn]:
    """The text and a first question in one message, then further questions."""
    rooms = Rooms(rng, num_rooms)
    first, *others = (rooms.turn() if i == 0 or rng.random() < 0.3 else rooms.list_turn() for i in range(num_questions))
    return [Turn(first.task, f"{rooms.text()} {first.question}", first.answer), *others]


def short_conversation(rng: random.Random, num_questions: int) -> list[Turn]:
    turns = []
    for _ in range(num_questions):
        make = rng.choice((*SHORT_TURNS, None))
        turns.append(copy_turn(rng, rng.randint(2, 20)) if make is None else make(rng))
    return turns
