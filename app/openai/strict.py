"""What request bodies have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator


class StrictBody(BaseModel):
    """Types are strict, and unknown fields are errors. A field's docstring is its description in the OpenAPI page."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def refused(why: str, *harmless: Any) -> BeforeValidator:
    """For a field of OpenAI's that cannot be honoured here: anything but a null and what is `harmless` is an error that
    says why."""

    def check(value: Any) -> Any:
        if value is not None and value not in harmless:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def text_or(kind: str) -> Discriminator:
    """Tells a text from a list, which has the tag `kind`: so what is wrong is said of the one that was meant only."""
    return Discriminator(lambda value: kind if isinstance(value, list) else "text")
