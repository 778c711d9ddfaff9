"""Attacks by structured output: excessive schemas, regular expressions and grammars."""

from __future__ import annotations

import random
from typing import Any

from tests.hostile.attacker import Attack, Attacker

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


def _body(**more: Any) -> dict[str, Any]:
    return {"model": "builtin", "prompt": "x", "max_tokens": 3} | more


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _wide(count: int, **more: Any) -> dict[str, Any]:
    return _object(**{f"p{i}": {} for i in range(count)}) | more


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = _object(a=schema) | {"required": ["a"]}
    return schema


async def choices(a: Attacker) -> None:
    """More, longer and stranger strings than the parser has room for."""
    many = [[f"choice {i} {a.random.random()}" for i in range(count)] for count in (1500, 2000, 2001, 20_000)]
    odd = [["x" * 100_000], ["a" * i for i in range(1, 1500)], ["same"] * 5000, ["\0", "\n", "é" * 300], [""], []]
    bodies = [_body(guided_choice=strings, stream=stream) for strings in many + odd for stream in (False, True)]
    bodies += [_body(guided_choice=many[1], n=4), _body(guided_choice=many[1], temperature=0, max_tokens=200)]
    await a.all(a.post(_TEXT, body, f"choices {i}") for i, body in enumerate(bodies * a.many(1, 8)))


async def schemas(a: Attacker) -> None:
    """Schemas: wide, deep, endless, contradictory, with references to files."""
    huge, recursive = 10**9, {"$ref": "#"}
    found: list[Any] = [
        *(_wide(count) for count in (200, 500, 2000)),
        _wide(500, required=[f"p{i}" for i in range(500)]),
        _wide(60, additionalProperties=False),
        *(_deep(depth) for depth in (20, 60, 90)),
        {"enum": [f"value {i}" for i in range(10_000)]},
        {"enum": ["x" * 200_000]},
        {"anyOf": [_object(**{f"a{i}": {"const": i}}) for i in range(1000)]},
        {"oneOf": [_object(a={"type": "integer"}), _object(a={"type": "number"})]},
        {"allOf": [_object(**{f"a{i}": recursive}) for i in range(100)]},
        _object(a=recursive, b={"type": "array", "items": recursive}),
        {"type": "array", "items": {"type": "integer"}, "minItems": huge},
        {"type": "array", "items": {"type": "array", "items": {}, "maxItems": 2000}, "maxItems": 2000},
        {"type": "string", "minLength": huge, "maxLength": huge},
        {"type": "string", "maxLength": 10**6, "pattern": "^(a|b|ab)*c$"},
        {"type": "string", "pattern": "(((a{200}){200}){200}){200}"},
        {"type": "integer", "minimum": 10**300, "maximum": 10**301},
        {"type": "number", "multipleOf": 1e-300},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"patternProperties": {f"^{'a' * i}.*": {} for i in range(1, 60)}},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(40)} | {"d40": {}}}
        | {"$ref": "#/$defs/d0"},
        {"x-guidance": {"whitespace_pattern": "(a|a)*"}, "type": "object"},
        *(a.random.choice(_ODD_SCHEMAS) | {"title": str(i)} for i in range(a.many(4, 100))),
    ]
    bodies = [_body(guided_json=schema) for schema in found]
    bodies += [_body(guided_json=text) for text in ("{", "[]", "null", "true", "\ud800", '{"type": "object"' * 1000)]
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": _wide(500)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": _wide(500)}}
    chat = {"model": "builtin", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    await a.all(
        [
            *(a.post(_TEXT, body, f"schema {str(body['guided_json'])[:80]}") for body in bodies),
            a.post(_CHAT, chat | {"response_format": named}, "response_format"),
            a.post(_CHAT, chat | {"tools": [tool], "tool_choice": "required"}, "tool_choice"),
            a.post(_CHAT, chat | {"tools": [tool] * 20, "tool_choice": "auto", "stream": True}, "tools"),
        ]
    )


_ODD_SCHEMAS: list[dict[str, Any]] = [
    {"type": 5},
    {"type": ["object", "nonsense"]},
    {"properties": []},
    {"enum": {}},
    {"enum": []},
    {"required": "a"},
    {"items": 7},
    {"minLength": "x"},
    {"pattern": "("},
    {"pattern": "\\p{Nonsense}"},
    {"format": "nonsense"},
    {"format": "date-time", "type": "string"},
    {"const": float("1e308")},
    {"not": {}},
    {"if": {}, "then": {"type": "string"}},
    {"uniqueItems": True, "type": "array"},
    {"$schema": "nonsense"},
    {"$id": "http://x/", "$ref": "#a"},
    {"additionalProperties": {"$ref": "#"}},
]


async def regexes(a: Attacker) -> None:
    """Regular expressions: bombs of all kinds, and invalid ones."""
    found = [
        "(a+)+$",
        "(a|a)*b",
        "(a|aa)+$",
        "a{1,100000}",
        "a{100000}",
        "((a{100}){100}){100}",
        "(.*a){20}",
        "(.*)(.*)(.*)(.*)(.*)[^x]{500}",
        ".*.*.*.*.*.*.*.*=.*",
        "(?=a)b",
        "(?<!a)b",
        "(a)\\1",
        "\\b\\B\\w\\W",
        "[^\\x00-\\x{10FFFF}]",
        "[z-a]",
        "(" * 5000,
        "(" * 2000 + "a" + ")" * 2000,
        "a" * 100_000,
        "|".join(f"{i:x}" for i in range(30_000)),
        "[[:alpha:]]",
        "\\p{L}{1,500}\\p{N}{1,500}",
        "$^",
        "(?i)" + "straße" * 500,
        "\0",
    ]
    await a.all(a.post(_TEXT, _body(guided_regex=regex), f"regex {regex[:40]!r}") for regex in found * a.many(1, 10))


async def grammars(a: Attacker) -> None:
    """Grammars: many rules, endless ones, invalid ones."""

    def rules(count: int, last: str = '"x"') -> str:
        return "start: r0\n" + "\n".join(f'r{i}: "{i}" r{i + 1} | "y{i}"' for i in range(count)) + f"\nr{count}: {last}"

    def wide(count: int) -> str:
        return "start: " + " | ".join(f"r{i}" for i in range(count)) + "\n" + "\n".join(
            f'r{i}: "{i}" r{(i + 1) % count}?' for i in range(count)
        )  # fmt: skip

    found = [
        rules(1500),
        rules(20_000),
        wide(1500),
        wide(2500),
        "start: start",
        'start: start "a" | "a"',
        "start: a\na: b\nb: a",
        'start: a a a a a a a a\na: "x"* "x"* "x"* | ',
        "start: (((((A?)*)+)?)*)+\nA: /a*/",
        "start: A\nA: /(a|a)*(b|b)*((a{100}){100}){100}/",
        "start: nobody",
        "%import common.NONSENSE\nstart: NONSENSE",
        "%import .secret (x)\nstart: x",
        "start: /[/",
        "start:",
        "?" * 10_000,
        'start: "' + "x" * 200_000 + '"',
        "%llguidance {}\nstart: " + '"a"? ' * 3000,
        '%llguidance {"nonsense": 1}\nstart: "a"',
        "start: %json {" + '"a":{' * 500,
        "\0\0\0",
    ]
    bodies = [_body(guided_grammar=text, stream=i % 2 == 1) for i, text in enumerate(found * a.many(1, 10))]
    await a.all(a.post(_TEXT, body, f"grammar {body['guided_grammar'][:40]!r}") for body in bodies)


async def mixed(a: Attacker) -> None:
    """Structures that once broke a step, many at once, in steps shared with other requests."""
    found: list[dict[str, Any]] = [
        {"guided_choice": [f"{i} {'x' * 20}" for i in range(2000)]},
        {"guided_json": _wide(500)},
        {"guided_grammar": "start: " + " | ".join(f'"{i}" x{i}' for i in range(1500)) + "\n"
         + "\n".join(f'x{i}: "{i}"' for i in range(1500))},
    ]  # fmt: skip
    rng: random.Random = a.random

    def body() -> dict[str, Any]:
        more: dict[str, Any] = {
            "n": rng.choice((1, 3)),
            "stream": rng.random() < 0.5,
            "max_tokens": rng.choice((1, 30)),
        }
        more |= {"logprobs": rng.choice((None, 2)), "temperature": rng.choice((0, 1.0)), "seed": rng.randrange(100)}
        return _body(**rng.choice(found)) | more

    await a.all(a.post(_TEXT, body(), "mixed") for _ in range(a.many(24, 300)))


ATTACKS: dict[str, Attack] = {
    "choices": choices,
    "schemas": schemas,
    "regular expressions": regexes,
    "grammars": grammars,
    "structures, mixed": mixed,
}
