"""Layout: from model geometry to the strides of keys and values in pages.

A block of `block_tokens` tokens has one page in each of the layout's slices. *Interleaved*: one slice for all layers,

    page    | token 0                                                    | token 1 …
            | layer 0: K [heads, dim] V [heads, dim] | layer 1: … | pad |

*Per layer*: a slice of its own for the keys and for the values of each layer,

    page    | token 0: K [heads, dim] | token 1 …       slice 0: keys of layer 0, slice 1: its values, slice 2: …

*Sliced*: a slice for every 4 to 8 layers, which are interleaved within it,

    page    | token 0: layer 0: K, V | layer 1: … | layer 7: K, V | token 1 …      slice 0: layers 0 to 7, slice 1: …

*Whole*: sliced blocks with one slice for all layers, so that a block is one page.

In all of them pages mapped side by side make one array of tokens with a constant stride, which is why a page is a whole
number of tokens. Interleaved blocks are small (Llama-3-8B in granules of 2 MiB: 16 tokens against 1,024), and a block
costs one mapping instead of two for each layer; per-layer reads are dense. Sliced blocks are between the two: 64 tokens
in four pages, so that a kernel's tile is a whole block and a layer's kernel touches a quarter of the pages. Whole ones
take a quarter of the driver's calls, whose time does not depend on a page's size.

A page is usually a physical allocation of its own. Where 64 tokens are less than a granule, the pages of several
neighbouring blocks, an *extent*, share an allocation (a *handle*); Qwen2.5-0.5B in granules of 2 MiB:

    handle of slice 0    | page of block 8 | page of block 9 | … | page of block 15 |      256 KiB each

Such blocks are read at home only: a region maps the blocks of one sequence, and can map whole handles only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from folio.vmem.errors import LayoutError

if TYPE_CHECKING:
    import torch

LayoutKind = Literal["interleaved", "sliced", "whole", "per_layer"]

# Rows start at multiples of a cache line, so that no vector load of one token splits two lines.
_ROW_ALIGNMENT_BYTES = 64
# Smaller blocks waste less, but each of them costs mapping calls and a place in every block table.
_SMALLEST_BLOCK_TOKENS = 16
# Pages of more granules are not tried: what a larger page saves in padding it loses in unfilled last blocks.
_MOST_GRANULES_TRIED = 16
# Layouts whose blocks are whole tiles of the kernels.
_TILED: tuple[LayoutKind, ...] = ("sliced", "whole")
# Sliced layouts: layers of a slice, and tokens of a block. The shortest block is a tile of the kernels; longer ones are
# for pages that cannot be shared.
_SLICE_LAYERS = range(4, 9)
_SLICED_BLOCK_TOKENS = (64, 128, 256, 512, 1024)
# A handle of more granules is not shared: all blocks of an extent must be free before its memory goes back.
_MOST_SHARED_GRANULES = 8


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one layer's cache: K is `[num_heads, key_dim]` a token, V is `[num_heads, value_dim]`."""

    num_heads: int
    key_dim: int
    value_dim: int

    def row_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of a token's keys and of its values."""
        return self.num_heads * self.key_dim * dtype.itemsize, self.num_heads * self.value_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Row:
    """A row's slice, and its offset in the token's share of that slice."""

    slice: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Strides and sizes. `keys[i]` and `values[i]` are the rows of layer i.

    Attributes:
        token_bytes: the stride from token to token in every slice.
        payload_bytes: bytes of a token's keys and values in all layers.
        extent_blocks: neighbouring blocks whose pages share a handle in each slice.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    kind: LayoutKind
    block_tokens: int
    token_bytes: int
    payload_bytes: int
    num_slices: int
    keys: tuple[Row, ...]
    values: tuple[Row, ...]
    extent_blocks: int = 1

    @property
    def page_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def handle_bytes(self) -> int:
        """Bytes that are created and mapped as a whole: the pages of an extent in one slice."""
        return self.extent_blocks * self.page_bytes

    @property
    def block_bytes(self) -> int:
        """Physical bytes of a block, one page in each slice."""
        return self.num_slices * self.page_bytes

    @property
    def extent_pages(self) -> int:
        """Pages of an extent: memory is taken and given back in these."""
        return self.num_slices * self.extent_blocks

    @property
    def num_homes(self) -> int:
        """Address ranges in which a block has `home_bytes`."""
        return self.num_slices

    @property
    def home_bytes(self) -> int:
        return self.page_bytes

    @property
    def padding(self) -> float:
        """Share of a full block's bytes without keys or values."""
        return 1 - self.payload_bytes * self.block_tokens / self.block_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def expected_waste(self, expected_tokens: int) -> float:
        """Share of bytes without keys or values for sequences of about that length, whose last block is half full on
        average."""
        held_tokens = expected_tokens + (self.block_tokens - 1) / 2
        return 1 - expected_tokens / held_tokens * (1 - self.padding)

    def view(self, memory: Sequence[torch.Tensor], layer: int, run_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer `layer` of `memory`: for each slice a uint8 tensor of whole runs of `run_tokens` tokens.

        Returns:
            K `[num_runs, run_tokens, num_heads, key_dim]` and V `[…, value_dim]`, strided views of `memory`.
        """
        spec = self.layers[layer]
        token_stride = self.token_bytes // self.dtype.itemsize

        def strided(row: Row, dim: int) -> torch.Tensor:
            values = memory[row.slice].view(self.dtype)
            num_runs = memory[row.slice].numel() // (run_tokens * self.token_bytes)
            return values.as_strided(
                (num_runs, run_tokens, spec.num_heads, dim),
                (run_tokens * token_stride, token_stride, dim, 1),
                row.offset_bytes // self.dtype.itemsize,
            )

        return strided(self.keys[layer], spec.key_dim), strided(self.values[layer], spec.value_dim)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A state of fixed size for each sequence: one block of adjacent pages.

    Attributes:
        payload_bytes: of the state.
        block_tokens: tokens of one block: more than any sequence has.
    """

    payload_bytes: int
    page_bytes: int
    block_tokens: int = 1 << 40
    extent_blocks: ClassVar[int] = 1

    @property
    def handle_bytes(self) -> int:
        return self.page_bytes

    @property
    def extent_pages(self) -> int:
        return self.num_slices

    @property
    def num_slices(self) -> int:
        return -(-self.payload_bytes // self.page_bytes)

    @property
    def block_bytes(self) -> int:
        return self.num_slices * self.page_bytes

    @property
    def num_homes(self) -> int:
        return 1

    @property
    def home_bytes(self) -> int:
        return self.block_bytes

    @property
    def padding(self) -> float:
        """Share of a block's bytes without state."""
        return 1 - self.payload_bytes / self.block_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """One block, once the sequence has begun."""
        return min(num_tokens, 1)


def plan_layout(
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    *,
    granularity_bytes: int,
    kind: LayoutKind = "interleaved",
    block_tokens: int | None = None,
    page_bytes: int | None = None,
    expected_tokens: int = 1024,
    multiple_of: int = 1,
    shares_handles: bool = False,
) -> KVLayout:
    """Lay out layers so that handles are whole numbers of granules, and pages whole numbers of tokens.

    Without `block_tokens` and `page_bytes` the page size with the least expected waste is chosen, the smallest of
    equals.

    Args:
        block_tokens: tokens of a block; the token is padded until that many fill whole granules.
        page_bytes: the page size of other layer groups; as many tokens as fit become a block.
        expected_tokens: length of a typical sequence, to weigh padding against unfilled last blocks.
        multiple_of: with `page_bytes`, the block is a multiple of so many tokens.
        shares_handles: let sliced and whole blocks of less than a granule share handles.

    Raises:
        LayoutError: there are no layers, a dimension is not positive, or the numbers make no page.
    """
    if not layers:
        raise LayoutError("a layout needs at least one layer")
    if any(min(spec.num_heads, spec.key_dim, spec.value_dim) < 1 for spec in layers):
        raise LayoutError(f"heads and dimensions must be positive: {layers}")
    if expected_tokens < 1:
        raise LayoutError(f"expected_tokens {expected_tokens} must be at least 1")
    planner = _Planner(tuple(layers), dtype, kind, granularity_bytes, _placements(layers, dtype, kind), expected_tokens)
    if page_bytes is not None:
        candidates = planner.in_pages_of(page_bytes, block_tokens, multiple_of)
    elif block_tokens is not None or kind in _TILED:
        lengths = _SLICED_BLOCK_TOKENS if block_tokens is None else (block_tokens,)
        candidates = planner.of_lengths(lengths, shares_handles=shares_handles and kind in _TILED)
    else:
        return planner.of_least_waste()
    # Among layouts that waste the same within 0.1 %, prefer unshared pages, small extents and few mappings.
    return min(
        candidates,
        key=lambda made: (
            round(made.expected_waste(expected_tokens), 3),
            made.extent_blocks > 1,
            made.extent_blocks * made.block_bytes,
            made.num_slices,
        ),
    )


def plan_groups(
    groups: Sequence[Sequence[LayerSpec]],
    dtype: torch.dtype,
    *,
    granularity_bytes: int,
    kind: LayoutKind = "interleaved",
    block_tokens: int | None = None,
    expected_tokens: int = 1024,
    shares_handles: bool = False,
) -> tuple[KVLayout, ...]:
    """Lay out each layer group with pages of one size, so that the groups can share one page budget.

    The group with the longest rows sets the page size. In the others a block holds as many tokens as fit, in multiples
    of that group's block, because prefixes are shared in units that are whole blocks of every group. Several groups
    share no handles: pages of a handle that one group uses in part would be lost to the others.
    """
    if not groups:
        raise LayoutError("there must be at least one layer group")
    largest = max(groups, key=lambda layers: _placements(layers, dtype, kind)[-1].row_bytes if layers else 0)
    plan = partial(plan_layout, dtype=dtype, granularity_bytes=granularity_bytes, kind=kind)
    leader = plan(
        largest,
        block_tokens=block_tokens,
        expected_tokens=expected_tokens,
        shares_handles=shares_handles and len(groups) == 1,
    )
    return tuple(
        leader
        if list(layers) == list(largest)
        else plan(layers, page_bytes=leader.page_bytes, multiple_of=leader.block_tokens)
        for layers in groups
    )


class _Placement(NamedTuple):
    """Rows of every layer's keys and of its values, the number of slices, and the bytes of a token in a slice."""

    keys: tuple[Row, ...]
    values: tuple[Row, ...]
    num_slices: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Planner:
    """Layouts to choose from, see `plan_layout`."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    kind: LayoutKind
    granularity_bytes: int
    placements: Sequence[_Placement]
    expected_tokens: int

    def in_pages_of(self, page_bytes: int, block_tokens: int | None, multiple_of: int) -> list[KVLayout]:
        """Layouts with pages of a given size."""
        if page_bytes % self.granularity_bytes:
            raise LayoutError(f"page_bytes {page_bytes} is not a multiple of the granularity {self.granularity_bytes}")
        fitting = [rows for rows in self.placements if _most_tokens(page_bytes, rows.row_bytes, multiple_of)]
        return [self._in_page(rows, page_bytes, block_tokens, multiple_of) for rows in fitting or self.placements[:1]]

    def of_lengths(self, lengths: Sequence[int], *, shares_handles: bool) -> list[KVLayout]:
        """Layouts with blocks of given lengths, whose pages have a handle each, or also share handles."""
        candidates = [self._of_tokens(rows, tokens) for rows, tokens in product(self.placements, lengths)]
        if shares_handles:
            tried = product(self.placements, lengths, range(1, _MOST_SHARED_GRANULES + 1))
            candidates += [made for each in tried if (made := self._shared(*each)) is not None]
        return candidates

    def of_least_waste(self) -> KVLayout:
        """The smallest of the pages that waste least."""
        smallest = _smallest_block(self.expected_tokens)
        first = _round_up(smallest * self.placements[0].row_bytes, self.granularity_bytes)
        sizes = [first + i * self.granularity_bytes for i in range(_MOST_GRANULES_TRIED)]
        return min(
            (self._in_page(self.placements[0], size) for size in sizes),
            key=lambda made: made.expected_waste(self.expected_tokens),
        )

    def _in_page(self, rows: _Placement, size: int, block_tokens: int | None = None, multiple_of: int = 1) -> KVLayout:
        tokens = block_tokens or _most_tokens(size, rows.row_bytes, multiple_of)
        if not tokens or size % (tokens * _ROW_ALIGNMENT_BYTES) or size // tokens < rows.row_bytes:
            raise LayoutError(f"pages of {size} bytes cannot hold {tokens or 1} tokens of {rows.row_bytes} bytes")
        return self._layout(rows, size, tokens)

    def _of_tokens(self, rows: _Placement, tokens: int) -> KVLayout:
        if tokens < 1 or self.granularity_bytes % tokens:
            raise LayoutError(f"block_tokens {tokens} must divide the granularity of {self.granularity_bytes} bytes")
        step = max(self.granularity_bytes // tokens, _ROW_ALIGNMENT_BYTES)
        return self._layout(rows, tokens * _round_up(rows.row_bytes, step), tokens)

    def _shared(self, rows: _Placement, tokens: int, num_granules: int) -> KVLayout | None:
        size = num_granules * self.granularity_bytes
        blocks = _most_tokens(size, tokens * rows.row_bytes, alignment=tokens * _ROW_ALIGNMENT_BYTES)
        return self._layout(rows, size // blocks, tokens, blocks) if blocks > 1 else None

    def _layout(self, rows: _Placement, size: int, tokens: int, extent_blocks: int = 1) -> KVLayout:
        payload, token_bytes = sum(sum(spec.row_bytes(self.dtype)) for spec in self.layers), size // tokens
        places = rows.num_slices, rows.keys, rows.values
        return KVLayout(self.layers, self.dtype, self.kind, tokens, token_bytes, payload, *places, extent_blocks)


def _placements(layers: Sequence[LayerSpec], dtype: torch.dtype, kind: LayoutKind) -> list[_Placement]:
    """The placements to choose from: of sliced layouts one for each number of layers in a slice, ascending."""
    if kind == "per_layer":
        keys = tuple(Row(2 * i, 0) for i in range(len(layers)))
        values = tuple(Row(2 * i + 1, 0) for i in range(len(layers)))
        longest = max(max(spec.row_bytes(dtype)) for spec in layers)
        return [_Placement(keys, values, 2 * len(layers), _round_up(longest, _ROW_ALIGNMENT_BYTES))]
    counts = [min(count, len(layers)) for count in _SLICE_LAYERS] if kind == "sliced" else [len(layers)]
    # As even as the number of slices allows.
    even = {-(-len(layers) // -(-len(layers) // count)) for count in counts}
    return [_interleave(layers, dtype, count) for count in sorted(even)]


def _interleave(layers: Sequence[LayerSpec], dtype: torch.dtype, slice_layers: int) -> _Placement:
    rows: list[Row] = []
    longest = 0
    for first in range(0, len(layers), slice_layers):
        offset = 0
        for spec in layers[first : first + slice_layers]:
            for num_bytes in spec.row_bytes(dtype):
                rows.append(Row(first // slice_layers, offset))
                offset = _round_up(offset + num_bytes, _ROW_ALIGNMENT_BYTES)
        longest = max(longest, offset)
    return _Placement(tuple(rows[::2]), tuple(rows[1::2]), rows[-1].slice + 1, longest)


def _smallest_block(expected_tokens: int) -> int:
    """Tokens of the smallest block worth its mapping calls: half of it is about 3 % of a typical sequence at most."""
    tokens = _SMALLEST_BLOCK_TOKENS
    while tokens > 1 and tokens / 2 > 0.03 * expected_tokens:
        tokens //= 2
    return tokens


def _most_tokens(num_bytes: int, row_bytes: int, multiple_of: int = 1, *, alignment: int = _ROW_ALIGNMENT_BYTES) -> int:
    """The most tokens that divide `num_bytes` evenly at an aligned stride of at least `row_bytes`; 0 if there are
    none. Of blocks likewise."""
    for tokens in range(num_bytes // row_bytes // multiple_of * multiple_of, 0, -multiple_of):
        if num_bytes % (tokens * alignment) == 0:
            return tokens
    return 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
