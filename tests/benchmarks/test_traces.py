"""Benchmarks of real traffic, without it."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import harness, report


@pytest.mark.parametrize(
    "name",
    [
        *("engine.fragmentation", "engine.mapping", "engine.mapping_simulated", "serving.__main__", "fleet.routing"),
        *("fleet.agents", "fleet.disaggregation", "fleet.shelf", "fleet.shelf_simulated", "fleet.shelf_replicas"),
        *("fleet.shelf_constants", "fleet.shelf_read_ahead"),
    ],
)
def test_a_missing_trace_is_noted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(*traces: Path) -> None:
        raise SystemExit(" ".join(trace.suffix for trace in traces))

    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(harness, "note_missing", noted)
    with pytest.raises(SystemExit, match=r"^(\.csv|\.jsonl|\.jsonl \.csv)$"):
        import_module(f"benchmarks.{name}").main()


def test_the_result_and_the_report_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a checkout without traces wrote the figures of synthetic requests like any others."""
    there, missing = tmp_path / "there.csv", tmp_path / "missing.csv"
    there.touch()
    monkeypatch.setattr(harness, "_missing_traces", [])
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "commit", lambda: "0")
    monkeypatch.setenv("FOLIO_RESULTS", str(tmp_path))
    harness.note_missing(there, missing)
    harness.finish("mapping", argparse.Namespace(device="cpu", quick=False), {"exposed_share": 0.001}, {})
    assert f"there is no {missing}" in capsys.readouterr().out
    written = report.text_of(tmp_path, {})
    assert "| met, synthetic requests | `mapping.exposed_share`" in written
    assert "**Synthetic requests**: there was no missing.csv." in written
