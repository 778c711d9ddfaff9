"""Sizes of memory as users write and read them."""

from __future__ import annotations

import re

import typer

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of a size such as 4GiB, 500MB, 2G or 1073741824; for `typer.Option(parser=parse_size, metavar="SIZE")`."""
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise typer.BadParameter(f"{text!r} is no size; write a number and a unit, such as 4GiB or 500MB")
    number, unit, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def show_size(num_bytes: float) -> str:
    """A size such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
