"""Two ranks give the outputs of one, for every way of sampling in one batch."""

from __future__ import annotations

from tests.app.engine.tensor_parallel.decoding import generate
from tests.app.engine.tensor_parallel.thread_ranks import thread_ranks
from tests.conftest import MakeCheckpoint


def test_every_way_of_decoding_on_two_ranks(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("llama")
    expected = generate(folder)
    assert generate(folder, thread_ranks, tensor_parallel_size=2) == expected
    assert generate(folder, thread_ranks, tensor_parallel_size=2, speculation="ngram") == expected
    draft = {"speculation": "draft", "draft_model": str(folder)}
    assert generate(folder, thread_ranks, tensor_parallel_size=2, **draft) == expected
