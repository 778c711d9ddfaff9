"""JSON schemas of clients, as far as outputs can be forced to follow them.

Keywords that cannot be enforced are left out and named, like unknown fields: an agent's tool that has one must not end
the conversation. Annotations are left out, too.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from folio.app.api.output.json_text import strict_json
from folio.app.http.request_context import note_ignored

_SCHEMA = {"additionalItems", "additionalProperties", "items"}
_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"$defs", "definitions", "patternProperties", "properties"}
# Further keywords that constrain values, but are enforced in other words only, or not at all.
_OTHER_KEYWORDS = (
    "$dynamicRef $ref contains dependencies dependentRequired dependentSchemas else if maxContains minContains not "
    "propertyNames required then unevaluatedItems unevaluatedProperties uniqueItems"
)
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_TYPE_NAMES = {list: "array", bool: "boolean", type(None): "null", dict: "object", str: "string"}
_TYPE_NAMES |= {int: "number", float: "number"}
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_FORMAT_PATTERNS = {
    "base64": "^[A-Za-z0-9+/]*={0,2}$",
    "byte": "^[A-Za-z0-9+/]*={0,2}$",
    "decimal": "^-?[0-9]+(\\.[0-9]+)?$",
}
# Longest texts, unless a schema has its own bound: small models go on in a text that may go on. Local parts, paths and
# names of hosts by RFC 5321 and 1123, URIs as long as RFC 9110 asks to support, fractions of seconds in nanoseconds.
_FORMAT_CHARS = {"email": 254, "hostname": 253, "uri": 8000, "date-time": 35, "time": 24, "duration": 64, "decimal": 64}
_LOCAL_PART = "^[^@]{1,64}@"
# A schema with one of these has constraints besides its own keywords.
_COMBINING = {"$ref", "allOf", "anyOf", "if", "oneOf", "patternProperties"}
# Longer patterns are not enforced; those that have been checked are remembered.
MAX_PATTERN_CHARS = 32 << 10
# The most arrays that `uniqueItems` of a set of values is replaced by.
_MAX_ARRAYS = 256
# Schemas of a `oneOf`, and values of an `enum`, that are compared with one another.
_MAX_COMPARED = 64
_DRAFT = re.compile(r"(http://json-schema\.org/draft-0[4-7]|https://json-schema\.org/draft/20(19-09|20-12))/schema#?")
_ID = re.compile(r'"(?:\$id|id)": ("(?:[^"\\]|\\.)*")')


def enforceable(schema: Any, field: str) -> dict[str, Any]:
    """The part of a schema that can be enforced. The answer's header names the keywords that are left out.

    Args:
        field: the body's field with the schema.
    """
    walk = _Walk(schema)
    cleaned = walk.cleaned(schema)
    if not isinstance(cleaned, dict):
        return {"anyOf": []}  # stays an error: nothing satisfies it
    note_ignored([f"{field}.{keyword}" for keyword in walk.dropped])
    if cleaned and not walk.is_approximate:
        return cleaned
    options = cleaned.get("x-guidance", {})
    return cleaned | {"x-guidance": {"lenient": True} | options if isinstance(options, dict) else options}


def enforceable_json(spec: str, field: str) -> str:
    """`enforceable` for a schema as text. Text that is no schema stays as it is."""
    try:
        schema = strict_json(spec)
    except ValueError:
        return spec
    return json.dumps(enforceable(schema, field)) if isinstance(schema, dict) and schema else spec


class _Walk:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._checks = _CHECKS | {"$ref": self._is_reference}
        self.dropped: dict[str, None] = {}
        self.is_approximate = False  # for the parser, which proves less than `_are_disjoint`

    def cleaned(self, schema: Any) -> dict[str, Any] | bool:
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else {}
        if schema.get("not") in ({}, True):
            return False
        kept: dict[str, Any] = {}
        for key, value in _in_other_words(schema).items():
            if value is None and key != "const":
                continue  # a keyword that a client's language has, and leaves empty
            kept |= self._kept(key, value, schema)
        required = kept.get("required", ())
        if kept.get("additionalProperties") is False and not kept.keys() & _COMBINING:
            known = [name for name in required if kept.get("properties", {}).get(name, False) is not False]
            if len(known) < len(required):
                self._drop("required")
                kept["required"] = known
        return kept

    def _kept(self, key: str, value: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """A keyword as it can be enforced."""
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            yield key, self._named(key, value)
        elif key in (*_SCHEMAS, "items") and isinstance(value, list):
            yield from self._list(key, [self.cleaned(one) for one in value])
        elif key in _SCHEMA and isinstance(value, dict | bool):
            yield key, self.cleaned(value)
        elif key == "required" and isinstance(value, list):
            yield key, [name for name in value if isinstance(name, str)]
        elif key == "type":
            yield from self._type(value)
        elif key == "format":
            yield from self._format(value, schema)
        else:
            yield from self._checked(key, value)

    def _named(self, key: str, schemas: dict[str, Any]) -> dict[str, Any]:
        named = {n: self.cleaned(one) for n, one in schemas.items() if key != "patternProperties" or is_pattern(n)}
        if len(named) < len(schemas):
            self._drop(key)
        return named

    def _list(self, key: str, schemas: list[Any]) -> Iterator[tuple[str, Any]]:
        self.is_approximate |= key == "oneOf"
        if key == "oneOf" and not _are_disjoint(schemas):
            self._drop(key)
        if schemas or key not in ("anyOf", "oneOf"):
            yield key, schemas
        else:
            self._drop(key)

    def _checked(self, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        if (is_enforced := self._checks.get(key)) is not None and is_enforced(value):
            yield key, value
        elif key in _KEYWORDS:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self.dropped[key] = None

    def _type(self, value: Any) -> Iterator[tuple[str, Any]]:
        types = [one for one in (value if isinstance(value, list) else [value]) if one in _TYPES]
        if not types and value != "any":
            self._drop("type")
        if types:
            yield "type", types if isinstance(value, list) else types[0]

    def _is_reference(self, value: Any) -> bool:
        """Whether a value is a pointer into the schema or a name in it; nothing is fetched."""
        if not isinstance(value, str):
            return False
        if not value.startswith("#/"):
            return value == "#" or value in self._ids
        parts = value[2:].split("/")
        node = self._root if parts[0] in _NAMED_SCHEMAS | _SCHEMAS | _SCHEMA else None
        for part in parts:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return isinstance(node, dict | bool)

    @functools.cached_property
    def _ids(self) -> set[str]:
        return {json.loads(name) for name in _ID.findall(json.dumps(self._root))}

    def _format(self, value: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        if schema.get("type") in ("array", "boolean", "integer", "null", "number", "object"):
            return  # a format is one of texts
        if isinstance(value, str) and value in _FORMATS:
            yield "format", value
            if value == "email" and schema.get("pattern") is None:
                yield "pattern", _LOCAL_PART
        elif isinstance(value, str) and value in _FORMAT_PATTERNS and "pattern" not in schema:
            yield "pattern", _FORMAT_PATTERNS[value]
        else:
            self._drop("format")
            return
        most = _FORMAT_CHARS.get(value)
        if most and all(schema.get(key) is None for key in ("const", "enum", "maxLength")):
            yield "maxLength", most


def _in_other_words(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, with keywords that can be enforced in place of equivalent ones that cannot."""
    same = dict(schema)
    if schema.get("uniqueItems") is False:
        del same["uniqueItems"]
    elif schema.get("uniqueItems") is True and (arrays := _arrays(schema)) is not None:
        return {"enum": arrays}
    if schema.get("not") is False:
        del same["not"]
    names = schema.get("propertyNames")
    if names in (True, {}, {"type": "string"}):
        del same["propertyNames"]
    elif not schema.keys() & {"properties", "patternProperties"} and (pattern := _names(names)) is not None:
        del same["propertyNames"]
        same["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        same["additionalProperties"] = False
    if schema.get("unevaluatedProperties") is False and not schema.keys() & _COMBINING:
        del same["unevaluatedProperties"]
        same["additionalProperties"] = False
    _require_dependent(same)
    return same


def _require_dependent(same: dict[str, Any]) -> None:
    """Require what depends on properties that are required."""
    needs, required = same.get("dependentRequired"), same.get("required")
    if isinstance(needs, dict) and isinstance(required, list) and needs.keys() <= {*map(str, required)}:
        del same["dependentRequired"]
        same["required"] = sum((names for names in needs.values() if isinstance(names, list)), required)


def _arrays(schema: Mapping[str, Any]) -> list[list[Any]] | None:
    """All arrays of different items, if they are few."""
    items, least, most = schema.get("items"), schema.get("minItems", 0), schema.get("maxItems", _MAX_ARRAYS)
    values = items.get("enum") if isinstance(items, dict) else None
    if not isinstance(values, list) or not (_is_count(least) and _is_count(most)) or schema.keys() & _COMBINING:
        return None
    lengths = range(least, min(most, len(values)) + 1)
    if sum(math.perm(len(values), length) for length in lengths) > _MAX_ARRAYS:
        return None
    return [[*array] for length in lengths for array in itertools.permutations(values, length)]


def _names(names: Any) -> str | None:
    """A pattern of the names that `propertyNames` allows."""
    if not isinstance(names, dict):
        return None
    allowed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(allowed, list) and all(isinstance(name, str) for name in allowed):
        return f"^({'|'.join(map(re.escape, allowed))})$"
    pattern = names.get("pattern")
    is_all = isinstance(pattern, str) and is_pattern(pattern) and names.keys() <= {"pattern", "type"}
    return pattern if is_all else None


def _are_disjoint(schemas: Sequence[dict[str, Any] | bool]) -> bool:
    """Whether no value follows two of the schemas, as far as types and constants tell."""
    return len(schemas) <= _MAX_COMPARED and all(itertools.starmap(_differ, itertools.combinations(schemas, 2)))


def _differ(one: Any, other: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False in (one, other)
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        if len(values[0]) * len(values[1]) > _MAX_COMPARED**2:
            return False
        return not any(value in values[1] for value in values[0])
    types = [_types(schema) for schema in (one, other)]
    if not types[0] & types[1]:
        return True
    shared = {*one.get("required", ())} & {*other.get("required", ())}
    properties = [schema.get("properties", {}) for schema in (one, other)]
    return types == [{"object"}] * 2 and any(_differ(properties[0].get(n), properties[1].get(n)) for n in shared)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: Mapping[str, Any]) -> set[str]:
    if (values := _values(schema)) is not None:
        return {_TYPE_NAMES[type(value)] for value in values}
    given = schema.get("type", _TYPES)
    types = {given} if isinstance(given, str) else {*given}
    return types | {"number"} if "integer" in types else types


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def is_pattern(pattern: str) -> bool:
    """Whether the pattern can be enforced: it is not too long, and has no look-around, back references or faults."""
    return len(pattern) <= MAX_PATTERN_CHARS and _is_regular(pattern)


@functools.lru_cache(maxsize=1024)
def _is_regular(pattern: str) -> bool:
    if importlib.util.find_spec("llguidance") is None:
        return True  # structures are refused altogether
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63


# Whether a keyword with this value can be enforced.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("$anchor", "$id", "const", "id", "x-guidance"), lambda _: True),
    "$schema": lambda value: isinstance(value, str) and _DRAFT.fullmatch(value) is not None,
    **dict.fromkeys(
        ("exclusiveMaximum", "exclusiveMinimum"), lambda value: _is_number(value) or isinstance(value, bool)
    ),
    **dict.fromkeys(("maximum", "minimum"), _is_number),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), _is_count),
    "enum": lambda value: isinstance(value, list) and len(value) > 0,
    "pattern": lambda value: isinstance(value, str) and is_pattern(value),
}
# All others are annotations.
_KEYWORDS = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | {*_OTHER_KEYWORDS.split(), *_CHECKS} - {"$schema"}
