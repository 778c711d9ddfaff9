"""What request bodies have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class StrictBody(BaseModel):
    """Types are strict, and unknown fields are errors. A field's docstring is its description in the OpenAPI page."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def refused(why: str) -> BeforeValidator:
    """For a field of OpenAI's that cannot be honoured here: anything but a null is an error that says why."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(why)

    return BeforeValidator(check)
