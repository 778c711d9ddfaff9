"""The planner's numbers, and that no two rows of a token overlap."""

from __future__ import annotations

import pytest
import torch

from vmem import KVLayout, LayerSpec, LayoutError, plan_layout


def plan(num_layers: int, heads: int, dim: int, dtype: torch.dtype, block_tokens: int = 16) -> KVLayout:
    layers = [LayerSpec(heads, dim, dim)] * num_layers
    return plan_layout(layers, dtype, granularity_bytes=4096, block_tokens=block_tokens)


@pytest.mark.parametrize(
    ("shape", "token_bytes", "waste"),
    [
        ((24, 2, 64, torch.bfloat16), 12288, 0.0),  # Qwen2.5-0.5B
        ((32, 8, 128, torch.bfloat16), 131072, 0.0),  # Llama-3-8B
        ((3, 2, 16, torch.float32), 768, 0.0),
        ((3, 1, 8, torch.float32), 512, 1 - 192 / 512),  # rows padded to 64 bytes, tokens to 256
    ],
)
def test_sizes(shape: tuple[int, int, int, torch.dtype], token_bytes: int, waste: float) -> None:
    layout = plan(*shape)
    assert layout.token_bytes == token_bytes
    assert layout.block_bytes == 16 * token_bytes
    assert layout.waste == pytest.approx(waste)
    assert [layout.num_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize("block_tokens", [1, 2, 16, 64, 256, 4096])
def test_blocks_are_whole_granules(block_tokens: int) -> None:
    assert plan(2, 1, 24, torch.bfloat16, block_tokens).block_bytes % 4096 == 0


def test_views_do_not_overlap() -> None:
    layers = [LayerSpec(2, 8, 4), LayerSpec(1, 24, 24), LayerSpec(3, 16, 16)]
    layout = plan_layout(layers, torch.float32, granularity_bytes=4096)
    memory = torch.zeros(3 * layout.block_bytes, dtype=torch.uint8)
    views = [view for i in range(3) for view in layout.view(memory, i, layout.block_tokens)]
    assert [list(view.shape) for view in views[:2]] == [[3, 16, 2, 8], [3, 16, 2, 4]]
    for i, view in enumerate(views):
        view.fill_(i + 1.0)
    for i, view in enumerate(views):
        assert bool((view == i + 1.0).all())
    assert memory.view(torch.float32).count_nonzero() == sum(view.numel() for view in views)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one layer"):
        plan_layout([], torch.float32, granularity_bytes=4096)
    with pytest.raises(LayoutError, match="positive"):
        plan(1, 0, 8, torch.float32)
    with pytest.raises(LayoutError, match="block_tokens 24 must divide"):
        plan(1, 1, 8, torch.float32, 24)
