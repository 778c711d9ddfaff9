"""What request bodies have in common."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

# Objects and arrays in each other. Python's own bound depends on who calls, and is an error of ours when it is met.
MAX_JSON_DEPTH = 100


class StrictBody(BaseModel):
    """Types are strict, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
