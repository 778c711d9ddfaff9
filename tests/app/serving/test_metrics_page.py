"""The page of metrics: one for all nodes, in snake case, clean by promtool's rules, with vLLM's names if wanted."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from folio.app.errors import UnavailableError
from folio.app.serving.metrics_page import MetricsPage, merge, render
from tests.declared_metrics import declared_metrics
from tests.promlint import complaints

NOISE = 'Component="core_worker",SessionName="s",Version="2.60.0",otel_scope_name="x"'


def agent(node: str, application: str = "folio") -> str:
    """The page of a node's agent, in Ray's format."""
    tags = f'{{{NOISE},NodeAddress="{node}",application="{application}",route="chat"}}'
    bucket = tags.replace("route", 'le="1.0",route')
    return (
        "# HELP ray_folio_requests_total Requests.\n# TYPE ray_folio_requests_total counter\n"
        f"ray_folio_requests_total{tags} 3.0\n"
        "# HELP ray_folio_request_seconds Seconds.\n# TYPE ray_folio_request_seconds histogram\n"
        f"ray_folio_request_seconds_bucket{bucket} 2.0\n"
        f"ray_folio_request_seconds_count{tags} 2.0\n"
        f"ray_folio_request_seconds_sum{tags} 1.0\n"
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
            return await MetricsPage("folio", "toy", agents=lambda: urls).text()

    page = asyncio.run(run())
    assert page.count("# TYPE ray_folio_requests_total counter") == 1
    assert page.count("# TYPE ray_folio_request_seconds histogram") == 1
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    requests = [s for s in samples if s.name == "ray_folio_requests_total"]
    assert [(s.labels["node_address"], s.value) for s in requests] == [("10.0.0.1", 3.0), ("10.0.0.2", 3.0)]
    assert requests[0].labels == {
        "node_address": "10.0.0.1",
        "application": "folio",
        "route": "chat",
        "model_name": "toy",
    }
    assert len(samples) == 2 * 4
    assert "ray_tasks" not in page


async def test_a_fresh_page_is_served_again() -> None:
    async with agents([agent("10.0.0.1")]) as (urls, asked):
        page = MetricsPage("folio", "toy", agents=lambda: urls)
        first, second = await asyncio.gather(page.text(), page.text())
        assert first == second
        assert asked == [1]
        old = MetricsPage("folio", "toy", agents=lambda: urls, fresh_s=0.0)
        await old.text()
        await old.text()
        assert asked == [3]


@pytest.mark.parametrize("other", [None, "gone"])
async def test_no_page_without_all_nodes(other: str | None) -> None:
    async with agents([agent("10.0.0.1"), None]) as (urls, _):
        if other == "gone":
            urls[1] = "http://127.0.0.1:9/metrics"
        page = MetricsPage("folio", "toy", agents=lambda: urls)
        with pytest.raises(UnavailableError, match="does not answer"):
            await page.text()
        urls.pop()
        assert "ray_folio_requests_total" in await page.text()  # the failure is not cached


def test_no_page_before_the_first_report() -> None:
    with pytest.raises(UnavailableError, match="no metrics of 'folio' yet"):
        merge([agent("10.0.0.1", "other")], "folio", "toy")


def test_the_model_of_a_metric_is_its_name() -> None:
    """With several models all metrics had the name of the first one."""
    values = "# TYPE ray_folio_x gauge\n" + "".join(
        f'ray_folio_x{{application="folio",replica="r"{label}}} 1\n'
        for label in (',model="a"', ',model="b"', ',model=""', "")
    )

    def names(model: str | None) -> list[str | None]:
        [family] = merge([values], "folio", model).values()
        return [s.labels.get("model_name") for s in family.samples]

    assert names(None) == ["a", "b", None, None]
    assert names("only") == ["a", "b", "only", "only"]


def declared() -> str:
    """An agent's page with a sample of every metric in the code, with Ray's labels."""
    lines = []
    for name, kind, tags in sorted(declared_metrics()):
        name = f"ray_{name}_total" if kind == "counter" else f"ray_{name}"
        values = [f'{tag}="x"' for tag in (*tags, "NodeAddress", "WorkerId", "SessionName", "replica")]
        labels = ",".join([*values, 'application="folio"'])
        lines += [f"# HELP {name} Something.", f"# TYPE {name} {kind}"]
        if kind == "histogram":
            lines += [f'{name}_bucket{{{labels},le="{le}"}} 1' for le in ("1.0", "+Inf")]
            lines += [f"{name}_{part}{{{labels}}} 1" for part in ("sum", "count")]
        else:
            lines.append(f"{name}{{{labels}}} 1")
    return "\n".join([*lines, ""])


def test_promtool_would_not_complain_about_any_metric() -> None:
    """Labels were in camel case, and seconds were `_s` and `_us`."""
    page = render(merge([declared()], "folio", "toy").values())
    assert len(page.splitlines()) > 100
    assert 'node_address="x"' in page
    assert 'worker_id="x"' in page
    assert complaints(page) == []


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
def test_promtool_does_not_complain_about_any_metric() -> None:
    page = render(merge([declared()], "folio", "toy").values())
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("with_vllm", [False, True])
async def test_names_of_vllm_are_on_the_page_if_wanted(with_vllm: bool) -> None:
    async with agents([declared()]) as (urls, _):
        page = await MetricsPage("folio", "toy", with_vllm=with_vllm, agents=lambda: urls).text()
    assert ("vllm:num_requests_waiting{" in page) == with_vllm
    assert "ray_folio_waiting_sequences{" in page
