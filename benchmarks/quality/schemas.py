"""A hundred JSON schemas, and how many answers of a model are valid under theirs.

Strings, arrays, nesting and numbers are bounded, so that the longest valid answer ends before the token limit: an
answer that does not end is not valid. Schemas have only keywords that Folio enforces (`docs/guides`, structured
output).
"""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from folio.app.engine import LLM, SamplingParams, Structure

SEED = 7
TOPICS = ("a book", "a city", "an order", "a recipe", "a flight", "a bicycle", "a film", "a hotel", "a song", "a tree")
NAMES = (
    *("name", "title", "kind", "size", "price", "year", "count", "rating", "owner", "colour", "place", "notes"),
    *("items", "parts", "tags", "code", "weight", "is_new", "contact", "address", "language", "level", "steps", "unit"),
    *("größe", "first name", "@id", "x-ref"),
)
WORDS = ("red", "green", "blue", "small", "large", "new", "used", "daily", "weekly", "north", "south", "open", "closed")
PATTERNS = (
    *(r"^[A-Z]{3}-\d{4}$", r"^\d{4}-\d{2}-\d{2}$", r"^#[0-9a-f]{6}$", r"^[a-z]{2,12}$", r"^\+\d{6,12}$"),
    *(
        r"^(Mon|Tues|Wednes)day$",
        r"^\w{1,16}@\w{1,16}\.(org|net)$",
        r"^v\d{1,3}(\.\d{1,3}){2}$",
        r"^[^\s\"]{3,20}$",
        r"^[A-ZÄÖÜ][a-zäöüß]{1,15}$",
    ),
)
FORMATS = ("date-time", "date", "email", "ipv4", "ipv6", "uuid")
TEMPERATURE, MAX_TOKENS = 0.7, 512
Schema = dict[str, Any]


class _Maker:
    """Makes schemas of all kinds, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}
        self._leaves: Sequence[Callable[[], Schema]] = (
            *(self._integer, self._number, self._string, self._pattern, self._format, self._enum, self._constant),
            *(self._boolean, self._optional, self._nullable),
        )
        self._nested: Sequence[Callable[[int], Schema]] = (
            *(self._object, self._array, self._reference, self._tuple, self._map, self._one_of, self._all_of),
            *(self._set, self._chain),
        )

    def schema(self) -> Schema:
        self._definitions = {}
        whole = self._random.choices((self._object, self._array, self._one_of), (8, 1, 1))[0]
        made = whole(2)
        return made | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        if depth and self._random.random() < 0.4:
            return self._random.choice(self._nested)(depth - 1)
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

    def _tuple(self, depth: int) -> Schema:
        items = [self._any(0), self._any(min(depth, 1))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}

    def _set(self, _: int) -> Schema:
        return {"type": "array", "items": self._enum(), "uniqueItems": True, "maxItems": 3}

    def _map(self, depth: int) -> Schema:
        names = {"pattern": "^[a-z]{1,12}$"}
        values = self._any(min(depth, 1))
        return {"type": "object", "propertyNames": names, "additionalProperties": values, "maxProperties": 2}

    def _reference(self, _: int) -> Schema:
        name = self._random.choice(("Person", "Place", "Amount"))
        if name not in self._definitions:
            self._definitions[name] = self._object(0)
        return {"$ref": f"#/$defs/{name}"}

    def _chain(self, _: int) -> Schema:
        """A list of at most three links, whose end is null. A definition of itself would have no longest answer."""
        following: Schema = {"type": "null"}
        for name in ("Third", "Second", "First"):
            self._definitions[name] = _closed({"link": {"const": "next"}, "following": following})
            following = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
        return {"$ref": "#/$defs/First"}

    def _one_of(self, depth: int) -> Schema:
        kinds = self._random.sample(WORDS, 2)
        return {"oneOf": [_closed({"kind": {"const": kind}, "value": self._any(min(depth, 1))}) for kind in kinds]}

    def _all_of(self, _: int) -> Schema:
        one, other = self._random.sample(NAMES, 2)
        properties = {name: self._any(0) for name in (one, other)}
        parts: list[Schema] = [{"required": [one]}, {"required": [other]}]
        return {"type": "object", "properties": properties, "allOf": parts, "additionalProperties": False}

    def _integer(self) -> Schema:
        least = self._random.choice((-50, 0, 1, 1900))
        return {"type": "integer", "minimum": least, "exclusiveMaximum": least + self._random.choice((5, 100, 1000))}

    def _number(self) -> Schema:
        most = self._random.choice((1, 10, 99.5))
        return {"type": "number", self._random.choice(("minimum", "exclusiveMinimum")): -0.5, "maximum": most} | (
            {"multipleOf": 0.25} if self._random.random() < 0.5 else {}
        )

    def _string(self) -> Schema:
        return {"type": "string", "minLength": self._random.randint(0, 3), "maxLength": self._random.randint(8, 40)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._random.choice(PATTERNS)}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._random.choice(FORMATS), "maxLength": 45}

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(WORDS, self._random.randint(2, 5))}

    def _constant(self) -> Schema:
        return {"const": self._random.choice((*WORDS[:3], 42, True, None, [1, "two"], {"a": 0.5}))}

    def _boolean(self) -> Schema:
        return {"type": "boolean"}

    def _optional(self) -> Schema:
        return {"anyOf": [self._string(), {"type": "null"}]}

    def _nullable(self) -> Schema:
        return {"type": ["integer", "null"], "minimum": 0, "maximum": 255}


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def make_schemas(count: int) -> list[Schema]:
    maker = _Maker(SEED)
    return [maker.schema() for _ in range(count)]


def ask(llm: LLM, schemas: Sequence[Schema], num_told: int) -> tuple[list[str], list[str]]:
    """A sampled output for each schema, as by `response_format`, and for the first `num_told` ones an output for the
    prompt alone, which has the schema. One that does not end is cut."""
    from folio.app.api.output.schemas import enforceable  # needs pydantic, which a GPU machine may lack

    tokenizer: Any = llm.engine.model.tokenizer
    prompts: list[str | list[int]] = []
    params = []
    for i, schema in enumerate((*schemas, *schemas[:num_told])):
        seed = i % len(schemas)
        content = f"Describe {TOPICS[seed % len(TOPICS)]} in JSON that fits this schema: {json.dumps(schema)}"
        message = [{"role": "user", "content": content}]
        prompts.append(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        structure = Structure("json", json.dumps(enforceable(schema, "schema"))) if i < len(schemas) else None
        params.append(SamplingParams(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed, structure=structure))
    texts = [completion.text for completion in llm.generate(prompts, params)]
    return texts[: len(schemas)], texts[len(schemas) :]


def _is_date_time(text: str) -> bool:
    """RFC 3339, whose letters may be small, and which has leap seconds."""
    return bool(datetime.fromisoformat(text.upper().replace(":60", ":59")))


def is_valid(output: str, schema: Schema) -> bool:
    """Whether an output is JSON that follows the schema, formats included; it may be in a block of Markdown."""
    jsonschema: Any = importlib.import_module("jsonschema")
    checker = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
    checker.checks("date-time", ValueError)(_is_date_time)
    block = re.fullmatch(r"\s*```(?:json)?\n(.*)```\s*", output, re.S)
    try:
        value = json.loads(block[1] if block else output)
    except json.JSONDecodeError:
        return False
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value))
