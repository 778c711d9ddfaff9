"""Prefixes outlive their memory, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vmem.sequences import run, serve
from tests.vmem.small_memory import BLOCK_TOKENS, FlakyCuda, FlakyHost
from tests.vmem.store.stores import IDS, fetch, opened

SHAPES: list[dict[str, Any]] = [
    {},
    {"kind": "per_layer"},
    {"kind": "sliced"},
    {"windowed": True},
    {"windowed": True, "window_block_tokens": 8},
    {"stateful": True},
    {"windowed": True, "stateful": True},
]


@pytest.mark.parametrize("backend", [FlakyHost, FlakyCuda])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_is_there_after_a_restart(
    tmp_path: Path, backend: type[FlakyHost | FlakyCuda], shape: dict[str, Any]
) -> None:
    with opened(tmp_path, backend, **shape) as (memory, store):
        serve(memory, IDS, 0)
    assert store.counts.written
    assert not store.counts.dropped
    with opened(tmp_path, backend, **shape) as (memory, store):
        assert fetch(memory, store) == 6
        run(memory, [*IDS, 1], 6 * BLOCK_TOKENS)
    assert store.counts.read
    assert not store.counts.written
