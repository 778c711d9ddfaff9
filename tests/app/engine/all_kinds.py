"""An engine that does all kinds of decoding at once, in little memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from folio.app.engine.engine import Engine
from folio.app.engine.sampling.params import SamplingParams
from tests.app.engine.engines import engine_of, folder_of
from tests.conftest import HYBRIDS, VOCAB_SIZE, MakeCheckpoint

Outputs = dict[tuple[str, int], list[int]]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist()


def work(engine: Engine, way: str) -> Outputs:
    """Every kind of decoding, several at once, in chunks, with others' prefixes, preempted every few steps."""
    engine.memory.tree.clear()
    repeating = prompt(9, 3) * 6

    def ask(name: str, prompt: list[int], **params: Any) -> None:
        engine.submit(name, prompt, SamplingParams(**({"max_tokens": 8, "seed": 4, "ignore_eos": True} | params)))

    ask("first", prompt(100), temperature=0)
    ask("same step", prompt(100)[:64] + prompt(9, 1), temperature=0)
    ask("samples", prompt(37, 2), n=3, temperature=2.0)
    outputs: Outputs = defaultdict(list)
    for number in range(400):
        if number == 4:
            ask("partly filled", prompt(100)[:41] + prompt(30, 5), temperature=0)
            ask("beams", prompt(30, 6), n=2, best_of=3, use_beam_search=True)
            ask("guessed", repeating, temperature=0, max_tokens=20)
        if number == 9:
            engine.cancel("guessed")
            ask("after it", repeating + prompt(3, 7), temperature=0)
        if number == 12:
            ask("long", prompt(150, 8), temperature=0)
            ask("best", prompt(37, 2), n=1, best_of=2)
        if number % 7 == 6 and engine.scheduler.running:
            engine.scheduler.begun.preempt(engine.scheduler.running[-1], way)  # type: ignore[arg-type]
        if number > 12 and not engine.has_work:
            break
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs[delta.request_id, delta.index] += delta.token_ids
        engine.check_integrity()
    assert not engine.has_work
    outputs.pop(("guessed", 0), None)  # how far it came depends on the times of steps, which decide on draft tokens
    return dict(outputs)


def small_engine(make_checkpoint: MakeCheckpoint, model: str, view: str, step_tokens: int = 48) -> Engine:
    """An engine that keeps what it has mapped."""
    return engine_of(
        folder_of(make_checkpoint, model),
        dtype="float32",
        kv_memory_bytes=4 << 20,
        kv_idle_release_s=1e9,
        prefix_cache_release_s=1e9,
        kv_view=view,
        max_model_len=200,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=16,
        speculation="off" if model in HYBRIDS else "ngram",
    )
