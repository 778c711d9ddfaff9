"""Simulated mapping: what steps wait for, counted."""

from __future__ import annotations

from benchmarks.engine.mapping_simulated import simulate
from benchmarks.workloads import azure


def test_steps_of_long_prompts_wait_for_few_mappings() -> None:
    """Continuing prompts, and prompts that waited, once mapped 60 of their 64 pages a chunk themselves: 4 % of the step
    time. A page a block takes a quarter of the calls."""
    lengths, _ = azure(None, 40, 0)
    sliced, sliced_calls = simulate("sliced", lengths, prepares=True)
    whole, whole_calls = simulate("whole", lengths, prepares=True)
    unprepared, _ = simulate("sliced", lengths, prepares=False)
    assert whole < sliced < 0.01 < unprepared
    assert sliced_calls["create"] == 4 * whole_calls["create"] - 3  # of the anchor page there is one
    assert 3.5 < sliced_calls["map"] / whole_calls["map"] < 4.5
