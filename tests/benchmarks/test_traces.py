"""Benchmarks of real traffic."""

import sys
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "name",
    [
        *("engine.fragmentation", "engine.mapping", "serving.__main__", "fleet.routing", "fleet.agents"),
        *("fleet.shelf", "fleet.shelf_simulated", "fleet.shelf_replicas", "fleet.shelf_constants"),
    ],
)
def test_whole_runs_need_their_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a checkout without traces wrote the figures of synthetic requests as results."""
    monkeypatch.setattr(sys, "argv", [name, "--trace", str(tmp_path / "missing.csv")])
    with pytest.raises(SystemExit, match=r"no trace at .*missing\.csv"):
        import_module(f"benchmarks.{name}").main()
