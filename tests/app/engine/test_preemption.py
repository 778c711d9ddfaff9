"""The cost model learns what it sees, and decides by it."""

from __future__ import annotations

import random

import pytest

from folio.app.engine import LLM
from folio.app.engine.schedule.preemption import LinearCost, PreemptionCostModel
from tests.conftest import ARCHITECTURES, MakeCheckpoint


def test_it_finds_the_weights_behind_noise() -> None:
    noise = random.Random(0)
    cost = LinearCost((1.0, 100.0))
    for _ in range(300):
        tokens = noise.randint(1, 1000)
        cost.observe((1.0, tokens), (0.002 + 1e-5 * tokens) * noise.uniform(0.95, 1.05))
    assert cost.seconds((1.0, 500)) == pytest.approx(0.007, rel=0.05)
    assert cost.seconds((1.0, 1)) == pytest.approx(0.002, rel=0.1)


def test_nothing_costs_less_than_nothing() -> None:
    """Steps of one size say nothing about the other quantities; a fit that goes through them anyhow went negative."""
    cost = LinearCost((1.0, 100.0, 1e4))
    for tokens, seconds in ((100, 0.01), (101, 0.009), (102, 0.0085)):
        cost.observe((1.0, tokens, tokens * tokens), seconds)
    assert cost.seconds((1.0, 2000, 4e6)) > 0
    assert cost.seconds((0.0, 0.0, 0.0)) == 0


def test_it_forgets_what_was_long_ago() -> None:
    cost = LinearCost((1.0,))
    for _ in range(500):
        cost.observe((1.0,), 1.0)
    for _ in range(2000):
        cost.observe((1.0,), 2.0)
    assert cost.seconds((1.0,)) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("bytes_per_token", "better"), [(1_000, "swap"), (1_000_000, "recompute")])
def test_it_takes_the_cheaper_way(bytes_per_token: int, better: str) -> None:
    model = PreemptionCostModel(step_tokens=512)
    for num_bytes in (10**4, 10**6, 10**8):
        model.observe_swap(num_bytes, 2 * num_bytes / 1e9)
    for tokens in (1, 16, 100, 300, 512):
        model.observe_step(tokens, tokens * tokens // 2, 0.001 + 1e-4 * tokens)
    cost = model.cost([(1000, 0)], 1000 * bytes_per_token)
    assert cost.better == better
    assert cost.recompute_s == pytest.approx(0.102, rel=0.1)
    assert cost.swap_s == pytest.approx(2 * bytes_per_token * 1e-6, rel=0.01)


def test_verifications_are_told_from_other_steps() -> None:
    """Tokens keep their cost whether or not a step verifies draft tokens."""
    model = PreemptionCostModel(step_tokens=512)
    for i in range(400):
        drafts = i % 9
        attended = 400 * (1 + drafts)
        seconds = 0.001 + 1e-4 * (1 + drafts) + 0.0005 * bool(drafts)
        model.observe_step(1 + drafts, attended, seconds, verifies=bool(drafts))
    times = model.step_times
    assert times.verify_s == pytest.approx(0.0005, rel=0.01)
    assert times.fixed_s == pytest.approx(0.001, rel=0.01)
    plain = PreemptionCostModel(step_tokens=512)
    for tokens in (1, 16, 100, 300, 512):
        plain.observe_step(tokens, tokens * tokens // 2, 0.001 + 1e-4 * tokens)
    assert plain.step_times.verify_s == 0


def test_what_stays_cached_is_not_computed_again() -> None:
    model = PreemptionCostModel(step_tokens=512)
    for num_bytes in (10**4, 10**6, 10**8):
        model.observe_swap(num_bytes, 2 * num_bytes / 1e9)
    for tokens in (1, 16, 100, 300, 512):
        model.observe_step(tokens, tokens * tokens // 2, 0.001 + 1e-4 * tokens)
    assert model.cost([(20, 980)], 10_000_000).better == "recompute"
    assert model.cost([(1000, 0)], 10_000_000).better == "swap"


def test_swaps_are_tried_where_nobody_is_yet(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("llama", **ARCHITECTURES["llama"][1])
    for settings in ({}, {"swap_bytes": 0}, {"kv_memory_bytes": 6 * 16 * 768}):
        with LLM(folder, **({"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True} | settings)) as llm:
            cost = llm.engine.recovery.cost([], 1 << 20)
            assert (cost.swap_s > 0) == ("swap_bytes" not in settings)
            llm.engine.check_integrity()
