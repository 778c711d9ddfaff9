"""Training corpus of the built-in model, generated from a seed.

A *turn* is one question with its answer, a *conversation* a list of turns. The answer follows from the question or from
an earlier turn, so accuracy is exact match. Openings and facts about Folio are in `openings.py`.
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any, NamedTuple

from tools.builtin_model import openings
from tools.builtin_model.subjects import CITIES, NAMES, NOUNS, VERBS

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
    """One question and its only right answer.

    Attributes:
        given: spans of characters of the answer that are not to be learned: a schema dictates them.
        system: a system message before the question, if it is the first of its conversation.
    """

    question: str
    answer: str
    given: tuple[tuple[int, int], ...] = ()
    system: str = ""


def is_held_out(*operands: int) -> bool:
    """True if an arithmetic problem is reserved for the evaluation, by a hash that is equal in every process."""
    return zlib.crc32(repr(operands).encode()) % 100 < HELD_OUT_PERCENT


def opening_turn(rng: random.Random) -> Turn:
    """A greeting, a fact about Folio, a question that the toy cannot answer, and so on."""
    share = rng.random()
    if share < 0.3:
        intent = "unknown"
    elif share < 0.8:
        intent = rng.choice(_SMALL_TALK)
    else:
        intent = rng.choice(_FACTS)
    return Turn(openings.question(rng, intent), openings.answer_to(intent))


_SMALL_TALK = (*(name for name in openings.ANSWERS if name != "unknown"), "identity", "help", "languages")
_FACTS = (*openings.CONCEPTS, *openings.MATTERS, *["folio"] * 5, "start", "other_model")

_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """A number from 0 to 99 in English words."""
    if number < 20:
        return _UNITS[number]
    tens = _TENS[number // 10 - 2]
    return f"{tens}-{_UNITS[number % 10]}" if number % 10 else tens


_SUMS = (
    "{}+{}|{} + {}|{}+{}=|{} + {} =|{}+{}=?|{} + {} = ?|{}+{}?|{} + {}?|{} plus {}|{} and {} together|{} plus {} is|what is {} and {}|"
    "what is {}+{}|what is {} + {}|what is {} plus {}|what's {}+{}|what's {} + {}|what's {} plus {}|how much is {}+{}|"
    "how much is {} + {}|how much is {} plus {}|add {} and {}|add {} to {}|the sum of {} and {}|what is the sum of {} and {}|"
    "calculate {}+{}|calculate {} + {}|compute {} + {}|can you add {} and {}|what do {} and {} make|what does {} + {} equal|"
    "sum {} and {}|{} plus {} equals|{} plus {} equals what|tell me {} + {}|solve {} + {}|what do you get if you add {} and {}|"
    "{} added to {}|what is {} added to {}|what does {} plus {} make|find {} + {}|how much are {} and {}|add up {} and {}|work out {} + {}"
).split("|")
_DIFFERENCES = (
    "{}-{}|{} - {}|{}-{}=|{} - {} =|{}-{}=?|{} - {} = ?|{}-{}?|{} - {}?|{} minus {}|{} less {}|{} minus {} is|"
    "what is {}-{}|what is {} - {}|what is {} minus {}|what's {}-{}|what's {} - {}|what's {} minus {}|how much is {}-{}|"
    "how much is {} - {}|how much is {} minus {}|subtract {1} from {0}|take {1} from {0}|take {1} away from {0}|{} take away {}|"
    "calculate {}-{}|calculate {} - {}|compute {} - {}|can you subtract {1} from {0}|what is {1} less than {0}|what does {} - {} equal|"
    "the difference of {} and {}|what is the difference between {} and {}|{} minus {} equals|tell me {} - {}|solve {} - {}|"
    "remove {1} from {0}|what is {} take away {}|what is left if you take {1} from {0}|find {} - {}|what does {} minus {} make|work out {} - {}|{1} subtracted from {0}"
).split("|")


def arithmetic_turn(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Addition or subtraction of numbers below 100 whose result is not negative, in digits or in words."""
    while True:
        bound = 100 if rng.random() < 0.85 else 13
        left, right, plus = rng.randrange(bound), rng.randrange(bound), rng.random() < 0.5
        pattern = rng.choice(_SUMS if plus else _DIFFERENCES)
        first, second = (right, left) if pattern in _REVERSED else (left, right)
        if (plus or left >= right) and is_held_out(first, second, int(plus)) == held_out:
            break
    words = (
        not any(sign in pattern for sign in "+=")
        and " - " not in pattern
        and "}-{" not in pattern
        and rng.random() < 0.35
    )
    operands = (in_words(left), in_words(right)) if words else (left, right)
    question = openings.disguise(rng, pattern.format(*operands)) if rng.random() < 0.4 else pattern.format(*operands)
    if not all(str(n) in question for n in (left, right)) and not words:
        question = pattern.format(*operands)  # a slip of the finger changed a number
    if rng.random() < 0.5:
        question = question[:1].upper() + question[1:]
        question += "?" if question.startswith(("Wh", "How", "Can")) and not question.endswith("?") else ""
    result = first + second if plus else first - second
    return Turn(question, f"{first} {'+' if plus else '-'} {second} = {result}.")


_REVERSED = ("add {} to {}", "{} added to {}", "what is {} added to {}")


def sort_turn(rng: random.Random) -> Turn:
    numbers = rng.sample(range(100), rng.randint(2, 10))
    unsorted, ordered = (" ".join(map(str, row)) for row in (numbers, sorted(numbers)))
    ask = rng.choice(
        ("Sort these numbers:", "Sort these numbers:", "Sort:", "sort", "Please sort", "Sort the numbers", "sort:")
    )
    return Turn(f"{ask} {unsorted}", f"Sorted: {ordered}")


def reverse_turn(rng: random.Random) -> Turn:
    words = rng.sample(WORDS, rng.randint(2, 10))
    ask = rng.choice(
        ("Reverse:", "Reverse:", "reverse", "Reverse the words", "Please reverse", "reverse:", "Reverse these words:")
    )
    return Turn(f"{ask} {' '.join(words)}", f"Reversed: {' '.join(reversed(words))}")


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


_COLORS = "red blue green yellow black white brown orange purple pink gray gold".split()
_JOBS = "teacher doctor nurse farmer judge lawyer singer writer painter driver cook baker soldier".split()
# What is told of a person or a thing: its values, and their unit.
_RELATIONS: dict[str, tuple[Any, str]] = {
    "weight": (range(2, 200), " kg"),
    "age": (range(1, 100), " years"),
    "height": (range(50, 220), " cm"),
    "price": (range(1, 1000), " euros"),
    "length": (range(2, 500), " m"),
    "distance": (range(1, 500), " km"),
    "temperature": (range(300), " degrees"),
    "speed": (range(5, 300), " km"),
    "seat": (range(1, 300), ""),
    "phone": (range(100, 1000), ""),
    "color": (_COLORS, ""),
    "city": (CITIES, ""),
    "job": (_JOBS, ""),
}
_ASKS = "What is the {r} of {n}|what is the {r} of {n}|Tell me the {r} of {n}|The {r} of {n}|What's the {r} of {n}|Which is the {r} of {n}|Give me the {r} of {n}".split(
    "|"
)


def _subject(rng: random.Random) -> str:
    """A person, or "the" and a thing."""
    word = openings.pseudo_word(rng)
    if rng.random() < 0.6:
        return word.capitalize() if rng.random() < 0.2 else rng.choice(NAMES)
    return f"the {word.lower() if rng.random() < 0.2 else rng.choice(NOUNS)}"


class Story:
    """Look-up task with names and units: "The weight of Alice is 62 kg. ...", and questions about it."""

    def __init__(self, rng: random.Random, num_facts: int, num_subjects: int | None = None) -> None:
        self._rng = rng
        subjects = [_subject(rng) for _ in range(num_subjects or rng.randint(1, num_facts))]
        pairs = {(rng.choice(subjects), rng.choice(list(_RELATIONS))) for _ in range(num_facts)}
        self._facts = {pair: rng.choice(_RELATIONS[pair[1]][0]) for pair in sorted(pairs, key=lambda _: rng.random())}

    def text(self) -> str:
        return " ".join(self._sentence(name, relation) for name, relation in self._facts)

    def _sentence(self, name: str, relation: str) -> str:
        return f"The {relation} of {name} is {self._facts[name, relation]}{_RELATIONS[relation][1]}."

    def turn(self) -> Turn:
        name, relation = self._rng.choice(list(self._facts))
        question = self._rng.choice(_ASKS).format(n=name, r=relation)
        end = "" if self._rng.random() < 0.15 else "." if question.startswith(("Tell", "Give")) else "?"
        return Turn(question + end, self._sentence(name, relation))

    def json_turn(self) -> Turn:
        """What is told of a person or thing, as a JSON object."""
        rng = self._rng
        name = rng.choice(list(self._facts))[0]
        known = {relation: value for (owner, relation), value in self._facts.items() if owner == name}
        keys = list(known)
        rng.shuffle(keys)
        fields: dict[str, Any] = {"name": name.removeprefix("the ")} if rng.random() < 0.5 else {}
        fields |= {key: known[key] for key in keys[: rng.randint(1, 4)]}
        ask = rng.choice(
            (
                "Write JSON with {k} of {n}.",
                "Give me JSON with {k} of {n}.",
                "Answer in JSON: {k} of {n}",
                "JSON with {k} of {n}",
                "Return a JSON object with {k} of {n}.",
                "As JSON: {k} of {n}",
            )
        )
        return Turn(ask.format(n=name, k=", ".join(fields)), json.dumps(fields))


def story_conversation(rng: random.Random, num_facts: int, num_questions: int) -> list[Turn]:
    """The text and a first question in one message, then further questions."""
    story = Story(rng, num_facts)
    first, *others = (story.json_turn() if rng.random() < 0.25 else story.turn() for _ in range(num_questions))
    joint = rng.choice((" ", "\n", " ", "\n\n"))
    return [Turn(f"{story.text()}{joint}{first.question}", first.answer), *others]


_NAME_OF_KEY = ("name", "first_name", "person", "user", "author", "title")
_MORE_KEYS = "answer result value text reply message items list color size kind type id note summary label tags score status reason city country street email date".split()


def schema_turn(rng: random.Random) -> Turn:
    """Any question that a schema makes be answered in JSON: what the text does not tell is short, and the object ends."""
    told: dict[str, Any] = {}
    question = opening_turn(rng).question
    if rng.random() < 0.7:
        name = _subject(rng).removeprefix("the ")
        sentences = []
        for relation in rng.sample(list(_RELATIONS), rng.randint(1, 3)):
            values, unit = _RELATIONS[relation]
            told[relation] = rng.choice(values)
            sentences.append(f"The {relation} of {name} is {told[relation]}{unit}.")
        question = " ".join(sentences)
        question = rng.choice(
            (
                "{}",
                "{} As JSON.",
                "Extract: {}",
                "{} Answer in JSON.",
                "Who is it? {}",
                "{} Who is {n}?",
                "{} Tell me about {n}.",
            )
        ).format(question, n=name)
        told[rng.choice(_NAME_OF_KEY[:4])] = name
    fields = dict(told)
    for _ in range(rng.randint(0 if told else 1, 3)):
        key = rng.choice(_MORE_KEYS) if rng.random() < 0.6 else openings.pseudo_word(rng).lower()
        fields.setdefault(key, rng.choice(("unknown", "unknown", "unknown", 0, 0, False, [])))
    keys = list(fields)
    rng.shuffle(keys)
    answer, given = "{", []
    for i, key in enumerate(keys):
        begin = len(answer) - 1 if i == 0 else len(answer)
        answer += f'{", " if i else ""}"{key}": '
        if isinstance(fields[key], str):
            answer += '"'
        given.append((begin, len(answer)))
        answer += json.dumps(fields[key]).removeprefix('"')
    return Turn(question, answer + "}", tuple(given))


def memory_conversation(rng: random.Random) -> list[Turn]:
    """What people tell of themselves, and ask for later."""
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(5, 99)
    color = rng.choice(_COLORS)
    told = [
        (("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}", "I'm called {}.", "Hi, my name is {}!"), name, f"Nice to meet you, {name}.",
         ("What is my name?", "Who am I?", "Do you remember my name?", "what's my name", "What am I called?"), f"Your name is {name}."),
        (("I live in {}.", "I am from {}.", "I come from {}", "My city is {}."), city, f"I will remember that you live in {city}.",
         ("Where do I live?", "Where am I from?", "where do i live", "Do you know where I live?"), f"You live in {city}."),
        (("I am {} years old.", "My age is {}.", "I'm {} years old"), age, f"I will remember that you are {age} years old.",
         ("How old am I?", "What is my age?", "how old am i"), f"You are {age} years old."),
        (("My favorite color is {}.", "I like {}.", "I love the color {}."), color, f"I will remember that you like {color}.",
         ("What is my favorite color?", "Which color do I like?", "what color do i like"), f"Your favorite color is {color}."),
    ]  # fmt: skip
    chosen = rng.sample(told, rng.randint(1, 3))
    turns = [Turn(rng.choice(say).format(value), reply) for say, value, reply, _, _ in chosen]
    for _ in range(rng.randint(0, 2)):
        turns.insert(rng.randint(1, len(turns)), rng.choice((opening_turn, arithmetic_turn))(rng))
    rng.shuffle(chosen)
    return turns + [Turn(rng.choice(ask), answer) for _, _, _, ask, answer in chosen]


def short_copy_turn(rng: random.Random) -> Turn:
    """Repeat a few words of any kind."""
    words = [
        rng.choice((*NOUNS, *VERBS)) if rng.random() < 0.7 else openings.pseudo_word(rng)
        for _ in range(rng.randint(1, 8))
    ]
    text = " ".join(words)
    ask = rng.choice(
        ("Repeat: {}", "Repeat after me: {}", "repeat {}", "Say: {}", 'Say "{}"', "Repeat {}", "Echo {}", "echo: {}")
    )
    return Turn(ask.format(text), f"Repeated: {text}")


SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant", "You are a chatbot.", "Be brief.", "Answer briefly.", "You are Folio.", "You are a friendly assistant.",
    "Answer in one sentence.", "You are an expert.", "Be kind and helpful.", "You are a helpful, honest assistant.", "Help the user.", "Keep answers short.", "Answer the questions of the user.",
)  # fmt: skip


def short_conversation(rng: random.Random, num_questions: int) -> list[Turn]:
    """Turns of every short task."""
    turns: list[Turn] = []
    while len(turns) < num_questions:
        share = rng.random()
        if share < 0.64:
            turns.append(opening_turn(rng))
        elif share < 0.68:
            turns.append(arithmetic_turn(rng))
        elif share < 0.74:
            turns.append(sort_turn(rng))
        elif share < 0.77:
            turns.append(reverse_turn(rng))
        elif share < 0.80:
            turns.append(copy_turn(rng, rng.randint(2, 20)) if rng.random() < 0.5 else short_copy_turn(rng))
        elif share < 0.86:
            turns.append(schema_turn(rng))
        elif share < 0.90:
            turns += memory_conversation(rng)
        else:
            turns += story_conversation(rng, rng.randint(1, 8), rng.randint(2, 6))
    if rng.random() < 0.2:
        turns[0] = turns[0]._replace(system=rng.choice(SYSTEMS))
    return turns


def look_up_conversation(rng: random.Random, num_rooms: int, num_questions: int) -> list[Turn]:
    """The text and a first question in one message, then further questions."""
    rooms = Rooms(rng, num_rooms)
    first, *others = (rooms.turn() if i == 0 or rng.random() < 0.3 else rooms.list_turn() for i in range(num_questions))
    return [Turn(f"{rooms.text()} {first.question}", first.answer), *others]
