"""Draft lengths: the optimum, 0 where drafting does not pay, and recovery where it pays again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from folio.app.engine.report import StepTimes
from folio.app.engine.speculation.length import Acceptance, LengthControl, choose_lengths
from tests.app.engine.speculation.requests import generate, make_sequence

STEP = StepTimes(fixed_s=0.02, token_s=0.0005, attended_s=1e-8)
FREE = StepTimes()


def speed(
    lengths: tuple[int, ...], rates: list[float], num_cached: list[int], step: StepTimes, draft: StepTimes
) -> float:
    """Tokens per second by the definition."""
    tokens = sum(sum(p**j for j in range(k + 1)) for p, k in zip(rates, lengths, strict=True))
    seconds = step.fixed_s + bool(max(lengths)) * step.verify_s + max(lengths) * draft.fixed_s
    for k, cached in zip(lengths, num_cached, strict=True):
        seconds += (k + 1) * (step.token_s + step.attended_s * cached)
        seconds += k * (draft.token_s + draft.attended_s * cached)
    return tokens / seconds


milliseconds = st.floats(0.01, 20).map(lambda ms: ms / 1000)
times = st.builds(
    StepTimes,
    milliseconds,
    milliseconds.map(lambda s: s / 10),
    milliseconds.map(lambda s: s / 1e5),
    st.one_of(st.just(0.0), milliseconds),
)


# Regression: single drafts were verified at low acceptance, because only their token counted, not the verification
# (0.9 times the speed without speculation). It is paid once a step: a request joins others for which it pays.
SHORT_STEP = StepTimes(fixed_s=0.001, token_s=0.00003)


@example([(0.2, 8, 100)], SHORT_STEP, FREE, 100)
@example([(0.2, 8, 100)], replace(SHORT_STEP, verify_s=0.0005), FREE, 100)
@example([(0.2, 8, 100), (0.9, 8, 100)], replace(SHORT_STEP, verify_s=0.0005), FREE, 100)
@example([(0.9, 8, 100)], StepTimes(fixed_s=0.0, token_s=0.01), FREE, 100)  # a token costs as much as a step
@example([(0.9, 8, 100)], STEP, FREE, 100)
@example([(0.9, 8, 100)], STEP, STEP, 100)  # a draft model as slow as the model itself gains nothing either
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 5000)), min_size=1, max_size=4),
    times,
    st.one_of(st.just(FREE), times),
    st.integers(0, 12),
)
def test_lengths_are_optimal(
    sequences: list[tuple[float, int, int]], step: StepTimes, draft: StepTimes, budget: int
) -> None:
    """Against all combinations of lengths, and never slower than without drafts."""
    rates, most, num_cached = map(list, zip(*sequences, strict=True))
    chosen = tuple(choose_lengths(rates, most, num_cached, step=step, draft=draft, budget=budget))
    assert sum(chosen) <= budget
    assert all(0 <= k <= limit for k, limit in zip(chosen, most, strict=True))
    best = max(
        speed(lengths, rates, num_cached, step, draft)
        for lengths in itertools.product(*(range(limit + 1) for limit in most))
        if sum(lengths) <= budget
    )
    found = speed(chosen, rates, num_cached, step, draft)
    if budget >= sum(most):
        assert found == pytest.approx(best, rel=1e-9)
    else:  # regression: the order by gain per time is not optimal for a budget of one of two tokens
        assert speed((0,) * len(most), rates, num_cached, step, draft) <= found * (1 + 1e-9) <= best * (1 + 2e-9)


def test_the_longest_drafts_before_any_measurement() -> None:
    assert choose_lengths([0.6, 0.6], [4, 2], [10, 10], step=FREE, draft=FREE, budget=100) == [4, 2]
    assert choose_lengths([], [], [], step=STEP, draft=FREE, budget=100) == []


def test_acceptance_follows_verifications() -> None:
    acceptance = Acceptance(half_life=32)
    assert acceptance.rate(0.6) == pytest.approx(0.6)
    for _ in range(200):
        acceptance.note(4, 1)  # one right, one wrong, and two that were not reached
    assert acceptance.rate(0.6) == pytest.approx(0.5, abs=0.02)
    for _ in range(100):
        acceptance.note(4, 4)
    assert acceptance.rate(0.6) > 0.95


def control(step: StepTimes = STEP, draft: StepTimes = FREE, most: int = 8) -> LengthControl:
    return LengthControl(most, lambda: step, lambda: draft)


def test_the_last_token_is_never_drafted() -> None:
    sequence = make_sequence([1, 2, 3], max_tokens=5)
    lengths = control()
    assert lengths.choose([sequence], 100) == [4]
    generate(sequence, 4, 5, 6)
    assert lengths.choose([sequence], 100) == [1]
    generate(sequence, 7)
    assert lengths.choose([sequence], 100) == [0]


def test_a_choice_follows_verifications_requests_and_times() -> None:
    """A choice is kept while nothing has changed that it depends on."""
    sequence, other = (make_sequence([1, 2, 3], max_tokens=10_000) for _ in range(2))
    times = [STEP]
    lengths = LengthControl(8, lambda: times[-1], lambda: FREE)
    for _ in range(60):
        lengths.note(sequence, 8, 8)
        lengths.note(other, 8, 8)
    assert lengths.choose([sequence], 100) == lengths.choose([sequence], 100) == [8]
    assert lengths.choose([sequence], 3) == [3]
    assert lengths.choose([sequence, other], 100) == [8, 8]
    lengths.forget_sequence(other)
    assert lengths.choose([sequence], 100) == [8]
    for _ in range(20):
        lengths.note(sequence, 8, 0)
    assert lengths.choose([sequence], 100)[0] < 8
    for _ in range(60):
        lengths.note(sequence, 8, 8)
    assert lengths.choose([sequence], 100) == [8]
    times.append(StepTimes(token_s=0.01))
    later = [lengths.choose([sequence], 100) for _ in range(15)]
    assert later[0] == [8]  # the times are read in every 16th step
    assert later[-1] == [0]


def test_probes_become_rare_and_drafting_recovers() -> None:
    """A request with rejected drafts probes less and less often; after accepted ones it drafts again."""
    sequence, other = make_sequence([1, 2, 3], max_tokens=10_000), make_sequence([1, 2, 3], max_tokens=10_000)
    lengths = control(StepTimes(fixed_s=0.02, token_s=0.01))
    asked = []
    for step in range(1600):
        k, _ = lengths.choose([sequence, other], 100)
        if k:
            asked.append(step)
            lengths.note(sequence, k, 0)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert len(asked) < 30
    assert set(gaps[-3:]) == {256}
    found = 0
    for _ in range(1600):
        k, _ = lengths.choose([sequence, other], 100)
        found += bool(k)
        if k:
            lengths.note(sequence, k, k)
    assert found > 1000


def test_probes_share_their_steps_and_the_budget() -> None:
    sequences = [make_sequence([1, 2, 3], max_tokens=10_000) for _ in range(4)]
    lengths = control()
    for _ in range(20):
        for sequence in sequences:
            lengths.note(sequence, 8, 0)
    chosen = [lengths.choose(sequences, 10) for _ in range(64)]
    assert [lengths for lengths in chosen if any(lengths)] == [[4, 4, 2, 0]] * 4


def test_a_new_request_starts_at_the_acceptance_of_others() -> None:
    lengths = control(StepTimes(fixed_s=0.02, token_s=0.01))
    old, new = make_sequence([1], max_tokens=10_000), make_sequence([1], max_tokens=10_000)
    assert lengths.choose([new], 100)[0] > 0
    lengths.forget_sequence(new)
    for _ in range(500):
        lengths.note(old, 4, 0)
    assert lengths.choose([new], 100) == [0]
    lengths.forget_sequence(old)
    assert lengths.num_requests == 1
