"""Random use of several KV memories over the pages of one device, against a plain model.

What one memory has written is never changed by another owner of pages, bytes add up after every rule within a small
capacity, and at the end nothing is left. Beside the memories, a backend with pages of other sizes writes to them, as
weights would.

CI runs about 3,000 rules; `pytest --hypothesis-profile=nightly tests/vmem/test_shared_machine.py` more than 100,000.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from folio.vmem import (
    AddressRange,
    DevicePages,
    KVMemory,
    LayerGroup,
    LayerSpec,
    MapError,
    OutOfPages,
    PinError,
    PrefixUse,
    StepDemand,
    VmemError,
    plan_layout,
)
from tests.nightly import examples
from tests.vmem.backends.stand_in_driver import StandInDriver
from tests.vmem.memory_machine import POLICY, USES, MemoryMachine
from tests.vmem.small_memory import (
    BLOCK_TOKENS,
    PAGE_BYTES,
    FlakyCuda,
    FlakyHost,
    make_memory,
    read,
)

# What is drawn must not depend on what happened, or threads would make examples impossible to repeat.
CHOICE = st.integers(0, 5)
USE = st.one_of(*(st.tuples(st.just(name), st.fixed_dictionaries(arguments)) for name, arguments in USES.items()))
PINS = st.sampled_from([0, 0, 17, 32])
_STEPS = 50


def groups_of(page_bytes: int) -> list[LayerGroup]:
    """One layer in blocks of one page."""
    dim = page_bytes // BLOCK_TOKENS // 16
    layout = plan_layout(
        [LayerSpec(2, dim, dim)], torch.float32, granularity_bytes=page_bytes, block_tokens=BLOCK_TOKENS
    )
    assert layout.page_bytes == page_bytes
    return [LayerGroup((0,), layout)]


class Model(MemoryMachine):
    """A memory over shared pages, and what should be in it."""

    def __init__(self, memory: KVMemory, device: FlakyHost | FlakyCuda, threaded: bool, number: int) -> None:
        super().__init__()
        self.open(memory, device, threaded)
        self.salt = "x" * number  # models write different values for the same tokens
        self.pinned: dict[str, list[int]] = {}

    @property
    def owned_bytes(self) -> int:
        return self.memory.held_bytes + self.memory.pages.handle_bytes  # with the anchor page


class SharedMachine(RuleBasedStateMachine):
    """With `background` each memory has its mapper's thread. A GPU may have less memory than the account says."""

    @initialize(
        on_cuda=st.booleans(),
        capacity_pages=st.integers(24, 80),
        missing_pages=st.sampled_from([0, 0, 8]),
        page_sizes=st.lists(st.sampled_from([1, 1, 2]), min_size=2, max_size=3),
        options=st.fixed_dictionaries(
            {
                "background": st.booleans(),
                "eager_allocation": st.booleans(),
                "idle_release_s": st.sampled_from([1e9, 0.0]),
                "max_mappings": st.sampled_from([70, 1000]),
            }
        ),
    )
    def start(
        self, on_cuda: bool, capacity_pages: int, missing_pages: int, page_sizes: list[int], options: dict[str, Any]
    ) -> None:
        self.pages = DevicePages(capacity_pages * PAGE_BYTES, swap_bytes=80 * PAGE_BYTES)
        self.driver: StandInDriver | None = None
        if on_cuda:
            device_bytes = (capacity_pages - missing_pages) * PAGE_BYTES
            self.driver = StandInDriver(device_bytes, may_follow_leftovers=True)
        self.threaded, self.options = options["background"], options
        self.budget_pages = max(capacity_pages, 40)
        self.charged = 0
        self.models: list[Model | None] = [None] * len(page_sizes)
        self.page_sizes = [size * PAGE_BYTES for size in page_sizes]
        self.weights = self._device()
        self.layers: list[tuple[AddressRange, int, int]] = []  # where, page, byte that fills it
        for m in range(len(page_sizes)):
            self._add(m)

    # ---- models come and go ----

    @rule(m=CHOICE, removes=st.sampled_from([False, False, True]))
    def replace(self, m: int, removes: bool) -> None:
        """Remove a model, or add the one that is missing."""
        m %= len(self.models)
        if (model := self.models[m]) is None:
            self._add(m)
        elif removes:
            model.backend.fail_at = -1
            model.free_all()
            self.finish_steps()
            model.memory.close()
            self.models[m] = None

    @rule(
        m=CHOICE,
        documents=st.lists(st.integers(0, 1), max_size=2),
        pins=PINS,
        swaps=st.booleans(),
        fails_after=st.sampled_from([None, None, 1, 2, 3, 5]),
    )
    def release_all(self, m: int, documents: list[int], pins: int, swaps: bool, fails_after: int | None) -> None:
        """A model falls asleep, perhaps after some prompts; what it should remember is in host memory."""
        if (model := self._model(m)) is None:
            return
        memory, device = model.memory, model.backend
        self.submit(m, documents, 64, 20, "auto", "home", pins)
        if swaps:
            model.swap_out(set(range(len(model.written))))
        while model.written:
            model.finish(0)
        if fails_after is not None:
            device.fail_at = device.num_calls + fails_after
        try:
            pinned = memory.release_all()
        except MapError:
            memory.check_integrity()
            device.fail_at = -1
            pinned = memory.release_all()
        found = [(prefix.pin_name, list(prefix.token_ids)) for prefix in pinned]
        assert found == [(name, ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS]) for name, ids in model.pinned.items()]
        model.pinned.clear()
        if not self.threaded:
            assert memory.held_bytes == 0
        model.revision += 1
        memory.set_budget(0, model.revision)
        memory.check_integrity()
        assert memory.held_bytes == 0
        assert memory.report().cached_prefixes == 0
        self._look()

    @rule(m=CHOICE, fraction=st.sampled_from([0.0, 0.2, 0.5, 1.0, 1.0]))
    def set_budget(self, m: int, fraction: float) -> None:
        if (model := self._model(m)) is not None:
            model.set_budget(fraction)

    # ---- memory that is not of a KV cache ----

    @rule(num_bytes=st.sampled_from([1, 5 * PAGE_BYTES + 1, 20 * PAGE_BYTES, 0, 0]))
    def charge(self, num_bytes: int) -> None:
        """Charge some memory, or end all charges."""
        if not num_bytes:
            self.pages.discharge(self.charged)
            self.charged = 0
        with contextlib.suppress(OutOfPages, MapError):
            self.pages.charge(num_bytes)
            self.charged += num_bytes

    @rule()
    def trim(self) -> None:
        with contextlib.suppress(MapError):
            self.pages.trim()
            if not self.threaded:
                assert not self.pages.idle_bytes

    @rule(value=st.sampled_from([0, 0x7F, 0xFF]), count=st.integers(-9, 9))
    def load_layers(self, value: int, count: int) -> None:
        """Load weights into pages of the size of some memory's, or unload some; 0xFF bytes are NaN."""
        self._never_fail()
        self._unload_layers(-count)
        size = self.weights.page_bytes or self.page_sizes[-1]
        for _ in range(count):
            try:
                page = self.weights.create(size)
            except OutOfPages:
                return
            reserved = self.weights.reserve(size)
            self.weights.map(reserved.address, [page])
            self.weights.tensor(reserved).fill_(value)
            self.layers.append((reserved, page, value))
        self._look()

    def _unload_layers(self, count: int) -> None:
        for _ in range(min(count, len(self.layers))):
            reserved, page, _ = self.layers.pop()
            self.weights.unmap(reserved)
            self.weights.destroy(page)
            self.weights.release(reserved)

    # ---- requests ----

    @rule(
        m=CHOICE,
        documents=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        common=st.sampled_from([0, 16, 33, 64, 97]),
        own=st.sampled_from([0, 1, 20, 60]),
        policy=POLICY,
        view=st.sampled_from(["home", "region"]),
        pins=PINS,
    )
    def submit(self, m: int, documents: list[int], common: int, own: int, policy: str, view: str, pins: int) -> None:
        """Prompts, of which the beginning may be pinned. They wake the model."""
        if (model := self._model(m)) is None:
            return
        if not model.memory.pages.budget:
            model.set_budget(1.0)
        before = set(model.written)
        model.submit(policy, documents, common, own, model.salt, view, PrefixUse(), False)
        for sequence in [s for s in model.written if pins and s not in before]:
            ids, name = model.written[sequence].ids, f"pin {len(model.pinned) % 2}"
            with contextlib.suppress(PinError, VmemError):
                model.memory.pin(name, sequence, min(pins, len(ids)))
                model.pinned.setdefault(name, ids[:pins])

    @rule(m=CHOICE, uses=st.lists(USE, min_size=1, max_size=3))
    def use(self, m: int, uses: list[tuple[str, dict[str, Any]]]) -> None:
        for name, arguments in uses:
            if (model := self._model(m)) is not None:
                getattr(model, name)(**arguments)

    # ---- time and trouble ----

    @rule()
    def finish_steps(self) -> None:
        if self.driver is not None:
            self.driver.finish_work()

    @rule(m=CHOICE, calls=st.integers(1, 12))
    def fail_soon(self, m: int, calls: int) -> None:
        if (model := self._model(m)) is not None:
            model.fail_soon(calls)

    # ---- checks ----

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pages"):
            return
        models = [model for model in self.models if model is not None]
        for model in models:
            model.adds_up()
        self.pages.check_integrity()
        assert self.pages.charged_bytes == self.charged
        assert self.pages.swap_space.used_bytes == sum(model.memory.swapping.used_bytes for model in models)
        assert self.pages.swap_space.used_bytes <= 80 * PAGE_BYTES
        if self.threaded:  # else mappers take and give back pages meanwhile
            return
        owned = sum(model.owned_bytes for model in models) + len(self.layers) * self.weights.page_bytes
        assert self.pages.used_bytes == owned
        assert self.pages.mappings.total >= sum(model.backend.num_mappings for model in models)
        if self.driver is not None:
            assert self.driver.used_bytes == self.pages.used_bytes + self.pages.idle_bytes

    def teardown(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.charge(0)
        self._never_fail()
        self._look()
        for m, model in enumerate(self.models):
            if model is not None:
                self.replace(m, True)
        self._unload_layers(len(self.layers))
        self.weights.close()
        self.pages.check_integrity()
        assert self.pages.used_bytes == self.pages.idle_bytes == self.pages.mappings.total == 0
        self.pages.close()
        if self.driver is not None:
            assert self.driver.leftovers == (0, 0, 0, 0, 0)
            assert not self.driver.violations

    # ---- helpers ----

    def _device(self) -> FlakyHost | FlakyCuda:
        return FlakyHost(0, self.pages) if self.driver is None else FlakyCuda(0, self.pages, self.driver)

    def _never_fail(self) -> None:
        for device in (self.weights, *(model.backend for model in self.models if model is not None)):
            device.fail_at = -1

    def _add(self, m: int) -> None:
        """Add a model, if there is memory for its anchor page."""
        self._never_fail()
        device = self._device()
        try:
            memory, _ = make_memory(
                device=device,
                pages=self.pages,
                layer_groups=groups_of(self.page_sizes[m]),
                num_pages=self.budget_pages,
                swap_pages=60,
                **self.options,
            )
        except OutOfPages:
            device.close()
            return
        self.models[m] = Model(memory, device, self.threaded, m)

    def _model(self, m: int) -> Model | None:
        return self.models[m % len(self.models)]

    def _look(self) -> None:
        """Read everything that the open sequences of all memories have written."""
        for model in self.models:
            for sequence, tokens in [] if model is None else model.written.items():
                demand = StepDemand(sequence, len(tokens.ids), len(tokens.ids))
                with contextlib.suppress(MapError, OutOfPages):
                    model.memory.ensure([demand])
                    assert read(model.memory, demand, 0, "own") == tokens.contents
        for reserved, _, value in self.layers:
            assert self.weights.tensor(reserved).eq(value).all()


SharedMachine.TestCase.settings = settings(
    max_examples=examples(60, nightly=2200),
    stateful_step_count=_STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSharedMachine = SharedMachine.TestCase
