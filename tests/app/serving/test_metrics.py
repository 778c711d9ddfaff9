"""What is told to Prometheus, without a cluster."""

from __future__ import annotations

import pytest

from app.engine.speculation import SpeculationCounts
from app.engine.start_times import StartTimes
from app.serving import metrics
from app.serving.metrics import ReadyGauge, SpeculationMeter


def test_guesses_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tells sums, and Prometheus wants what is new; a counter may not be increased by 0."""
    counted: list[tuple[str, int, str]] = []

    class Counter:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert tag_keys == ("proposer",)
            self.name = name

        def inc(self, value: int, tags: dict[str, str]) -> None:
            assert value > 0
            counted.append((self.name, value, tags["proposer"]))

    monkeypatch.setattr(metrics.metrics, "Counter", Counter)
    meter = SpeculationMeter()
    meter.note(None)
    counts = SpeculationCounts("ngram")
    meter.note(counts)
    counts.draft_tokens, counts.accepted_tokens = 8, 0
    meter.note(counts)
    meter.note(counts)
    counts.draft_tokens, counts.accepted_tokens = 11, 2
    assert counts.acceptance_rate == pytest.approx(2 / 11)
    meter.note(counts)
    assert counted == [
        ("folio_draft_tokens", 8, "ngram"),
        ("folio_draft_tokens", 3, "ngram"),
        ("folio_accepted_tokens", 2, "ngram"),
    ]


def test_a_start_is_told_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert (name, tag_keys) == ("folio_ready_s", ("phase",))

        def set(self, value: float, tags: dict[str, str]) -> None:
            told[tags["phase"]] = value

    monkeypatch.setattr(metrics.metrics, "Gauge", Gauge)
    ReadyGauge().note(StartTimes(weights_s=1.0, warm_up_s=2.0, process_s=7.0))
    assert (told["weights"], told["warm_up"], told["process"], told["all"]) == (1.0, 2.0, 7.0, 3.0)
    assert told["prefixes"] == 0.0
