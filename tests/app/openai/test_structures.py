"""What bodies ask of the output's form becomes one structure, or none, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from app.engine.sampling.params import Structure
from app.errors import RequestError
from app.openai.sampling_body import ResponseFormat, guided_structure, only_structure, structure_of


@dataclass
class Guides:
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@pytest.mark.parametrize(
    ("body", "structure"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Structure("json", "{}")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}, "strict": True}},
            Structure("json", '{"type": "array"}'),
        ),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, Structure("json", "{}")),
    ],
)
def test_response_formats(body: dict[str, Any], structure: Structure | None) -> None:
    assert structure_of(TypeAdapter(ResponseFormat).validate_python(body)) == structure
    assert structure_of(None) is None


@pytest.mark.parametrize(
    "body",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}},
        {"type": "text", "json_schema": {"name": "n"}},
    ],
)
def test_other_response_formats_are_errors(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ResponseFormat).validate_python(body)


@pytest.mark.parametrize(
    ("body", "structure"),
    [
        (Guides(), None),
        (Guides(guided_json='{"type": "null"}'), Structure("json", '{"type": "null"}')),
        (Guides(guided_json={"type": "null"}), Structure("json", '{"type": "null"}')),
        (Guides(guided_regex="a"), Structure("regex", "a")),
        (Guides(guided_choice=["a", "é"]), Structure("choice", '["a", "\\u00e9"]')),
        (Guides(guided_grammar="start: /a/"), Structure("grammar", "start: /a/")),
    ],
)
def test_extension_fields(body: Guides, structure: Structure | None) -> None:
    assert guided_structure(body) == structure


def test_only_one_may_decide() -> None:
    with pytest.raises(RequestError, match="guided_regex, guided_choice") as raised:
        guided_structure(Guides(guided_regex="a", guided_choice=["a"]))
    assert raised.value.param == "guided_regex"
    assert only_structure({}) is None
