"""Random use of KV memory against a plain model: what was written through one view is read through every other, the
books add up after every rule, no mapping is changed under a running step, and at the end nothing is left.

CI runs about 6,600 rules; `pytest --hypothesis-profile=nightly tests/vmem/test_memory_machine.py` more than 100,000.
"""

from __future__ import annotations

import contextlib
import math

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.vmem.small_memory import (
    MAX_TOKENS,
    PAGE_BYTES,
    FlakyCuda,
    FlakyHost,
    do_background,
    make_memory,
    pages_read,
    read,
    write,
)
from vmem import Demand, LayoutKind, MapError, OutOfPages, SequenceMemory, VmemError
from vmem.mapper import Mapper

# What is drawn must not depend on what happened, or threads would make examples impossible to repeat.
CHOICE = st.integers(0, 7)
# How many tokens from the end a fork or a truncation is: often none or few, so that last blocks are shared.
BACK = st.sampled_from([0, 0, 0, 1, 5, 16, 17, 40])
_STEPS = 50
_EXAMPLES = {"default": 150, "nightly": 2400}


class MemoryMachine(RuleBasedStateMachine):
    """With `threaded` the mapper's thread works beside the rules; without it, between them where a rule says so."""

    @initialize(
        backend=st.sampled_from([FlakyHost, FlakyCuda]),
        kind=st.sampled_from(["interleaved", "per_layer"]),
        windowed=st.booleans(),
        threaded=st.booleans(),
        num_pages=st.sampled_from([40, 44, 80]),
        floor_pages=st.sampled_from([0, 10]),
        max_mappings=st.sampled_from([60, 1000]),
        overlap=st.booleans(),
        deferred=st.booleans(),
        eager=st.booleans(),
        threshold=st.sampled_from([0.0, 0.1, 0.6]),
        idle_s=st.sampled_from([0.0, 0.001, 1e9]),
    )
    def begin(
        self,
        backend: type[FlakyHost] | type[FlakyCuda],
        kind: LayoutKind,
        windowed: bool,
        threaded: bool,
        num_pages: int,
        floor_pages: int,
        max_mappings: int,
        overlap: bool,
        deferred: bool,
        eager: bool,
        threshold: float,
        idle_s: float,
    ) -> None:
        self.threaded = threaded
        start = Mapper.start
        if not threaded:
            Mapper.start = lambda self: None  # type: ignore[method-assign]
        try:
            self.memory, self.backend = make_memory(
                backend,
                num_pages=num_pages,
                kind=kind,
                windowed=windowed,
                floor_pages=floor_pages,
                overlap=overlap,
                deferred_reclamation=deferred,
                eager_allocation=eager,
                reclaim_threshold=threshold,
                idle_release_s=idle_s,
                max_mappings=max_mappings,
            )
        finally:
            Mapper.start = start  # type: ignore[method-assign]
        self.num_pages = num_pages
        self.written: dict[SequenceMemory, list[float]] = {}
        self.next_value = 1.0
        self.revision = 0

    # ---- rules ----

    @rule(policy=st.sampled_from(["auto", "region", "block_table"]), num_tokens=st.integers(1, 70))
    def submit(self, policy: str, num_tokens: int) -> None:
        sequence = self.memory.open(policy)  # type: ignore[arg-type]
        try:
            self.memory.append(sequence, num_tokens)
        except VmemError:
            self.memory.free(sequence)
            return
        self.written[sequence] = []
        self._step([Demand(sequence, 0, num_tokens)], "home")

    @rule(
        which=st.sets(CHOICE, min_size=1, max_size=5),
        growth=st.integers(1, 20),
        view=st.sampled_from(["home", "region"]),
    )
    def step(self, which: set[int], growth: int, view: str) -> None:
        demands = []
        for sequence in [s for i, s in enumerate(self.written) if i in which]:
            start = len(self.written[sequence])
            end = min(start + growth, MAX_TOKENS)
            if start == end:
                continue
            try:
                self.memory.append(sequence, end)
            except (OutOfPages, MapError):
                continue
            demands.append(Demand(sequence, start, end))
        self._step(demands, view)

    @rule(which=CHOICE)
    def finish(self, which: int) -> None:
        if (sequence := self._at(which)) is None:
            return
        del self.written[sequence]
        try:
            self.memory.free(sequence)
        except MapError:  # without deferred reclamation the unmapping itself may fail; the sequence is gone
            assert self.backend.fail_at >= 0

    @rule(which=st.sets(CHOICE, min_size=1, max_size=5), growth=st.integers(1, 20))
    def grow(self, which: set[int], growth: int) -> None:
        """Blocks for a step that never comes."""
        for sequence in [s for i, s in enumerate(self.written) if i in which]:
            with contextlib.suppress(OutOfPages, MapError):
                self.memory.append(sequence, min(len(self.written[sequence]) + growth, MAX_TOKENS))

    @rule(which=CHOICE, back=BACK, policy=st.sampled_from(["auto", "region", "block_table"]))
    def fork(self, which: int, back: int, policy: str) -> None:
        parent = self._at(which)
        if parent is None or not self.written[parent]:
            return
        num_tokens = max(1, len(self.written[parent]) - back)
        try:
            child = self.memory.fork(parent, num_tokens, policy)  # type: ignore[arg-type]
        except VmemError:
            return
        self.written[child] = self.written[parent][:num_tokens]

    @rule(which=CHOICE, back=BACK)
    def truncate(self, which: int, back: int) -> None:
        if (sequence := self._at(which)) is None:
            return
        num_tokens = max(0, len(self.written[sequence]) - back)
        try:
            self.memory.truncate(sequence, num_tokens)
        except VmemError:  # has left the window
            return
        del self.written[sequence][num_tokens:]

    @rule(fraction=st.floats(0, 1))
    def set_budget(self, fraction: float) -> None:
        fewest = self.memory._pages._fewest
        pages = fewest + math.floor(fraction * (self.num_pages - fewest))
        self.revision += 1
        assert self.memory.set_budget(pages * PAGE_BYTES, self.revision) in ("applied", "deferred")
        assert self.memory.set_budget(PAGE_BYTES * self.num_pages, self.revision) == "stale"
        while self.memory.num_free_pages < 0 and self.written:  # as the scheduler does: the latest gives way
            try:
                self.memory.free(self._pop())
            except MapError:
                assert self.backend.fail_at >= 0

    @rule(units=st.integers(1, 30))
    def background(self, units: int) -> None:
        if self.threaded:
            self.memory.wait_for_progress(0.001)
            return
        with contextlib.suppress(MapError, OutOfPages):
            do_background(self.memory, units)

    @rule()
    def finish_steps(self) -> None:
        if isinstance(self.backend, FlakyCuda):
            self.backend.fake.finish_work()

    @rule(calls=st.integers(1, 12))
    def fail_soon(self, calls: int) -> None:
        """Some call from now, whosever it is, fails."""
        self.backend.fail_at = self.backend.num_calls + calls

    # ---- checks ----

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check_integrity()
        report = self.memory.report()
        assert report.active_bytes + report.parked_bytes <= report.physical_bytes
        assert report.eager_bytes <= report.parked_bytes
        assert report.mapped_bytes == self.backend.num_mappings * PAGE_BYTES
        assert report.physical_bytes <= self.num_pages * PAGE_BYTES
        if isinstance(self.backend, FlakyCuda):
            assert not self.backend.fake.violations

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.backend.fail_at = -1
        while self.written:
            self.memory.free(self._pop())
        self.finish_steps()
        self.memory.check_idle()
        self.memory.close()
        if isinstance(self.backend, FlakyCuda):
            assert self.backend.fake.leftovers == (0, 0, 0, 0, 0)
            assert not self.backend.fake.violations

    # ---- helpers ----

    def _at(self, which: int) -> SequenceMemory | None:
        return list(self.written)[which % len(self.written)] if self.written else None

    def _pop(self) -> SequenceMemory:
        return self.written.popitem()[0]

    def _step(self, demands: list[Demand], view: str) -> None:
        """Map, write and read back; then let the step run on while the rules go on."""
        try:
            self.memory.ensure(demands)
        except (MapError, OutOfPages):
            return
        if isinstance(self.backend, FlakyCuda):
            self.backend.fake.launch(pages_read(self.memory, demands))
        for demand in demands:
            values = [self.next_value + i for i in range(demand.end - demand.start)]
            self.next_value += len(values)
            through = view if demand.sequence.view == "region" else "home"
            write(self.memory, demand, values, through)
            self.written[demand.sequence] += values
        for demand in demands:
            for group in self.memory.groups:
                for layer in group.layers:
                    table = demand.sequence.groups[self.memory.group_of(layer)]
                    expected = self.written[demand.sequence][table.first * 16 :]
                    assert read(self.memory, demand, layer, "home") == expected
                    if demand.sequence.view == "region":
                        assert read(self.memory, demand, layer, "region") == expected
        self.memory.launched()
        self.memory.plan([Demand(d.sequence, d.end, min(d.end + 5, MAX_TOKENS)) for d in demands])


MemoryMachine.TestCase.settings = settings(
    max_examples=_EXAMPLES.get(settings.get_current_profile_name(), _EXAMPLES["default"]),
    stateful_step_count=_STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMemoryMachine = MemoryMachine.TestCase
