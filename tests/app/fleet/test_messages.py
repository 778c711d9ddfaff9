"""What passes between ingress and replicas."""

from __future__ import annotations

from dataclasses import asdict, replace

from folio.app.fleet.messages import reports_as_stats, reports_from_stats
from tests.app.fleet.reports import IDLE


def test_a_report_of_another_version_is_none() -> None:
    reports = {"m": IDLE, "n": replace(IDLE, made_at=1.0)}
    stats = reports_as_stats(reports, {"m": ("f", "at")}, 2.5)
    assert stats == {
        "start_s": 2.5,
        "outputs": {"m": ("f", "at")},
        "is_draining": False,
        "made_at": 1.0,
        "models": {name: asdict(report) for name, report in reports.items()},
    }
    assert reports_from_stats(stats) == reports
    of_model = stats["models"]["n"]
    for other in ({**of_model, "more": 1}, {**of_model, "step": 0.1}, {**of_model, "step": {"fixed_s": 1.0}}):
        assert reports_from_stats({**stats, "models": {"m": stats["models"]["m"], "n": other}}) is None
    assert reports_from_stats(of_model) is None  # of a version without shelves
