"""`folio budget`: the ceiling of every replica's KV cache."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Json, Url, call
from folio.app.cli.sizes import parse_size
from folio.app.cli.text import console, counted, printable, table
from folio.app.config.sizes import show_size

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
_COLUMNS = {"budget": "budget", "taken": "physical"} | {
    kind: kind for kind in ("active", "cached", "pinned", "swapped")
}


def budget(
    size: Annotated[
        int | None,
        typer.Argument(parser=parse_size, metavar="[SIZE]", help="New budget of each replica, such as 2GiB."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Show how much memory the KV caches take and may take; with SIZE, change what each may take. With API keys, for
    operators."""
    changed = None if size is None else call(url, api_key, "PUT", "/v1/budget", {"budget_bytes": size})
    reports = call(url, api_key, "GET", "/v1/load/memory")
    if as_json:
        print(json.dumps({"change": changed, "replicas": reports}))
        return
    answers = Counter(changed["answers"] if changed else ())
    for answer, number in sorted(answers.items()):
        print(f"{number} of {counted(answers.total(), 'replica')}: {answer} ({_OUTCOMES.get(answer, answer)})")
    shown = table(None, "replica", *_COLUMNS)
    for name, report in sorted(reports.items()):
        shown.add_row(printable(name), *(show_size(report[f"{field}_bytes"]) for field in _COLUMNS.values()))
    console().print(shown)
