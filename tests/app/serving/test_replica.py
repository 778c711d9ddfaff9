"""When a replica says that it must be replaced, without a cluster and without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import UnavailableError
from app.serving.replica import EngineReplica


def test_a_budget_that_nobody_can_change_is_a_reason() -> None:
    """Regression: the thread that shares memory could end, and the replica served on, its budget counted for ever."""
    replica: Any = object.__new__(EngineReplica)
    replica._closing, replica._leaving = False, None
    replica._engine = SimpleNamespace(healthy=True, check=lambda: None, close=lambda: None)
    replica._member = SimpleNamespace(healthy=True, close=lambda: None)
    replica.check_health()
    replica._member.healthy = False
    with pytest.raises(UnavailableError, match="budget"):
        replica.check_health()
    replica._member = None
    replica.check_health()
