"""Ranks make the embeddings of one rank: each has the whole hidden states after the last norm."""

from __future__ import annotations

import pytest

from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.app.engine.test_pooling import assert_close, checkpoint, embed, expected, headless, make_engine
from tests.conftest import MakeCheckpoint, tokens

__all__ = ["headless"]  # a fixture


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("method", ["last", "mean"])
def test_two_ranks(make_checkpoint: MakeCheckpoint, name: str, method: str) -> None:
    folder = checkpoint(make_checkpoint, name)
    engine = make_engine(
        folder, launch=thread_ranks, pooling=method, tensor_parallel_size=2, max_num_batched_tokens=48, dtype="float32"
    )
    prompts = [tokens(length, length) for length in (5, 33, 120)]
    for prompt, actual in zip(prompts, embed(engine, prompts), strict=True):
        assert_close(actual, expected(folder, prompt, method))
    engine.close()


def test_two_ranks_without_output_layer(make_checkpoint: MakeCheckpoint, headless: object) -> None:
    engine = make_engine(headless, launch=thread_ranks, tensor_parallel_size=2, dtype="float32")
    [actual] = embed(engine, [tokens(30)])
    assert_close(actual, expected(checkpoint(make_checkpoint), tokens(30), "last"))
    engine.close()
