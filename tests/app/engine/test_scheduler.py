"""Steps stay within their bounds, nobody starves, and what waits costs a step nothing."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.report import StepTimes
from folio.app.engine.request.faults import SequenceFailure
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.schedule.running import RunningRequests
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.engine.schedule.scheduler import PATIENCE
from folio.app.errors import RequestError
from folio.vmem import IntegrityError, KVMemory, OutOfPages
from folio.vmem.prefix.prefix_cache import PrefixCache
from tests.app.engine.engines import ExpectSteps, MakeEngine, greedy, raising, run, steps, tokens_of
from tests.conftest import VOCAB_SIZE

BLOCK_BYTES = 4096  # of 32 tokens
_BEAMS = {"n": 3, "use_beam_search": True}


class Counted:
    """An engine each of whose steps is checked against the bounds when it has been scheduled."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.most_tokens = self.most_rows = 0
        scheduler, schedule = engine.scheduler, engine.scheduler.schedule

        def checked(*args: Any, **ahead: bool) -> list[Scheduled]:
            scheduled = schedule(*args, **ahead)
            for s in scheduled:
                assert s.sequence.memory.num_tokens >= s.sequence.num_computed + s.num_tokens, "each token has a block"
                beams = [beam for beam in scheduled if beam.sequence.request is s.sequence.request]
                if s.samples and s.sequence.request.lockstep:
                    assert [beam.sequence for beam in beams if beam.samples] == s.sequence.request.sequences
            num_tokens = sum(s.num_tokens for s in scheduled)
            assert num_tokens <= engine.config.max_num_batched_tokens
            assert len(scheduled) <= scheduler.num_running <= scheduler.max_num_seqs
            self.most_tokens = max(self.most_tokens, num_tokens)
            self.most_rows = max(self.most_rows, len(scheduled))
            return scheduled

        scheduler.schedule = checked  # type: ignore[method-assign]


class Clock:
    """The clock of an engine's scheduler, which expects a token of a prompt to take a second.

    Attributes:
        now: seconds.
    """

    def __init__(self, engine: Engine, expect_steps: ExpectSteps) -> None:
        self.now = 0.0
        engine.scheduler._clock = lambda: self.now
        expect_steps(StepTimes(token_s=1.0))


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    """Engines whose steps are checked."""

    def make(model: str = "tiny", **settings: Any) -> Engine:
        return Counted(make_engine(model, **settings)).engine

    return make


def ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE - 1) for _ in range(length)]


def ended(engine: Engine) -> list[str]:
    """Run everything; the requests in the order in which they end, none with an error."""
    deltas = list(steps(engine))
    tokens_of(deltas)
    return [delta.request_id for delta in deltas if delta.ends_request]


def test_forks_that_are_to_come_have_their_places(make: MakeEngine) -> None:
    """Regression: a running group counted as one until its prompt was computed. Of 40 requests with n=32 all began at
    once, and went on as 1,056 sequences where 64 may run, with more tokens in a step than it may have."""
    counted = Counted(make(max_num_seqs=64, max_num_batched_tokens=96))
    for i in range(40):
        counted.engine.submit(str(i), [i, 2, 3, 4, 5, 6, 7, 8], SamplingParams(n=32, max_tokens=3, ignore_eos=True))
    run(counted.engine)
    assert counted.most_rows == 64, "all places are used"
    assert counted.most_tokens <= 96


def test_a_fork_finds_no_place_that_coming_forks_have(make: MakeEngine) -> None:
    """Regression: `Engine.fork` counted only the sequences that there were."""
    counted = Counted(make(max_num_seqs=4, max_num_batched_tokens=16))
    engine = counted.engine
    engine.submit("runs", [1, 2, 3], greedy(50))
    engine.step()
    engine.submit("long", list(range(40)), SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    engine.step()  # its prompt takes three
    with pytest.raises(RequestError, match="no room for 1 more sequences"):
        engine.fork("runs", "fork", greedy(50))
    run(engine)
    assert counted.most_rows == 4


def test_beams_that_may_come_back_have_their_places(make: MakeEngine) -> None:
    """A search counts with its whole width, also while fewer of its beams go on."""
    engine = make(max_num_seqs=4)
    engine.submit("beams", [1, 2], greedy(4, **_BEAMS))
    engine.step()
    [request] = engine.scheduler.running
    engine.decoder.end_sequence(request.sequences[-1])
    assert len(request.sequences) == 2
    assert engine.scheduler.num_running == 3


@pytest.mark.parametrize(("seed", "max_num_seqs", "num_blocks"), [(0, 4, 6), (1, 8, 12), (3, 8, 24)])
def test_whatever_is_asked_steps_stay_within_their_bounds(
    make: MakeEngine, expect_steps: ExpectSteps, seed: int, max_num_seqs: int, num_blocks: int
) -> None:
    """Random requests, forks, cancellations, preemptions and budgets. Whoever is refused without a look at the prefix
    cache would have been refused with one."""
    rng = random.Random(seed)
    engine = make(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([17, 40]),
        max_model_len=120,
        kv_memory_bytes=num_blocks * BLOCK_BYTES,
        speculation=rng.choice(["off", "ngram"]),
        fair_tenants=rng.random() < 0.5,
    )
    scheduler = engine.scheduler
    clock = Clock(engine, expect_steps)
    admission = scheduler._admission
    can_admit, fits, num_refused, matched = admission.can_admit, admission._fits, 0, False

    def note_match(request: Request, reserve: int) -> bool:
        nonlocal matched
        matched = True
        return fits(request, reserve)

    def check_refusal(request: Request, reserve: int) -> bool:
        nonlocal matched, num_refused
        matched = False
        if can_admit(request, reserve):
            return True
        if not matched and scheduler.num_running + request.num_sequences <= scheduler.max_num_seqs:
            num_refused += 1
            memo = admission._refused
            assert not fits(request, reserve)
            admission._refused = memo
        return False

    admission.can_admit, admission._fits = check_refusal, note_match  # type: ignore[method-assign]
    common, names = ids(rng, 60), []
    for number in range(120):
        clock.now += rng.random() * 200
        kind = rng.random()
        if kind < 0.6:
            prompt = common[: rng.choice([0, 20, 33, 60])] + ids(rng, rng.choice([1, 5, 30]))
            prompt = prompt[:30] * 2 if rng.random() < 0.3 else prompt
            several = rng.choice([{}, {"prompt_logprobs": 0}, {"n": 2}, {"n": 8}, {"best_of": 5}, _BEAMS])
            params = SamplingParams(
                **{"max_tokens": rng.choice([1, 4, 30]), "seed": number, "ignore_eos": True, **several},
                temperature=float("use_beam_search" not in several and rng.random() < 0.5),
            )
            with contextlib.suppress(RequestError):  # more than may run at once
                options = {"priority": rng.choice([0, 0, 0, 1]), "tenant": rng.choice("ab")}
                options |= rng.choice([{}, {"expected_cached_tokens": len(prompt) * 2 // 3}])
                engine.submit(str(number), prompt, params, **options)
                names.append(str(number))
        elif kind < 0.75 and names:
            with contextlib.suppress(RequestError):  # it is not there any more, or there is no room
                engine.fork(rng.choice(names), f"fork {number}", greedy(rng.choice([1, 12]), n=rng.choice([1, 3])))
        elif kind < 0.85 and names:
            engine.cancel(rng.choice(names))
        elif kind < 0.9 and scheduler.running:
            scheduler.begun.preempt(rng.choice(scheduler.running), rng.choice(["swap", "recompute"]))
        elif kind < 0.95:
            least, most = engine.memory.least_budget_bytes, engine.memory.most_budget_bytes
            engine.set_budget(rng.randint(least, most), number)
        for _ in range(rng.choice([0, 1, 1, 4])):
            engine.step()
        engine.check_integrity()
    engine.set_budget(engine.memory.most_budget_bytes, 1000)
    run(engine)
    assert num_refused, "nobody had to wait for pages"


def test_what_runs_is_counted_once_and_not_for_each_draft(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the pages to keep for all that runs were summed up again for each sequence with a draft: 64 of them
    took 3 ms instead of 0.03 in every step."""
    engine = make(max_num_seqs=64)
    for i in range(64):
        engine.submit(str(i), [i, 1, 2], greedy(20))
    while len(engine.scheduler.decoding()) < 64:
        engine.step()
    reserve, calls = RunningRequests.reserve.fget, []  # type: ignore[attr-defined]

    def counted(requests: RunningRequests) -> int:
        calls.append(requests)
        pages: int = reserve(requests)
        return pages

    monkeypatch.setattr(RunningRequests, "reserve", property(counted))
    scheduled = engine.scheduler.schedule(dict.fromkeys(engine.scheduler.decoding(), (1, 2)))
    assert [len(s.drafts) for s in scheduled] == [2] * 64
    assert len(calls) == 1
    engine.scheduler.abort_step()


FAILING = 500  # a prompt that begins with this token cannot be looked up


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that are looked up in the prefix cache to see whether they may begin."""
    lengths: list[int] = []
    match = PrefixCache.match

    def counted(prefixes: PrefixCache, chain: Any, token_ids: Any) -> Any:
        if token_ids[0] == FAILING:
            raise RuntimeError("injected")
        lengths.append(len(token_ids))
        return match(prefixes, chain, token_ids)

    monkeypatch.setattr(PrefixCache, "match", counted)
    return lengths


def test_a_prompt_without_room_is_looked_up_once(make: MakeEngine, looked_up: list[int]) -> None:
    """Regression: whatever the running sequences had generated made the prompt that waits be looked up again, in every
    second step; it begins as soon as there is room, all the same."""
    num_tokens = 16 * 32
    engine = make(max_num_seqs=8, kv_memory_bytes=20 * BLOCK_BYTES, max_model_len=600)
    rng = random.Random(0)
    for name, max_tokens in (("long", 120), ("short", 50), ("short too", 50)):
        engine.submit(name, ids(rng, 16), greedy(max_tokens))
    engine.step()
    engine.step()  # each of them has a block, and may want another one
    engine.submit("waits", ids(rng, num_tokens), greedy(4))
    looked_up.clear()
    assert ended(engine) == ["short", "short too", "waits", "long"]
    assert looked_up == [num_tokens] * 3, "when it came, when there was room, and when it was given its blocks"


def test_a_prompt_that_cannot_be_looked_up_ends_its_request_only(make: MakeEngine, looked_up: list[int]) -> None:
    """Regression: in a full batch the look for the coming prompt comes before admission's, and its failure ended all
    requests."""
    engine = make(max_num_seqs=1)
    engine.submit("runs", [1, 2, 3], greedy(4))
    engine.step()
    engine.submit("waits", [FAILING, 8, 9], greedy(4))
    assert {name: deltas[-1].error is None for name, deltas in run(engine).items()} == {"runs": True, "waits": False}


def test_long_prompts_delay_a_short_one_by_one_step(make: MakeEngine, expect_steps: ExpectSteps) -> None:
    """Regression: a short prompt waited until all long ones that had come before it were computed, those that had not
    begun and those that had."""
    engine = make(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=600)
    Clock(engine, expect_steps)
    rng = random.Random(3)
    for i in range(4):
        engine.submit(f"long {i}", ids(rng, 512), greedy(1))
    engine.step()
    engine.submit("short", ids(rng, 20), greedy(1))
    assert [delta.request_id for delta in engine.step()] == ["short"]
    assert ended(engine) == [f"long {i}" for i in range(4)]


def test_a_prompt_is_passed_until_it_is_due(make: MakeEngine, expect_steps: ExpectSteps) -> None:
    """And not by a longer one, whatever the router expects in the cache, if the request does not read the cache."""
    engine = make(max_num_batched_tokens=32, max_num_seqs=8, max_model_len=600)
    clock = Clock(engine, expect_steps)
    rng = random.Random(5)
    engine.submit("first", ids(rng, 200), greedy(1))
    engine.submit("second", ids(rng, 100), greedy(1))  # passes the first one, which has not begun
    engine.step()
    engine.submit("cached", ids(rng, 300), greedy(1), expected_cached_tokens=290)
    engine.submit("not cached", ids(rng, 300), greedy(1, prompt_logprobs=0), expected_cached_tokens=290)
    clock.now = PATIENCE * (200 - 150) - 1
    engine.submit("between", ids(rng, 150), greedy(1))
    clock.now += 2
    engine.submit("too late", ids(rng, 150), greedy(1))
    assert ended(engine) == ["cached", "second", "between", "first", "too late", "not cached"]


def test_a_new_prompt_passes_those_of_the_running_ones_that_are_due_later(
    make: MakeEngine, expect_steps: ExpectSteps
) -> None:
    """Regression: it was compared with the first of them only, which may take a part of each step for long."""
    engine = make(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=600)
    Clock(engine, expect_steps)
    rng = random.Random(8)
    engine.submit("first", ids(rng, 300), greedy(1, prompt_logprobs=0))  # at most 128 tokens a step
    engine.submit("last", ids(rng, 500), greedy(1))
    engine.step()
    engine.submit("between", ids(rng, 400), greedy(1))
    engine.step()
    assert [r.num_computed for r in engine.scheduler.unfinished()] == [256, 128, 128]


def test_decodes_go_ahead_of_tokens_that_are_not_known(make: MakeEngine) -> None:
    """And what they compute is cached once it is known."""
    engine = make(max_model_len=600, async_scheduling="on")
    schedule, num_ahead = engine.scheduler.schedule, [0]

    def counted(*args: Any, ahead: bool = False) -> list[Scheduled]:
        scheduled = schedule(*args, ahead=ahead)
        num_ahead[0] += ahead and len(scheduled)
        return scheduled

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    prompt = ids(random.Random(3), 40)
    engine.submit("first", prompt, greedy(100))
    assert engine.scheduler.num_waiting == 1
    tokens = tokens_of(run(engine)["first"])
    assert num_ahead[0] == 99
    engine.submit("next", prompt + tokens, greedy(1))
    assert run(engine)["next"][-1].num_cached_tokens == 128
    assert engine.scheduler.num_waiting == 0


def test_a_prompt_that_must_wait_costs_the_others_no_token(make: MakeEngine) -> None:
    engine = make(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=600)
    rng = random.Random(8)
    engine.submit("first", ids(rng, 300), greedy(1, prompt_logprobs=0))  # all rows of logits
    engine.submit("second", ids(rng, 301), greedy(1, prompt_logprobs=0))
    engine.submit("third", ids(rng, 500), greedy(1))
    engine.step()
    assert [r.num_computed for r in engine.scheduler.unfinished()] == [128, 0, 128]


def test_the_step_that_completes_a_prefix_admits_who_waits_for_it(make: MakeEngine, expect_steps: ExpectSteps) -> None:
    """Regression: the request was looked up before that step's prompts were scheduled, and not again behind them."""
    engine = make(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=600)
    Clock(engine, expect_steps)
    rng = random.Random(6)
    shared = ids(rng, 96)
    engine.submit("long", [*shared, *ids(rng, 10)], greedy(4))
    engine.step()
    engine.submit("short", [*shared, *ids(rng, 2)], greedy(4))
    assert {delta.request_id for delta in engine.step()} == {"long", "short"}


def test_a_long_prompt_without_room_waits_for_those_that_pass_it(
    make: MakeEngine, expect_steps: ExpectSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not preempt prompts that are part of the same step: one of them may share what another one computes."""
    engine = make(max_num_batched_tokens=128, max_num_seqs=8, max_model_len=600)
    Clock(engine, expect_steps)
    rng = random.Random(4)
    engine.submit("long", ids(rng, 512), greedy(2))
    engine.step()
    shared = ids(rng, 32)
    for i in range(2):
        engine.submit(f"short {i}", [*shared, *ids(rng, 8)], greedy(2))
    [long] = engine.scheduler.running[0].sequences
    refused = refuse_pages(monkeypatch, long, 3)
    first = engine.step()
    assert [(delta.request_id, delta.num_cached_tokens) for delta in first] == [("short 0", 0), ("short 1", 32)]
    assert refused == [128 + 80]
    assert long.memory is not None, "it keeps what is computed"
    assert sorted(ended(engine)) == ["long", "short 0", "short 1"]
    assert len(refused) == 3, "then it preempts those that decode"


def test_a_prompt_preempts_nobody_who_comes_first(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs are recomputed; the second one has no room while the first is part of the step."""
    engine = make(max_num_seqs=8)
    rng = random.Random(7)
    engine.submit("first", ids(rng, 20), greedy(60))
    engine.submit("two", ids(rng, 40), SamplingParams(n=2, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        engine.step()
    first, two = engine.scheduler.running
    assert len(two.sequences) == 2
    engine.scheduler.begun.preempt(two, "recompute")
    refused = refuse_pages(monkeypatch, two.sequences[1], 1)
    while not refused:
        engine.step()
    assert first.sequences[0].memory is not None
    assert two.sequences[0].memory is not None
    assert engine.scheduler.preempted == []
    assert sorted(ended(engine)) == ["first", "two"]


@pytest.mark.parametrize("is_async", ["on", "off"])
@pytest.mark.parametrize("then", ["goes on", "fails", "is cancelled"])
@pytest.mark.parametrize("room", ["no longer", "not beside others"])
def test_a_new_request_is_not_preempted_when_its_prompt_is_staged(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, room: str, then: str, is_async: str
) -> None:
    """Regression: forks of a request that waits begin together. One that had no room preempted their request, and with
    it the sequence whose staged prompt it shared: the next step could not be committed (`IntegrityError`)."""
    engine = make(max_num_seqs=8, max_model_len=200, kv_memory_bytes=60 * BLOCK_BYTES, async_scheduling=is_async)
    rng = random.Random(7)
    if room == "not beside others":
        engine.submit("first", ids(rng, 20), greedy(60))
        engine.step()
    engine.submit("parent", ids(rng, 170), greedy(20))
    engine.fork("parent", "forks", greedy(20, n=4))
    engine.cancel("parent")
    first, second, *_ = engine.scheduler.waiting.peek().sequences
    if room == "no longer":  # for two of them: 6 blocks and 1
        engine.set_budget(engine.memory.least_budget_bytes, 1)
        assert engine.memory.least_budget_bytes == 7 * BLOCK_BYTES
    else:
        refuse_pages(monkeypatch, second, 1)
    deltas = []
    if then == "fails":
        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "launch", raising(RuntimeError("broken")))
            with pytest.raises(RuntimeError, match="broken"):
                engine.step()
    else:
        deltas += engine.step()
        assert first.num_computed == 170
        assert engine.scheduler.preempted == []
    engine.check_integrity()
    if then == "is cancelled":
        engine.decoder.end_sequence(first)
    deltas += steps(engine)
    of_forks = [delta for delta in deltas if delta.request_id == "forks"]
    forks = [tokens_of([d for d in of_forks if d.index == index]) for index in range(then == "is cancelled", 4)]
    assert len(forks[0]) == 20
    assert forks[1:] == forks[:1] * (len(forks) - 1), "all are greedy"


def refuse_pages(monkeypatch: pytest.MonkeyPatch, sequence: Sequence, times: int) -> list[int]:
    """Let no block be allocated for a sequence, so many times; returns its tokens at each of them."""
    append: Any = KVMemory.append
    refused: list[int] = []

    def without_room(memory: KVMemory, own: Any, num_tokens: int, **more: Any) -> None:
        if own is sequence.memory and len(refused) < times:
            refused.append(num_tokens)
            raise OutOfPages(1, 0)
        append(memory, own, num_tokens, **more)

    monkeypatch.setattr(KVMemory, "append", without_room)
    return refused


def test_a_tenants_prompts_are_charged_to_it(make: MakeEngine) -> None:
    """With one sequence at a time and one output token each, requests with short prompts get the same tokens in more
    turns."""
    engine, rng = make(max_num_seqs=1, fair_tenants=True), random.Random(2)
    for i in range(16):
        for tenant, num_tokens in (("a", 320), ("b", 20)):
            engine.submit(f"{tenant}{i}", ids(rng, num_tokens), greedy(1), tenant=tenant)
    order = [name[0] for name in ended(engine)]
    assert order[:20].count("a") <= 5, order


def test_of_resumed_groups_one_computes_the_prefix_again(make: MakeEngine) -> None:
    """The other one waits for it, though it is admitted and the step has room: the first one's logits are limited."""
    engine, rng = make(max_num_seqs=8, max_num_batched_tokens=256), random.Random(1)
    prefix = ids(rng, 160)
    for name, params in (("first", {"prompt_logprobs": 1}), ("second", {})):
        engine.submit(name, prefix + ids(rng, 5), greedy(40, **params))
    scheduler = engine.scheduler
    for _ in range(10):
        engine.step()
    first, second = scheduler.decoding()
    for sequence in (second, first):
        scheduler.begun.preempt(sequence.request, "recompute")
    engine.memory.tree.clear()
    engine.step()
    assert (first.num_computed, second.num_computed, second.memory) == (128, 0, None)
    assert len(ended(engine)) == 2


def test_who_waits_for_a_prefix_begins_when_it_is_computed(make: MakeEngine, looked_up: list[int]) -> None:
    """And is not looked up while only outputs grow."""
    engine = make(max_num_seqs=8, max_num_batched_tokens=32)
    rng = random.Random(1)
    prefix = ids(rng, 96)
    engine.submit("first", prefix + ids(rng, 5), greedy(40))
    engine.step()
    engine.submit("second", prefix + ids(rng, 5), greedy(4))
    scheduler = engine.scheduler
    for _ in range(2):
        engine.step()
        assert len(scheduler.waiting) == 1
    [first] = [sequence for request in scheduler.running for sequence in request.sequences]
    assert first.num_computed == 96, "what it waits for is computed now"
    engine.step()
    assert len(scheduler.waiting) == 0
    engine.cancel("first")
    assert all(delta.num_cached_tokens == 96 for delta in steps(engine))


@pytest.mark.parametrize(
    ("num_tokens", "ends", "num_cached"), [(32, [16, 32], 16), (33, [32, 33], 32), (49, [32, 48, 49], 48)]
)
def test_steps_end_where_a_recurrent_state_can_be_shared(
    make: MakeEngine, num_tokens: int, ends: list[int], num_cached: int
) -> None:
    """After whole blocks, and before the last token, which the next request with the prompt has to compute."""
    engine = make("bamba", block_tokens=16, max_num_batched_tokens=40, max_num_seqs=4)
    prompt = ids(random.Random(3), num_tokens)
    engine.submit("first", prompt, greedy(1))
    [sequence] = engine.scheduler.unfinished()
    computed = []
    while engine.has_work:
        engine.step()
        computed.append(sequence.num_computed)
    assert computed == ends
    engine.submit("again", prompt, greedy(1))
    assert [delta.num_cached_tokens for delta in engine.step()] == [num_cached]


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, SequenceFailure), (IntegrityError, IntegrityError)])
def test_a_call_that_fails_for_one_sequence_fails_its_request(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: type[Exception], raised: type[Exception]
) -> None:
    """An inconsistent memory is no request's failure, nor is what fails before any sequence has its turn."""
    engine = make()
    engine.submit("runs", [1, 2, 3], greedy(8))
    fail = raising(error("injected"))
    for place, expected in (("append", raised), ("num_free_pages", error)):
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(KVMemory, place, property(fail) if place == "num_free_pages" else fail)
            with pytest.raises(expected):
                engine.scheduler.schedule()
        engine.scheduler.abort_step()
