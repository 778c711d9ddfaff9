"""Random use of KV memory against a plain model.

Contents written through one view are read through every other, prefix hits have the contents of the same tokens, the
accounting adds up after every rule, no mapping changes under a running step, and at the end nothing is left.

`test_memory_machine.py` and `test_threads.py` run it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from folio.vmem import (
    KVMemory,
    MapError,
    OutOfPages,
    OutOfSwap,
    PinError,
    PrefixUse,
    SequenceMemory,
    StepDemand,
    SwappedGroup,
    VmemError,
)
from tests.vmem.small_memory import (
    DOCUMENTS,
    MAX_TOKENS,
    FlakyBackend,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    Tokens,
    do_background,
    make_memory,
    pages_read,
    read,
    read_state,
    write,
    write_state,
)

# What is drawn must not depend on what happened, or threads would make examples impossible to repeat.
CHOICE = st.integers(0, 7)
# How many tokens from the end a fork or a truncation is: often none or few, so that last blocks are shared.
BACK = st.sampled_from([0, 0, 0, 1, 5, 16, 17, 40])
COMMON = st.sampled_from([0, 16, 17, 30, 32, 33, 40, 48, 49, 50, 64, 65, 71, 96, 97])

POLICY = st.sampled_from(["auto", "region", "block_table"])
SOME = st.sets(CHOICE, min_size=1, max_size=5)
# Rules that use a memory, and their arguments.
USES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "step": {"which": SOME, "growth": st.integers(1, 20), "view": st.sampled_from(["home", "region"])},
    "finish": {"which": CHOICE},
    "grow": {"which": SOME, "growth": st.integers(1, 20)},
    "fork": {"which": CHOICE, "back": BACK, "policy": POLICY, "cached": st.booleans()},
    "truncate": {"which": CHOICE, "back": BACK},
    "swap_out": {"which": st.sets(CHOICE, min_size=1, max_size=4)},
    "swap_in": {"which": CHOICE, "gives_up": st.sampled_from([False, False, False, True])},
    "background": {"units": st.integers(1, 30)},
}


def colliding_hash(parent: bytes, content: bytes) -> bytes:
    """A hash with three values."""
    return bytes([hashlib.blake2b(parent + content).digest()[0] % 3])


class MemoryMachine(RuleBasedStateMachine):
    """With `background` the mapper's thread works beside the rules; without it, between them where a rule says so."""

    @initialize(
        backend=st.sampled_from([FlakyHost, FlakyCuda, FlakyMirror]),
        num_pages=st.sampled_from([44, 48, 80]),
        settings=st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["interleaved", "sliced", "per_layer"]),
                "windowed": st.booleans(),
                "window_block_tokens": st.sampled_from([16, 32]),
                "stateful": st.booleans(),
                "background": st.booleans(),
                "floor_pages": st.sampled_from([0, 10]),
                "max_mappings": st.sampled_from([60, 1000]),
                "prefix_cache": st.sampled_from([True, True, False]),
                "hash": st.sampled_from([None, None, colliding_hash]),
                "overlap": st.booleans(),
                "deferred_reclamation": st.booleans(),
                "eager_allocation": st.booleans(),
                "reclaim_threshold": st.sampled_from([0.0, 0.1, 0.6]),
                "idle_release_s": st.sampled_from([0.0, 0.001, 1e9]),
                "cache_release_s": st.sampled_from([0.0, 0.01, 1e9, 1e9]),
            }
        ),
    )
    def begin(
        self,
        backend: type[FlakyHost] | type[FlakyCuda] | type[FlakyMirror],
        num_pages: int,
        settings: dict[str, Any],
    ) -> None:
        self.open(*make_memory(backend, num_pages=num_pages, swap_pages=40, **settings), settings["background"])

    def open(self, memory: KVMemory, backend: FlakyBackend, threaded: bool) -> None:
        self.memory, self.backend, self.threaded = memory, backend, threaded
        self.handle_bytes = memory.pages.handle_bytes
        report = memory.report()  # calls at the start are not all counted
        self.num_uncounted = backend.num_mappings - (report.map_calls - report.unmap_calls)
        self.written: dict[SequenceMemory, Tokens] = {}
        self.swapped: list[tuple[SwappedGroup, list[Tokens]]] = []
        self.next_token = 10_000
        self.coming: dict[SequenceMemory, list[int]] = {}
        self.revision = 0

    # ---- rules ----

    @rule(
        policy=POLICY,
        documents=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        common=COMMON,
        own=st.sampled_from([0, 0, 0, 1, 5, 16, 20]),
        salt=st.sampled_from(["", "", "", "x"]),
        view=st.sampled_from(["home", "region"]),
        use=st.builds(
            PrefixUse,
            kind=st.sampled_from(["", "chat"]),
            num_prompt_tokens=st.sampled_from([None, 1, 40]),
            resumes=st.booleans(),
            retain_s=st.sampled_from([0.0, 0.0, 0.002, 1e9]),
            retains_output=st.booleans(),
        ),
        fails=st.sampled_from([False] * 7 + [True]),
    )
    def submit(
        self,
        policy: str,
        documents: list[int],
        common: int,
        own: int,
        salt: str,
        view: str,
        use: PrefixUse,
        fails: bool,
    ) -> None:
        """Prompts in one step; those of one document share the units that the step computes."""
        demands = []
        shared_with_step: list[SequenceMemory] = []
        for document in documents:
            ids = DOCUMENTS[document][:common] + self._fresh(max(own, 1 - common))
            tokens = Tokens(self.memory.prefixes.chain((salt,) if salt else ()), ids)
            sequence = self.memory.create_sequence(policy, expected_tokens=len(ids))  # type: ignore[arg-type]
            try:
                found = self.memory.share_prefix(sequence, tokens.chain, ids, use)
                assert found < len(ids)
                self.memory.append(sequence, len(ids), start=found)
            except VmemError:
                self._free(sequence)
                continue
            self.memory.prefixes.announce_prefill(sequence, len(ids), [len(ids) // 16 * 16])
            self.memory.prefixes.stage_prefix(sequence, ids, found, len(ids))
            self.written[sequence] = Tokens(tokens.chain, ids[:found])
            shared_with_step.append(sequence)
            demands.append(StepDemand(sequence, found, len(ids)))
            self.coming[sequence] = ids
        if not self._step(demands, view, fails=fails):
            self.memory.prefixes.abort_prefixes()
            for sequence in shared_with_step:
                del self.written[sequence]
                self._free(sequence)

    @rule(**USES["step"])
    def step(self, which: set[int], growth: int, view: str) -> None:
        demands = []
        for sequence in [s for i, s in enumerate(self.written) if i in which]:
            tokens = self.written[sequence]
            start = len(tokens.ids)
            end = min(start + growth, MAX_TOKENS)
            if start == end:
                continue
            try:
                self.memory.append(sequence, end, start=start)
            except (OutOfPages, MapError):
                continue
            document = next((d for d in DOCUMENTS if d[:start] == tokens.ids), None)
            self.coming[sequence] = document[:end] if document else tokens.ids + self._fresh(end - start)
            self.memory.prefixes.stage_prefix(sequence, self.coming[sequence], start, end)
            demands.append(StepDemand(sequence, start, end))
        if not self._step(demands, view):
            self.memory.prefixes.abort_prefixes()
            for sequence in [demand.sequence for demand in demands]:
                tokens = self.written[sequence]
                if (
                    self.memory.prefixes.has_states
                ):  # as the scheduler does: half of the step may have changed the state
                    del self.written[sequence]
                    self._free(sequence)
                    continue
                self.memory.truncate(sequence, len(tokens.ids))  # other tokens will come in their place

    @rule(**USES["finish"])
    def finish(self, which: int) -> None:
        if (sequence := self._at(which)) is not None:
            del self.written[sequence]
            self._free(sequence)

    @rule(**USES["grow"])
    def grow(self, which: set[int], growth: int) -> None:
        """Blocks for a step that never comes."""
        for sequence in [s for i, s in enumerate(self.written) if i in which]:
            start = len(self.written[sequence].ids)
            with contextlib.suppress(OutOfPages, MapError):
                self.memory.append(sequence, min(start + growth, MAX_TOKENS))

    @rule(**USES["fork"])
    def fork(self, which: int, back: int, policy: str, cached: bool) -> None:
        parent = self._at(which)
        if parent is None or not self.written[parent].ids or self._has_room_ahead(parent):
            return
        tokens = self.written[parent]
        own = tokens.first(len(tokens.ids) - (0 if self.memory.prefixes.has_states else back))
        chain = own.chain if cached else None
        try:
            child = self.memory.fork(parent, len(own.ids), policy, chain)  # type: ignore[arg-type]
        except VmemError:
            return
        self.written[child] = own

    @rule(**USES["truncate"])
    def truncate(self, which: int, back: int) -> None:
        if (sequence := self._at(which)) is None or self._has_room_ahead(sequence):
            return
        tokens = self.written[sequence]
        num_tokens = max(0, len(tokens.ids) - back)
        try:
            self.memory.truncate(sequence, num_tokens)
        except VmemError:  # has left the window, or the state has moved on
            return
        del tokens.ids[num_tokens:]

    @rule(**USES["swap_out"])
    def swap_out(self, which: set[int]) -> None:
        sequences = [s for i, s in enumerate(self.written) if i in which]
        try:
            swapped = self.memory.swap_out(sequences)
        except OutOfSwap:
            return
        self.swapped.append((swapped, [self.written.pop(sequence) for sequence in sequences]))

    @rule(**USES["swap_in"])
    def swap_in(self, which: int, gives_up: bool) -> None:
        if not self.swapped:
            return
        swapped, tokens = self.swapped[which % len(self.swapped)]
        if gives_up:
            self.memory.swapping.discard_swapped(swapped)
        else:
            try:
                sequences = self.memory.swap_in(swapped)
            except VmemError:
                return
            self.written.update(zip(sequences, tokens, strict=True))
        self.swapped.remove((swapped, tokens))

    @rule(which=CHOICE, name=st.sampled_from(["a", "b"]), back=BACK)
    def pin(self, which: int, name: str, back: int) -> None:
        if (sequence := self._at(which)) is None or self._has_room_ahead(sequence):
            return
        num_tokens = len(self.written[sequence].ids) - (0 if self.memory.prefixes.has_states else back)
        with contextlib.suppress(PinError, VmemError):
            self.memory.pin(name, sequence, num_tokens)

    @rule(name=st.sampled_from(["a", "b"]))
    def unpin(self, name: str) -> None:
        with contextlib.suppress(PinError):
            self.memory.unpin(name)

    @rule(fraction=st.floats(0, 1))
    def set_budget(self, fraction: float) -> None:
        least, most = self.memory.least_budget_bytes, self.memory.most_budget_bytes
        handles = math.floor(fraction * (most - least) / self.handle_bytes)
        self.revision += 1
        assert self.memory.set_budget(least + handles * self.handle_bytes, self.revision) in ("applied", "deferred")
        assert self.memory.set_budget(most, self.revision) == "stale"
        while self.memory.num_free_pages < 0 and self.written:  # as the scheduler does: the latest gives way
            self._free(self._pop())

    @rule(**USES["background"])
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
        """Make one of the next calls of the device fail."""
        self.backend.fail_at = self.backend.num_calls + calls

    # ---- checks ----

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check_integrity()
        report = self.memory.report()
        assert report.active_bytes + report.parked_bytes + report.cached_bytes <= report.physical_bytes
        assert report.eager_bytes <= report.parked_bytes
        if not self.threaded:  # else the mapper may change mappings meanwhile
            assert report.mapped_bytes == self.backend.num_mappings * self.handle_bytes
            num_mapped = report.map_calls - report.unmap_calls
            assert num_mapped + self.num_uncounted == self.backend.num_mappings
            assert report.physical_bytes == (report.create_calls - report.destroy_calls) * self.handle_bytes
            assert report.alias_calls <= report.map_calls
        assert report.physical_bytes <= self.memory.most_budget_bytes
        assert report.pinned_bytes <= report.active_bytes
        assert report.swapped_bytes <= report.swap_budget_bytes
        if not self.memory.prefixes.enabled:
            assert not report.cached_bytes
        if isinstance(self.backend, FlakyCuda):
            assert not self.backend.fake.violations
        if isinstance(self.backend, FlakyMirror) and not self.threaded:
            assert self.backend.there.num_mappings == self.backend.num_mappings

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.backend.fail_at = -1
        self.free_all()
        self.finish_steps()
        self.memory.check_idle()
        self.memory.close()
        if isinstance(self.backend, FlakyCuda):
            assert self.backend.fake.leftovers == (0, 0, 0, 0, 0)
            assert not self.backend.fake.violations

    # ---- helpers ----

    def free_all(self) -> None:
        while self.written:
            self.memory.free(self._pop())
        while self.swapped:
            self.memory.swapping.discard_swapped(self.swapped.pop()[0])

    def _at(self, which: int) -> SequenceMemory | None:
        return list(self.written)[which % len(self.written)] if self.written else None

    def _pop(self) -> SequenceMemory:
        return self.written.popitem()[0]

    def _free(self, sequence: SequenceMemory) -> None:
        try:
            self.memory.free(sequence)
        except MapError:  # without deferred reclamation the unmapping itself may fail; the sequence is gone
            assert self.backend.fail_at >= 0

    def _fresh(self, count: int) -> list[int]:
        """Tokens of no other sequence."""
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def _has_room_ahead(self, sequence: SequenceMemory) -> bool:
        """Whether `grow` has added blocks for tokens never computed: the state is not of that length."""
        return self.memory.prefixes.has_states and sequence.num_tokens != len(self.written[sequence].ids)

    def _step(self, demands: list[StepDemand], view: str, *, fails: bool = False) -> bool:
        """Map, write and read back; then let the step run on while the rules go on. False if it failed before."""
        try:
            self.memory.ensure(demands)
        except (MapError, OutOfPages):
            return False
        if fails:
            return False
        if isinstance(self.backend, FlakyCuda):
            self.backend.fake.launch(pages_read(self.memory, demands))
        for demand in demands:
            tokens = self.written[demand.sequence]
            if self.memory.prefixes.has_states and demand.start:
                assert read_state(self.memory, demand.sequence) == tokens.contents[-1]
            tokens.ids = self.coming.pop(demand.sequence)
            values = tokens.contents[demand.start : demand.end]
            through = view if demand.sequence.view == "region" else "home"
            write(self.memory, demand, values, through)
            if self.memory.prefixes.has_states:
                write_state(self.memory, demand.sequence, values[-1])
        for demand in demands:
            for group in self.memory.groups:
                for layer in group.layers:
                    table = demand.sequence.groups[self.memory.tensors.group_of(layer)]
                    expected = self.written[demand.sequence].contents[table.first * group.layout.block_tokens :]
                    if view == "home" or demand.sequence.view == "block_table":
                        assert read(self.memory, demand, layer, "home") == expected
                    if demand.sequence.view == "region":
                        assert read(self.memory, demand, layer, "region") == expected
        self.memory.launched()
        self.memory.prefixes.commit_prefixes()
        coming = self.next_token % 3 * MAX_TOKENS // 2  # tokens of the prompt that the next step may begin
        self.memory.plan([StepDemand(d.sequence, d.end, min(d.end + 5, MAX_TOKENS)) for d in demands], coming)
        return True
