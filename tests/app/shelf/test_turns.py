"""Turns in a simulated device, under loads that try to starve a model or to make models take turns too often."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.simulator.device import Device
from benchmarks.simulator.shelf import ShelfOutcome, ShelfSimulation
from benchmarks.simulator.shelf_model import ShelfModel, ShelfRequest
from folio.app.shelf.arbiter import Arbiter
from folio.app.shelf.turns import LATE_TURN_WAKES, OVERDUE_TARGETS
from tests.nightly import examples

CAPACITY = 10_000
STEP_S = 0.01
DEVICE = Device(
    name="test",
    fixed_s=STEP_S,
    token_s=1e-5,
    attended_s=0.0,
    decode_attended_s=0.0,
    step_tokens=1000,
    max_num_seqs=8,
    cache_tokens=0,
    unit_tokens=16,
)


def model(name: str, weight_bytes: int, wake_s: float = 0.1, kv_token_bytes: int = 1, **more: object) -> ShelfModel:
    return ShelfModel(
        name=name,
        device=DEVICE,
        weight_bytes=weight_bytes,
        kv_token_bytes=kv_token_bytes,
        load_s=wake_s,
        sleep_s=wake_s / 10,
        **more,  # type: ignore[arg-type]
    )


def endless(name: str, until_s: float, every_s: float, output: int = 20) -> list[ShelfRequest]:
    """More requests than the model can serve alone."""
    return [ShelfRequest(name, i * every_s, 50, output) for i in range(int(until_s / every_s))]


def serve(
    models: Sequence[ShelfModel], requests: Sequence[ShelfRequest], until_s: float = math.inf
) -> tuple[ShelfOutcome, ShelfSimulation]:
    simulation = ShelfSimulation(models, Arbiter(CAPACITY))
    return simulation.run(sorted(requests, key=lambda request: request.at), until_s), simulation


def ended(outcome: ShelfOutcome, name: str) -> int:
    return sum(request.ended_at is not None for request in outcome.requests if request.model == name)


def test_two_busy_models_that_do_not_fit_together_share_the_time() -> None:
    models = [model(name, 6000) for name in "ab"]
    requests = [*endless("a", 100, 0.02), *endless("b", 100, 0.02)]
    outcome, _ = serve(models, requests, 100)
    a, b = ended(outcome, "a"), ended(outcome, "b")
    assert 0.8 < a / b < 1.25
    wakes_s = outcome.num_wakes * models[0].load_s
    assert wakes_s < 2 * 100 / LATE_TURN_WAKES, "exchanges take a bounded share of the time"
    assert outcome.busy_s > 85


def test_a_model_kept_always_gives_its_memory_in_turn() -> None:
    kept = model("kept", 4000, keep="always", kv_token_bytes=40)
    other = model("other", 5000, kv_token_bytes=7)
    outcome, _ = serve([kept, other], [*endless("kept", 60, 0.05), ShelfRequest("other", 5.0, 80, 20)], 60)
    assert outcome.requests[-1].model == "kept"
    other_request = next(request for request in outcome.requests if request.model == "other")
    assert other_request.ended_at is not None
    assert other_request.ttft_s < 10
    assert ended(outcome, "kept") > 100


def test_single_requests_that_alternate_are_served_at_once() -> None:
    models = [model(name, 6000) for name in "ab"]
    requests = [ShelfRequest("ab"[i % 2], 2.0 * i, 20, 5) for i in range(40)]
    outcome, _ = serve(models, requests)
    assert max(request.ttft_s for request in outcome.requests) < 0.2


def test_weights_of_models_give_shares_of_time_under_overload() -> None:
    models = [model("a", 6000, share=3.0), model("b", 6000), model("c", 6000)]
    requests = [request for m in models for request in endless(m.name, 150, 0.02)]
    outcome, _ = serve(models, requests, 150)
    a, b, c = (ended(outcome, m.name) for m in models)
    assert a > 1.2 * b
    assert 0.8 < b / c < 1.25


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[ShelfModel], list[ShelfRequest]]:
    models = [
        model(
            f"m{i}",
            draw(st.integers(100, 9500)),
            draw(st.sampled_from([0.001, 0.1, 1.0])),
            draw(st.sampled_from([1, 10, 100])),
            ttft_s=draw(st.sampled_from([0.2, 1.0, 10.0])),
            share=draw(st.sampled_from([0.5, 1.0, 4.0])),
            keep=draw(st.sampled_from(["auto", "auto", "auto", 0.0, 2.0])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    requests = []
    for spec in models:
        at = 0.0
        for _ in range(draw(st.integers(0, 12))):
            at += draw(st.sampled_from([0.0, 0.01, 0.5, 3.0]))
            prompt, output = draw(st.sampled_from([(1, 1), (30, 5), (60, 60), (5, 200)]))
            requests.append(ShelfRequest(spec.name, at, prompt, output))
    return models, requests


@settings(deadline=None, max_examples=examples(60, nightly=2000))
@given(loads())
def test_every_request_ends_that_fits_alone(load: tuple[list[ShelfModel], list[ShelfRequest]]) -> None:
    models, requests = load
    specs = {spec.name: spec for spec in models}
    outcome, _ = serve(models, requests, 1000)
    for request in outcome.requests:
        spec = specs[request.model]
        blocks = -(-(request.num_tokens + request.num_output_tokens) // 16)
        fits = spec.weight_bytes + blocks * 16 * spec.kv_token_bytes <= CAPACITY
        assert (request.ended_at is not None) == fits, f"{request} did not end"
    assert outcome.ended_at < 1000


@settings(deadline=None, max_examples=examples(8, nightly=200))
@given(
    sizes=st.lists(st.integers(2000, 9000), min_size=2, max_size=6),
    wake_s=st.sampled_from([0.01, 0.1, 0.5]),
    every_s=st.sampled_from([0.03, 0.2, 1.0]),
)
# Small models are exchanged for one another in memory that the large one needs as a whole.
@example(sizes=[2400] * 6 + [9000], wake_s=0.1, every_s=0.1)
def test_exchanges_are_bounded_and_nobody_starves_under_endless_work(
    sizes: list[int], wake_s: float, every_s: float
) -> None:
    seconds = 60.0
    models = [model(f"m{i}", size, wake_s) for i, size in enumerate(sizes)]
    requests = [request for spec in models for request in endless(spec.name, seconds, every_s, 40)]
    outcome, _ = serve(models, requests, seconds)
    if every_s < 0.1:  # all of them always have work
        turn_s = max(1.0, LATE_TURN_WAKES * 2 * wake_s)
        at_once = len(list(itertools.takewhile(lambda n: n <= CAPACITY, itertools.accumulate(sorted(sizes)))))
        assert outcome.num_sleeps <= (seconds / turn_s + 1) * at_once + len(sizes)
    for spec in models:
        waited = max(
            (r.first_token_at or seconds) - r.at for r in outcome.requests[: len(models)] if r.model == spec.name
        )
        turns_s = len(sizes) * max(2.0, 2 * LATE_TURN_WAKES * 2 * wake_s)
        assert waited < OVERDUE_TARGETS * spec.ttft_s + turns_s, spec.name
