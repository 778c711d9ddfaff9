"""`folio top`: the view at several sizes, and a server that goes and comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from folio.app.cli.connection import Server
from folio.app.cli.main import main
from folio.app.cli.top.command import Watch
from folio.app.cli.top.models import model_rows
from folio.app.cli.top.view import KINDS, bar, kinds_of, view
from folio.app.dashboard.state import Load, Memory, ModelOnDevice, ReplicaState, Traffic
from tests.app.cli.fake_server import error, serving, stream
from tests.processes import until_async

MIB = 1 << 20
MEMORY = dict.fromkeys(Memory.model_fields, 0) | {
    "budget_bytes": 1024 * MIB,
    "physical_bytes": 700 * MIB,
    "active_bytes": 300 * MIB,
    "pinned_bytes": 20 * MIB,
    "cached_bytes": 200 * MIB,
    "parked_bytes": 100 * MIB,
}


def replica(name: str, num_running: int = 3, **memory: int) -> dict[str, Any]:
    load = dict.fromkeys(Load.model_fields, 0) | {"num_running": num_running, "num_waiting": 2, "max_num_seqs": 64}
    state = {
        "name": name,
        "model": "m",
        "age_s": 4000.0,
        "load": load,
        "memory": MEMORY | memory,
        "maps": [],
        "steps": {"outputs": [40, 50], "sequences": [3, 5]},
        "last_step": 2,
    }
    ReplicaState.model_validate(state)  # the view reads what the dashboard's state has
    return state


def on_gpu(name: str) -> dict[str, Any]:
    parts = {"weights": 16_000 * MIB, "kv": 700 * MIB, "idle": 0, "free": 60_000 * MIB}
    state = replica(name, exposed_us=1_250_000, hidden_us=30_000_000) | {
        "gpu": {"parts": parts, "pinned_bytes": 512 * MIB}
    }
    ReplicaState.model_validate(state)
    return state


def state_of(*replicas: dict[str, Any]) -> dict[str, Any]:
    times = {"num": 9, "p50": 0.0123, "p90": 0.034, "p99": 1.2}
    traffic = {
        "prompt_tokens": 1000,
        "cached_tokens": 430,
        "requests_per_s": 2.5,
        "ttft_s": times,
        "tpot_s": times,
    }
    Traffic.model_validate(traffic)
    return {
        "at": 1e9,
        "period_s": 1.0,
        "model": "evil\x1b[2J",
        "num_starting": 1,
        "num_silent": 0,
        "num_continued": 4,
        "traffic": traffic,
        "events": [{"ago_s": 70, "kind": "came", "replica": "r2"}],
        "replicas": list(replicas),
    }


def shown(state: Any, width: int, height: int | None = None, problem: tuple[float, str] | None = None) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), markup=False, highlight=False)  # noqa: SIM115
    console.print(view(state, width, problem, height))
    return console.export_text().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_view_fits_any_width(width: int) -> None:
    busy = replica("r3")
    busy["memory"] = None
    leaving = replica("r2", swapped_bytes=5 * MIB) | {"is_draining": True}
    lines = shown(state_of(replica("r1"), leaving, busy), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in text
    for figure in (
        "3 replicas",
        "running 9",
        "continued 4",
        "queue 6",
        "tokens/s 270",
        "hit rate 43%",
        "12.3 34 1200 ms",
        "r1",
        "r2",
    ):
        assert figure in text
    assert width == 40 or "3 replicas, 1 starting, 1 draining" in text
    assert sum("█" in line for line in lines) == 3  # two bars and the legend
    if width >= 120:
        assert next(line.split()[:7] for line in lines if "r1" in line) == ["r1", "1", "h", "3/64", "2", "5", "90"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_gpu_is_shown_by_part(width: int) -> None:
    lines = shown(state_of(on_gpu("r1"), on_gpu("r2"), replica("r3")), width)
    gpus = [line for line in lines if line.startswith("GPU of")]
    assert [line.split()[2] for line in gpus] == ["r1", "r2"]
    assert max(map(len, lines)) <= width
    if width == 200:
        expected = "weights 15.62 GiB   kv 700 MiB   free 58.59 GiB   pinned on host 512 MiB"
        assert gpus[0].split("   ", 1)[1] == f"{expected}   mapping 1.2 s exposed, 30.0 s hidden"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("make", [replica, on_gpu])
def test_a_low_terminal_shows_the_busiest(width: int, make: Callable[[str], dict[str, Any]]) -> None:
    replicas = [make(f"r{number}") for number in range(20)]
    for number, each in enumerate(replicas):
        each["load"]["num_running"] = number
    lines = shown(state_of(*replicas), width, height=24)
    assert len(lines) <= 24
    assert any("r19" in line for line in lines)
    assert not any("r0 " in line for line in lines)
    assert any("replicas with less to do" in line for line in lines)


def test_a_server_that_is_away_is_told() -> None:
    text = "\n".join(shown(state_of(replica("r1")), 120, problem=(1e9, "nothing answers at http://x")))
    assert "not reachable since" in text
    assert "nothing answers at http://x" in text
    assert "r1" in text
    assert "0 replicas" in "\n".join(shown(state_of(), 80))


@pytest.mark.parametrize("width", [10, 33, 100])
def test_the_bar_has_every_kind(width: int) -> None:
    drawn = bar(MEMORY, width).plain
    assert len(drawn) == width
    assert set(drawn) == {character for _, _, character in KINDS}
    assert sum(kinds_of(MEMORY).values()) == MEMORY["budget_bytes"]


def test_the_bar_of_a_budget_that_was_lowered() -> None:
    memory = MEMORY | {"budget_bytes": 100 * MIB}
    assert kinds_of(memory)["not taken"] == 0
    assert len(bar(memory, 50).plain) == 50
    assert len(bar(dict.fromkeys(MEMORY, 0), 50).plain) == 50


def event(state: Any) -> bytes:
    return f"id: 1\nevent: state\ndata: {json.dumps(state)}\n\n".encode()


def test_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = state_of(), state_of(replica("r1"))

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        assert request.path == "/dashboard/events"
        return await stream(request, b"retry: 1000\n\n", event(first), event(second))

    monkeypatch.setenv("COLUMNS", "120")
    with serving(answer) as url:
        assert main(["top", "--url", url, "--once"]) == 0
        assert "1 replica, 1 starting" in (out := capsys.readouterr().out)
        assert "\x1b" not in out
        assert main(["top", "--url", url, "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == second


def test_a_server_that_drains_is_not_asked_at_once_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Its streams end at once, and the client opened hundreds a second."""

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return await stream(request, b"retry: 1000\n\n")

    with serving(answer) as url:
        assert main(["top", "--url", url, "--once"]) == 1
        assert capsys.readouterr().err == f"{url} is stopping\n"


def test_it_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "the view needs a terminal; use --once or --json" in capsys.readouterr().err


def test_a_server_that_restarts_is_found_again() -> None:
    is_away = False

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if is_away:
            return error("the server is draining", 503, "server_error")
        response = await stream(request, event(state_of(replica("r1"))))
        while not is_away:
            await response.write(event(state_of(replica("r1"), replica("r2"))))
            await asyncio.sleep(0.01)
        return response

    async def follow(url: str) -> None:
        nonlocal is_away
        watch = Watch()
        async with Server(url) as server:
            following = asyncio.create_task(watch.follow(server, 0.01))
            await until_async(lambda: len(watch.state.get("replicas", ())) == 2)
            assert watch.problem is None
            is_away = True
            await until_async(lambda: watch.problem is not None)
            assert watch.problem is not None
            assert watch.problem[1] == "the server is draining"
            assert len(watch.state["replicas"]) == 2  # what was seen last stays
            is_away = False
            await until_async(lambda: watch.problem is None)
            following.cancel()

    with serving(answer) as url:
        asyncio.run(follow(url))


# ---- models of a shelf ----


def model(name: str, state: str = "awake", **figures: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(ModelOnDevice.model_fields, 0) | {"evicted_for": None, "error": None}
    return zeros | {"name": name, "state": state} | figures


def shelf(name: str, *models: dict[str, Any], needed_bytes: int = 200 * MIB) -> dict[str, Any]:
    device = {"used_bytes": 100 * MIB, "charged_bytes": 300 * MIB, "workspace_bytes": 112 * MIB, "idle_bytes": 5 * MIB}
    found = replica(name) | {"models": list(models), "device": device | {"capacity_bytes": 1024 * MIB}}
    found["device"] |= {"needed_bytes": needed_bytes}
    ReplicaState.model_validate(found)  # the view reads what the dashboard's state has
    return found


CHAT = model(
    "chat",
    device_weight_bytes=256 * MIB,
    kv_bytes=64 * MIB,
    num_running=3,
    num_waiting=4,
    num_wakes=2,
    last_wake_s=0.25,
)
CODER = model(
    "coder\x1b[2J",
    "asleep",
    num_waiting=1,
    num_wakes=7,
    num_evictions=6,
    evicted_for="chat",
    wake_s=1.5,
    last_wake_s=0.5,
)
BROKEN = model("broken", "failed", error="its weights\nare truncated", wake_s=1.0)


@pytest.mark.parametrize("width", [40, 60, 84, 120, 200])
def test_the_models_fit_any_width(width: int) -> None:
    lines = shown(state_of(shelf("r1", CODER, BROKEN, CHAT)), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in text
    assert lines[0].startswith("folio  3 models  1 replica")
    assert "device memory 512 MiB of 1 GiB" in text
    assert "broken has failed: its weights are"[: width - 1] in text
    names = [
        line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in ("chat", "coder[2J", "broken")
    ]
    assert names[:3] == ["chat", "coder[2J", "broken"], "those with the most requests first"
    if width >= 84:
        rows = {line.split()[0]: line.split()[1:] for line in lines if "MiB" in line or "asleep" in line}
        assert rows["chat"][:11] == ["awake", "3", "4", "256", "MiB", "64", "MiB", "2", "250", "0", "0"]
        assert rows["coder[2J"][:9] == ["asleep", "0", "1", "-", "-", "7", "500", "1500", "6"]
        assert ("chat" in rows["coder[2J"]) == (width >= 120)
    if width == 200:
        drawn = next(line for line in lines if line.startswith("chat"))
        assert abs(drawn.count("█") - 94 / 4) <= 1
        assert abs(drawn.count("▒") - 94 / 16) <= 1


def test_replicas_are_added_up() -> None:
    asleep = CHAT | {"state": "asleep", "device_weight_bytes": 0, "kv_bytes": 0, "wake_s": 3.0, "last_wake_s": 0.5}
    [row] = model_rows([shelf("r1", CHAT), shelf("r2", asleep)])
    assert (row.sums["num_running"], row.sums["num_wakes"], row.num_bytes) == (6, 4, 320 * MIB)
    assert (row.wait_s, row.last_wake_s) == (0.0, 0.5)
    text = "\n".join(shown(state_of(shelf("r1", CHAT), shelf("r2", asleep)), 120))
    assert "1 awake 1 asleep" in text
    assert "device memory 1 GiB of 2 GiB" in text


def test_memory_that_is_needed_is_seen_beside_the_budget() -> None:
    """Regression: an operator saw that a replica was added, and not that its models needed more than one has."""
    one, two = shelf("r1", CHAT), shelf("r2", CODER, needed_bytes=1536 * MIB)
    for replicas, said in (
        ([one], "of 1 GiB   needed 200 MiB   "),
        ([two], "of 1 GiB   needed 1.5 GiB, more than there is   "),
        ([one, two], "of 2 GiB   needed 1.695 GiB, more than there is at 1 of 2   "),
    ):
        assert said in "\n".join(shown(state_of(*replicas), 120))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("num_replicas", [1, 20])
def test_a_low_terminal_shows_the_models_with_requests(width: int, num_replicas: int) -> None:
    models = [model(f"m{number}", num_running=number) for number in range(60)]
    lines = shown(state_of(*(shelf(f"r{number}", *models) for number in range(num_replicas))), width, height=30)
    assert len(lines) <= 30
    assert any("m59" in line for line in lines)
    assert any("models with less to do" in line for line in lines)
    assert any(line.startswith("r") for line in lines)


def test_a_single_model_has_no_table_of_models() -> None:
    assert model_rows([replica("r1")]) == []
    assert not any("device memory" in line for line in shown(state_of(replica("r1")), 120))
