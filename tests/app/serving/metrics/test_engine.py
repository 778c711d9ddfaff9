"""What an engine replica tells Prometheus, without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.config.engine import EngineConfig
from app.engine.engine import Engine
from app.engine.sampling.params import SamplingParams
from app.engine.speculation import SpeculationCounts
from app.engine.startup import StartTimes
from app.serving.metrics import EngineMeter, ReadyGauge, SpeculationMeter
from tests.app.serving.metrics.conftest import Told


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20))
    yield engine
    engine.close()


def test_guesses_are_counted_once(told: Told) -> None:
    """The engine tells sums, and Prometheus wants what is new; a counter may not be increased by 0."""
    meter = SpeculationMeter()
    meter.note(None)
    counts = SpeculationCounts("ngram")
    meter.note(counts)
    counts.draft_tokens, counts.accepted_tokens = 8, 0
    meter.note(counts)
    meter.note(counts)
    counts.draft_tokens, counts.accepted_tokens = 11, 2
    meter.note(counts)
    assert told == [
        ("folio_draft_tokens", 8, {"proposer": "ngram"}),
        ("folio_draft_tokens", 3, {"proposer": "ngram"}),
        ("folio_accepted_tokens", 2, {"proposer": "ngram"}),
    ]


def test_what_an_engine_does_is_told_once(told: Told, engine: Engine) -> None:
    """Gauges as they are, counters what they have gained, and each step's time once."""
    meter = EngineMeter()

    def note() -> list[tuple[str, float, dict[str, str]]]:
        told.clear()
        meter.note(engine.load(), engine.report(), engine.take_activity())
        return list(told)

    def values(name: str) -> list[float]:
        return [value for told_name, value, _ in told if told_name == name]

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
    by_kind = {tags["kind"]: value for name, value, tags in told if name == "folio_kv_bytes"}
    assert by_kind["budget"] == report.budget_bytes
    assert by_kind["active"] == report.active_bytes > 0
    while engine.has_work:
        engine.step()
    note()
    assert values("folio_running_sequences") == [0]
    assert len(values("folio_step_s")) == 1
    assert values("folio_queue_s") == values("folio_prefix_queried_tokens") == []


def test_preemptions_are_told_by_way(told: Told, engine: Engine) -> None:
    meter = EngineMeter()
    load, report, activity = engine.load(), engine.report(), engine.take_activity()
    meter.note(load, report, replace(activity, num_preempted={"swap": 2, "recompute": 0}))
    meter.note(load, report, replace(activity, num_preempted={"swap": 2, "recompute": 1}))
    assert [call for call in told if call[0] == "folio_preemptions"] == [
        ("folio_preemptions", 2, {"way": "swap"}),
        ("folio_preemptions", 1, {"way": "recompute"}),
    ]


def test_a_start_is_told_phase_by_phase(told: Told) -> None:
    ReadyGauge().note(StartTimes(model_s=1.0, warm_up_s=2.0, process_s=7.0))
    phases = {tags["phase"]: value for name, value, tags in told if name == "folio_ready_s"}
    assert len(phases) == len(told)
    assert (phases["model"], phases["warm_up"], phases["process"], phases["all"]) == (1.0, 2.0, 7.0, 3.0)
    assert phases["prefixes"] == 0.0
