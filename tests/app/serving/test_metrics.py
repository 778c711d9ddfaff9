"""Metrics of ingresses and engine replicas, recorded instead of sent to Ray; their list in the docs; their page."""

from __future__ import annotations

import ast
import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from ray.serve import metrics

from app.config.engine import EngineConfig
from app.engine.engine import Engine
from app.engine.report import StartTimes
from app.engine.sampling.params import SamplingParams
from app.engine.speculation import SpeculationCounts
from app.errors import DeadlineError, EngineError, OverloadedError, RequestError, UnavailableError, UnknownModelError
from app.fleet.messages import GenerateRequest, Piece
from app.serving.metrics import EdgeMeter, EngineMeter, MetricsPage, RequestMeter, merge

ROOT = Path(__file__).parents[3]
CALLS = [GenerateRequest("a", [1, 2, 3], SamplingParams()), GenerateRequest("b", [1, 2], SamplingParams())]
Recorded = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """(name, value, tags) of every call, in order."""
    calls: Recorded = []

    class Metric:
        def __init__(
            self, name: str, description: str, tag_keys: Sequence[str] = (), boundaries: Sequence[float] = ()
        ) -> None:
            assert description.endswith(".")
            assert sorted(boundaries) == list(boundaries)
            self.info = {"name": name}
            self._name, self._tag_keys = name, tag_keys

        def inc(self, value: float = 1, tags: dict[str, str] | None = None) -> None:
            assert value > 0  # else Ray raises
            self.set(value, tags)

        def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
            self.set(value, tags)

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self._tag_keys)
            calls.append((self._name, value, dict(tags or {})))

    for kind in ("Counter", "Gauge", "Histogram"):
        replacement: Any = Metric
        monkeypatch.setattr(metrics, kind, replacement)
    return calls


def test_dropped_fields_are_counted_by_name(recorded: Recorded) -> None:
    meter = EdgeMeter()
    meter.on_ignored_field("provider")
    meter.on_ignored_field("other")
    names = [{"field": "provider"}, {"field": "other"}]
    assert recorded == [("folio_ignored_fields", 1, tags) for tags in names]


def made_in_code() -> set[tuple[str, str, tuple[str, ...]]]:
    """(name, kind, tags) of every metric in the code."""
    made = set()
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            kind = node.func.attr
            if kind not in ("Counter", "Gauge", "Histogram") or ast.unparse(node.func.value) != "metrics":
                continue
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            tags = keywords.get("tag_keys") or (node.args[2] if len(node.args) > 2 else ast.Tuple([]))
            made.add((ast.literal_eval(node.args[0]), kind.lower(), tuple(sorted(ast.literal_eval(tags)))))
    return made


def test_the_documentation_lists_exactly_the_metrics_that_exist() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = {
        (name, kind, tuple(sorted(re.findall(r"`(\w+)`", tags))))
        for name, kind, tags in re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    }
    made = made_in_code()
    assert len(made) > 20
    assert listed == made


# ---- engine replicas ----


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20))
    yield engine
    engine.close()


def test_draft_tokens_are_counted_once(recorded: Recorded) -> None:
    """The engine has totals, a counter takes increases, and never one of 0."""
    meter = EngineMeter()
    meter.note_speculation(None)
    counts = SpeculationCounts("ngram")
    meter.note_speculation(counts)
    counts.draft_tokens, counts.accepted_tokens = 8, 0
    meter.note_speculation(counts)
    meter.note_speculation(counts)
    counts.draft_tokens, counts.accepted_tokens = 11, 2
    meter.note_speculation(counts)
    assert recorded == [
        ("folio_draft_tokens", 8, {"proposer": "ngram"}),
        ("folio_draft_tokens", 3, {"proposer": "ngram"}),
        ("folio_accepted_tokens", 2, {"proposer": "ngram"}),
    ]


def test_an_engines_activity_is_recorded_once(recorded: Recorded, engine: Engine) -> None:
    """Gauges have present values, counters increases, histograms each step's time once."""
    meter = EngineMeter()

    def note() -> list[tuple[str, float, dict[str, str]]]:
        recorded.clear()
        meter.note(engine.load.report(), engine.report(), engine.load.take_activity())
        return list(recorded)

    def values(name: str) -> list[float]:
        return [value for n, value, _ in recorded if n == name]

    note()
    assert values("folio_step_s") == values("folio_queue_s") == values("folio_preemptions") == []
    for name in ("a", "b"):
        engine.submit(name, list(range(5, 45)), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    engine.step()
    note()
    assert values("folio_running_sequences") == [2]
    assert len(values("folio_step_s")) == 2
    first, second = values("folio_queue_s")
    assert first > second > 0  # both wait for the same step
    assert values("folio_prefix_queried_tokens") == [80]
    report = engine.report()
    by_kind = {tags["kind"]: value for name, value, tags in recorded if name == "folio_kv_bytes"}
    assert by_kind["budget"] == report.budget_bytes
    assert by_kind["active"] == report.active_bytes > 0
    while engine.has_work:
        engine.step()
    note()
    assert values("folio_running_sequences") == [0]
    assert len(values("folio_step_s")) == 1
    assert values("folio_queue_s") == values("folio_prefix_queried_tokens") == []


def test_preemptions_are_counted_by_mode(recorded: Recorded, engine: Engine) -> None:
    meter = EngineMeter()
    load, report, activity = engine.load.report(), engine.report(), engine.load.take_activity()
    meter.note(load, report, replace(activity, num_preempted={"swap": 2, "recompute": 0}))
    meter.note(load, report, replace(activity, num_preempted={"swap": 2, "recompute": 1}))
    assert [call for call in recorded if call[0] == "folio_preemptions"] == [
        ("folio_preemptions", 2, {"way": "swap"}),
        ("folio_preemptions", 1, {"way": "recompute"}),
    ]


def test_the_phases_of_a_start(recorded: Recorded) -> None:
    EngineMeter().note_start(StartTimes(model_s=1.0, warm_up_s=2.0, process_s=7.0))
    phases = {tags["phase"]: value for name, value, tags in recorded if name == "folio_ready_s"}
    assert len(phases) == len(recorded)
    assert (phases["model"], phases["warm_up"], phases["process"], phases["all"]) == (1.0, 2.0, 7.0, 3.0)
    assert phases["prefixes"] == 0.0


# ---- ingresses ----


def sums(recorded: Recorded) -> Counter[str]:
    return Counter({name: sum(v for n, v, _ in recorded if n == name) for name, _, _ in recorded})


def test_tokens_and_times_of_a_stream(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT is that of the first piece of any output; TPOT is the mean of each output's later tokens."""
    clock = iter([10.0, 10.5, 11.0, 12.5, 13.0])
    monkeypatch.setattr("app.serving.metrics.time.perf_counter", lambda: next(clock))
    with RequestMeter().measure("chat") as measured:
        measured.sends(CALLS, "m")
        measured.streams(Piece("x", (7, 8), num_cached_tokens=2))
        measured.streams(Piece("y", (7,), num_cached_tokens=1), prompt=1)
        measured.streams(Piece("z", (7, 8, 9, 10), finish_reason="stop", num_cached_tokens=2))
    route = {"route": "chat"}
    assert recorded == [
        ("folio_requests_in_flight", 1, route),
        ("folio_requests_in_flight", 0, route),
        ("folio_requests", 1, route | {"outcome": "ok"}),
        ("folio_prompt_tokens", 5, route),
        ("folio_prompt_cached_tokens", 3, route),
        ("folio_output_tokens", 7, route),
        ("folio_first_token_s", 0.5, route),
        ("folio_output_token_s", 0.5, route),  # four tokens in two seconds; the other output had one piece
        ("folio_request_s", 3.0, route),
    ]


def test_a_whole_answer_has_no_first_token(recorded: Recorded) -> None:
    with RequestMeter().measure("completions") as measured:
        measured.sends(CALLS, "m")
        measured.receives([[Piece("x", (7, 8)), Piece("y", (7,), 1)], [Piece("z", (7,))]])
    totals = sums(recorded)
    assert (totals["folio_prompt_tokens"], totals["folio_output_tokens"]) == (5, 4)
    assert "folio_first_token_s" not in totals
    assert "folio_prompt_cached_tokens" not in totals
    assert totals["folio_requests"] == 1


def test_a_fork_has_no_prompt(recorded: Recorded) -> None:
    with RequestMeter().measure("fork") as measured:
        measured.receives([[Piece("x", (7,), num_cached_tokens=64)]])
    assert "folio_prompt_cached_tokens" not in sums(recorded)
    assert sums(recorded)["folio_output_tokens"] == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestError("x"), "invalid"),
        (UnknownModelError("x"), "invalid"),
        (DeadlineError("x"), "timeout"),
        (OverloadedError("x", 1.0), "refused"),
        (UnavailableError("x"), "unavailable"),
        (EngineError("x"), "failed"),
        (ZeroDivisionError("x"), "failed"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_the_error_of_a_request_is_its_outcome(recorded: Recorded, error: BaseException, outcome: str) -> None:
    """Tokens count, the time of whole requests does not."""
    meter = RequestMeter()
    with pytest.raises(type(error)), meter.measure("chat") as measured:  # noqa: PT012
        measured.sends(CALLS, "m")
        raise error
    assert ("folio_requests", 1, {"route": "chat", "outcome": outcome}) in recorded
    assert ("folio_requests_in_flight", 0, {"route": "chat"}) in recorded
    assert sums(recorded)["folio_prompt_tokens"] == 5
    assert "folio_request_s" not in sums(recorded)


def test_the_requests_in_flight_are_repeated(recorded: Recorded) -> None:
    """Ray drops a gauge 20 s after it was last set, and a request may take minutes."""
    meter = RequestMeter()
    with meter.measure("chat"):
        recorded.clear()
        meter.repeat()
        assert recorded == [("folio_requests_in_flight", 1, {"route": "chat"})]
    recorded.clear()
    meter.repeat()
    assert recorded == [("folio_requests_in_flight", 0, {"route": "chat"})]


def test_an_error_within_an_answer_is_the_outcome(recorded: Recorded) -> None:
    with RequestMeter().measure("responses") as measured:
        measured.fails(EngineError("x"))
    assert ("folio_requests", 1, {"route": "responses", "outcome": "failed"}) in recorded


def test_requests_in_flight_are_counted_by_route(recorded: Recorded) -> None:
    meter = RequestMeter()
    with meter.measure("chat"), meter.measure("chat"), meter.measure("fork"):
        pass
    in_flight = [(tags["route"], value) for name, value, tags in recorded if name == "folio_requests_in_flight"]
    assert in_flight == [("chat", 1), ("chat", 2), ("fork", 1), ("fork", 0), ("chat", 1), ("chat", 0)]


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
        monkeypatch.setattr("app.serving.metrics._FRESH_S", 0.0)
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
