"""`folio budget`: the ceiling of every replica's KV cache."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from app.cli.connection import DEFAULT_URL, ApiKey, Server, Url
from app.cli.sizes import parse_size, show_size
from app.cli.text import printable

EXAMPLES = """
folio budget
folio budget 2GiB
folio budget 500MiB --url http://127.0.0.1:8001 --api-key KEY
"""

_OUTCOMES = {
    "applied": "within it now",
    "deferred": "will be, when requests that hold more have ended or are preempted",
    "stale": "kept another change, which was newer",
}


def budget(
    size: Annotated[
        int | None,
        typer.Argument(parser=parse_size, metavar="[SIZE]", help="New budget of each replica, such as 2GiB."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how much memory the KV caches take and may take; with SIZE, change what each may take. With API keys, for
    operators."""
    changed, reports = asyncio.run(_change(Server(url, api_key), size))
    if as_json:
        print(json.dumps({"change": changed, "replicas": reports}))
        return
    if changed is not None:
        answers: list[str] = changed["answers"]
        for answer in sorted(set(answers)):
            print(f"{answers.count(answer)} of {_replicas(len(answers))}: {answer} ({_OUTCOMES.get(answer, answer)})")
    _print_table(reports)


def _replicas(number: int) -> str:
    return f"{number} replica{'' if number == 1 else 's'}"


async def _change(server: Server, size: int | None) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """(the server's answer to a change, the memory report of each replica). Raises `FolioError`."""
    async with server:
        changed = None if size is None else await server.call("PUT", "/v1/budget", {"budget_bytes": size})
        return changed, await server.call("GET", "/v1/load/memory")


def _print_table(reports: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("replica", overflow="fold")
    columns = ("budget", "taken", "active", "cached", "pinned", "swapped")
    for column in columns:
        table.add_column(column, justify="right")
    for name, report in sorted(reports.items()):
        fields = ("budget_bytes", "physical_bytes", "active_bytes", "cached_bytes", "pinned_bytes", "swapped_bytes")
        table.add_row(printable(name), *(show_size(report[field]) for field in fields))
    Console(markup=False, highlight=False).print(table)
