"""Blocks of a prompt come to the engine that will decode it, while another one computes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.request.engine_request import BegunOutput
from folio.app.engine.sampling.params import SamplingParams
from folio.app.fleet.messages import GenerateRequest
from folio.app.replica.prefill import pieces_here
from tests.app.engine.engines import engine_of, run
from tests.processes import until


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    first, second = engine_of("builtin", dtype="float32"), engine_of("builtin", dtype="float32")
    yield first, second
    for engine in (first, second):
        engine.check_integrity()
        engine.close()


async def test_a_call_finds_what_came_before_it(engines: tuple[Engine, Engine]) -> None:
    """Although the engine that has computed it gives nothing any more by then."""
    first, second = engines
    prompt = first.model.tokenizer("The capital of Japan is a city on a river. " * 8)["input_ids"]
    assert first.handover is not None
    assert second.handover is not None
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=7)
    call = GenerateRequest("request", prompt, params, held_at=first.handover.address(), fetches=True)
    requests: Any = SimpleNamespace(engine_of=lambda model: SimpleNamespace(driver=SimpleNamespace(engine=second)))
    fetching = pieces_here(requests, call, "second")
    assert await anext(fetching) == "second"
    first.submit("request", prompt, params)
    deltas = []
    while not deltas:
        deltas += first.step()
    unit_tokens, receiver = second.memory.prefixes.unit_tokens, second.handover.receiver
    num_units = (len(prompt) - 1) // unit_tokens
    until(lambda: receiver.num_bytes)
    assert receiver.num_bytes == num_units * receiver.unit_bytes
    first.handover.close()
    begun = [token for delta in deltas for token in delta.token_ids]
    second.prepare(replace(call, begun=(BegunOutput(0, begun),), fetches=False))("elsewhere")
    rest = run(second)["elsewhere"]
    assert rest[0].num_cached_tokens == num_units * unit_tokens
    assert [token for delta in rest for token in delta.token_ids] == [
        token for delta in run(first)["request"] for token in delta.token_ids
    ]
    await fetching.aclose()
