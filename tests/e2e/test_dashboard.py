"""The dashboard in a real browser, over two replicas: a chat's pages come and go, and a killed replica is seen."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.served import Served
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.third_day(2),
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.skipif(
        not importlib.util.find_spec("playwright"), reason="playwright is missing: pip install 'folio-serve[browser]'"
    ),
]
DEADLINE_S = 600
ARGS = {"engine": {"model": "builtin", "kv_memory_bytes": 16 << 20, "num_threads": 1}}


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front) -> Iterator[Served]:
    front.delete()
    server = Served("folio-dashboard", cluster_url, ARGS)
    with deleted_at_the_end(server.name):
        server.deploy(num_replicas=2, timeout_s=DEADLINE_S)
        yield server


@pytest.fixture
def page(server: Served) -> Iterator[Any]:
    """A page of the dashboard. Afterwards: no error was logged, and every request went to the server."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    hosts: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1100})
        page.on(
            "console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(server.url + "/")
        assert page.url.endswith("/dashboard")
        yield page
        browser.close()
    assert faults == []
    assert hosts == {urlsplit(server.url).netloc}


def seen(page: Any, expression: str) -> Any:
    """The value of an expression over `folio`, as soon as it is true."""
    found: list[Any] = []

    def check() -> bool:
        page.wait_for_timeout(50)  # Playwright's events come only while one of its calls waits
        found[:] = [page.evaluate(f"window.folio && ({expression})")]
        return bool(found[0])

    until(check, DEADLINE_S)
    return found[0]


def test_the_pages_of_a_chat_come_and_go(page: Any) -> None:
    seen(page, "folio.state?.replicas.length === 2")
    assert page.inner_text("#connection-text") == "live"
    page.fill("#max-tokens", "1000")
    for attempt in range(30):  # beside other tests the browser may not get to run before an answer is complete
        page.click("#clear")
        numbers = " ".join(str(100 + attempt + 2 * i) for i in range(400))
        page.fill("#message", f"Repeat: {numbers}")
        page.press("#message", "Enter")
        answered = "document.querySelectorAll('.message.assistant small').length"
        most = max(seen(page, f"folio.marked || {answered} && -1"), 0)
        seen(page, answered)
        if most:
            break
    assert most > 0, "the request's blocks must be outlined while it runs"
    assert "cached" in page.inner_text(".message.assistant small")
    seen(page, "document.querySelectorAll('#tokens .token').length > 5")
    seen(page, "folio.marked === 0")
    seen(page, "folio.state.decisions.length > 0")  # regression: the router noted them into a copy of the log
    owned = "folio.state.replicas.every(r => r.memory && r.memory.active_bytes === 0)"
    seen(page, owned)


def test_a_second_turn_shows_its_cached_tokens(page: Any) -> None:
    seen(page, "folio.state?.replicas.length === 2")
    for turn, text in enumerate(("What is a page? " * 5, "And a block?")):
        page.fill("#message", text)
        page.press("#message", "Enter")
        seen(page, f"document.querySelectorAll('.message.assistant small').length > {turn}")
    seen(page, "document.querySelectorAll('#tokens .token.cached').length >= 16")


def test_keyboard_and_theme(page: Any) -> None:
    names = seen(page, "folio.state?.replicas.length === 2 && folio.state.replicas.map(r => r.name)")
    assert page.evaluate("folio.chosen") == names[0]
    page.keyboard.press("j")
    assert page.evaluate("folio.chosen") == names[1]
    page.keyboard.press("b")
    page.keyboard.press("ArrowRight")
    assert "block" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    background = "getComputedStyle(document.body).backgroundColor"
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    light = page.evaluate(background)
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(background) != light
    for width in (400, 2000):
        page.set_viewport_size({"width": width, "height": 900})
        seen(page, "document.documentElement.scrollWidth <= innerWidth")


def test_a_killed_replica_is_seen_to_go_and_another_to_come(server: Served, page: Any) -> None:
    names = seen(page, "folio.state?.replicas.length === 2 && folio.state.replicas.map(r => r.name)")
    server.kill_one()
    gone = seen(page, "folio.state.events.find(e => e.kind === 'went')?.replica")
    assert gone in names
    seen(page, "folio.state.events.some(e => e.kind === 'came') && folio.state.replicas.length === 2")
    assert "stopped" in page.inner_text("#events")
    assert page.locator(".replica").count() == 2
    assert page.inner_text("#connection-text") == "live"
