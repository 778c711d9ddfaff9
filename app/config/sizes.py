"""Sizes of memory as users write and read them, in configuration files and on the command line. Imports nothing
heavy."""

from __future__ import annotations

import re
from typing import Annotated, Any

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of a size such as 4GiB, 500MB, 2G or 1073741824. Raises `ValueError`."""
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise ValueError(f"{text!r} is no size; write a number and a unit, such as 4GiB or 500MB")
    number, unit, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def show_size(num_bytes: float) -> str:
    """A size such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


class WrittenSize:
    """Makes pydantic read a text by `parse_size`. Only pydantic calls it: the engine's settings need no pydantic."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_bytes_of, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return handler(schema) | {"format": "size"}


def _bytes_of(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError:
        raise ValueError("Input should be a size such as 4GiB or 500MB, or a number of bytes") from None


Bytes = Annotated[int, WrittenSize()]
