"""`folio pins`: prefixes that stay in the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Json, Url, call
from folio.app.cli.text import console, counted, printable, read_text, table
from folio.app.config.sizes import show_size

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
    """Show the pinned prefixes: tokens, bytes on a replica, and the replicas that have them.

    `1 of 2`: one of them has it in memory. Where the model sleeps, or lacked memory, its next wake computes the prefix.
    """
    _show(url, api_key, as_json)


@pins.command("add", epilog=_ADD_EXAMPLES)
def add_pin(
    name: Annotated[str, typer.Argument(help="The pin's name.")],
    prompt: Annotated[str | None, typer.Option(help="Text that prompts begin with.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with that text; - is standard input.")] = None,
    system: Annotated[str | None, typer.Option(help="Or a system message that conversations begin with.")] = None,
    model: Annotated[str | None, typer.Option(help="Its model; needed where there are several.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Compute a prefix on every replica, and pin it."""
    if [prompt, file, system].count(None) != 2:
        raise typer.BadParameter("give one of --prompt, --file and --system")
    body: dict[str, Any] = {"name": name} | ({} if model is None else {"model": model})
    if system is not None:
        body["messages"] = [{"role": "system", "content": system}]
    else:
        body["prompt"] = prompt if file is None else read_text(file)
    card = call(url, api_key, "POST", "/v1/pins", body)
    print(
        f"{printable(card['id'])}: {card['num_tokens']} tokens, {show_size(card['num_bytes'])} a replica, on "
        f"{counted(card['num_replicas'], 'replica')}"
    )


@pins.command("remove", epilog=_REMOVE_EXAMPLES)
def remove_pin(
    name: Annotated[str, typer.Argument(help="The pin's name.")],
    model: Annotated[str | None, typer.Option(help="Its model; needed if several have a pin of this name.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Unpin a prefix on every replica. It stays in the cache until its memory is needed."""
    query = "" if model is None else f"?{urlencode({'model': model})}"
    call(url, api_key, "DELETE", f"/v1/pins/{quote(name, safe='')}{query}")
    print(f"{printable(name)} is not pinned any more")


def _show(url: str, api_key: str | None, as_json: bool) -> None:
    cards = call(url, api_key, "GET", "/v1/pins").get("data") or []
    if as_json:
        print(json.dumps(cards))
        return
    if not cards:
        print("nothing is pinned; `folio pins add` pins a prefix")
        return
    shown = table(None, "pin", "tokens", "memory on a replica", "replicas", "model")
    for card in cards:
        where = (
            str(num) if (num := card["num_computed"]) == card["num_replicas"] else f"{num} of {card['num_replicas']}"
        )
        row = printable(card["id"]), str(card["num_tokens"]), show_size(card["num_bytes"]), where
        shown.add_row(*row, printable(card["model"]))
    console().print(shown)
