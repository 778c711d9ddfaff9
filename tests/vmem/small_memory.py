"""Small KV memories over the host and over the stand-in CUDA driver, and a plain model to compare them with."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from folio.vmem import (
    BlockContents,
    CacheTensors,
    CudaBackend,
    DevicePages,
    HostBackend,
    KVLayout,
    KVMemory,
    LayerGroup,
    LayerSpec,
    LayoutKind,
    LocalContents,
    MapError,
    MappingOptions,
    MirroredBackend,
    SequenceMemory,
    StateLayout,
    StepDemand,
    TokenChain,
    plan_layout,
)
from folio.vmem.backends.cuda import CPU
from folio.vmem.layout import Row
from folio.vmem.tensor_parallel.mirror import MirroredContents
from tests.vmem.backends.stand_in_driver import StandInDriver
from tests.vmem.direct_peers import DirectPeers

BLOCK_TOKENS = 16
PAGE_BYTES = 4096
MAX_TOKENS = 160
WINDOW_TOKENS = 40
STATE_BYTES = 6000
# Prompts begin like one of these documents, and go on with tokens of their own after so many.
DOCUMENTS = [[d * 1000 + i for i in range(MAX_TOKENS)] for d in range(2)]


def layout(
    kind: LayoutKind = "interleaved", block_tokens: int = BLOCK_TOKENS, *, shares_handles: bool = False
) -> KVLayout:
    """One layer in blocks that are one page interleaved, and a page for keys and one for values per layer. Sliced: two
    layers, a page for each, of which two may share a handle."""
    if kind == "sliced":
        spec, row = LayerSpec(1, 16, 16), 64
        token_bytes = PAGE_BYTES // block_tokens // (2 if shares_handles else 1)
        keys, values = (Row(0, 0), Row(1, 0)), (Row(0, row), Row(1, row))
        blocks = 2 if shares_handles else 1
        return KVLayout((spec, spec), torch.float32, kind, block_tokens, token_bytes, 4 * row, 2, keys, values, blocks)
    dim = (16 if kind == "interleaved" else 32) * BLOCK_TOKENS // block_tokens
    return plan_layout(
        [LayerSpec(2, dim, dim)], torch.float32, granularity_bytes=PAGE_BYTES, block_tokens=block_tokens, kind=kind
    )


def groups(
    kind: LayoutKind = "interleaved",
    *,
    windowed: bool = False,
    window_block_tokens: int = BLOCK_TOKENS,
    stateful: bool = False,
) -> list[LayerGroup]:
    """One group of layers that see everything, perhaps one of layers that see a window, and one of two pages of state.
    Sliced blocks of a single group share handles."""
    first = layout(kind, shares_handles=not windowed and not stateful)
    made = [LayerGroup(tuple(range(len(first.layers))), first)]
    if windowed:
        seen = layout(kind, window_block_tokens)
        layers = tuple(range(len(first.layers), len(first.layers) + len(seen.layers)))
        made.append(LayerGroup(layers, seen, WINDOW_TOKENS))
    if stateful:
        made.append(LayerGroup((), StateLayout(payload_bytes=STATE_BYTES, page_bytes=PAGE_BYTES)))
    return made


class FlakyHost(HostBackend):
    """The host backend; call number `fail_at` of those that change something fails.

    Attributes:
        before: called before each of these calls with its name and its number of handles, of which it may refuse any.
    """

    def __init__(self, capacity_bytes: int, pages: DevicePages | None = None) -> None:
        super().__init__(capacity_bytes, pages=pages)
        self.num_calls = 0
        self.fail_at = -1
        self.before: Callable[[str, int], object] = lambda call, count: None

    def _count(self, call: str, count: int = 1) -> None:
        self.num_calls += 1
        self.before(call, count)
        if self.num_calls == self.fail_at:
            raise MapError("injected")

    def create(self, page_bytes: int) -> int:
        self._count("create")
        return super().create(page_bytes)

    def destroy(self, handle: int) -> None:
        self._count("destroy")
        super().destroy(handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        self._count("map", len(handles))
        super().map(address, handles)

    def unmap(self, mapped: Any) -> None:
        self._count("unmap")
        super().unmap(mapped)


class FlakyCuda(CudaBackend):
    """The CUDA backend over a stand-in driver with pages of 4 KiB, perhaps of another backend; driver call number
    `fail_at` fails."""

    def __init__(
        self, capacity_bytes: int, pages: DevicePages | None = None, fake: StandInDriver | None = None
    ) -> None:
        self.fake = fake or StandInDriver(capacity_bytes, may_follow_leftovers=True)
        self.fake.granularity_bytes = PAGE_BYTES
        # Without a clock, so that the same calls are made each time: `fail_at` counts them.
        super().__init__(driver=self.fake, tensor_device=CPU, clock=lambda: 0.0, pages=pages)

    @property
    def num_calls(self) -> int:
        return len(self.fake.calls)

    @property
    def fail_at(self) -> int:
        return self.fake.fail_at

    @fail_at.setter
    def fail_at(self, call: int) -> None:
        self.fake.fail_at = call
        self.fake.fail_status = self.fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


class FlakyMirror(MirroredBackend):
    """The host backend on two ranks; call number `fail_at` fails, on rank 0 if it is even, else on rank 1."""

    def __init__(self, capacity_bytes: int) -> None:
        self._here = FlakyHost(capacity_bytes)
        self.ranks = DirectPeers(FlakyHost)
        self._fail_at = -1
        super().__init__(self._here, self.ranks, capacity_bytes=capacity_bytes)

    @property
    def there(self) -> FlakyHost:
        [peer] = self.ranks.backends
        assert isinstance(peer, FlakyHost)
        return peer

    @property
    def num_calls(self) -> int:
        return min(self._here.num_calls, self.there.num_calls)

    @property
    def fail_at(self) -> int:
        return self._fail_at

    @fail_at.setter
    def fail_at(self, call: int) -> None:
        self._fail_at = call
        ahead = (call - self.num_calls + 1) // 2
        self._here.fail_at = self._here.num_calls + ahead if call >= 0 and call % 2 == 0 else -1
        self.there.fail_at = self.there.num_calls + ahead if call >= 0 and call % 2 == 1 else -1


FlakyBackend = FlakyHost | FlakyCuda | FlakyMirror


@dataclass(eq=False)
class Tokens:
    """A sequence's tokens so far. What it caches for a token depends on all tokens up to that one."""

    chain: TokenChain
    ids: list[int] = field(default_factory=list)

    @property
    def contents(self) -> list[float]:
        contents, value = [], float(len("".join(self.chain.keys)))
        for token in self.ids:
            value = (value * 31 + token) % 1_000_003  # exact in float32
            contents.append(value)
        return contents

    def first(self, num_tokens: int) -> Tokens:
        """The first tokens only, at least one."""
        num_tokens = max(num_tokens, 1)
        return Tokens(self.chain.fork(num_tokens), self.ids[:num_tokens])


def make_memory(
    backend: type[FlakyHost] | type[FlakyCuda] | type[FlakyMirror] = FlakyHost,
    *,
    device: FlakyBackend | None = None,
    pages: DevicePages | None = None,
    layer_groups: Sequence[LayerGroup] = (),
    num_pages: int = 40,
    kind: LayoutKind = "interleaved",
    windowed: bool = False,
    window_block_tokens: int = BLOCK_TOKENS,
    stateful: bool = False,
    num_regions: int = 4,
    max_tokens: int = MAX_TOKENS,
    floor_pages: int = 0,
    prefix_cache: bool = True,
    swap_pages: int = 0,
    hash: Callable[[bytes, bytes], bytes] | None = None,
    pin_quota: float = 0.25,
    retain_quota: float = 0.25,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> tuple[KVMemory, FlakyBackend]:
    """A memory that gives nothing back by itself unless `idle_release_s` says so.

    Args:
        device: over `pages`, which other memories share.
        layer_groups: in place of those that the other settings describe.
    """
    device = device or backend((num_pages + 1) * PAGE_BYTES)  # with the anchor page

    def contents(tensors: CacheTensors) -> BlockContents:
        local = LocalContents(tensors)
        return MirroredContents(local, tensors, device) if isinstance(device, FlakyMirror) else local

    given: dict[str, Any] = {} if hash is None else {"hash": hash}
    memory = KVMemory(
        device,
        layer_groups or groups(kind, windowed=windowed, window_block_tokens=window_block_tokens, stateful=stateful),
        may_be_empty=pages is not None,
        mappings=None if pages is None else pages.mappings,
        swap_space=None if pages is None else pages.swap_space,
        budget_bytes=num_pages * PAGE_BYTES,
        floor_bytes=floor_pages * PAGE_BYTES,
        num_regions=num_regions,
        max_tokens=max_tokens,
        prefix_cache=prefix_cache,
        swap_bytes=swap_pages * PAGE_BYTES,
        **given,
        pin_quota=pin_quota,
        retain_quota=retain_quota,
        clock=clock,
        contents=contents,
        options=MappingOptions(
            **({"idle_release_s": 1e9, "cache_release_s": 1e9, "eager_allocation": False} | options)
        ),
    )
    return memory, device


def refusing(*calls: str, error: Exception | None = None) -> Callable[[str, int], None]:
    """`FlakyHost.before` that refuses these calls."""

    def before(call: str, count: int) -> None:
        if call in calls:
            raise error or MapError("injected")

    return before


def do_background(memory: KVMemory, most: int = 1000) -> int:
    """Do what the mapper would do now, in this thread; returns how many units there were."""
    for done in range(most):
        with memory.lock:
            work = memory.policy.next_work(time.monotonic())
            if work is None:
                return done
            memory.mapper.run_now(work)
    return most


def pages_read(memory: KVMemory, demands: Iterable[StepDemand]) -> set[int]:
    """Addresses of the pages that a step over these demands reads and writes."""
    addresses: set[int] = set()
    for demand in demands:
        for group, table in zip(memory.group_memories, demand.sequence.groups, strict=True):
            size = group.layout.home_bytes
            for place in range(table.first, group.layout.num_blocks(demand.end)):
                if table.region is not None:
                    addresses.update(group.place_addresses(table.region, place))
                    continue
                begin = table.block_ids[place] * size
                for home, at in itertools.product(group.homes, range(begin, begin + size, group.layout.page_bytes)):
                    addresses.add(home.address + at // group.layout.handle_bytes * group.layout.handle_bytes)
    return addresses


def _chosen(view: str, demand: StepDemand) -> str:
    return {"region": "region", "block_table": "home"}[demand.sequence.view] if view == "own" else view


def use_home(memory: KVMemory, demand: StepDemand) -> None:
    """Have the sequence's blocks mapped at home, where a test reads them. Without a region they are already."""
    for group, table in zip(memory.group_memories, demand.sequence.groups, strict=True):
        block_ids = table.block_ids[table.first : group.layout.num_blocks(demand.end)]
        if table.region is None:
            assert not group.not_at_home(block_ids)
            continue
        for _ in range(100):  # failures may be injected, a few in a row
            with contextlib.suppress(MapError):
                memory.map_home(demand.sequence)
                break
        assert not group.not_at_home(block_ids)


def tensors_of_ranks(memory: KVMemory) -> list[CacheTensors]:
    """The caches of every rank, rank 0's first."""
    device = memory.backend
    peers = device.ranks.memories if isinstance(device, FlakyMirror) else []
    return [memory.tensors, *(peer.tensors(device.number) for peer in peers if isinstance(device, FlakyMirror))]


def write(memory: KVMemory, demand: StepDemand, values: Sequence[float], view: str) -> None:
    """Store one value a token in every layer's keys, and its negative in the values, through "home", "region", or the
    sequence's "own" view."""
    view = _chosen(view, demand)
    if view == "home":
        use_home(memory, demand)
    for g, group in enumerate(memory.groups):
        table, block_tokens = demand.sequence.groups[g], group.layout.block_tokens
        for layer, tensors in itertools.product(group.layers, tensors_of_ranks(memory)):
            key, value = tensors.region_view(layer) if view == "region" else tensors.home_view(layer)
            for position, number in zip(range(demand.start, demand.end), values, strict=True):
                if view == "region":
                    assert table.region is not None
                    at = table.region.slot, position
                else:
                    at = table.block_ids[position // block_tokens], position % block_tokens
                key[at], value[at] = number, -number


def write_state(memory: KVMemory, sequence: SequenceMemory, value: float) -> None:
    """Fill the sequence's recurrent state, first byte to last, with one number."""
    for state in _states(memory, sequence):
        state[:] = value


def read_state(memory: KVMemory, sequence: SequenceMemory) -> float:
    """The number that fills the sequence's recurrent state."""
    states = torch.stack(_states(memory, sequence))
    assert bool((states == states[0, 0]).all())
    return float(states[0, 0])


def _states(memory: KVMemory, sequence: SequenceMemory) -> list[torch.Tensor]:
    """Of every rank."""
    g = memory.tensors.state_group
    assert g is not None
    [block_id] = sequence.groups[g].block_ids
    return [t.state_view()[block_id][:STATE_BYTES].view(torch.float64) for t in tensors_of_ranks(memory)]


def read(memory: KVMemory, demand: StepDemand, layer: int, view: str) -> list[float]:
    """The values of the visible tokens up to `demand.end`, oldest first; keys and values must agree, and all ranks."""
    view = _chosen(view, demand)
    if view == "home":
        use_home(memory, demand)
    [found, *others] = [_read(memory, tensors, demand, layer, view) for tensors in tensors_of_ranks(memory)]
    assert all(other == found for other in others)
    return found


def _read(memory: KVMemory, tensors: CacheTensors, demand: StepDemand, layer: int, view: str) -> list[float]:
    g = memory.tensors.group_of(layer)
    table = demand.sequence.groups[g]
    start, end = table.first * memory.groups[g].layout.block_tokens, demand.end
    if view == "region":
        assert table.region is not None
        key, value = (side[table.region.slot, start:end, 0, 0] for side in tensors.region_view(layer))
    else:
        used = table.block_ids[table.first : memory.groups[g].layout.num_blocks(end)]  # others may not be mapped yet
        blocks = torch.tensor(used, dtype=torch.int64)
        key, value = (side[blocks].flatten(0, 1)[: end - start, 0, 0] for side in tensors.home_view(layer))
    assert key.tolist() == (-value).tolist()
    return [float(number) for number in key.tolist()]
