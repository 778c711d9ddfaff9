"""Pins over a sleep are computed again, or kept until that works."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from folio.app.engine.request.delta import Delta
from folio.app.engine.schedule.pin_restorer import PinRestorer
from folio.app.errors import RequestError, UnavailableError, UnknownModelError
from folio.vmem import CachedPrefix, MemoryReport, PinReport

RULES = CachedPrefix((1, 2, 3), ("key",), 0, "rules")
ROLE = CachedPrefix((4, 5), (), 0, "role")


class Engine:
    """Requests that compute pins, and a restorer of two pins that a sleep has taken."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self.unloaded: set[str | None] = set()
        self.copies: set[str | None] = set()  # names of pins that have been kept
        self.pins = PinRestorer(self.running, lambda pin: pin.pin_name in self.copies)
        self.pins.keep([RULES, ROLE])

    def wake(self) -> list[str]:
        """Returns names of the pins that are queued."""
        before = set(self.running)
        self.pins.restore(self._queue)
        return [name for request_id, name in self.running.items() if request_id not in before]

    def end(self, name: str, error: UnavailableError | None = None) -> list[Delta]:
        """End the request that computes a pin; returns the deltas for clients."""
        [request_id] = [request_id for request_id, running in self.running.items() if running == name]
        del self.running[request_id]
        return self.pins.take_own([Delta(request_id, (), "", error=error), Delta("client's", (), "")])

    def _queue(self, request_id: str, pin: CachedPrefix) -> None:
        if pin.pin_name in self.unloaded:
            raise UnknownModelError("no such adapter")
        assert pin.pin_name is not None
        self.running[request_id] = pin.pin_name


def test_a_pin_is_computed_until_that_works_and_its_deltas_are_nobodys() -> None:
    engine = Engine()
    assert engine.wake() == ["rules", "role"]
    assert engine.wake() == [], "they are being computed"
    assert [delta.request_id for delta in engine.end("rules")] == ["client's"]
    assert [delta.request_id for delta in engine.end("role", UnavailableError("no memory"))] == ["client's"]
    assert not engine.pins.requests
    assert engine.wake() == ["role"]


def test_a_pin_with_a_copy_is_not_computed() -> None:
    engine = Engine()
    assert engine.pins.pin_copies() == [], "they are not asked for"
    engine.wake()
    engine.copies.add("rules")
    [request_id] = engine.pins.pin_copies()
    assert engine.running.pop(request_id) == "rules"
    assert engine.pins.pin_copies() == []
    assert engine.pins.discard("rules") is None, "it is in memory"
    engine.end("role", UnavailableError("no memory"))
    assert engine.wake() == ["role"]


def test_a_pin_of_an_adapter_that_is_gone_is_no_pin() -> None:
    engine = Engine()
    engine.unloaded.add("rules")
    assert engine.wake() == ["role"]
    assert engine.pins.discard("rules") is None


def test_a_kept_pin_has_its_name() -> None:
    engine = Engine()
    engine.pins.check_same("rules", [1, 2, 3], ("key",))
    for token_ids, keys in (([1, 2], ("key",)), ([1, 2, 3], ())):
        with pytest.raises(RequestError, match="another prefix named 'rules' is pinned already"):
            engine.pins.check_same("rules", token_ids, keys)
    engine.wake()
    assert engine.running[engine.pins.discard("rules") or ""] == "rules"
    engine.pins.check_same("rules", [1, 2], ())


def test_kept_pins_are_reported_once() -> None:
    present = PinReport("rules", 3, 100)
    figures: dict[str, Any] = {field.name: 0 for field in fields(MemoryReport)} | {"pins": (present,)}
    assert Engine().pins.added_to(MemoryReport(**figures)).pins == (present, PinReport("role", 2, 0))
