"""Parts of the page in Node, with elements that only keep what they are given."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from app.dashboard.http import STATIC
from app.dashboard.state import Gpu

NODE = shutil.which("node")
pytestmark = [pytest.mark.processes, pytest.mark.skipif(not NODE, reason="there is no Node")]

# Shows each state in turn, and prints the panel after each.
_SCRIPT = """
const element = () => ({
  children: [], style: {}, hidden: true, textContent: "",
  append(...more) { this.children.push(...more); },
  replaceChildren(...all) { this.children = all; },
});
globalThis.document = { createElement: element };
const [source, gpus] = JSON.parse(require("fs").readFileSync(0));
import("data:text/javascript;base64," + Buffer.from(source).toString("base64")).then(({ GpuTable }) => {
  const note = element(), table = element();
  const panel = { querySelector: (name) => (name === "table" ? table : note) };
  const shown = new GpuTable(panel, { bytes: (size) => size + " B" });
  const widths = (bar) => bar.children.map((part) => [part.className, part.style.width]);
  const seen = (cell) => (cell.className === "bar" ? widths(cell) : cell.textContent);
  console.log(JSON.stringify(gpus.map((gpu) => {
    shown.show({ gpu });
    return [panel.hidden, note.textContent, table.children[0].children.map((row) => row.children.map(seen))];
  })));
});
"""


def shown(*gpus: Gpu | None) -> list[Any]:
    """Whether the panel is hidden, its note and its rows, after each state."""
    assert NODE is not None
    given = json.dumps([(STATIC / "models.js").read_text(), [gpu and gpu.model_dump() for gpu in gpus]])
    done = subprocess.run([NODE, "-e", _SCRIPT], input=given, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_a_gpus_memory_is_drawn_by_part() -> None:
    first = Gpu(parts={"weights": 60, "kv": 20, "idle": 0, "free": 120}, pinned_bytes=7)
    later = Gpu(parts={"kv": 50, "graphs": 50}, pinned_bytes=0)
    cpu, drawn, again, gone = shown(None, first, later, None)
    assert cpu == [True, "", []]
    assert drawn == [
        False,
        "200 B in all; 7 B of host memory are pinned for it.",
        [
            ["weights", [["weights", "30%"]], "60 B"],
            ["kv", [["kv", "10%"]], "20 B"],
            ["free", [["free", "60%"]], "120 B"],
        ],
    ]
    assert [row[0] for row in again[2]] == ["kv", "graphs"]
    assert gone[0] is True


_STALL = """
const [source, states] = JSON.parse(require("fs").readFileSync(0));
import("data:text/javascript;base64," + Buffer.from(source).toString("base64")).then(({ Movement }) => {
  const movement = new Movement();
  console.log(JSON.stringify(states.map((state) => movement.status(state, (s) => s + " s"))));
});
"""


def test_a_replica_that_ends_no_step_is_told() -> None:
    """Regression: "live" while nothing moved for 26 s."""
    assert NODE is not None
    # (time, steps ended since, running, waiting) of two replicas
    seen = [
        (0, [1], 1, 0),
        (2, [], 1, 0),
        (3, [], 1, 4),
        (26, [], 0, 4),
        (27, [2], 1, 0),
        (40, [], 0, 0),
        (42, [], 1, 0),
        (43, [], 1, 0),
    ]
    states = [
        {
            "at": at,
            "replicas": [
                {"name": "a", "steps": {"num": steps}, "load": {"num_running": running, "num_waiting": waiting}},
                {"name": "b", "steps": {"num": []}, "load": {"num_running": 0, "num_waiting": 0}},
            ],
        }
        for at, steps, running, waiting in seen
    ]
    given = json.dumps([(STATIC / "stall.js").read_text(), states])
    done = subprocess.run([NODE, "-e", _STALL], input=given, capture_output=True, text=True, timeout=60, check=True)
    texts = [text for _, text in json.loads(done.stdout)]
    assert texts == ["live", "live", "stalled for 3 s", "stalled for 26 s", "live", "live", "live", "stalled for 3 s"]
