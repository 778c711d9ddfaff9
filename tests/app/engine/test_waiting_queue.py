"""Whose turn it is: as they are due, and by turns of tenants."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.waiting_queue import WaitingQueue
from folio.vmem import TokenChain

ARRIVALS = itertools.count()
PARAMS = SamplingParams(max_tokens=1)


def request_of(
    tenant: str | None = None,
    priority: int = 0,
    num_tokens: int = 1,
    arrival: int | None = None,
    due: float = 0.0,
) -> Request:
    number = next(ARRIVALS) if arrival is None else arrival
    request = Request("", PARAMS, priority, number, tenant=tenant, due=due)
    Sequence(request, [0] * num_tokens, PARAMS, 1, None, TokenChain(16), [0] * num_tokens)
    return request


def pop(queue: WaitingQueue) -> Request:
    request = queue.peek()
    assert request is not None
    queue.remove(request)
    return request


def test_a_request_that_waits_for_room_is_passed_only_by_a_higher_priority() -> None:
    queue = WaitingQueue(8)
    large, other = request_of("a", num_tokens=100), request_of("b")
    queue.add(large)
    queue.add(other)
    assert queue.peek() is large
    queue.charge(large, 1000)  # others of the tenant go on being computed meanwhile
    assert queue.peek() is large
    urgent = request_of("b", priority=-1)
    queue.add(urgent)
    assert pop(queue) is urgent
    assert queue.peek() is other  # its turn came


@pytest.mark.parametrize("quantum", [None, 8])
def test_whoever_is_due_first_begins_first(quantum: int | None) -> None:
    """Also if another one is the head already; with turns only of the same tenant, and the turn stays with it."""
    queue = WaitingQueue(quantum)
    requests = [request_of("a", due=due) for due in (3.0, 2.0, 4.0)]
    for request in requests:
        queue.add(request)
    assert queue.peek() is requests[1]
    queue.charge(requests[1], 1000)
    sooner, other = request_of("a", due=1.0), request_of("b", due=0.0)
    queue.add(sooner)
    assert queue.peek() is sooner
    queue.add(other)
    assert pop(queue) is (other if quantum is None else sooner)


def test_who_comes_back_has_its_debts_and_no_savings() -> None:
    queue = WaitingQueue(10)
    for _ in range(60):
        queue.add(request_of("busy"))

    def next_tenants(count: int) -> list[str | None]:
        tenants = []
        for _ in range(count):
            request = pop(queue)
            queue.charge(request, 10)
            tenants.append(request.tenant)
        return tenants

    queue.add(request_of("idle"))
    queue.add(request_of("owing"))
    assert next_tenants(3) == ["busy", "idle", "owing"]
    queue.charge(request_of("owing"), 70)  # its output: it owes seven rounds
    assert next_tenants(4) == ["busy"] * 4  # three of them
    for _ in range(4):
        queue.add(request_of("idle"))
        queue.add(request_of("owing"))
    assert next_tenants(13) == ["idle", "busy"] * 4 + ["owing", "busy"] * 2 + ["owing"]


def test_forgotten_when_nobody_waits() -> None:
    """What nobody else wanted is free, so that who used it need not wait behind those who come now."""
    queue = WaitingQueue(10)
    first = request_of("a")
    queue.add(first)
    pop(queue)
    queue.charge(first, 10**9)
    requests = [request_of("a"), request_of("b")]
    for request in requests:
        queue.add(request)
    assert [pop(queue), pop(queue)] == requests


def test_thousands_of_tenants_are_forgotten_again() -> None:
    """Memory follows who waits and who owes, not who was ever there."""
    queue = WaitingQueue(64)
    queue.add(request_of("always"))
    queue.add(request_of("always"))
    most = 0
    for i in range(5000):
        queue.add(request_of(f"tenant {i}"))
        while len(queue) > 4:
            request = pop(queue)
            queue.charge(request, 100)
            if request.tenant == "always":
                queue.add(request_of("always"))
        most = max(most, len(queue._levels[0]._ring))
    assert most < 20
    assert sum(queue.lengths()) == len(queue)
    for request in list(queue):
        queue.remove(request)
    assert not queue._levels
    assert not queue.lengths()


@dataclass
class Work:
    """What a tenant sends again and again: tokens of prompt and of output."""

    sizes: list[tuple[int, int]]


WORK = st.builds(Work, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(any), min_size=1, max_size=4))


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(WORK, min_size=2, max_size=4),
    num_slots=st.integers(1, 4),
    quantum=st.sampled_from([1, 8, 32]),
    others=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 20)), max_size=20),
)
def test_what_backlogged_tenants_get_differs_by_a_constant(
    work: list[Work], num_slots: int, quantum: int, others: list[tuple[int, int]]
) -> None:
    """As many slots as run at once, a token a step for each; tenants that come and go beside them."""
    queue = WaitingQueue(quantum)
    sizes = {f"tenant {i}": itertools.cycle(w.sizes) for i, w in enumerate(work)}
    outputs: dict[Request, int] = {}
    longest = max(prompt + output for w in work for prompt, output in w.sizes)
    most_output = max(output for w in work for _, output in w.sizes)
    bound = 3 * quantum + 2 * (longest + num_slots * most_output)
    service = dict.fromkeys(sizes, 0)
    coming = deque(sorted(others))

    def add(tenant: str, prompt: int, output: int) -> None:
        request = request_of(tenant, num_tokens=max(prompt, 1))
        outputs[request] = output
        queue.add(request)

    def charge(request: Request, num_tokens: int) -> None:
        queue.charge(request, num_tokens)
        if request.tenant in service:
            service[request.tenant] += num_tokens

    for tenant in sizes:
        for _ in range(2):
            add(tenant, *next(sizes[tenant]))
    running: list[Request] = []
    for step in range(400):
        while coming and coming[0][0] <= step:
            add(f"other {len(coming) % 3}", 1, coming.popleft()[1])
        while len(running) < num_slots:
            request = pop(queue)
            charge(request, sum(len(r.token_ids) for r in request.sequences))
            running.append(request)
            if request.tenant in sizes:
                add(request.tenant, *next(sizes[request.tenant]))
        for request in list(running):
            if outputs[request]:
                outputs[request] -= 1
                charge(request, 1)
            else:
                running.remove(request)
        assert max(service.values()) - min(service.values()) <= bound, f"step {step}: {service}"


PRIORITIES = st.sampled_from([-1, 0, 0, 3])
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([None, "a", "b", "c"]), PRIORITIES),
    st.tuples(st.just("add late"), st.sampled_from([None, "a", "b", "c"]), PRIORITIES),
    st.tuples(st.just("add early"), st.sampled_from([None, "a", "b", "c"]), PRIORITIES),
    st.tuples(st.just("pop"), st.integers(0, 50), st.integers(0, 50)),
    st.tuples(st.just("remove"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("charge"), st.integers(0, 50), st.integers(0, 60)),
)


@settings(max_examples=150, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=80), quantum=st.sampled_from([None, 1, 16]))
def test_order_and_books(operations: list[tuple[str, object, int]], quantum: int | None) -> None:
    """Priority goes first, within a tenant who is due first does, and somebody is next as long as anybody waits."""
    queue = WaitingQueue(quantum)
    waiting: dict[tuple[int, str | None], list[Request]] = defaultdict(list)
    inserted: dict[Request, None] = {}
    begun: list[Request] = []

    def leave(request: Request) -> None:
        waiting[request.priority, request.tenant].remove(request)
        del inserted[request]

    for name, what, number in operations:
        everybody = sorted((g for requests in waiting.values() for g in requests), key=lambda g: g.arrival)
        if name.startswith("add"):
            arrival = -1 - next(ARRIVALS) if name == "add early" else None  # it was somewhere else meanwhile
            request = request_of(what, number, arrival=arrival, due=float(name == "add late"))  # type: ignore[arg-type]
            waiting[number, request.tenant].append(request)
            queue.add(request)
            inserted[request] = None
        elif name == "pop" and everybody:
            request = pop(queue)
            assert request.priority == min(g.priority for g in everybody)
            assert request is min(waiting[request.priority, request.tenant], key=lambda g: (g.due, g.arrival))
            if quantum is None:
                assert request is min(everybody, key=lambda g: (g.priority, g.due, g.arrival))
            leave(request)
            begun.append(request)
            queue.charge(request, number)
        elif name == "remove" and everybody:
            request = everybody[int(what) % len(everybody)]  # type: ignore[call-overload]
            queue.remove(request)
            leave(request)
        elif name == "charge" and begun:
            queue.charge(begun[int(what) % len(begun)], number)  # type: ignore[call-overload]
        count = sum(map(len, waiting.values()))
        assert len(queue) == len(queue.lengths()) == count
        assert (queue.peek() is None) == (count == 0)
        assert queue.peek() is queue.peek()
        assert list(queue) == list(inserted)
