"""What the tests of a client declare, and what all of them ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

MODEL = "scripted"
QUESTION = "What is 2 + 3?"
USER: dict[str, Any] = {"role": "user", "content": QUESTION}


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the table in `docs/clients.md`; its module has it as `CLIENT`.

    Attributes:
        packages: distributions whose versions are recorded, the client's own first.
        absent: feature → the reason why the client does not have it.
        notes: feature → what a user has to know.
    """

    name: str
    packages: tuple[str, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


class Total(BaseModel):
    """A structured answer."""

    total: int
    unit: str


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS},
}
