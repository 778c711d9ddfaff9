"""What request bodies have in common."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

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


def refused(why: str, *harmless: Any) -> BeforeValidator:
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
