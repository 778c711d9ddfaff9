"""Pictures of the dashboard, from real runs: `docs/images/trade.svg` and, with chromium, `docs/images/dashboard-*.png`.

`python -m tools.dashboard_pictures` starts two replicas that share KV memory, sends waves of load to each in turn,
and draws what the dashboard's events say: pages rise at one replica and fall at the other. `--simulated 64` takes a
picture of so many simulated replicas instead.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.served import Served, cluster

if TYPE_CHECKING:
    from folio.app.dashboard.state import DashboardState

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHARED_BYTES = 16 << 20
# A replica keeps room for one longest sequence: here a sixth of the shared memory.
ARGS = {
    "engine": {
        "model": "builtin",
        "max_model_len": 1280,
        "num_threads": 1,
        "prefix_cache_release_s": 1.0,
        "max_num_seqs": 64,
    },
    "shared_kv_memory_bytes": SHARED_BYTES,
    "routing": {"policy": "round_robin"},
}
# A wave: so many requests of so many outputs, each of so many tokens.
WAVE, OUTPUTS, TOKENS = 20, 2, 240
COLOURS = {
    "active": "#3b7bf0",
    "shared": "#8b5cf6",
    "pinned": "#e07a10",
    "cached": "#12a182",
    "parked": "#d8b23a",
    "free": "#a3adbb",
}
COLUMNS, CELL = 32, 11


@dataclass(frozen=True, slots=True)
class Frame:
    """The states of two replicas' blocks at one moment. `states`: of each replica, the name of each block's state."""

    at: float
    states: tuple[list[str], ...]
    physical_bytes: tuple[int, ...]


class Recording(threading.Thread):
    """Records the events of a server until `stop` is set."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.stop = threading.Event()
        self.frames: list[Frame] = []

    def run(self) -> None:
        import httpx  # a GPU machine may lack it and pydantic

        from folio.app.dashboard.state import DashboardState

        while not self.stop.is_set():
            with httpx.stream("GET", f"{self._url}/dashboard/events?fast=true", timeout=60) as answer:
                for line in answer.iter_lines():
                    if self.stop.is_set():
                        return
                    if line.startswith("data: "):
                        self._note(DashboardState.model_validate_json(line[6:]))

    def _note(self, state: DashboardState) -> None:
        found = [(state.details[r.name].maps[0], r.memory) for r in state.replicas if r.name in state.details]
        if len(found) == 2 and all(memory is not None for _, memory in found):
            states = tuple([state.states[cell] for cell in blocks.states()] for blocks, _ in found)
            self.frames.append(
                Frame(state.at, states, tuple(m.model_dump()["physical_bytes"] for _, m in found if m is not None))
            )


def record(server: Served, waves: int, wave_s: float) -> list[Frame]:
    """Waves of forks at each replica in turn; forks go to the replica that has the request."""
    import httpx

    from folio.app.api.openai.bodies import ForkRequest

    parents: dict[str, str] = {}
    for number in itertools.count():
        body = {"model": "builtin", "prompt": f"The key of room {number} " * 8, "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        request_id = answer.raise_for_status().json()["id"]
        parents[request_id.rpartition(".")[2]] = request_id
        if len(parents) == 2:
            break
    recording = Recording(server.url)
    recording.start()
    try:
        for _, name in zip(range(waves), itertools.cycle(sorted(parents)), strict=False):
            until = time.monotonic() + wave_s
            running: list[Any] = []
            while time.monotonic() < until or running:
                running = [answer for answer in running if not _is_done(answer)]
                if time.monotonic() < until and len(running) < WAVE:
                    fork = ForkRequest(
                        model="builtin",
                        request_id=parents[name],
                        n=OUTPUTS,
                        max_tokens=TOKENS,
                        temperature=1.5,
                        ignore_eos=True,
                    )
                    running.append(server.ingress.fork.remote(fork))
                time.sleep(0.02)
        time.sleep(2.0)  # the last pages go back
    finally:
        recording.stop.set()
        recording.join()
    return recording.frames


def _is_done(answer: Any) -> bool:
    try:
        answer.result(timeout_s=0)
    except TimeoutError:
        return False
    return True


def draw(frames: Sequence[Frame], play_s: float) -> str:
    """An animated SVG of the frames, for light and dark pages."""
    begin, span = frames[0].at, max(frames[-1].at - frames[0].at, 1e-3)
    times = [(frame.at - begin) / span for frame in frames]
    num_cells = -(-max(len(s) for frame in frames for s in frame.states) // COLUMNS) * COLUMNS
    height = num_cells // COLUMNS * CELL
    panels, top = (24, 424), 58
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {top + height + 150}" '
        'font-family="system-ui,sans-serif">',
        "<style>svg{background:#fff}text{fill:#1b2130;font-size:14px}.s{fill:#5b6475;font-size:12px}.n{fill:#8891a0;opacity:.28}"
        "@media(prefers-color-scheme:dark){svg{background:#16181f}text{fill:#e6eaf1}.s{fill:#98a2b3}}</style>",
        f'<text x="24" y="24" font-weight="600">Two replicas share {SHARED_BYTES >> 20} MiB of KV memory</text>',
        f'<text x="24" y="{top - 10}" class="s">replica A, a square is a block of 16 tokens</text>',
        f'<text x="424" y="{top - 10}" class="s">replica B</text>',
    ]
    shown = dict.fromkeys(s for frame in frames for states in frame.states for s in states if s in COLOURS)
    for number, state in enumerate(shown):
        x = 420 + number * 74
        lines.append(f'<rect x="{x}" y="14" width="11" height="11" rx="2" fill="{COLOURS[state]}"/>')
        lines.append(f'<text x="{x + 15}" y="24" class="s">{state}</text>')
    for replica, left in enumerate(panels):
        for cell in range(num_cells):
            x, y = left + cell % COLUMNS * CELL, top + cell // COLUMNS * CELL
            lines.append(f'<rect class="n" x="{x + 3}" y="{y + 3}" width="3" height="3"/>')
            colours = [
                COLOURS.get(frame.states[replica][cell] if cell < len(frame.states[replica]) else "", "transparent")
                for frame in frames
            ]
            if set(colours) == {"transparent"}:
                continue
            kept = [i for i, colour in enumerate(colours) if i == 0 or colour != colours[i - 1]]
            values = ";".join(colours[i] for i in kept)
            keys = ";".join(f"{times[i]:.3f}" for i in kept)
            lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="2" fill="{colours[0]}">'
                f'<animate attributeName="fill" calcMode="discrete" values="{values}" keyTimes="{keys}" '
                f'dur="{play_s:g}s" repeatCount="indefinite"/></rect>'
            )
    lines += _curves(frames, times, top + height + 36, play_s)
    return "\n".join([*lines, "</svg>"])


def _curves(frames: Sequence[Frame], times: Sequence[float], top: int, play_s: float) -> list[str]:
    """Memory of both replicas on top of each other, below the limit, with a line that moves along."""
    width, height = 752, 84
    most = SHARED_BYTES * 1.02
    span_s = frames[-1].at - frames[0].at

    def area(lower: Sequence[float], upper: Sequence[float]) -> str:
        there = [
            f"{24 + t * width:.1f},{top + height - v / most * height:.1f}" for t, v in zip(times, upper, strict=True)
        ]
        back = [
            f"{24 + t * width:.1f},{top + height - v / most * height:.1f}" for t, v in zip(times, lower, strict=True)
        ]
        return " ".join(there + back[::-1])

    first = [float(frame.physical_bytes[0]) for frame in frames]
    both = [float(sum(frame.physical_bytes)) for frame in frames]
    limit = top + height - SHARED_BYTES / most * height
    return [
        f'<text x="24" y="{top - 8}" class="s">memory of A (blue) and B (orange), and their limit</text>',
        f'<polygon points="{area([0.0] * len(first), first)}" fill="#3b7bf0" fill-opacity=".75"/>',
        f'<polygon points="{area(first, both)}" fill="#e07a10" fill-opacity=".75"/>',
        f'<line x1="24" x2="776" y1="{limit:.1f}" y2="{limit:.1f}" stroke="#8891a0" stroke-dasharray="4 4"/>',
        f'<line y1="{top}" y2="{top + height}" x1="24" x2="24" stroke="#8891a0" stroke-width="2">'
        f'<animateTransform attributeName="transform" type="translate" values="0 0;{width} 0" dur="{play_s:g}s" '
        'repeatCount="indefinite"/></line>',
        f'<text x="24" y="{top + height + 20}" class="s">{span_s:.0f} seconds of a real run</text>',
    ]


def photograph(
    url: str, name: str, *, dark: bool, width: int = 1400, height: int = 1000, ask: str | None = None
) -> None:
    """A picture of the page. Needs playwright and chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium: apt-get install chromium")
    api: Any = importlib.import_module("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
        page.goto(url)
        page.wait_for_timeout(12_000)
        if ask is not None:
            page.fill("#message", ask)
            page.press("#message", "Enter")
            page.wait_for_timeout(4000)
        page.screenshot(path=IMAGES / name, type="jpeg" if name.endswith(".jpg") else "png")
        browser.close()


def main() -> None:
    """Record, draw, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--wave-s", type=float, default=10.0)
    parser.add_argument("--play-s", type=float, default=14.0)
    parser.add_argument("--simulated", type=int, metavar="REPLICAS")
    options = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    if options.simulated:
        local: Any = importlib.import_module("tests.local_server")
        simulated: Any = importlib.import_module("tests.app.dashboard.simulated")
        api, _ = simulated.simulated_api(options.simulated, 100_000)
        with local.listening(api) as url:
            photograph(url, "dashboard-fleet.jpg", dark=False, width=1600, height=1200)
        return
    with cluster() as url:
        server = Served("folio-pictures", url, ARGS)
        server.deploy(num_replicas=2, timeout_s=600)
        frames = record(server, options.waves, options.wave_s)
        photograph(url, "dashboard-light.jpg", dark=False, ask="What is a page?")
        photograph(url, "dashboard-dark.jpg", dark=True, ask="What is a block?")
    picture = draw(frames, options.play_s)
    (IMAGES / "trade.svg").write_text(picture)
    most = [max(frame.physical_bytes[i] for frame in frames) for i in range(2)]
    print(json.dumps({"frames": len(frames), "bytes": len(picture), "most_physical_bytes": most}))


if __name__ == "__main__":
    main()
