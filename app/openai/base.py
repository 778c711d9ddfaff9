"""Base types of bodies: strict validation, bounded lists, fields that are left out while they are null."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

# Nesting of objects and arrays. Python's recursion limit depends on the caller's depth and would be answered with 500.
MAX_JSON_DEPTH = 100
# Far more than any object here has. Each unknown field would be an error of its own.
MAX_FIELDS = 200
MAX_METADATA = 16

# Parts of messages that other servers accept.
_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio", "input_file", "file", "video_url", "document")

Item = TypeVar("Item")
# pydantic describes every bad item of a list in about a kilobyte; the first one is enough.
ListOf = Annotated[list[Item], Field(fail_fast=True)]
# Left out of the JSON when it is null. OpenAI sends all other nulls.
Omitted = Annotated[Item | None, Field(exclude_if=lambda value: value is None)]


class StrictBody(BaseModel):
    """Base of request bodies. A field's docstring is its description on the OpenAPI page."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, fields: Any) -> Any:
        return _check_number(fields, MAX_FIELDS, "fields")


def at_most(number: int, what: str) -> BeforeValidator:
    """Bound a list or object before its items are validated: each takes microseconds, and all may be invalid."""
    return BeforeValidator(lambda items: _check_number(items, number, what))


def _check_number(items: Any, most: int, what: str) -> Any:
    if isinstance(items, dict | list) and len(items) > most:
        raise ValueError(f"{len(items)} {what}; at most {most} are allowed")
    return items


def check_text(text: str) -> str:
    """Raise `ValueError` for an unpaired surrogate: JSON can carry it, but UTF-8 and tokenizers cannot."""
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Raise `ValueError` for an object that is nested too deep, or cannot be written as strict JSON in UTF-8."""
    level: list[dict[str, Any] | list[Any]] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"objects and arrays are nested deeper than {MAX_JSON_DEPTH}; make it flatter")
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


Text = Annotated[str, AfterValidator(check_text)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


def unsupported_field(why: str, *harmless: Any) -> BeforeValidator:
    """Refuse values of an OpenAI field that is not supported, except null and the `harmless` ones."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def _refuse_media(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _MEDIA:
        raise ValueError(f"this model takes text only; leave out the part of type {part['type']!r}")
    return part


# For a part of a message.
only_text = BeforeValidator(_refuse_media)


def text_or(kind: str) -> Discriminator:
    """Tell a list, tagged `kind`, from a text, so that errors describe only the kind that was sent."""
    return Discriminator(lambda value: kind if isinstance(value, list) else "text")


class _Part(Protocol):
    text: str


def joined_text(content: str | Sequence[_Part] | None) -> str:
    """The text of a message's content."""
    return (content or "") if content is None or isinstance(content, str) else "".join(part.text for part in content)


Name = Annotated[Text, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA, "notes"),
]


class ClientFields(StrictBody):
    """Fields of OpenAI's bodies that clients send and that change no output: accepted only with such values."""

    metadata: Metadata | None = None
    """Notes of the client. Nothing is stored; only `/v1/responses` repeats them in its answer."""
    store: Annotated[
        Literal[False] | None, unsupported_field("answers are not stored here; leave it out or send false", False)
    ] = None
    """Answers are never stored: `true` is refused."""
    service_tier: Annotated[
        Literal["auto", "default"] | None,
        unsupported_field("there is one tier, the default; leave it out, or use priority", "auto", "default"),
    ] = None
    """There is one tier. Use `priority` for urgent requests."""
    safety_identifier: Annotated[Text | None, Field(max_length=256)] = None
    """The end user of the request. Ignored."""
    prompt_cache_key: Name | None = None
    """Requests with the same key go to the same replica where that costs little, like those with the same
    `X-Session-Id`. Cached prefixes are found without it."""
    prompt_cache_retention: Annotated[
        Literal["in_memory"] | None,
        unsupported_field("cached prefixes are kept in memory only; leave it out, or use pin", "in_memory"),
    ] = None
    """Cached prefixes are kept in memory, for as long as the server's settings allow."""
