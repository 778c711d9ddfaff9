"""What passes between ingress and replicas."""

from __future__ import annotations

from app.fleet.messages import report_as_stats, report_from_stats
from tests.app.fleet.reports import IDLE


def test_a_report_of_another_version_is_none() -> None:
    stats = report_as_stats(IDLE)
    assert report_from_stats(stats) == IDLE
    assert report_from_stats({**stats, "more": 1}) is None
    assert report_from_stats({**stats, "step": 0.1}) is None
    assert report_from_stats({**stats, "step": {**stats["step"], "more": 1}}) is None
