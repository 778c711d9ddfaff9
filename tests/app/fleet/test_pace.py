"""How often streams send."""

from __future__ import annotations

from contextlib import ExitStack

from app.fleet.streams import StreamPace


def test_streams_share_the_items_of_a_second() -> None:
    pace = StreamPace(100, min_interval_s=0.02, max_interval_s=0.25)
    with ExitStack() as streams:
        first = streams.enter_context(pace.stream())
        assert first() == 0.02, "no stream sends more often"
        for _ in range(15):
            streams.enter_context(pace.stream())
        assert first() == 0.16
        for _ in range(80):
            streams.enter_context(pace.stream())
        assert first() == 0.25, "and none more seldom"
    with pace.stream() as alone:
        assert alone() == 0.02
