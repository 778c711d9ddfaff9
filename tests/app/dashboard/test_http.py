"""The page and its data over HTTP: an engine with the built-in model behind the guard, without Ray."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient
from starlette.types import Message

from folio.app.config.http import HttpSettings, KeySource
from folio.app.dashboard.collector import MOST_VIEWERS
from folio.app.dashboard.http import STATIC, EventStream
from folio.app.dashboard.state import DashboardState, ReplicaDetail, ReplicaState
from folio.app.dashboard.views import WatchCall, view_replica
from folio.app.fleet.messages import split_public_id
from folio.app.fleet.status import ModelReport, ReplicaStatus
from folio.app.shelf.status import ModelStatus
from tests.local_server import LocalServer, guarded_api, listening
from tests.processes import until

_OPERATOR, _TENANT = "k" * 20, "t" * 20


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    server = LocalServer(kv_memory_bytes=16 << 20, num_threads=1)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: LocalServer) -> TestClient:
    return TestClient(server.api)


@pytest.fixture
def keyed(server: LocalServer, tmp_path: Path) -> TestClient:
    file = tmp_path / "keys.json"
    keys = [{"name": "op", "key": _OPERATOR, "operator": True}, {"name": "tenant", "key": _TENANT}]
    file.write_text(json.dumps({"keys": keys}))
    return TestClient(
        guarded_api(server.ingress, HttpSettings(api_keys=KeySource(file=file)), server.ingress.dashboard)
    )


def test_the_root_leads_to_the_page(client: TestClient) -> None:
    for method in ("GET", "HEAD"):
        answer = client.request(method, "/", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")
        assert client.request(method, "/").status_code == 200


def test_everything_that_the_page_names_is_served_and_nothing_is_elsewhere(client: TestClient) -> None:
    page = client.get("/dashboard")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    named: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named.extend(v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("#", "docs")))
            assert not [k for k, _ in attrs if k.startswith("on") or k == "style"], "the policy forbids inline code"

    Links().feed(page.text)
    assert {name.rsplit("/")[-1] for name in named} >= {"app.js", "style.css", "uPlot.iife.min.js", "uPlot.min.css"}
    for name in named:
        answer = client.get("/" + name)
        assert answer.status_code == 200, name
        assert client.head("/" + name).headers["content-length"] == str(len(answer.content))
        again = client.get("/" + name, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in STATIC.iterdir():
        links = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not links or path.name.startswith(("uPlot", "LICENSE")), (path, links)


def test_other_files_are_not_served(client: TestClient) -> None:
    for name in ("nothing.js", "..%2Fstate.py", "%2e%2e/http.py", ""):
        assert client.get(f"/dashboard/static/{name}").status_code == 404


def test_the_dashboard_can_be_turned_off(server: LocalServer) -> None:
    client = TestClient(guarded_api(server.ingress, HttpSettings(dashboard=False)))
    for path in ("/", "/dashboard", "/dashboard/state", "/dashboard/events", "/dashboard/static/app.js"):
        assert client.get(path).status_code == 404


def test_data_need_a_key_as_the_load_does_and_files_need_none(keyed: TestClient) -> None:
    for path in ("/", "/dashboard", "/dashboard/static/app.js"):
        assert keyed.get(path).status_code == 200
    for path in ("/dashboard/state", "/dashboard/events", "/v1/load"):
        assert keyed.get(path).status_code == 401
        assert keyed.get(path, headers={"authorization": "Bearer " + "x" * 20}).status_code == 401
        assert keyed.get(path, headers={"authorization": f"Bearer {_TENANT}"}).status_code == 403
    assert keyed.get("/dashboard/state", headers={"authorization": f"Bearer {_OPERATOR}"}).status_code == 200


def test_other_protection_of_the_load_protects_the_data(server: LocalServer, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "tenant", "key": _TENANT}]}))
    for settings, with_key in (
        (HttpSettings(api_keys=KeySource(file=file), operator_paths=frozenset()), True),
        (HttpSettings(api_keys=KeySource(file=file), open_paths=frozenset({"/v1/load"})), False),
    ):
        client = TestClient(guarded_api(server.ingress, settings, server.ingress.dashboard))
        headers = {"authorization": f"Bearer {_TENANT}"} if with_key else {}
        for path in ("/dashboard/state", "/v1/load"):
            assert client.get(path, headers=headers).status_code == 200


def test_state_follows_a_request_and_tells_its_blocks(server: LocalServer) -> None:
    """The request runs until it has been seen: its client leaves then."""
    seen: list[DashboardState] = []
    ids: list[str] = []
    enough = threading.Event()
    body = {
        "model": "builtin",
        "prompt": "The key of room " * 10,
        "max_tokens": 3900,
        "ignore_eos": True,
        "stream": True,
    }
    with listening(server.api) as url, httpx.Client(base_url=url, timeout=120) as client:

        def chat() -> None:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and not ids:
                        ids.append(json.loads(line[6:])["id"])
                    if enough.is_set():
                        return

        thread = threading.Thread(target=chat)
        with client.stream("GET", "/dashboard/events?fast=true") as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            for line in events.iter_lines():
                if not line.startswith("data: "):
                    continue
                if not seen:
                    thread.start()
                seen.append(DashboardState.model_validate_json(line[6:]))
                if (
                    ids
                    and any(sum(state.replicas[0].steps.outputs) for state in seen)
                    and any(detail.sequences for detail in seen[-1].details.values())
                ):
                    enough.set()
                if enough.is_set() and not seen[-1].replicas[0].load.num_running:
                    break
                assert len(seen) < 600
        thread.join()
    running = [detail for state in seen for detail in state.details.values() if detail.sequences]
    sequence = running[-1].sequences[0]
    assert (sequence.request_id, seen[0].replicas[0].name) == split_public_id(ids[0])
    assert sequence.num_prompt_tokens > 0
    _check_blocks(running[-1])
    text = "".join(state.model_dump_json() for state in seen)
    assert "room" not in text


def _check_blocks(detail: ReplicaDetail) -> None:
    """The blocks of every sequence are owned ones on the map."""
    for sequence in detail.sequences:
        [table] = sequence.tables
        runs = list(zip(table.runs[::2], table.runs[1::2], strict=True))
        assert sum(number for _, number in runs) == table.num_blocks
        cells = detail.maps[0].states()
        for first, number in runs:
            assert set(cells[first - 1 : first - 1 + number]) <= {2, 3, 4}


def test_steps_are_recorded_only_while_somebody_looks(server: LocalServer, client: TestClient) -> None:
    watch: Any = server.engine.watch
    body = {"model": "builtin", "prompt": "room", "max_tokens": 4, "ignore_eos": True}
    client.get("/dashboard/state")
    client.post("/v1/completions", json=body)
    assert watch.steps()
    watch._until = 0.001  # nobody has looked for long
    client.post("/v1/completions", json=body)
    until(lambda: not watch.is_on)
    assert not watch._steps


def test_a_new_ingress_gets_no_steps_that_were_watched_before(server: LocalServer) -> None:
    """Its viewers, whose streams had ended at another ingress, took them for those of the last second."""
    body = {"model": "builtin", "prompt": "room", "max_tokens": 4, "ignore_eos": True}
    watch = server.engine.watch
    status = ReplicaStatus("a", 0.0, (ModelReport(ModelStatus(name="m", state="awake"), server.engine.load()),))
    watch.steps()
    TestClient(server.api).post("/v1/completions", json=body)
    until(lambda: len(watch.steps()) >= 4)

    def numbers(call: WatchCall) -> tuple[int, int, int]:
        """Steps, requests that have begun, and the last step."""
        view = view_replica(status, {"m": watch}, call, 0.0, False)
        steps = ReplicaState.model_validate_json(view.state).steps
        assert all(0 <= seconds < 60 for seconds in steps.queue_s)
        return sum(steps.num), len(steps.queue_s), view.last_step

    num_steps, num_begun, last_step = numbers(WatchCall(since={"a": 0}))
    assert num_steps >= 4
    assert num_begun == 1
    assert numbers(WatchCall()) == (0, 0, last_step)
    assert numbers(WatchCall(since={"a": last_step})) == (0, 0, last_step)


def test_links_that_lead_to_no_page() -> None:
    for url in ("javascript:alert(1)", "grafana.example.com", "https://", "https://a b"):
        with pytest.raises(ValidationError, match="is no URL of a page; write one such as https://grafana"):
            HttpSettings(dashboard_links={"Grafana": url})


def test_faulty_queries_are_named(client: TestClient) -> None:
    """The answer blamed the body, which there was none of."""
    long = "x" * 65
    for query, param in (("fast=banana", "fast"), ("replica=a&" * 9, "replica"), (f"request={long}", "request")):
        answer = client.get(f"/dashboard/events?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert answer.json()["error"]["message"].startswith(param)


def test_viewers_that_come_all_at_once_are_refused_with_an_answer(server: LocalServer) -> None:
    """All passed the check before the first one counted: later ones got 200 and a broken connection."""
    api = guarded_api(server.ingress, dashboard=server.ingress.dashboard)
    status: list[int] = []
    ended = asyncio.Event()

    async def receive() -> Message:
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    async def run() -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/dashboard/events",
            "query_string": b"",
            "headers": [],
            "app": api,
        }
        viewers = [asyncio.create_task(api(dict(scope), receive, send)) for _ in range(MOST_VIEWERS + 8)]
        async with asyncio.timeout(30):
            while len(status) < len(viewers):
                await asyncio.sleep(0.01)
            ended.set()
            await asyncio.gather(*viewers)

    asyncio.run(run())
    assert sorted(status) == [200] * MOST_VIEWERS + [429] * 8
    assert server.ingress.dashboard.num_viewers == 0


def test_a_viewer_that_takes_nothing_loses_its_stream() -> None:
    """A reader that stalls must not hold a viewer's place, and events must not pile up for it."""
    made: list[int] = []

    async def events() -> AsyncGenerator[str, None]:
        while True:
            made.append(1)
            yield "data: {}\n\n"

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def run() -> None:
        with pytest.raises(ClientDisconnect):
            await EventStream(events(), stalled_s=0.05)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert len(made) == 1


def test_a_viewer_that_leaves_ends_its_stream() -> None:
    ended: list[bool] = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield "data: {}\n\n"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    asyncio.run(EventStream(events())({"type": "http"}, receive, send))
    assert ended == [True]
