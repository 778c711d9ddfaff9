"""`folio drain`: move the requests of a replica to the others."""

from __future__ import annotations

from typing import Annotated

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Url, call
from folio.app.cli.text import printable

EXAMPLES = """
folio drain p3k1x9qa
folio drain p3k1x9qa --undo
"""


def drain(
    replica: Annotated[str, typer.Argument(help="The replica's name, as folio top and folio budget show it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it have requests again.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Move the requests of a replica to the others, and send it no new ones, before its machine is stopped. With API
    keys, for operators."""
    name = printable(call(url, api_key, "PUT", "/v1/drain", {"replica": replica, "draining": not undo})["replica"])
    print(f"{name} gets requests again" if undo else f"{name} gets no more requests; those it has move to the others")
