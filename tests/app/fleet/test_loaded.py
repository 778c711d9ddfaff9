"""The registry of adapters loaded at run time: its table, and one change at a time."""

from __future__ import annotations

from folio.app.engine.lora.source import AdapterSource
from folio.app.fleet.loaded import LoadedRegistry, LoadedTable

A, B = AdapterSource("a", "/a", "1"), AdapterSource("b", "/b", "2")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_change_at_a_time() -> None:
    registry = LoadedRegistry(settling_s=0)
    assert registry.begin("first") == LoadedTable()
    assert registry.begin("second") is None
    assert not registry.commit("second", LoadedTable(1, (A,)))
    registry.end("second")  # ends nothing
    assert registry.begin("second") is None
    assert registry.commit("first", LoadedTable(1, (A,)))
    assert not registry.commit("first", LoadedTable(1, (B,)))  # not newer
    registry.end("first")
    assert registry.begin("second") == LoadedTable(1, (A,))
    assert not registry.commit("first", LoadedTable(2, ()))


def test_a_change_that_takes_too_long_is_not_committed() -> None:
    registry = LoadedRegistry(settling_s=0, lease_s=10, clock=(clock := Clock()))
    registry.begin("slow")
    clock.now += 9
    assert registry.begin("other") is None
    clock.now += 1
    assert registry.begin("other") is not None
    assert not registry.commit("slow", LoadedTable(1, (A,)))
    assert registry.commit("other", LoadedTable(1, (B,)))
    registry.end("slow")
    assert registry.begin("third") is None


def test_a_new_registry_learns_the_newest_table() -> None:
    """Before it has, no change may begin: it would be the change of an old table."""
    registry = LoadedRegistry(settling_s=3, clock=(clock := Clock()))
    assert registry.begin("change") is None
    for table in (LoadedTable(2, (A,)), LoadedTable(5, (B,)), LoadedTable(4, ())):
        registry.restore(table)
    clock.now += 3
    assert registry.begin("change") == LoadedTable(5, (B,))
    assert registry.newer(4) == (5, LoadedTable(5, (B,)))
    assert registry.newer(5) == (5, None)
    assert registry.newer(6) == (5, None)
