"""Parts of the page in Node, with elements that only keep what they are given."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from folio.app.dashboard.http import STATIC
from folio.app.dashboard.state import Gpu

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
    """Regressions: "live" while nothing moved for 26 s, and while the only replica was stopped."""
    assert NODE is not None
    # (time, steps ended since, running, waiting) of two replicas, `None`: the first one does not answer; and the text
    seen = [
        (0, [1], 1, 0, "live"),
        (2, [], 1, 0, "live"),
        (3, [], 1, 4, "stalled for 3 s"),
        (26, [], 0, 4, "stalled for 26 s"),
        (27, [2], 1, 0, "live"),
        (40, [], 0, 0, "live"),
        (42, [], 1, 0, "live"),
        (43, [], 1, 0, "stalled for 3 s"),
        (45, [3], 1, 0, "live"),
        (46, None, 1, 0, "live"),
        (48, None, 1, 0, "no answer from 1 of 2 replicas for 3 s"),
        (49, [4], 1, 0, "live"),
        (51, None, 1, 0, "live"),
    ]
    states = [
        {
            "at": at,
            "num_silent": int(steps is None),
            "replicas": [
                {"name": "a", "steps": {"num": steps}, "load": {"num_running": running, "num_waiting": waiting}},
                {"name": "b", "steps": {"num": []}, "load": {"num_running": 0, "num_waiting": 0}},
            ][steps is None :],
        }
        for at, steps, running, waiting, _ in seen
    ]
    given = json.dumps([(STATIC / "stall.js").read_text(), states])
    done = subprocess.run([NODE, "-e", _STALL], input=given, capture_output=True, text=True, timeout=60, check=True)
    told = [("live" if text == "live" else "stalled", text) for *_, text in seen]
    assert [tuple(pair) for pair in json.loads(done.stdout)] == told
