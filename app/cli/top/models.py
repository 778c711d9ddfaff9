"""Models that share a device, in the view of `folio top`: their states, memory, requests, wakes and evictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from folio.app.cli.text import counted, printable, show_ms
from folio.app.config.sizes import show_size

# The most ready first, with colours.
_STATES = {
    "awake": "green",
    "waking": "yellow",
    "loading": "yellow",
    "asleep": "blue",
    "new": "bright_black",
    "failed": "red",
}
_SUMS = ("device_weight_bytes", "kv_bytes", "num_running", "num_waiting", "num_wakes", "num_evictions")
# Kinds of memory in a model's bar: colours and characters.
_WEIGHTS, _KV = ("green", "█"), ("cyan", "▒")
_WIDE, _MIDDLE = 120, 84
# An empty line, the line about the devices, the table's head, the number of models left out, and a failed one's error.
_FRAME_LINES = 5


@dataclass
class ModelRow:
    """One model on all replicas.

    Attributes:
        states: number of replicas for each state of the model.
        sums: figures of the replicas, added up.
        wait_s: least expected time until a request has memory; `None` if it has failed everywhere.
        last_wake_s: the longest of the replicas' last wakes; `None` before the first.
        evicted_for, error: of any replica.
    """

    name: str
    states: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    wait_s: float | None = None
    last_wake_s: float | None = None
    evicted_for: str = ""
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return self.sums["device_weight_bytes"] + self.sums["kv_bytes"]

    @property
    def num_requests(self) -> int:
        return self.sums["num_running"] + self.sums["num_waiting"]

    def add(self, model: Mapping[str, Any]) -> None:
        """Add the model's state at one replica, a `ModelOnDevice`."""
        self.states[model["state"]] += 1
        self.sums.update({name: model[name] for name in _SUMS})
        if model["state"] != "failed":
            self.wait_s = min(model["wake_s"], model["wake_s"] if self.wait_s is None else self.wait_s)
        if model["num_wakes"]:
            self.last_wake_s = max(model["last_wake_s"], self.last_wake_s or 0.0)
        self.evicted_for = model["evicted_for"] or self.evicted_for
        self.error = model["error"] or self.error

    def cells(self) -> dict[str, Text]:
        """The figures as text, by column."""
        state = Text()
        for name in filter(self.states.__contains__, _STATES):
            state.append(" " if state else "")
            state.append(f"{self.states[name]} {name}" if len(self.states) > 1 else name, style=_STATES[name])
        texts = {
            "run": str(self.sums["num_running"]),
            "queue": str(self.sums["num_waiting"]),
            "weights": show_size(self.sums["device_weight_bytes"]) if self.sums["device_weight_bytes"] else "-",
            "KV": show_size(self.sums["kv_bytes"]) if self.sums["kv_bytes"] else "-",
            "wakes": str(self.sums["num_wakes"]),
            "last ms": show_ms(self.last_wake_s),
            "evicted": str(self.sums["num_evictions"]),
            "for": printable(self.evicted_for),
            "wait ms": show_ms(self.wait_s) if self.wait_s != 0 else "0",
        }
        cells = {"model": Text(printable(self.name)), "state": state}
        return cells | {name: Text(text) for name, text in texts.items()}

    def bar(self, capacity_bytes: int, width: int) -> Text:
        """The model's memory; `width` is the capacity of all devices. Each kind has one character at least."""
        text = Text()
        for num_bytes, (colour, character) in (
            (self.sums["device_weight_bytes"], _WEIGHTS),
            (self.sums["kv_bytes"], _KV),
        ):
            cells = max(round(width * num_bytes / capacity_bytes), 1 if num_bytes else 0)
            text.append(character * min(cells, width - len(text)), style=colour)
        return text


def model_rows(replicas: Sequence[Mapping[str, Any]]) -> list[ModelRow]:
    """The models of all replicas that share devices, those with the most requests and memory first."""
    rows: dict[str, ModelRow] = {}
    for replica in replicas:
        for model in replica.get("models") or ():
            rows.setdefault(model["name"], ModelRow(model["name"])).add(model)
    return sorted(rows.values(), key=lambda row: (-row.num_requests, -row.num_bytes, row.name))


def models_view(
    rows: Sequence[ModelRow], replicas: Sequence[Mapping[str, Any]], width: int, num_lines: int | None
) -> tuple[RenderableType, int]:
    """The models as text.

    Args:
        rows: at least one.
        num_lines: bound of the lines, with which one model is shown at least; `None`: as many as it takes.

    Returns:
        the text, and a bound of its lines.
    """
    lines_each = 1 if width >= _MIDDLE else 2
    room = len(rows) if num_lines is None else max((num_lines - _FRAME_LINES) // lines_each, 1)
    shown = rows[:room]
    devices = [device for replica in replicas if (device := replica.get("device"))]
    totals = {name: sum(device[name] for device in devices) for name in (devices or ({},))[0]}
    num_short = sum(device["needed_bytes"] > device["capacity_bytes"] for device in devices)
    parts: list[RenderableType] = [Text(), _device_line(totals, num_short, len(devices))]
    parts.append(_table(shown, width, totals["capacity_bytes"]) if lines_each == 1 else _narrow(shown))
    if len(shown) < len(rows):
        parts.append(Text(f"… and {counted(len(rows) - len(shown), 'model')} with less to do", style="dim"))
    if failed := next((row for row in rows if row.error), None):
        reason = f"{printable(failed.name)} has failed: {printable(failed.error)}"
        parts.append(Text(reason.replace("\n", " "), style="red", no_wrap=True, overflow="ellipsis"))
    return Group(*parts), _FRAME_LINES + lines_each * len(shown)


def _device_line(device: Mapping[str, int], num_short: int, num_devices: int) -> Text:
    """The memory of all devices.

    Args:
        num_short: devices where the models with requests need more than there is, so that they take turns. With
            autoscaling this starts another replica.
    """
    taken = sum(device[f"{kind}_bytes"] for kind in ("used", "charged", "workspace"))
    text = Text("device memory ", style="dim", no_wrap=True, overflow="ellipsis")
    text.append(f"{show_size(taken)} of {show_size(device['capacity_bytes'])}", style="not dim")
    text.append("   needed ").append(show_size(device["needed_bytes"]), style="not dim")
    if num_short:
        where = f" at {num_short} of {num_devices}" if num_devices > 1 else ""
        text.append(f", more than there is{where}", style="not dim yellow")
    for (colour, character), name in ((_WEIGHTS, "weights"), (_KV, "KV")):
        text.append(f"   {character} {name}", style=colour)
    text.append(f"   workspace {show_size(device['workspace_bytes'])}   idle {show_size(device['idle_bytes'])}")
    return text


def _table(rows: Sequence[ModelRow], width: int, capacity_bytes: int) -> Table:
    """A line for each model."""
    table = Table(box=None, pad_edge=False, header_style="dim", width=width)
    table.add_column("model", no_wrap=True, overflow="ellipsis", max_width=24, ratio=1)
    table.add_column("state", no_wrap=True)
    names = ["run", "queue", "weights", "KV", "wakes", "last ms", "wait ms", "evicted"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    is_wide, bar_width = width >= _WIDE, width - 106
    if is_wide:
        table.add_column("for", no_wrap=True, overflow="ellipsis", max_width=16)
        table.add_column("of the devices", no_wrap=True, width=bar_width)
    for row in rows:
        cells = row.cells()
        wide = (cells["for"], row.bar(capacity_bytes, bar_width)) if is_wide else ()
        table.add_row(cells["model"], cells["state"], *(cells[name] for name in names), *wide)
    return table


def _narrow(rows: Sequence[ModelRow]) -> Group:
    """Two lines for each model."""
    parts: list[RenderableType] = []
    for row in rows:
        cells = row.cells()
        head = Text(no_wrap=True, overflow="ellipsis").append_text(cells["model"]).append("  ")
        head.stylize("bold")
        head.append_text(cells["state"]).append(
            f"  run {cells['run']} queue {cells['queue']} wait {cells['wait ms']} ms"
        )
        figures = f"  {cells['weights']} + KV {cells['KV']}  {cells['wakes']} wakes  last {cells['last ms']} ms"
        parts += [head, Text(f"{figures}  evicted {cells['evicted']}", style="dim", no_wrap=True, overflow="ellipsis")]
    return Group(*parts)
