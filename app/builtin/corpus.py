"""Training corpus of the built-in model, generated from a seed, and facts about Folio.

A *turn* is one question with its answer, a *conversation* a list of turns. The answer follows from the question or from
an earlier turn, so accuracy is exact match.
"""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

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


class Turn(NamedTuple):
    """One question and its only right answer."""

    question: str
    answer: str


def is_held_out(*operands: int) -> bool:
    """True if an arithmetic problem is reserved for the evaluation, by a hash that is equal in every process."""
    return zlib.crc32(repr(operands).encode()) % 100 < HELD_OUT_PERCENT


def facts_turn(rng: random.Random) -> Turn:
    questions, answer = rng.choice(FACTS)
    return Turn(rng.choice(questions), answer)


def arithmetic_turn(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Addition or subtraction of numbers below 100 whose result is not negative."""
    while True:
        left, right, plus = rng.randrange(100), rng.randrange(100), rng.random() < 0.5
        if (plus or left >= right) and is_held_out(left, right, int(plus)) == held_out:
            break
    if plus:
        question = rng.choice(("What is {} plus {}?", "What is {} + {}?", "Add {} and {}.")).format(left, right)
        return Turn(question, f"The answer is {left + right}.")
    question = rng.choice(("What is {} minus {}?", "What is {} - {}?")).format(left, right)
    return Turn(question, f"The answer is {left - right}.")


def sort_turn(rng: random.Random) -> Turn:
    numbers = rng.sample(range(100), rng.randint(2, 10))
    unsorted, ordered = (" ".join(map(str, row)) for row in (numbers, sorted(numbers)))
    return Turn(f"Sort these numbers: {unsorted}", f"Sorted: {ordered}")


def reverse_turn(rng: random.Random) -> Turn:
    words = rng.sample(WORDS, rng.randint(2, 10))
    return Turn(f"Reverse: {' '.join(words)}", f"Reversed: {' '.join(reversed(words))}")


def copy_turn(rng: random.Random, num_items: int) -> Turn:
    """Repeat a list of distinct items; up to 900 numbers and 40 words."""
    items = rng.sample([str(n) for n in ROOMS] + WORDS, num_items)
    return Turn(f"Repeat: {' '.join(items)}", f"Repeated: {' '.join(items)}")


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
        return Turn(question, f"The key of room {room} is {key}.")

    def list_turn(self) -> Turn:
        """Several look-ups in one answer."""
        rooms = self._rng.sample(list(self._keys), self._rng.randint(1, min(12, len(self._keys))))
        answer = ", ".join(f"room {room} is {self._keys[room]}" for room in rooms)
        return Turn(f"List the keys of rooms {' '.join(map(str, rooms))}", f"The key of {answer}.")


SHORT_TURNS = (facts_turn, arithmetic_turn, arithmetic_turn, sort_turn, reverse_turn)


def look_up_conversation(rng: random.Random, num_rooms: int, num_questions: int) -> list[Turn]:
    """The text and a first question in one message, then further questions."""
    rooms = Rooms(rng, num_rooms)
    first, *others = (rooms.turn() if i == 0 or rng.random() < 0.3 else rooms.list_turn() for i in range(num_questions))
    return [Turn(f"{rooms.text()} {first.question}", first.answer), *others]


def short_conversation(rng: random.Random, num_questions: int) -> list[Turn]:
    turns = []
    for _ in range(num_questions):
        make = rng.choice((*SHORT_TURNS, None))
        turns.append(copy_turn(rng, rng.randint(2, 20)) if make is None else make(rng))
    return turns


FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Good morning"), "Hello! Ask me about Folio, or give me a small task."),
    (
        ("Who are you?", "What are you?", "Introduce yourself."),
        "I am the built-in model of Folio, a very small model made to test a server.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I answer questions about Folio, add, subtract, sort, reverse, repeat, and look up keys of rooms.",
    ),
    (("Thanks", "Thank you", "Thank you!"), "You are welcome."),
    (("Goodbye", "Bye", "Bye!"), "Goodbye!"),
    (
        ("What is Folio?", "Tell me about Folio.", "what is folio?"),
        "Folio is a server for language models on Ray Serve that keeps its KV cache in mapped virtual memory.",
    ),
    (
        ("What is a block?", "Explain a block.", "What does block mean?"),
        "A block holds the keys and values of a few consecutive tokens. It is what sequences own and share.",
    ),
    (
        ("What is a page?", "Explain a page.", "What does page mean?"),
        "A page is a physical granule of memory. It is what gets mapped and unmapped.",
    ),
    (
        ("What is a block table?", "Explain the block table."),
        "A block table says which physical blocks a sequence owns, in order.",
    ),
    (
        ("What is a region?", "Explain a region."),
        "A region is one contiguous range of virtual addresses that holds the blocks of one sequence in order.",
    ),
    (
        ("What is PagedAttention?", "Explain PagedAttention."),
        "PagedAttention reads keys and values through a block table, so that memory need not be contiguous.",
    ),
    (
        ("What is vAttention?", "Explain vAttention."),
        "vAttention lets the MMU make the KV cache contiguous, and maps physical pages on demand.",
    ),
    (
        ("What is the KV cache?", "What is a KV cache?", "Explain the KV cache."),
        "The KV cache keeps the keys and values of all tokens so far, so that they are computed only once.",
    ),
    (("What is prefill?", "Explain prefill."), "Prefill computes the prompt, many tokens at once."),
    (("What is decode?", "Explain decode."), "Decode computes one new token for each running sequence in a step."),
    (
        ("What is a step?", "Explain a step."),
        "A step is one iteration of the engine: it schedules, maps, computes and samples.",
    ),
    (
        ("What is continuous batching?", "Explain continuous batching."),
        "Continuous batching lets sequences join and leave the batch at every step.",
    ),
    (
        ("What is chunked prefill?", "Explain chunked prefill."),
        "Chunked prefill cuts long prompts into pieces that share a step with decodes.",
    ),
    (
        ("What is a prefix cache?", "Explain the prefix cache."),
        "A prefix cache keeps blocks of earlier prompts, so that a prompt that begins alike starts later.",
    ),
    (
        ("What is copy-on-write?", "Explain copy-on-write."),
        "With copy-on-write, sequences share a block until one of them writes to it.",
    ),
    (("What is TTFT?", "Explain TTFT."), "TTFT is the time from a request to its first token."),
    (("What is TPOT?", "Explain TPOT."), "TPOT is the time per output token after the first."),
    (
        ("What is a replica?", "Explain a replica."),
        "A replica is one copy of the engine; more replicas serve more requests.",
    ),
    (
        ("What is the mapper?", "Explain the mapper."),
        "The mapper is the part that maps pages into regions before a step needs them.",
    ),
    (
        ("What is preemption?", "Explain preemption."),
        "Preemption takes the blocks of the latest request away, by swap or by recompute, and resumes it later.",
    ),
    (
        ("What is tensor parallelism?", "Explain tensor parallelism."),
        "Tensor parallelism splits the weights of each layer over several devices.",
    ),
    (
        ("How do I start Folio?", "How do I start the server?", "How do I run Folio?"),
        "Type make serve and send a request to the address it prints.",
    ),
    (("How do I test Folio?", "How do I run the tests?"), "Type make test."),
    (
        ("Which API does Folio speak?", "What API does Folio have?"),
        "Folio speaks the OpenAI API: models, completions and chat completions.",
    ),
    (
        ("Does Folio need a GPU?", "Can Folio run without a GPU?"),
        "No. Folio also runs on a CPU, with the same memory manager.",
    ),
    (
        ("How do I serve another model?", "How do I change the model?"),
        "Write its name or its folder after model in serve_config.yaml.",
    ),
    (("What license does Folio have?", "Is Folio free?"), "Folio is free software under the Apache License 2.0."),
    (
        ("Why does Folio map memory?", "Why virtual memory?"),
        "Because mapped pages look contiguous to any kernel, and unmapped pages can be given back.",
    ),
)
