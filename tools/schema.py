"""What a JSON schema allows, in words for a cell of a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_NUMBERS = (
    ("exclusiveMinimum", "above"),
    ("minimum", "at least"),
    ("exclusiveMaximum", "below"),
    ("maximum", "at most"),
)
_SIZES = (("minLength", "at least"), ("maxLength", "at most"), ("minItems", "at least"), ("maxItems", "at most"))


def cell(text: str) -> str:
    """Text on one line, for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    """A value as YAML and JSON have it, as code."""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def allowed(schema: Schema) -> str:
    """The values that a schema allows; null last."""
    parts = list(dict.fromkeys(_allowed(schema)))
    return " or ".join(sorted(parts, key=lambda part: part == "null"))


def _allowed(schema: Schema) -> Iterator[str]:
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        for choice in choices:
            yield from _allowed(choice)
    elif "const" in schema:
        yield code(schema["const"])
    elif "enum" in schema:
        yield ", ".join(map(code, schema["enum"]))
    elif "$ref" in schema:
        yield f"a `{schema['$ref'].rpartition('/')[2]}`"
    else:
        yield _KINDS[schema.get("type", "any")](schema)


def _number(schema: Schema) -> str:
    bounds = [f"{words} {_short(schema[key])}" for key, words in _NUMBERS if key in schema]
    kind = "a number" if schema["type"] == "number" else "a size" if schema.get("format") == "size" else "an integer"
    return " ".join([kind, " and ".join(bounds)]).strip()


def _short(number: float) -> str:
    return f"{number:.0f}" if number == int(number) else f"{number:g}"


def _text(schema: Schema) -> str:
    if schema.get("format") == "path":
        return "a path"
    bounds = [f"{words} {schema[key]} characters" for key, words in _SIZES if schema.get(key, 1) > 1]
    pattern = [f"matching `{schema['pattern']}`"] if "pattern" in schema else []
    return ", ".join(["a text", *bounds, *pattern])


def _list(schema: Schema) -> str:
    bounds = [f"{words} {schema[key]}" for key, words in _SIZES if key in schema]
    items = schema.get("items", {})
    of = f" of {_plural(allowed(items))}" if items else ""
    return ", ".join([f"a list{of}", *bounds])


def _mapping(schema: Schema) -> str:
    values = schema.get("additionalProperties")
    return f"a mapping to {_plural(allowed(values))}" if isinstance(values, dict) and values else "a mapping"


def _plural(text: str) -> str:
    for one in ("a text", "a number", "an integer", "a mapping"):
        if text.startswith(one):
            return f"{one.partition(' ')[2]}s{text.removeprefix(one)}"
    return text.removeprefix("a ")


_KINDS = {
    "integer": _number,
    "number": _number,
    "string": _text,
    "array": _list,
    "object": _mapping,
    "boolean": lambda _: "true or false",
    "null": lambda _: "null",
    "any": lambda _: "any",
}
