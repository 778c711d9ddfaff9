"""The cost model learns what it sees, and decides by it."""

from __future__ import annotations

import random

import pytest

from folio.app.engine.schedule.preemption import LinearCost, PreemptionCostModel
from tests.app.engine.engines import BLOCK_BYTES, MakeEngine


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


def observed() -> PreemptionCostModel:
    """1 GB a second, there and back; a step takes 1 ms and 0.1 ms a token."""
    model = PreemptionCostModel(step_tokens=512)
    for num_bytes in (10**4, 10**6, 10**8):
        model.observe_swap(num_bytes, 2 * num_bytes / 1e9)
    for tokens in (1, 16, 100, 300, 512):
        model.observe_step(tokens, tokens * tokens // 2, 0.001 + 1e-4 * tokens)
    return model


@pytest.mark.parametrize(
    ("computed", "num_bytes", "better"),
    [
        ((1000, 0), 10**6, "swap"),
        ((1000, 0), 10**9, "recompute"),
        ((1000, 0), 10**7, "swap"),
        ((20, 980), 10**7, "recompute"),  # what stays cached is not computed again
    ],
)
def test_it_takes_the_cheaper_way(computed: tuple[int, int], num_bytes: int, better: str) -> None:
    cost = observed().cost([computed], num_bytes)
    assert cost.better == better
    assert cost.recompute_s == pytest.approx(0.001 * (1 + computed[0] // 512) + 1e-4 * computed[0], rel=0.1)
    assert cost.swap_s == pytest.approx(2e-9 * num_bytes, rel=0.01)


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
    assert observed().step_times.verify_s == 0


@pytest.mark.parametrize("settings", [{}, {"swap_bytes": 0}, {"kv_memory_bytes": 6 * BLOCK_BYTES}])
def test_swaps_are_tried_where_nobody_is_yet(make_engine: MakeEngine, settings: dict[str, int]) -> None:
    cost = make_engine(**settings).recovery.cost([], 1 << 20)
    assert (cost.swap_s > 0) == ("swap_bytes" not in settings)
