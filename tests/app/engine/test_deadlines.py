"""Which requests are past their deadline."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.request import Deadlines, check_timeout
from app.errors import RequestError

NAMES = st.sampled_from("abcdef")
TIMES = st.integers(0, 20).map(float)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), NAMES, TIMES),
            st.tuples(st.just("discard"), NAMES, TIMES),
            st.tuples(st.just("expired"), NAMES, TIMES),
        )
    )
)
def test_like_a_dictionary(operations: list[tuple[str, str, float]]) -> None:
    deadlines, expected = Deadlines(), dict[str, float]()
    for operation, name, at in operations:
        if operation == "add":
            deadlines.add(name, at)
            expected[name] = at
        elif operation == "discard":
            deadlines.discard(name)
            expected.pop(name, None)
        else:
            passed = sorted((t, n) for n, t in expected.items() if t <= at)
            assert deadlines.expired(at) == [n for _, n in passed]
            for _, n in passed:
                del expected[n]
    assert deadlines.expired(math.inf) == [n for _, n in sorted((t, n) for n, t in expected.items())]


def test_requests_that_end_in_time_leave_nothing() -> None:
    deadlines = Deadlines()
    for i in range(10_000):
        deadlines.add(str(i), 1e9)
        deadlines.discard(str(i))
    assert len(deadlines._heap) < 100


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_pass(timeout_s: float) -> None:
    with pytest.raises(RequestError, match="above 0"):
        check_timeout(timeout_s)
