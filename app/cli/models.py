"""`folio models`: the models of a server."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Json, Url, call
from folio.app.cli.text import console, printable, table

EXAMPLES = """
folio models
folio models add qwen Qwen2.5-0.5B-Instruct
folio models remove qwen
"""

models = typer.Typer(
    name="models",
    help="Show, add and remove models. With API keys, changes are for operators.",
    epilog=f"Examples:\n\n{EXAMPLES.strip()}",
    invoke_without_command=True,
)

_LIST_EXAMPLES = "Examples:\n\nfolio models list --json"
_ADD_EXAMPLES = "Examples:\n\nfolio models add qwen Qwen2.5-0.5B-Instruct --keep 600"
_REMOVE_EXAMPLES = "Examples:\n\nfolio models remove qwen"


def parse_keep(text: str) -> str | float:
    """The setting `keep`."""
    if text in ("auto", "always"):
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} must be auto, always, or seconds") from None


@models.callback()
def _without_command(
    context: typer.Context, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False
) -> None:
    if context.invoked_subcommand is None:
        _show(url, api_key, as_json)


@models.command("list", epilog=_LIST_EXAMPLES)
def list_models(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show the models and adapters with their contexts, and the states of models that share a device."""
    _show(url, api_key, as_json)


@models.command("add", epilog=_ADD_EXAMPLES)
def add_model(
    name: Annotated[str, typer.Argument(help="The model's name in requests.")],
    path: Annotated[str, typer.Argument(help="The model's folder, below the server's models_dir.")],
    keep: Annotated[
        str | None,
        typer.Option(
            parser=parse_keep,
            metavar="auto|always|SECONDS",
            help="When its weights leave the device: when others can use the memory better (auto), never (always), or "
            "after this time without a request.",
        ),
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Its share of the device's time beside other models.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt plus output in tokens.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Add a model to those of every replica. It is loaded at its first request."""
    options: dict[str, Any] = {"keep": keep, "weight": weight, "max_model_len": max_model_len}
    given = {key: value for key, value in options.items() if value is not None}
    card = call(url, api_key, "POST", "/v1/models", {"name": name, "path": path} | given)
    print(f"{printable(card['id'])} is served; its first request loads it")


@models.command("remove", epilog=_REMOVE_EXAMPLES)
def remove_model(
    name: Annotated[str, typer.Argument(help="The name of a model that was added.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Remove a model that was added while the server runs, and its adapters."""
    call(url, api_key, "DELETE", f"/v1/models/{quote(name, safe='')}")
    print(f"{printable(name)} is not served any more")


def _show(url: str, api_key: str | None, as_json: bool) -> None:
    cards = call(url, api_key, "GET", "/v1/models").get("data") or []
    if as_json:
        print(json.dumps(cards))
        return
    shown = table(None, "model", "state", "context", "adapter of")
    for card in cards:
        context = card.get("max_model_len")
        state = "" if card.get("parent") else card.get("state") or "awake"
        shown.add_row(
            printable(card["id"]), state, "" if context is None else f"{context:,}", printable(card.get("parent") or "")
        )
    console().print(shown)
