"""What clients say of the output's form → `Structure`. Whether the engine can compile it, the engine says."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from app.engine.sampling.params import Structure
from app.errors import RequestError
from app.openai.strict import JsonObject, StrictBody


class TextFormat(StrictBody):
    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictBody):
    """`name` and `description` are for people. `strict` is accepted: the output follows the schema in any case."""

    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictBody):
    """JSON that the schema describes; without a schema any object."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class HasGuides(Protocol):
    """The fields of a body that say what the output looks like, as vLLM calls them."""

    @property
    def guided_json(self) -> str | dict[str, Any] | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


def structure_of(response_format: ResponseFormat | None) -> Structure | None:
    """What OpenAI's `response_format` asks for; `None`: anything."""
    if isinstance(response_format, JsonObjectFormat):
        return Structure("json", "{}")
    if isinstance(response_format, JsonSchemaFormat):
        return Structure("json", json.dumps(response_format.json_schema.schema_ or {}))
    return None


def guided_structure(body: HasGuides) -> Structure | None:
    """What the extension fields ask for; `None`: nothing. Raises `RequestError` when more than one is given."""
    given: dict[str, Structure] = {}
    if body.guided_json is not None:
        schema = body.guided_json
        given["guided_json"] = Structure("json", schema if isinstance(schema, str) else json.dumps(schema))
    if body.guided_regex is not None:
        given["guided_regex"] = Structure("regex", body.guided_regex)
    if body.guided_choice is not None:
        given["guided_choice"] = Structure("choice", json.dumps(body.guided_choice))
    if body.guided_grammar is not None:
        given["guided_grammar"] = Structure("grammar", body.guided_grammar)
    return only_structure(given)


def only_structure(asked: dict[str, Structure]) -> Structure | None:
    """Of what fields ask for, the one; `None` when none does. Raises `RequestError` when several do."""
    if len(asked) > 1:
        raise RequestError(f"only one of {', '.join(asked)} can decide the output's form", next(iter(asked)))
    return next(iter(asked.values()), None)
