"""Ranks make the embeddings of one rank: each has the whole hidden states after the last norm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.engine.engines import MakeEngine, folder_of
from tests.app.engine.pooled import assert_close, embed, expected, headless_copy
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint, tokens

RANKS = {"launch": thread_ranks, "tensor_parallel_size": 2, "dtype": "float32"}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("method", ["last", "mean"])
def test_two_ranks(make_engine: MakeEngine, make_checkpoint: MakeCheckpoint, name: str, method: str) -> None:
    engine = make_engine(name, pooling=method, max_num_batched_tokens=48, **RANKS)
    prompts = [tokens(length, length) for length in (5, 33, 120)]
    for prompt, actual in zip(prompts, embed(engine, prompts), strict=True):
        assert_close(actual, expected(folder_of(make_checkpoint, name), prompt, method))


def test_two_ranks_without_output_layer(make_engine: MakeEngine, llama: Path, tmp_path: Path) -> None:
    [actual] = embed(make_engine(headless_copy(llama, tmp_path), pooling="last", **RANKS), [tokens(30)])
    assert_close(actual, expected(llama, tokens(30), "last"))
