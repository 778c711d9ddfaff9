"""Metrics of engine replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from ray.serve import metrics

from folio.app.config.engine import EngineConfig
from folio.app.engine.engine import Engine
from folio.app.engine.gpu_memory import GpuMemory
from folio.app.engine.report import StartTimes
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.speculation import SpeculationCounts
from folio.app.replica.figures import Figures
from folio.app.serving.engine_metrics import EngineMeter, SteadyGauge, TotalCounter
from folio.kernels import note_compilation
from tests.app.serving.conftest import Recorded


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20))
    yield engine
    engine.close()


def test_draft_tokens_are_counted_once(recorded: Recorded) -> None:
    """The engine has totals, a counter takes increases, and never one of 0."""
    meter = EngineMeter()
    meter.note_speculation("m", None)
    counts = SpeculationCounts("ngram")
    meter.note_speculation("m", counts)
    counts.draft_tokens, counts.accepted_tokens, counts.checks = 8, 0, 2
    meter.note_speculation("m", counts)
    meter.note_speculation("m", counts)
    counts.draft_tokens, counts.accepted_tokens = 11, 2
    meter.note_speculation("m", counts)
    assert recorded == [
        ("folio_verified_drafts", 2, {"model": "m", "proposer": "ngram"}),
        ("folio_draft_tokens", 8, {"model": "m", "proposer": "ngram"}),
        ("folio_draft_tokens", 3, {"model": "m", "proposer": "ngram"}),
        ("folio_accepted_tokens", 2, {"model": "m", "proposer": "ngram"}),
    ]


def test_kernels_that_compile_after_the_start_are_counted(recorded: Recorded, engine: Engine) -> None:
    meter = EngineMeter()

    def note() -> list[float]:
        recorded.clear()
        meter.note_compilations(engine.load.take_activity().num_late_compilations)
        return [value for name, value, _ in recorded if name == "folio_late_compilations"]

    note_compilation("a kernel of the warm-up")
    engine.reset_counts()
    assert note() == []
    note_compilation("a kernel that a request waits for")
    assert note() == [1]
    assert note() == []


def test_a_gpus_memory_is_recorded_by_part(recorded: Recorded, engine: Engine) -> None:
    load, memory = engine.load.report(), engine.report()
    figures = Figures({}, load, memory, {}, GpuMemory({"weights": 7, "free": 0}, 5))
    EngineMeter().note_models({}, figures, is_loading=False)
    EngineMeter().note_models({}, replace(figures, gpu=None), is_loading=False)
    parts = [("folio_gpu_bytes", 7, {"part": "weights"}), ("folio_gpu_bytes", 0, {"part": "free"})]
    assert recorded == [*parts, ("folio_pinned_bytes", 5, {})]


def test_compilations_of_later_loads_are_no_late_ones(recorded: Recorded) -> None:
    """Each model's engine counts those of the process since its own load; the least number is told."""
    meter = EngineMeter()
    for least in (1, 0, 2, 2):  # the second engine begins at 0
        meter.note_compilations(least)
    assert recorded == [("folio_late_compilations", 1, {}), ("folio_late_compilations", 2, {})]


def test_an_engines_activity_is_recorded_once(recorded: Recorded, engine: Engine) -> None:
    """Gauges have present values, counters increases, histograms each step's time once."""
    meter = EngineMeter()

    gauges: dict[tuple[str, str], float] = {}

    def note() -> None:
        recorded.clear()
        meter.note("m", engine.load.report(), engine.report(), engine.load.take_activity())
        gauges.update({(name, tags["kind"]): value for name, value, tags in recorded if "kind" in tags})

    def values(name: str) -> list[float]:
        return [value for n, value, _ in recorded if n == name]

    note()
    assert values("folio_step_seconds") == values("folio_queue_seconds") == values("folio_preemptions") == []
    for name in ("a", "b"):
        engine.submit(name, list(range(5, 45)), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    engine.step()
    note()
    assert values("folio_running_sequences") == [2]
    assert len(values("folio_step_seconds")) == 2
    assert values("folio_step_tokens") == [48, 2]  # the second prompt finds 32 tokens of the first
    prefill_s, same = values("folio_prefill_seconds")  # both have their first token from the first step
    assert prefill_s == same == pytest.approx(values("folio_step_seconds")[0])
    first, second = values("folio_queue_seconds")
    assert first > second > 0  # both wait for the same step
    assert values("folio_prefix_queried_tokens") == [80]
    report = engine.report()
    assert gauges["folio_kv_bytes", "budget"] == report.budget_bytes
    assert gauges["folio_kv_bytes", "active"] == report.active_bytes > 0
    tokens = {kind: value for (name, kind), value in gauges.items() if name == "folio_kv_tokens"}
    assert tokens == {"block": 16, "free": engine.load.report().free_tokens, "total": engine.load.report().total_tokens}
    while engine.has_work:
        engine.step()
    note()
    assert values("folio_running_sequences") == [0]
    assert len(values("folio_step_seconds")) == 1
    assert values("folio_queue_seconds") == values("folio_prefix_queried_tokens") == []
    assert values("folio_prefill_seconds") == []


def test_prefill_lasts_from_the_first_chunk_to_the_first_token() -> None:
    """A request that is cancelled before its first token has no time."""
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20, max_num_batched_tokens=32))
    try:
        engine.submit("a", list(range(5, 85)), SamplingParams(max_tokens=2, ignore_eos=True))
        step_s: list[float] = []
        prefill_s: list[float] = []
        while not prefill_s:
            engine.step()
            activity = engine.load.take_activity()
            step_s += activity.step_s
            prefill_s += activity.prefill_s
        assert len(step_s) == 3  # 80 tokens
        assert prefill_s[0] >= sum(step_s)
        engine.cancel("a")
        engine.submit("b", list(range(85, 165)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
        engine.cancel("b")
        engine.submit("c", list(range(165, 170)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.step()
        activity = engine.load.take_activity()
        assert len(activity.queue_s) == 2
        assert len(activity.prefill_s) == 1
    finally:
        engine.close()


def test_preemptions_are_counted_by_mode(recorded: Recorded, engine: Engine) -> None:
    meter = EngineMeter()
    load, report, activity = engine.load.report(), engine.report(), engine.load.take_activity()
    meter.note("m", load, report, replace(activity, num_preempted={"swap": 2, "recompute": 0}))
    meter.note("m", load, report, replace(activity, num_preempted={"swap": 2, "recompute": 1}))
    assert [call for call in recorded if call[0] == "folio_preemptions"] == [
        ("folio_preemptions", 2, {"model": "m", "way": "swap"}),
        ("folio_preemptions", 1, {"model": "m", "way": "recompute"}),
    ]


def test_the_phases_of_a_start(recorded: Recorded) -> None:
    EngineMeter().note_start("m", StartTimes(model_s=1.0, warm_up_s=2.0, process_s=7.0))
    phases = {tags["phase"]: value for name, value, tags in recorded if name == "folio_ready_seconds"}
    assert len(phases) == len(recorded)
    assert (phases["model"], phases["warm_up"], phases["process"], phases["all"]) == (1.0, 2.0, 7.0, 3.0)
    assert phases["prefixes"] == 0.0


def test_the_totals_of_a_new_engine_begin_at_0(recorded: Recorded) -> None:
    """A model that is loaded again has a new engine, whose first events were not counted."""
    counter = TotalCounter(metrics.Counter("c", "C.", ("model",)))
    for total in (5, 5, 2, 3):
        counter.rise_to(total, {"model": "a"})
    counter.rise_to(1, {"model": "b"})
    assert [(value, tags["model"]) for _, value, tags in recorded] == [(5, "a"), (2, "a"), (1, "a"), (1, "b")]


def test_a_gauge_is_set_when_it_changes_and_again_before_ray_drops_it(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("folio.app.serving.engine_metrics.time.monotonic", lambda: now)
    gauge = SteadyGauge(metrics.Gauge("g", "G.", ("model",)))
    for now, value in ((100.0, 1), (100.5, 1), (101.0, 2), (101.5, 2), (106.0, 2), (110.0, 2)):  # noqa: B007
        gauge.set(value, {"model": "a"})
        gauge.set(7, {"model": "b"})
    assert [value for _, value, tags in recorded if tags["model"] == "a"] == [1, 2, 2]
    assert [value for _, value, tags in recorded if tags["model"] == "b"] == [7, 7]
