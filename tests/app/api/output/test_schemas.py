"""Schemas of agents: what can be enforced is, and all else is named; nothing ends a conversation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from folio.app.api.output.schemas import enforceable, enforceable_json
from folio.app.api.tools.bodies import Tools
from folio.app.api.tools.choice import chosen_tools
from folio.app.config.http import HttpSettings
from folio.app.engine.sampling.params import Structure
from folio.app.engine.sampling.structure import StructureCompiler
from folio.app.errors import EngineError, RequestError
from folio.app.http.request_context import CURRENT, RequestContext
from tests.app.small_tokenizers import byte_level

TOOLS = TypeAdapter(Tools).validate_python(
    [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "now")]
)
TEXT, INTEGER = {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": TEXT}}
OVERLAP = [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}]
BY_KIND = [{"properties": {"t": {"const": t}, t: INTEGER}, "required": ["t"], "type": "object"} for t in "ab"]
LABEL = "b" * 60
LONGEST = (  # formats, a text that is as long as one may be, and one that is longer
    ("email", "a" * 64 + "@b.de", "a" * 65 + "@b.de"),
    ("email", "@".join(("a", ".".join([LABEL] * 4))), "@".join(("a", ".".join([LABEL] * 5)))),
    ("hostname", ".".join([LABEL] * 4), ".".join([LABEL] * 5)),
    ("uri", "https://a.de/" + "x" * 7987, "https://a.de/" + "x" * 7988),
    ("date-time", "2026-01-01T00:00:00.123456789+00:00", "2026-01-01T00:00:00.1234567890+00:00"),
    ("time", "00:00:00.123456789+00:00", "00:00:00.1234567890+00:00"),
    ("duration", "P" + "1" * 62 + "D", "P" + "1" * 63 + "D"),
    ("decimal", "1" * 64, "1" * 65),
)
BASE64 = '"QUJD=A"'


@pytest.fixture
def context() -> Iterator[RequestContext]:
    context = RequestContext(HttpSettings(), "r")
    token = CURRENT.set(context)
    yield context
    CURRENT.reset(token)


def follows(schema: dict[str, Any], text: str) -> bool:
    tokenizer = byte_level()
    matcher = StructureCompiler(tokenizer, len(tokenizer), {0}).matcher(Structure("json", json.dumps(schema)))
    try:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token_id)
    except EngineError:
        return False
    return matcher.error is None


@pytest.mark.parametrize(
    ("schema", "dropped", "right", "wrong"),
    [
        *(({"type": "string", "format": f}, "format", '"x"', "1") for f in ("password", "binary", "uri-reference")),
        ({"type": "string", "format": "byte"}, "", '"QUI="', BASE64),
        ({"type": "string", "format": "decimal"}, "", '"-1.5"', '"x"'),
        ({"type": "string", "format": "ipv4"}, "", '"1.2.3.4"', '"x"'),
        *(({"type": "string", "format": f}, "", f'"{right}"', f'"{wrong}"') for f, right, wrong in LONGEST),
        ({"type": "string", "format": "email", "maxLength": 9}, "", '"a@b.de"', '"aaaaaa@b.de"'),
        ({"type": "string", "format": "email", "pattern": "de$"}, "", f'"{"a" * 70}@b.de"', '"a@b.com"'),
        ({"type": "string", "format": "email", "minLength": 6}, "", '"a@b.de"', '"a@b.d"'),
        ({"type": "integer", "format": "int64"}, "", "5", '"x"'),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", "[1, 1]", '["a"]'),
        ({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "uniqueItems": True}, "", "[2, 1]", "[1, 1]"),
        ({"type": "array", "items": TEXT, "uniqueItems": False}, "", '["a"]', "1"),
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": INTEGER}, "", '{"k": 1}', '{"k": "a"}'),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, "", '{"b": 1}', '{"c": 1}'),
        ({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {}}, "", '{"x": 1}', '{"a": 1'),
        (OBJECT | {"propertyNames": {"minLength": 2}}, "propertyNames", '{"a": "b"}', "1"),
        ({"type": "object", "properties": {"a": {"not": {}}, "b": INTEGER}}, "", '{"b": 1}', '{"a": 1'),
        ({"type": "integer", "not": {"const": 5}}, "not", "5", '"a"'),
        ({"not": False, "type": "integer"}, "", "5", '"a"'),
        ({"oneOf": [TEXT, INTEGER]}, "", "5", "true"),
        ({"oneOf": [OBJECT, TEXT, {"const": 5}]}, "", "5", "6"),
        ({"oneOf": BY_KIND}, "", '{"t": "a"}', '{"t": "c"}'),
        ({"oneOf": OVERLAP}, "oneOf", "5", '"a"'),
        (OBJECT | {"required": None, "minProperties": None, "enum": None}, "", '{"a": "b"}', '{"a": 1}'),
        (OBJECT | {"required": ["a", "z"], "additionalProperties": False}, "required", '{"a": "b"}', '{"z": 1}'),
        (OBJECT | {"unevaluatedProperties": False}, "", '{"a": "b"}', '{"z": 1}'),
        ({"allOf": [OBJECT], "unevaluatedProperties": False}, "unevaluatedProperties", '{"a": "b"}', '{"a": 1}'),
        (OBJECT | {"required": ["a"], "dependentRequired": {"a": ["b"]}}, "", '{"a": "x", "b": 1}', '{"a": "x"}}'),
        (OBJECT | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"a": "x"}', '{"a": 1}'),
        (OBJECT | {"if": {}, "then": {}, "else": False}, "if, then, else", '{"a": "x"}', '{"a": 1}'),
        ({"type": "array", "contains": {"const": 3}, "minContains": 1}, "contains, minContains", "[1]", "1"),
        ({"type": "string", "pattern": "^(?!a).*$"}, "pattern", '"a"', "1"),
        ({"type": "string", "pattern": "^[é漢]+$"}, "", '"漢"', '"a"'),
        ({"type": "foo"}, "type", "1", "x"),
        ({"type": ["string", "file"]}, "", '"a"', "1"),
        ({"type": "any"}, "", "1", "x"),
        ({"type": "array", "items": {"$ref": "http://localhost/x"}}, "$ref", "[1]", "1"),
        ({"type": "array", "items": {"$ref": "#/$defs/none"}}, "$ref", "[1]", "1"),
        ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, "", "1", '"a"'),
        ({"$ref": "http://x/n", "$defs": {"n": INTEGER | {"$id": "http://x/n"}}}, "", "1", '"a"'),
        ({"type": "integer", "minimum": "0", "maximum": 5}, "minimum", "5", "6"),
        ({"type": "string", "enum": []}, "enum", '"a"', "1"),
        ({"anyOf": [], "title": "t", "x-vendor": {"type": 1}, "nullable": True}, "anyOf", "1", "x"),
        ({"const": None}, "", "null", "1"),
        ({"type": "integer", "$ref": {"a": []}}, "$ref", "5", '"a"'),
        ({"type": "string", "format": ["email"]}, "format", '"x"', "1"),
        (OBJECT | {"required": ["a"], "dependentRequired": {"a": 5}}, "", '{"a": "x"}', '{"a": 1}'),
        ({"patternProperties": {"^(?!a)": TEXT, "^b": INTEGER}}, "patternProperties", '{"b": 1}', '{"b": "x'),
        ({"type": "object", "propertyNames": {"pattern": "^(?!a)"}}, "propertyNames", '{"b": 1}', "1"),
        ({"type": "string", "pattern": "a" * 40_000}, "pattern", '"b"', "1"),
        ({"type": "integer", "multipleOf": 0, "maxLength": 10**30}, "multipleOf, maxLength", "5", '"a"'),
        ({"type": "number", "maximum": 1.7e308, "minimum": 2}, "maximum", "5", "-1"),
        ({"$schema": "https://example.com/own", "type": "integer"}, "", "5", '"a"'),
        ({"oneOf": [{"const": number} for number in range(100)]}, "oneOf", "5", '"a"'),
        ({"oneOf": [{"enum": [*range(n, 9000, 2)]} for n in (0, 1)]}, "oneOf", "5", '"a"'),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_named(
    context: RequestContext, schema: dict[str, Any], dropped: str, right: str, wrong: str
) -> None:
    """All of these were answered with 400, and ended the conversation of an agent that sends them with every turn."""
    cleaned = enforceable(schema, "f")
    assert context.ignored_fields == (", ".join(f"f.{name}" for name in dropped.split(", ")) if dropped else None)
    assert follows(cleaned, right)
    assert not follows(cleaned, wrong)
    is_valid = isinstance(schema.get("dependentRequired", {}).get("a", []), list)
    if not dropped and is_valid and schema.get("type") not in ("any", ["string", "file"]) and "anyOf" not in schema:
        jsonschema.validate(json.loads(right), {k: v for k, v in schema.items() if v is not None or k == "const"})


def test_what_nothing_satisfies_stays_an_error() -> None:
    tokenizer = byte_level()
    for schema in ({"not": {}}, {"allOf": [TEXT, INTEGER]}):
        with pytest.raises(RequestError, match="nsatisfiable"):
            StructureCompiler(tokenizer, len(tokenizer), {0}).check_structure(
                Structure("json", json.dumps(enforceable(schema, "f")))
            )


def test_large_schemas_are_looked_at_in_linear_time(context: RequestContext) -> None:
    """Each of these took minutes."""
    begun = time.thread_time()
    enforceable({"oneOf": [{"const": number} for number in range(30_000)]}, "f")
    enforceable({"allOf": [{"$ref": f"x{number}"} for number in range(30_000)]}, "f")
    assert time.thread_time() - begun < 10


@pytest.mark.parametrize("spec", ["{", "[1]", "{}", '"a"'])
def test_text_that_is_no_schema_stays_as_it_is(spec: str) -> None:
    assert enforceable_json(spec, "f") == spec


def test_only_schemas_that_are_enforced_are_looked_at(context: RequestContext) -> None:
    """With "auto", and without `strict`, a tool's schema has no effect."""
    weather, now = TOOLS
    function = weather.function.model_copy(update={"parameters": OBJECT | {"if": {}}})
    strict = weather.model_copy(update={"function": function.model_copy(update={"strict": True})})
    chosen_tools([weather.model_copy(update={"function": function}), now], "auto", None)
    assert context.ignored_fields is None
    for tools, choice in (([strict, now], None), ([weather.model_copy(update={"function": function})], "required")):
        context.ignored_fields = "seed2"
        chosen = chosen_tools(tools, choice, None)  # type: ignore[arg-type]
        assert context.ignored_fields == "seed2, tools[].function.parameters.if"
        assert "if" not in chosen.functions["weather"]
        assert chosen.strict == ({"weather"} if choice is None else frozenset())


@pytest.mark.parametrize("parameters", [None, {"type": "null"}, {"type": None}, {"type": ["object", "null"]}, {}])
def test_functions_without_parameters(parameters: Any) -> None:
    function = TOOLS[1].function.model_copy(update={"parameters": parameters})
    tool = TOOLS[1].model_copy(update={"function": function})
    assert chosen_tools([tool], "required", None).functions["now"]["type"] == "object"
