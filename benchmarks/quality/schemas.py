"""A hundred JSON schemas, and how many outputs of a model are valid under theirs.

Strings, arrays and numbers are bounded, so that the longest valid output ends before the token limit: an output that
does not end is not valid.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from folio.app.engine import LLM, SamplingParams, Structure

SEED, TEMPERATURE, MAX_TOKENS = 7, 0.7, 1024
TOPICS = ("a book", "a city", "an order", "a recipe", "a flight", "a bicycle", "a film", "a hotel", "a song", "a tree")
NAMES = (
    *("name", "title", "kind", "size", "price", "year", "count", "rating", "owner", "colour", "place", "notes"),
    *("items", "parts", "tags", "code", "weight", "is_new", "contact", "address", "language", "level", "steps", "unit"),
)
WORDS = ("red", "green", "blue", "small", "large", "new", "used", "daily", "weekly", "north", "south", "open", "closed")
PATTERNS = (r"^[A-Z]{3}-\d{4}$", r"^\d{4}-\d{2}-\d{2}$", r"^#[0-9a-f]{6}$", r"^[a-z]{2,12}$", r"^\+\d{6,12}$")
Schema = dict[str, Any]


class _Maker:
    """Makes schemas of all kinds, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}
        self._leaves: Sequence[Callable[[], Schema]] = (
            *(self._integer, self._number, self._string, self._pattern, self._enum, self._constant),
            *(self._boolean, self._optional),
        )

    def schema(self) -> Schema:
        self._definitions = {}
        made = self._object(2)
        return made | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        nested = (self._object, self._array, self._reference)
        if depth and self._random.random() < 0.4:
            return self._random.choice(nested)(depth - 1)
        return self._random.choice(self._leaves)()

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(2, 5 if depth else 3))
        required = names[: self._random.randint(1, len(names))]
        properties = {name: self._any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(1, 3)
        return {"type": "array", "items": self._any(min(depth, 1)), "minItems": least, "maxItems": most}

    def _reference(self, depth: int) -> Schema:
        name = self._random.choice(("Person", "Place", "Amount"))
        if name not in self._definitions:
            self._definitions[name] = self._object(0)
        return {"$ref": f"#/$defs/{name}"}

    def _integer(self) -> Schema:
        least = self._random.choice((-50, 0, 1, 1900))
        return {"type": "integer", "minimum": least, "maximum": least + self._random.choice((5, 100, 1000))}

    def _number(self) -> Schema:
        return {"type": "number", "minimum": 0, "maximum": self._random.choice((1, 10, 99.5)), "multipleOf": 0.25}

    def _string(self) -> Schema:
        return {"type": "string", "minLength": self._random.randint(0, 3), "maxLength": self._random.randint(8, 40)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._random.choice(PATTERNS)}

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(WORDS, self._random.randint(2, 5))}

    def _constant(self) -> Schema:
        return {"const": self._random.choice((*WORDS[:3], 42, True, None))}

    def _boolean(self) -> Schema:
        return {"type": "boolean"}

    def _optional(self) -> Schema:
        return {"anyOf": [self._string(), {"type": "null"}]}


def make_schemas(count: int) -> list[Schema]:
    maker = _Maker(SEED)
    return [maker.schema() for _ in range(count)]


def ask(llm: LLM, schemas: Sequence[Schema]) -> list[str]:
    """An output for each schema, sampled; that of an output which did not end is cut."""
    tokenizer: Any = llm.engine.model.tokenizer
    prompts: list[str | list[int]] = []
    params = []
    for i, schema in enumerate(schemas):
        spec = json.dumps(schema)
        content = f"Describe {TOPICS[i % len(TOPICS)]} in JSON that fits this schema: {spec}"
        message = [{"role": "user", "content": content}]
        prompts.append(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        structure = Structure("json", spec)
        params.append(SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=i, structure=structure))
    return [completion.text for completion in llm.generate(prompts, params)]


def is_valid(output: str, schema: Schema) -> bool:
    jsonschema: Any = importlib.import_module("jsonschema")
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(output)))
    except json.JSONDecodeError:
        return False
