"""Plugin of pytest: the outcome of each test as a fact as soon as it is known, since a shard may be killed."""

from __future__ import annotations

import pytest

from benchmarks.facts import record


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":  # set up, or torn down
        return
    shown = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        shown = f"failed: {crash.message if crash is not None else report.longreprtext[-300:]}"[:300].replace("\n", " ")
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""  # of a skip
    record(report.nodeid, shown, outcome=report.outcome, seconds=round(report.duration, 2), reason=reason)
