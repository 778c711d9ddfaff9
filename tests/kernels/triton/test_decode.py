"""Each tuning of the decode kernel against the reference, and what padding rows and other bounds may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from folio.kernels.provider import FP8_DTYPES, VarlenBatch
from folio.kernels.triton.provider import TritonProvider
from tests.kernels.cases import Lengths
from tests.kernels.triton.problems import ALL_MASKS, CUDA, DEVICE, check, make_case

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if CUDA else []

TUNING_NAMES = ("five programs", "three programs", "short splits", "narrow tiles")
# Decodes of no token, of less than a tile, of whole tiles and of many, beside a prompt.
RAGGED: Lengths = [(1, 400), (1, 0), (1, 128), (3, 20), (1, 31)]


@pytest.fixture(scope="module", params=TUNING_NAMES)
def provider(request: pytest.FixtureRequest) -> TritonProvider:
    from folio.kernels.triton.decode import TUNINGS, SplitDecode  # needs Triton

    assert set(TUNINGS) == set(TUNING_NAMES)
    provider = TritonProvider()
    provider._decode = SplitDecode(TUNINGS[request.param])
    return provider


@pytest.mark.thirds
@pytest.mark.parametrize(
    ("features", "heads", "dim", "num_splits"),
    [
        ({}, (4, 1), 128, 0),
        ({}, (7, 1), 64, 5),
        ({"window_left": 300, "sinks": True}, (4, 1), 64, 0),
        ({"softcap": 3.0, "leftpad": True}, (2, 1), 256, 3),
        (ALL_MASKS, (3, 1), 64, 9),
        ({"cache_dtype": FP8_DTYPES[0]}, (4, 1), 128, 0),
        ({"cache_dtype": FP8_DTYPES[1], "alibi": "heads", "window_left": 90}, (7, 1), 64, 9),
    ],
    ids=str,
)
def test_ragged_decodes(
    provider: TritonProvider, features: dict[str, Any], heads: tuple[int, int], dim: int, num_splits: int
) -> None:
    region = num_splits > 4
    case = make_case(RAGGED, heads, (dim, dim), torch.bfloat16, region=region, block_tokens=64, **features)
    check(provider, case, num_splits)


@pytest.mark.parametrize("provider", ["five programs", "short splits"], indirect=True)
@pytest.mark.parametrize("region", [False, True])
def test_padding_rows_and_loose_bounds_change_no_bit(provider: TritonProvider, region: bool) -> None:
    """A captured decode has the grid of its bucket and of the longest context."""
    lengths = [(1, 300), (1, 1), (1, 77), (1, 290), (1, 5), (1, 200), (1, 64), (1, 130), (1, 9)]
    for bucket, features in ((1, {}), (4, {"window_left": 150}), (16, {"softcap": 2.0})):
        for count in {bucket // 2 + 1, bucket}:
            rows = (lengths * 2)[:count]
            case = make_case(rows, (2, 1), region=region, **features)
            expected = provider.attend(*case.arguments)
            padding, batch = bucket - count, case.batch
            table = torch.nn.functional.pad(batch.block_table, (0, 0 if region else 40, 0, padding))
            padded = VarlenBatch(
                torch.arange(bucket + 1, dtype=torch.int32, device=DEVICE),
                torch.nn.functional.pad(batch.cache_seqlens, (0, padding), value=1),
                table.contiguous(),
                1,
                100_000,
            )
            query = torch.nn.functional.pad(case.query, (0, 0, 0, 0, 0, padding))
            out = provider.attend(query, case.key_cache, case.value_cache, padded, case.masking)
            assert torch.equal(out[:count], expected), (bucket, count)


@pytest.mark.parametrize(
    ("tuning", "num_seqs", "num_cached", "tile", "expected"),
    [
        ("three programs", 64, 1024, 64, 1),  # 512 programs where 396 run at once
        ("five programs", 1, 1088, 64, 5),
        ("five programs", 16, 1024, 64, 4),
        ("five programs", 64, 1024, 64, 1),  # 512 of 660
        ("five programs", 256, 1024, 64, 1),
        ("short splits", 1, 1088, 64, 17),
        ("short splits", 1, 131072, 64, 82),  # all run at once
        ("short splits", 64, 1024, 64, 1),
        ("short splits", 128, 1024, 64, 3),  # 4.7 waves in 5 instead of 1.6 in 2
        ("short splits", 200, 1024, 64, 2),  # as 256 sequences, which they may be padded to
        ("short splits", 256, 64, 64, 1),
        ("narrow tiles", 1, 1088, 32, 5),
    ],
)
def test_splits_of_132_processors(tuning: str, num_seqs: int, num_cached: int, tile: int, expected: int) -> None:
    from folio.kernels.triton.decode import TUNINGS, SplitDecode

    decode = SplitDecode(TUNINGS[tuning])
    decode._num_processors[DEVICE] = 132
    assert decode._choose_splits(num_seqs, 8, num_cached, tile, DEVICE) == expected
