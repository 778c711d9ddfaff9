"""What request bodies have in common.

Parts of answers that leave out what is absent.

Fields of OpenAI's bodies that clients send, and that change no output here: taken where that is the truth.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

# Objects and arrays in each other. Python's own bound depends on who calls, and is an error of ours when it is met.
MAX_JSON_DEPTH = 100
# Far more than any object here has. Each unknown field would be an error of its own.
MAX_FIELDS = 200

# Parts of messages that models of other servers take.
_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio", "input_file", "file", "video_url", "document")

Item = TypeVar("Item")
# pydantic would describe every bad item of a list, in about a kilobyte each: the first one says enough.
ListOf = Annotated[list[Item], Field(fail_fast=True)]


class StrictBody(BaseModel):
    """Types are strict, and unknown fields are errors. A field's docstring is its description in the OpenAPI page."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, fields: Any) -> Any:
        return _check_number(fields, MAX_FIELDS, "fields")


def at_most(number: int, what: str) -> BeforeValidator:
    """For a list or an object of the client's: its size is looked at before its items, which may all be wrong, and take
    microseconds each if they are not."""
    return BeforeValidator(lambda items: _check_number(items, number, what))


def _check_number(items: Any, most: int, what: str) -> Any:
    if isinstance(items, dict | list) and len(items) > most:
        raise ValueError(f"there are {len(items)} {what}; there may be at most {most}")
    return items


def check_text(text: str) -> str:
    """JSON can carry half of a surrogate pair, which is no character and has no tokens. Raises `ValueError`."""
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


def check_json(value: dict[str, Any]) -> dict[str, Any]:
    """An object that is going to be written as JSON again. Raises `ValueError` if it nests too deep, or has numbers or
    halves of characters that JSON and prompts cannot have."""
    level: list[dict[str, Any] | list[Any]] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"objects and arrays are nested deeper than {MAX_JSON_DEPTH}; make it flatter")
        level = [child for node in level for child in _children(node) if isinstance(child, dict | list)]
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _children(node: dict[str, Any] | list[Any]) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


Text = Annotated[str, AfterValidator(check_text)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


def unsupported_field(why: str, *harmless: Any) -> BeforeValidator:
    """For a field of OpenAI's that cannot be honoured here: anything but a null and what is `harmless` is an error that
    says why."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def _refuse_media(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _MEDIA:
        raise ValueError(f"this model takes text only; leave the part of the type {part['type']!r} out")
    return part


# For a part of a message.
only_text = BeforeValidator(_refuse_media)


def text_or(kind: str) -> Discriminator:
    """Tells a text from a list, which has the tag `kind`: so what is wrong is said of the one that was meant only."""
    return Discriminator(lambda value: kind if isinstance(value, list) else "text")


class OmitNoneModel(BaseModel):
    """Fields named in `_left_out` are not in the JSON when they are `None`; of all others OpenAI sends a null."""

    _left_out: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _leave_out(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name not in self._left_out}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Of the fields: of what the serializer returns nothing would be known."""
        return handler(cast(CoreSchema, {key: value for key, value in core_schema.items() if key != "serialization"}))


MAX_METADATA = 16


Name = Annotated[Text, Field(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA, "notes"),
]


class ClientFields(StrictBody):
    """What any body of OpenAI's may have."""

    metadata: Metadata | None = None
    """Notes of the client's. Nothing is stored: only `/v1/responses` says them again in its answer."""
    store: Annotated[
        Literal[False] | None, unsupported_field("answers are not stored here; leave it out or send false", False)
    ] = None
    """Answers are never stored: `true` is refused."""
    service_tier: Annotated[
        Literal["auto", "default"] | None,
        unsupported_field("there is one tier, the default; leave it out, or say priority", "auto", "default"),
    ] = None
    """There is one tier. How urgent a request is, `priority` says."""
    safety_identifier: Annotated[Text | None, Field(max_length=256)] = None
    """Whom the request comes from. Nothing is done with it."""
    prompt_cache_key: Name | None = None
    """Requests with the same one go to the same replica where that costs little, like those with the same
    `X-Session-Id`. Cached prefixes are found without it."""
    prompt_cache_retention: Annotated[
        Literal["in_memory"] | None,
        unsupported_field("cached prefixes are kept in memory only; leave it out, or say pin", "in_memory"),
    ] = None
    """Cached prefixes are kept in memory, for as long as the server's settings say."""
