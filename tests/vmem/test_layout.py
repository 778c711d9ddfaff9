"""Layouts: sizes, and rows that do not overlap."""

from __future__ import annotations

import pytest
import torch

from folio.vmem import (
    KVLayout,
    LayerGroup,
    LayerSpec,
    LayoutError,
    LayoutKind,
    StateLayout,
    longest_sequence,
    plan_groups,
    plan_layout,
)

KIB, MIB = 1 << 10, 1 << 20
SHAPES = {  # layers, KV heads, head dimension
    "Llama-3-8B": (32, 8, 128),
    "Qwen2.5-0.5B": (24, 2, 64),
    "Llama-3-70B at TP 8": (80, 1, 128),
    "tiny": (2, 1, 16),
}


def plan(
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    granularity_bytes: int = 4 * KIB,
    kind: LayoutKind = "interleaved",
    block_tokens: int | None = None,
) -> KVLayout:
    num_layers, heads, dim = shape
    layers = [LayerSpec(heads, dim, dim)] * num_layers
    return plan_layout(layers, dtype, granularity_bytes=granularity_bytes, kind=kind, block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("model", "granularity", "kind", "block_tokens", "token_bytes", "page", "padding", "waste"),
    [
        # Waste is expected at 1,024 tokens: padding, and half of a last block.
        ("Llama-3-8B", 2 * MIB, "interleaved", 16, 131072, 2 * MIB, 0.0, 0.0073),
        ("Llama-3-8B", 2 * MIB, "per_layer", 1024, 2048, 2 * MIB, 0.0, 0.3331),
        ("Llama-3-8B", 4 * KIB, "interleaved", 16, 131072, 2 * MIB, 0.0, 0.0073),
        ("Llama-3-8B", 4 * KIB, "per_layer", 16, 2048, 32 * KIB, 0.0, 0.0073),
        ("Qwen2.5-0.5B", 2 * MIB, "interleaved", 512, 12288, 6 * MIB, 0.0, 0.1997),
        ("Qwen2.5-0.5B", 2 * MIB, "per_layer", 8192, 256, 2 * MIB, 0.0, 0.8),
        ("Qwen2.5-0.5B", 4 * KIB, "interleaved", 16, 12288, 192 * KIB, 0.0, 0.0073),
        ("Qwen2.5-0.5B", 4 * KIB, "per_layer", 16, 256, 4 * KIB, 0.0, 0.0073),
        ("Llama-3-70B at TP 8", 2 * MIB, "interleaved", 256, 40960, 10 * MIB, 0.0, 0.1107),
        ("Llama-3-70B at TP 8", 2 * MIB, "per_layer", 8192, 256, 2 * MIB, 0.0, 0.8),
        ("Llama-3-70B at TP 8", 4 * KIB, "interleaved", 16, 40960, 640 * KIB, 0.0, 0.0073),
        ("tiny", 4 * KIB, "interleaved", 16, 256, 4 * KIB, 0.5, 0.5036),
        ("tiny", 4 * KIB, "per_layer", 64, 64, 4 * KIB, 0.5, 0.5149),  # rows of 32 bytes, padded to 64
        ("tiny", 2 * MIB, "interleaved", 8192, 256, 2 * MIB, 0.5, 0.9),
    ],
)
def test_table(
    model: str,
    granularity: int,
    kind: LayoutKind,
    block_tokens: int,
    token_bytes: int,
    page: int,
    padding: float,
    waste: float,
) -> None:
    layout = plan(SHAPES[model], granularity_bytes=granularity, kind=kind)
    assert (layout.block_tokens, layout.token_bytes, layout.page_bytes) == (block_tokens, token_bytes, page)
    assert layout.page_bytes % granularity == 0
    assert layout.num_slices == (1 if kind == "interleaved" else 2 * SHAPES[model][0])
    assert layout.padding == pytest.approx(padding, abs=1e-4)
    assert layout.expected_waste(1024) == pytest.approx(waste, abs=1e-4)
    assert [layout.num_blocks(n * block_tokens) for n in (0, 1, 2)] == [0, 1, 2]
    assert layout.num_blocks(block_tokens + 1) == 2


@pytest.mark.parametrize(
    ("model", "granularity", "shares", "block_tokens", "slices", "page", "extent_blocks", "waste"),
    [
        ("Llama-3-8B", 2 * MIB, True, 64, 4, 2 * MIB, 1, 0.0298),
        ("Llama-3-8B", 2 * MIB, False, 64, 4, 2 * MIB, 1, 0.0298),
        ("Qwen2.5-0.5B", 2 * MIB, True, 64, 3, 256 * KIB, 8, 0.0298),
        ("Qwen2.5-0.5B", 2 * MIB, False, 512, 3, 2 * MIB, 1, 0.1997),
        ("Llama-3-70B at TP 8", 2 * MIB, True, 64, 10, 256 * KIB, 8, 0.0298),
        ("Llama-3-70B at TP 8", 2 * MIB, False, 512, 10, 2 * MIB, 1, 0.1997),
        ("Qwen2.5-7B", 2 * MIB, True, 64, 7, 512 * KIB, 4, 0.0298),
        ("Qwen2.5-0.5B", 4 * KIB, True, 64, 3, 256 * KIB, 1, 0.0298),
        ("tiny", 4 * KIB, True, 64, 1, 16 * KIB, 1, 0.5149),
    ],
)
def test_sliced_layouts(
    model: str,
    granularity: int,
    shares: bool,
    block_tokens: int,
    slices: int,
    page: int,
    extent_blocks: int,
    waste: float,
) -> None:
    """Blocks of whole handles cannot waste less: those of Qwen2.5-0.5B, of which one granule holds 170 tokens, waste
    7.7 % at least at 1,024 tokens, half a granule unfilled."""
    num_layers, heads, dim = (SHAPES | {"Qwen2.5-7B": (28, 4, 128)})[model]
    layout = plan_layout(
        [LayerSpec(heads, dim, dim)] * num_layers,
        torch.bfloat16,
        granularity_bytes=granularity,
        kind="sliced",
        shares_handles=shares,
    )
    assert (layout.block_tokens, layout.num_slices, layout.page_bytes) == (block_tokens, slices, page)
    assert layout.extent_blocks == extent_blocks
    assert layout.handle_bytes % granularity == 0
    assert layout.page_bytes == layout.block_tokens * layout.token_bytes
    assert layout.expected_waste(1024) == pytest.approx(waste, abs=1e-4)
    in_slice = [sum(row.slice == i for row in layout.keys) for i in range(slices)]
    assert sum(in_slice) == num_layers
    assert max(in_slice) <= 8
    assert max(in_slice) >= min(4, num_layers)
    assert all(key.slice == value.slice for key, value in zip(layout.keys, layout.values, strict=True))


@pytest.mark.parametrize("model", ["Llama-3-8B", "Qwen2.5-7B", "Qwen2.5-0.5B", "Llama-3-70B at TP 8"])
def test_whole_blocks_take_fewer_pages_and_no_more_memory(model: str) -> None:
    """A page costs the driver the same time whatever its size: a chunk of 1,024 tokens of Llama-3-8B is 16 pages
    instead of 64."""
    num_layers, heads, dim = (SHAPES | {"Qwen2.5-7B": (28, 4, 128)})[model]
    layers = [LayerSpec(heads, dim, dim)] * num_layers
    sliced, whole = (
        plan_layout(layers, torch.bfloat16, granularity_bytes=2 * MIB, kind=kind, shares_handles=True)
        for kind in ("sliced", "whole")
    )
    assert (whole.num_slices, whole.block_tokens) == (1, sliced.block_tokens)
    assert whole.handle_bytes <= sliced.num_slices * sliced.handle_bytes
    assert whole.expected_waste(1024) == sliced.expected_waste(1024) <= 0.037
    num_handles = [each.num_blocks(1024) * each.num_slices / each.extent_blocks for each in (sliced, whole)]
    assert (
        num_handles
        == {
            "Llama-3-8B": [64, 16],
            "Qwen2.5-7B": [28, 4],
            "Qwen2.5-0.5B": [6, 2],
            "Llama-3-70B at TP 8": [20, 4],
        }[model]
    )


def test_only_a_single_group_shares_handles() -> None:
    layers = [LayerSpec(2, 64, 64)] * 24
    [alone] = plan_groups([layers], torch.bfloat16, granularity_bytes=2 * MIB, kind="sliced", shares_handles=True)
    assert alone.extent_blocks == 8
    both = plan_groups(
        [layers[:12], layers[:6]], torch.bfloat16, granularity_bytes=2 * MIB, kind="sliced", shares_handles=True
    )
    assert [layout.extent_blocks for layout in both] == [1, 1]
    assert both[0].page_bytes == both[1].page_bytes
    assert both[1].block_tokens % both[0].block_tokens == 0


@pytest.mark.parametrize("block_tokens", [16, 64, 256])
def test_sliced_blocks_of_a_given_length(block_tokens: int) -> None:
    layers = [LayerSpec(2, 64, 64)] * 24
    for shares in (True, False):
        layout = plan_layout(
            layers,
            torch.bfloat16,
            granularity_bytes=2 * MIB,
            kind="sliced",
            block_tokens=block_tokens,
            shares_handles=shares,
        )
        assert layout.block_tokens == block_tokens
        assert layout.handle_bytes % (2 * MIB) == 0
        assert (layout.padding == 0) == shares


@pytest.mark.parametrize(
    ("granularity_bytes", "expected_tokens", "block_tokens", "is_padded"),
    [
        (2 * MIB, 64, 128, True),  # a padded page of fewer tokens
        (2 * MIB, 10000, 512, False),
        (4096, 1024, 16, False),
        (4096, 337, 16, False),
        (4096, 77, 4, False),  # half a block of 16 would be a tenth of Alpaca's 77 tokens
        (4096, 20, 1, False),
    ],
)
def test_expected_lengths_decide_the_page(
    granularity_bytes: int, expected_tokens: int, block_tokens: int, is_padded: bool
) -> None:
    layers = [LayerSpec(2, 64, 64)] * 24
    layout = plan_layout(layers, torch.bfloat16, granularity_bytes=granularity_bytes, expected_tokens=expected_tokens)
    assert (layout.block_tokens, layout.padding > 0) == (block_tokens, is_padded)


@pytest.mark.parametrize("block_tokens", [1, 2, 16, 64, 256, 4096])
def test_requested_blocks_are_whole_granules(block_tokens: int) -> None:
    layout = plan((2, 1, 24), block_tokens=block_tokens)
    assert layout.block_tokens == block_tokens
    assert layout.page_bytes % 4096 == 0


@pytest.mark.parametrize(
    ("kind", "granularity", "num_slices"),
    [
        ("interleaved", 4096, 1),
        ("per_layer", 4096, 18),
        ("sliced", 4096, 3),
        ("sliced", 1 << 20, 3),
        ("whole", 1 << 20, 1),
    ],
)
def test_views_do_not_overlap(kind: LayoutKind, granularity: int, num_slices: int) -> None:
    layers = [LayerSpec(2, 8, 4), LayerSpec(1, 24, 24), LayerSpec(3, 16, 16)] * 3
    layout = plan_layout(
        layers, torch.float32, granularity_bytes=granularity, kind=kind, block_tokens=16, shares_handles=True
    )
    assert (layout.num_slices, layout.extent_blocks > 1) == (num_slices, granularity > 4096)
    memory = [torch.zeros(3 * layout.page_bytes, dtype=torch.uint8) for _ in range(layout.num_slices)]
    views = [view for i in range(9) for view in layout.view(memory, i, layout.block_tokens)]
    assert [list(view.shape) for view in views[:2]] == [[3, 16, 2, 8], [3, 16, 2, 4]]
    for i, view in enumerate(views):
        view.fill_(i + 1.0)
    for i, view in enumerate(views):
        assert bool((view == i + 1.0).all())
    written = sum(int(part.view(torch.float32).count_nonzero()) for part in memory)
    assert written == sum(view.numel() for view in views)


def test_groups_have_pages_of_one_size() -> None:
    """Five window layers to one full layer, as in Gemma 3: a block of the smaller group holds five times the tokens."""
    layer = LayerSpec(4, 256, 256)
    windowed, full = plan_groups([[layer] * 25, [layer] * 5], torch.bfloat16, granularity_bytes=4096)
    assert windowed.page_bytes == full.page_bytes
    assert (windowed.block_tokens, full.block_tokens) == (16, 80)
    assert windowed.padding == full.padding == 0.0
    uneven = plan_groups([[layer] * 7, [LayerSpec(1, 192, 128)] * 3], torch.bfloat16, granularity_bytes=4096)
    assert uneven[0].page_bytes == uneven[1].page_bytes


def test_the_longest_sequence() -> None:
    one, other = (plan((2, 2, 8), torch.float32, block_tokens=n) for n in (16, 64))
    short, long = LayerGroup((0,), one), LayerGroup((1,), other)
    assert longest_sequence([short], 10, 1000) == 160
    assert longest_sequence([short, long], 6, 1000) == 64  # four pages and one, or five and two
    assert longest_sequence([short, long], 7, 1000) == 80
    assert longest_sequence([short, long], 1, 1000) == 0


def test_a_window_makes_room_for_longer_sequences() -> None:
    """A group with a window of 33 tokens needs 32 of them and those of a step, in blocks that begin anywhere."""
    one = plan((2, 2, 8), torch.float32, block_tokens=16)
    full, windowed = LayerGroup((0,), one), LayerGroup((1,), one, 33)
    assert windowed.most_pages(1000, 16) == 4
    assert windowed.most_pages(20, 16) == 2
    assert longest_sequence([full, windowed], 10, 16) == 96
    assert longest_sequence([windowed], 4, 16) == (1 << 30) - 1


def test_a_state_takes_the_same_pages_at_any_length() -> None:
    state = LayerGroup((), StateLayout(payload_bytes=9000, page_bytes=4096))
    assert (state.layout.num_slices, state.layout.num_homes, state.layout.block_bytes) == (3, 1, 12288)
    assert [state.layout.num_blocks(n) for n in (0, 1, 10**6)] == [0, 1, 1]
    assert state.most_pages(10**6, 1) == 6


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one layer"):
        plan_layout([], torch.float32, granularity_bytes=4096)
    with pytest.raises(LayoutError, match="at least one layer group"):
        plan_groups([], torch.float32, granularity_bytes=4096)
    with pytest.raises(LayoutError, match="positive"):
        plan((1, 0, 8))
    with pytest.raises(LayoutError, match="block_tokens 24 must divide"):
        plan((1, 1, 8), block_tokens=24)
    with pytest.raises(LayoutError, match="expected_tokens 0 must be at least 1"):
        plan_layout([LayerSpec(1, 8, 8)], torch.float32, granularity_bytes=4096, expected_tokens=0)
    assert plan_layout([LayerSpec(1, 8, 8)], torch.float32, granularity_bytes=4096, expected_tokens=1)
    layers = [LayerSpec(8, 128, 128)] * 32
    with pytest.raises(LayoutError, match="cannot hold 1 tokens"):
        plan_layout(layers, torch.bfloat16, granularity_bytes=4096, page_bytes=4096)
    with pytest.raises(LayoutError, match="not a multiple"):
        plan_layout(layers, torch.bfloat16, granularity_bytes=4096, page_bytes=5000)
