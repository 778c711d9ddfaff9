"""The scoring function: what a request costs at each replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.fleet.cost import LOAD_FIELDS, CostWeights, LoadArrays, request_cost

NO_HARM = CostWeights(work=0, even=0)


def loads(num_replicas: int = 2, **columns: Any) -> LoadArrays:
    """Idle replicas: 10 ms a step, 1 ms a token, steps of 100 tokens."""
    idle = {
        "fixed_s": 0.01,
        "token_s": 0.001,
        "step_tokens": 100,
        "max_num_seqs": 8,
        "free_tokens": 10_000,
        "total_tokens": 10_000,
    }
    values = {name: columns.get(name, idle.get(name, 0.0)) for name in LOAD_FIELDS}
    return LoadArrays(**{name: np.broadcast_to(np.asarray(v, dtype=float), num_replicas) for name, v in values.items()})


def cost(
    of: LoadArrays, num_tokens: int = 1000, cached: Any = 0, weights: CostWeights = NO_HARM
) -> tuple[list[float], list[float]]:
    tokens = np.broadcast_to(np.asarray(cached, dtype=float), len(of.fixed_s))
    ttft_s, harm_s = request_cost(of, num_tokens, tokens, weights)
    return ttft_s.tolist(), harm_s.tolist()


@pytest.mark.parametrize(
    ("columns", "cached", "more_s"),
    [
        ({}, 0, 0.0),  # than 1.1 s: 10 steps and 1,000 tokens
        ({}, 900, -0.99),  # cached tokens are not computed
        ({"attended_s": 1e-6}, 0, 1000 * 1001 / 2 * 1e-6),
        ({"attended_s": 1e-6}, 900, -0.99 + (100 * 900 + 100 * 101 / 2) * 1e-6),
        ({"queued_tokens": 200, "queued_s": 0.22, "decode_s": 0.005}, 0, 0.22 + 12 * 0.005),
        # A full cache is waited for: 500 tokens too few, 250 are freed a second.
        ({"free_tokens": 500, "freed_tokens_per_s": 250.0, "num_requests": 4}, 0, 500 / 250),
        # The ninth of eight: one of the others, 1,000 tokens each, must end; 500 tokens are freed a second.
        ({"num_requests": 7, "free_tokens": 3000, "freed_tokens_per_s": 500.0}, 0, 0.0),
        ({"num_requests": 8, "free_tokens": 2000, "freed_tokens_per_s": 500.0}, 0, 1000 / 500),
        # Other models take turns: a short prompt does not wait for all of another model's queue.
        ({"others_s": 0.3, "num_others": 1}, 0, 0.3),
        ({"others_s": 50.0, "num_others": 1}, 0, 1.1),
    ],
)
def test_the_time_to_the_first_token(columns: dict[str, float], cached: int, more_s: float) -> None:
    """At a replica beside an idle one."""
    idle = loads()
    beside = loads(**{name: [getattr(idle, name)[0], value] for name, value in columns.items()})
    ttft_s, harm_s = cost(beside, cached=[0, cached])
    assert ttft_s == pytest.approx([1.1, 1.1 + more_s])
    assert harm_s == [0, 0]


def test_harm() -> None:
    own_s = 1.1
    assert cost(loads(), weights=CostWeights(work=2, even=0))[1] == pytest.approx([2 * own_s] * 2)


def test_work_is_spread_evenly() -> None:
    """Regression: replicas with empty queues cost the same, whatever they had been given lately, and with 64 replicas
    one of them computed 1.5 times the mean."""
    even = CostWeights(work=0, even=2)
    assert cost(loads(assigned_share=[0.1, 0.3]), weights=even)[1] == pytest.approx([1.1, 3.3])
    assert cost(loads(assigned_share=0.0), weights=even)[1] == [0, 0]
    # What is cached counts for more than that: 0.11 s are left of 1.1 s, and 5 times the others' share.
    harm_s = cost(loads(assigned_share=[0.0, 0.1]), cached=[0, 900], weights=CostWeights())[1]
    assert harm_s[1] < harm_s[0]


@settings(deadline=None)
@given(
    num_tokens=st.integers(0, 100_000),
    cached_share=st.floats(0, 1),
    queued=st.integers(0, 1_000_000),
    free=st.integers(-1000, 10_000),
    num_requests=st.integers(-1, 10_000),
)
def test_any_load_has_a_finite_cost(
    num_tokens: int, cached_share: float, queued: int, free: int, num_requests: int
) -> None:
    of = loads(queued_tokens=queued, queued_s=queued / 1000, free_tokens=free, num_requests=num_requests)
    ttft_s, harm_s = cost(of, num_tokens, int(cached_share * num_tokens), CostWeights())
    assert all(np.isfinite(ttft_s + harm_s))
    assert min(ttft_s + harm_s) >= 0


@settings(deadline=None)
@given(more=st.sampled_from(["queued_s", "queued_tokens", "decode_s", "num_requests", "assigned_share"]))
def test_more_load_never_costs_less(more: str) -> None:
    columns = dict.fromkeys(LOAD_FIELDS, 0.5) | {more: [0.5, 0.9]}
    ttft_s, harm_s = cost(loads(**columns), weights=CostWeights())
    assert ttft_s[1] + harm_s[1] >= ttft_s[0] + harm_s[0]


def test_a_wake_is_waited_for_and_harms_others_only_once() -> None:
    """The second request for a model that wakes takes no more memory from others."""
    ttft_s, harm_s = cost(loads(3, wake_s=[0.0, 0.4, 0.4], sleeping_s=[0.0, 0.4, 0.0]))
    assert ttft_s == pytest.approx([1.1, 1.5, 1.5])
    assert harm_s == pytest.approx([0.0, 0.4, 0.0])
