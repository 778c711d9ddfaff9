"""`folio pins`: prefixes that stay in the cache."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.connection import DEFAULT_URL, ApiKey, Server, Url
from app.cli.sizes import show_size
from app.cli.text import printable

EXAMPLES = """
folio pins
folio pins add rules --file rules.txt
folio pins add support --system "You are the support assistant of a telescope shop."
folio pins remove rules
"""

pins = typer.Typer(
    name="pins",
    help="Show, add and remove pinned prefixes. With API keys, for operators.",
    epilog=f"Examples:\n\n{EXAMPLES.strip()}",
    invoke_without_command=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LIST_EXAMPLES = "Examples:\n\nfolio pins list --json"
_ADD_EXAMPLES = "Examples:\n\nfolio pins add rules --file rules.txt\n\ncat rules.txt | folio pins add rules --file -"
_REMOVE_EXAMPLES = "Examples:\n\nfolio pins remove rules"


@pins.callback()
def _without_command(
    context: typer.Context, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    if context.invoked_subcommand is None:
        _show(url, api_key, as_json)


@pins.command("list", epilog=_LIST_EXAMPLES)
def list_pins(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show the pinned prefixes: tokens, bytes on a replica, and the number of replicas that have them."""
    _show(url, api_key, as_json)


@pins.command("add", epilog=_ADD_EXAMPLES)
def add_pin(
    name: Annotated[str, typer.Argument(help="Of the pin.")],
    prompt: Annotated[str | None, typer.Option(help="Text that prompts begin with.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with that text; - is standard input.")] = None,
    system: Annotated[str | None, typer.Option(help="Or a system message that conversations begin with.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Compute a prefix on every replica, and pin it."""
    if [prompt, file, system].count(None) != 2:
        raise typer.BadParameter("give one of --prompt, --file and --system")
    body: dict[str, Any] = {"name": name}
    if system is not None:
        body["messages"] = [{"role": "system", "content": system}]
    else:
        body["prompt"] = prompt if file is None else _read(file)
    card = _call(url, api_key, "POST", "/v1/pins", body)
    print(
        f"{printable(card['id'])}: {card['num_tokens']} tokens, {show_size(card['num_bytes'])} a replica, on "
        f"{card['num_replicas']} {'replica' if card['num_replicas'] == 1 else 'replicas'}"
    )


@pins.command("remove", epilog=_REMOVE_EXAMPLES)
def remove_pin(
    name: Annotated[str, typer.Argument(help="Of the pin.")], url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Unpin a prefix on every replica. It stays in the cache until its memory is needed."""
    from urllib.parse import quote

    _call(url, api_key, "DELETE", f"/v1/pins/{quote(name, safe='')}")
    print(f"{name} is not pinned any more")


def _show(url: str, api_key: str | None, as_json: bool) -> None:
    import json

    cards = _call(url, api_key, "GET", "/v1/pins")["data"]
    if as_json:
        print(json.dumps(cards))
        return
    if not cards:
        print("nothing is pinned; `folio pins add` pins a prefix")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("pin", overflow="fold")
    for column in ("tokens", "memory on a replica", "replicas"):
        table.add_column(column, justify="right")
    for card in cards:
        row = printable(card["id"]), str(card["num_tokens"]), show_size(card["num_bytes"]), str(card["num_replicas"])
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise typer.BadParameter(f"--file {file} cannot be read: {reason}") from None


def _call(url: str, api_key: str | None, method: str, path: str, body: Any = None) -> Any:
    async def call() -> Any:
        async with Server(url, api_key) as server:
            return await server.call(method, path, body)

    return asyncio.run(call())
