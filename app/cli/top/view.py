"""The view of `folio top`: a dashboard's state as text of any width."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from folio.app.cli.text import counted, printable, show_ms
from folio.app.cli.top.models import model_rows, models_view
from folio.app.config.sizes import show_size

# Kinds of memory in the order of the bar, with colours and characters: without colours the bar is still read.
KINDS = (
    ("active", "green", "█"),
    ("pinned", "magenta", "▓"),
    ("cached", "cyan", "▒"),
    ("parked", "yellow", "░"),
    ("free", "blue", "-"),
    ("not taken", "bright_black", "·"),
)
_SWAPPED = "red"
_WIDE, _MIDDLE = 110, 76
# Empty lines, the table's head, the number of replicas left out, the latest events, and one line that may break.
_SPARE_LINES = 6


def kinds_of(memory: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the budget by kind. They add up to the budget, or to what is taken if that is more."""
    active = max(memory["active_bytes"] - memory["pinned_bytes"], 0)
    known = active + memory["pinned_bytes"] + memory["cached_bytes"] + memory["parked_bytes"]
    return {
        "active": active,
        "pinned": memory["pinned_bytes"],
        "cached": memory["cached_bytes"],
        "parked": memory["parked_bytes"],
        "free": max(memory["physical_bytes"] - known, 0),
        "not taken": max(memory["budget_bytes"] - memory["physical_bytes"], 0),
    }


def bar(memory: Mapping[str, Any], width: int) -> Text:
    """The budget as `width` characters. Each kind that takes memory has one at least, if they fit."""
    sizes = kinds_of(memory)
    total = sum(sizes.values()) or 1
    cells = {kind: max(round(width * size / total), 1 if size else 0) for kind, size in sizes.items()}
    while sum(cells.values()) > width:
        cells[max(cells, key=lambda kind: cells[kind])] -= 1
    largest = max(sizes, key=lambda kind: sizes[kind])
    cells[largest] += width - sum(cells.values())
    text = Text()
    for kind, colour, character in KINDS:
        text.append(character * cells[kind], style=colour)
    return text


def view(state: Mapping[str, Any], width: int, problem: tuple[float, str] | None, height: int | None = None) -> Group:
    """The whole view.

    Args:
        state: of `GET /dashboard/state`.
        problem: since when (seconds since 1970) and why there is no newer state.
        height: lines of the terminal; `None`: as many as it takes.
    """
    replicas: Sequence[Any] = state.get("replicas") or ()
    title, totals, legend = _title(state, problem), _totals(state, width), _legend()
    lines_each = 3 - (width >= _MIDDLE) - (width >= _WIDE)
    lines_each += any(replica.get("gpu") for replica in replicas)
    rows = model_rows(replicas)
    models: RenderableType = Group()
    room = len(replicas)
    if height is not None:
        others = sum(-(-len(line) // width) for text in (title, totals, legend) for line in text.plain.split("\n"))
        height -= others + _SPARE_LINES
    if rows:
        # Models get the lines that replicas leave, and no less than half.
        most = None if height is None else height - min(lines_each * len(replicas), height // 2)
        models, num_lines = models_view(rows, replicas, width, most)
        height = None if height is None else height - num_lines
    if height is not None:
        room = max(height // lines_each, 1)
    # The busiest first when not all fit.
    by_business = sorted(replicas, key=lambda replica: -_business(replica))
    shown = by_business[:room] if len(replicas) > room else list(replicas)
    gpus = [replica for replica in shown if replica.get("gpu")]
    parts: list[RenderableType] = [title, totals, Text()]
    parts.append((_wide if width >= _WIDE else _narrow)(shown, width, state.get("period_s") or 1.0))
    if len(shown) < len(replicas):
        parts.append(Text(f"… and {len(replicas) - len(shown)} replicas with less to do", style="dim"))
    parts += [models, *map(_gpu_line, gpus), Text(), legend]
    return Group(*parts, *_latest_events(state.get("events")))


def _latest_events(events: Sequence[Any] | None) -> list[Text]:
    if not events:
        return []
    return [Text(" · ".join(map(_event, list(events)[:2])), style="dim", no_wrap=True, overflow="ellipsis")]


def _business(replica: Mapping[str, Any]) -> int:
    load = replica["load"]
    return int(load["num_running"] + load["num_waiting"])


def _title(state: Mapping[str, Any], problem: tuple[float, str] | None) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    rows = model_rows(state.get("replicas") or ())
    served = counted(len(rows), "model") if rows else printable(str(state.get("model", "")))
    text.append(f"folio  {served}", style="bold")
    text.append(f"  {counted(len(state.get('replicas') or ()), 'replica')}")
    for field, word, style in (("num_starting", "starting", "yellow"), ("num_silent", "silent", "red")):
        if state.get(field):
            text.append(f", {state[field]} {word}", style=style)
    if num_draining := sum(bool(replica.get("is_draining")) for replica in state.get("replicas") or ()):
        text.append(f", {num_draining} draining", style="yellow")
    if "at" in state:
        text.append(f"  {time.strftime('%H:%M:%S', time.localtime(state['at']))}", style="dim")
    if problem is not None:
        since = time.strftime("%H:%M:%S", time.localtime(problem[0]))
        text.append(f"\nnot reachable since {since}: {printable(problem[1])}", style="bold red")
    return text


def _totals(state: Mapping[str, Any], width: int) -> Text:
    """Figures of all replicas and of the requests through this ingress."""
    traffic = state.get("traffic") or {}
    replicas = state.get("replicas") or ()
    prompt_tokens = traffic.get("prompt_tokens") or 0
    hit = f"{traffic['cached_tokens'] / prompt_tokens:.0%}" if prompt_tokens else "-"
    cells = [
        ("running", str(sum(replica["load"]["num_running"] for replica in replicas))),
        ("queue", str(sum(replica["load"]["num_waiting"] for replica in replicas))),
        ("tokens/s", f"{sum(tokens_per_s(replica, state['period_s']) for replica in replicas):.0f}"),
        ("requests/s", f"{traffic.get('requests_per_s', 0):.1f}"),
        ("failed/s", f"{traffic.get('failed_per_s', 0):.1f}"),
        ("continued", str(state.get("num_continued", 0))),
        ("hit rate", hit),
        ("TTFT p50 p90 p99", _percentiles(traffic.get("ttft_s"))),
        ("TPOT p50 p90 p99", _percentiles(traffic.get("tpot_s"))),
    ]
    lines = [Text()]
    for name, value in cells:
        cell = Text.assemble((f"{name} ", "dim"), value)
        if lines[-1] and len(lines[-1]) + 3 + len(cell) > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1] else "").append_text(cell)
    return Text("\n").join(lines)


def tokens_per_s(replica: Mapping[str, Any], period_s: float) -> float:
    """Output tokens a second of the steps since the state before."""
    total: int = sum(replica["steps"]["outputs"])
    return total / period_s


def _percentiles(values: Mapping[str, Any] | None) -> str:
    if not values or values.get("p50") is None:
        return "-"
    return " ".join(show_ms(values[key]) for key in ("p50", "p90", "p99")) + " ms"


def _figures(replica: Mapping[str, Any]) -> dict[str, str]:
    load, memory = replica["load"], replica["memory"]
    steps = replica["steps"]["sequences"]
    figures = {
        "replica": printable(replica["name"]),
        "age": _age(replica["age_s"]),
        "run": f"{load['num_running']}/{load['max_num_seqs']}",
        "queue": str(load["num_waiting"]),
        "batch": str(max(steps, default=0)),
        "taken": "busy",
        "budget": "",
        "swapped": "",
    }
    if memory is not None:
        figures |= {"taken": show_size(memory["physical_bytes"]), "budget": show_size(memory["budget_bytes"])}
        if memory["swapped_bytes"]:
            figures["swapped"] = show_size(memory["swapped_bytes"])
    return figures


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _wide(replicas: Sequence[Mapping[str, Any]], width: int, period_s: float) -> Table:
    """A line for each replica."""
    table = Table(box=None, pad_edge=False, header_style="dim", width=width)
    table.add_column("replica", no_wrap=True, overflow="ellipsis", max_width=16)
    for name in ("age", "run", "queue", "batch", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV memory", ratio=1, no_wrap=True)
    for name in ("taken", "of budget", "swapped"):
        table.add_column(name, justify="right", no_wrap=True)
    bar_width = max(width - 84, 10)
    for replica in replicas:
        each = _figures(replica)
        table.add_row(
            *(each[name] for name in ("replica", "age", "run", "queue", "batch")),
            f"{tokens_per_s(replica, period_s):.0f}",
            Text("busy", style="dim") if replica["memory"] is None else bar(replica["memory"], bar_width),
            each["taken"],
            each["budget"],
            Text(each["swapped"], style=_SWAPPED),
        )
    return table


def _narrow(replicas: Sequence[Mapping[str, Any]], width: int, period_s: float) -> Group:
    """Two or three lines for each replica: figures, then the bar."""
    parts: list[RenderableType] = []
    for replica in replicas:
        each = _figures(replica)
        load = (
            f"run {each['run']} queue {each['queue']} batch {each['batch']} tok/s {tokens_per_s(replica, period_s):.0f}"
        )
        memory = f"{each['taken']} of {each['budget']}"
        swapped = f" + {each['swapped']} swapped" if each["swapped"] else ""
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(each["replica"][:16], style="bold")
        head.append(f"  {each['age']}  ", style="dim").append(load)
        if width >= _MIDDLE:
            head.append(f"  {memory}").append(swapped, style=_SWAPPED)
        parts.append(head)
        if width < _MIDDLE:
            parts.append(Text(f"  {memory}", no_wrap=True, overflow="ellipsis").append(swapped, style=_SWAPPED))
        if replica["memory"] is not None:
            parts.append(Text("  ").append_text(bar(replica["memory"], width - 4)))
    return Group(*parts)


def _gpu_line(replica: Mapping[str, Any]) -> Text:
    """A replica's GPU memory by part, pinned host memory, and the mapping time since the start."""
    gpu, memory = replica["gpu"], replica["memory"]
    text = Text(no_wrap=True, overflow="ellipsis").append(f"GPU of {printable(replica['name'])[:16]}", style="dim")
    cells = [*gpu["parts"].items(), ("pinned on host", gpu["pinned_bytes"])]
    for name, num_bytes in cells:
        if num_bytes:
            text.append(f"   {name} ", style="dim").append(show_size(num_bytes))
    if memory is not None:
        exposed_s, hidden_s = memory["exposed_us"] / 1e6, memory["hidden_us"] / 1e6
        text.append("   mapping ", style="dim").append(f"{exposed_s:.1f} s exposed, {hidden_s:.1f} s hidden")
    return text


def _legend() -> Text:
    text = Text()
    for kind, colour, character in KINDS:
        text.append(f"{character} {kind}  ", style=colour)
    return text.append("q quits", style="dim")


def _event(event: Mapping[str, Any]) -> str:
    return f"{printable(str(event['replica']))} {event['kind']} {_age(event['ago_s'])} ago"
