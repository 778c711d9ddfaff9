"""Sizes among the options of commands."""

from __future__ import annotations

import typer

from folio.app.config import sizes


def parse_size(text: str) -> int:
    """Bytes of a size; for `typer.Option(parser=parse_size, metavar="SIZE")`."""
    try:
        return sizes.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
