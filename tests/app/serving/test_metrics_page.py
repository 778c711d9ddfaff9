"""The page `/metrics`, from metrics agents that run in the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from app.errors import UnavailableError
from app.serving.metrics_page import MetricsPage, merge

NOISE = 'Component="core_worker",SessionName="s",Version="2.60.0",otel_scope_name="x"'


def agent(node: str, application: str = "folio") -> str:
    """The page of a node's agent, in Ray's format."""
    tags = f'{{{NOISE},NodeAddress="{node}",application="{application}",route="chat"}}'
    bucket = tags.replace("route", 'le="1.0",route')
    return (
        "# HELP ray_folio_requests_total Requests.\n# TYPE ray_folio_requests_total counter\n"
        f"ray_folio_requests_total{tags} 3.0\n"
        "# HELP ray_folio_request_s Seconds.\n# TYPE ray_folio_request_s histogram\n"
        f"ray_folio_request_s_bucket{bucket} 2.0\n"
        f"ray_folio_request_s_count{tags} 2.0\n"
        f"ray_folio_request_s_sum{tags} 1.0\n"
        "# HELP ray_tasks Tasks.\n# TYPE ray_tasks gauge\n"
        f"ray_tasks{tags} 5.0\n"
        "# HELP ray_serve_x X.\n# TYPE ray_serve_x gauge\n"
        f'ray_serve_x{{{NOISE},NodeAddress="{node}",my_application="{application}"}} 1.0\n'
    )


@asynccontextmanager
async def agents(pages: Sequence[str | None]) -> AsyncIterator[tuple[list[str], list[int]]]:
    """The agents' addresses and numbers of requests; `None`: an agent that answers 500."""
    asked = [0] * len(pages)

    async def answer(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        asked[number] += 1
        page = pages[number]
        return web.Response(status=500) if page is None else web.Response(text=page)

    app = web.Application()
    app.router.add_get("/{number}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield [f"http://127.0.0.1:{runner.addresses[0][1]}/{number}" for number in range(len(pages))], asked
    finally:
        await runner.cleanup()


def test_all_nodes_have_one_page() -> None:
    """Each metric is described once, with the samples of all nodes, without other applications and Ray's own
    metrics."""

    async def run() -> str:
        async with agents([agent("10.0.0.1"), agent("10.0.0.2"), agent("10.0.0.2", "folio2")]) as (urls, _):
            return await MetricsPage("folio", lambda: urls).text()

    page = asyncio.run(run())
    assert page.count("# TYPE ray_folio_requests_total counter") == 1
    assert page.count("# TYPE ray_folio_request_s histogram") == 1
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    requests = [s for s in samples if s.name == "ray_folio_requests_total"]
    assert [(s.labels["NodeAddress"], s.value) for s in requests] == [("10.0.0.1", 3.0), ("10.0.0.2", 3.0)]
    assert requests[0].labels == {"NodeAddress": "10.0.0.1", "application": "folio", "route": "chat"}
    assert len(samples) == 2 * 4
    assert "ray_tasks" not in page


async def test_a_fresh_page_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with agents([agent("10.0.0.1")]) as (urls, asked):
        page = MetricsPage("folio", lambda: urls)
        first, second = await asyncio.gather(page.text(), page.text())
        assert first == second
        assert asked == [1]
        monkeypatch.setattr("app.serving.metrics_page._FRESH_S", 0.0)
        await page.text()
        assert asked == [2]


@pytest.mark.parametrize("other", [None, "gone"])
async def test_no_page_without_all_nodes(other: str | None) -> None:
    async with agents([agent("10.0.0.1"), None]) as (urls, _):
        if other == "gone":
            urls[1] = "http://127.0.0.1:9/metrics"
        page = MetricsPage("folio", lambda: urls)
        with pytest.raises(UnavailableError, match="does not answer"):
            await page.text()
        urls.pop()
        assert "ray_folio_requests_total" in await page.text()  # the failure is not cached


def test_no_page_before_the_first_report() -> None:
    with pytest.raises(UnavailableError, match="no metrics of 'folio' yet"):
        merge([agent("10.0.0.1", "other")], "folio")
