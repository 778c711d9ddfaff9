"""Eviction: what is known of prefixes decides which of them goes first, and retained ones go last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from folio.vmem import OutOfPages, PrefixUse, ReturnOrder
from folio.vmem.blocks.return_times import BAND_ENDS, ReturnTimes
from folio.vmem.blocks.segments import Segment
from tests.vmem.conftest import Make
from tests.vmem.sequences import prompt, serve
from tests.vmem.small_memory import PAGE_BYTES, do_background


@dataclass(eq=False)
class Unit:
    """A node of the tree, as far as eviction knows it; its block has its number."""

    digest: bytes
    depth: int
    segment: Segment
    block_id: int


def digests_of(names: list[int]) -> list[bytes]:
    return [b"".join(n.to_bytes(4, "big") for n in names[: i + 1]) for i in range(len(names))]


@dataclass
class Cache:
    """A cache of `capacity` units in eviction's order, without memory. Units of a prompt are named by numbers."""

    capacity: int
    quota: int = 0
    now: float = 0.0
    units: dict[bytes, Unit] = field(default_factory=dict)
    num_blocks: int = 0

    def __post_init__(self) -> None:
        self.order = ReturnOrder(lambda: self.quota, lambda num_units: num_units, lambda: self.now)
        self.queue = self.order.new_queue()

    def run(self, names: list[int], use: PrefixUse | None = None, num_output: int = 0) -> int:
        """Serve a prompt in no time; returns how many of its units were cached."""
        use = use or PrefixUse()
        digests = digests_of(names)
        nodes: list[Unit] = []
        for digest in digests:
            if digest not in self.units:
                break
            nodes.append(self.units[digest])
        segments = self.order.begin(digests, nodes, use)
        for node in nodes:
            self.queue.remove(node.block_id)
        found = len(nodes)
        digests += [b"output %d %d" % (self.num_blocks, i) for i in range(num_output)]
        for depth, digest in enumerate(digests[found:], start=found + 1):
            if (beyond := self.units.get(digest)) is not None:  # one before it was evicted
                self.queue.remove(beyond.block_id)
                nodes.append(beyond)
                continue
            segment = next(s for s in segments if s.end >= depth)
            self.num_blocks += 1
            nodes.append(Unit(digest, depth, segment, self.num_blocks))
        while len(self.units.keys() | {node.digest for node in nodes}) > self.capacity:
            self.evict()
        self.units |= {node.digest: node for node in nodes}
        self.order.end(segments, len(nodes), use)
        for node in reversed(nodes):
            self.queue.add(node.block_id, node)
        self.queue.check_integrity()
        return found

    def evict(self) -> None:
        block_id = self.queue.first()
        assert block_id is not None, "what is cached is evictable, retained or not"
        self.queue.remove(block_id)
        [digest] = [digest for digest, unit in self.units.items() if unit.block_id == block_id]
        del self.units[digest]

    def has(self, names: list[int]) -> int:
        return sum(digest in self.units for digest in digests_of(names))


def teach(cache: Cache, kind: str, *, returns: bool, first: int, after_s: float = 2.0, count: int = 40) -> None:
    """Let prompts of a kind return after a while, or never."""
    for i in range(first, first + count):
        cache.run([i], PrefixUse(kind))
        cache.now += after_s
        if returns:
            cache.run([i, i + 1_000_000], PrefixUse(kind))
            cache.now += after_s


def test_a_kind_that_never_returns_goes_before_one_that_does_although_it_is_newer() -> None:
    cache = Cache(20)
    teach(cache, "calls", returns=True, first=100)
    teach(cache, "completion", returns=False, first=300)
    while cache.units:
        cache.evict()
    cache.run([1, 2], PrefixUse("calls"))
    cache.now += 1
    cache.run([3, 4], PrefixUse("completion"))
    cache.evict()
    cache.evict()
    assert (cache.has([1, 2]), cache.has([3, 4])) == (2, 0)


def test_what_did_not_return_in_its_time_loses_its_advantage() -> None:
    """Calls return after two seconds; one that has not come back for minutes goes before a new completion."""
    cache = Cache(20)
    teach(cache, "calls", returns=True, first=100)
    teach(cache, "completion", returns=False, first=300, count=5)
    while cache.units:
        cache.evict()
    cache.run([1], PrefixUse("calls"))
    cache.now += 1000
    cache.run([2], PrefixUse("completion"))
    cache.evict()
    assert (cache.has([1]), cache.has([2])) == (0, 1)


def test_without_knowledge_the_least_recently_used_goes_first() -> None:
    cache = Cache(8)
    for i in range(4):
        cache.run([i, 10 + i])
        cache.now += 1
    order = []
    while cache.units:
        before = set(cache.units)
        cache.evict()
        [gone] = before - set(cache.units)
        order.append(gone[:4][-1:] + bytes([len(gone) // 4]))
    assert order == [bytes([i, depth]) for i in range(4) for depth in (2, 1)]  # ends before beginnings


def test_outputs_that_no_prompt_repeats_go_first() -> None:
    cache = Cache(200)
    for i in range(30):
        cache.run([i], PrefixUse("chat", 1), num_output=1)
        cache.now += 1
        cache.run([i, 100 + i], PrefixUse("chat", 1), num_output=1)
    while cache.units:
        cache.evict()
    cache.run([1000], PrefixUse("chat", 1))
    cache.now += 1
    cache.run([2000], PrefixUse("chat", 1), num_output=1)
    cache.evict()
    assert cache.has([1000]) == cache.has([2000]) == len(cache.units) / 2 == 1


def test_an_evicted_prefix_that_returns_is_counted() -> None:
    """Otherwise a cache that is too small could never learn what it should have kept."""
    cache = Cache(1)
    for i in range(20):
        cache.run([i], PrefixUse("calls"))
        cache.now += 1
        cache.run([1000 + i], PrefixUse("completion"))
        assert cache.run([i, 500 + i][:1], PrefixUse("calls")) == 0
    table = cache.order.times.add_class(("prompt", "calls", 0))
    assert sum(table.returned) >= 19


def test_a_system_prompt_of_many_conversations_is_not_taken_for_one_of_them() -> None:
    cache = Cache(1000)
    for i in range(10):
        cache.run([1, 2, 3, 100 + i, 200 + i])
        cache.now += 1
    parts = {unit.segment.part for digest, unit in cache.units.items() if unit.depth <= 3}
    assert parts == {"shared"}
    assert {unit.segment.part for unit in cache.units.values() if unit.depth > 3} == {"prompt"}
    shared = cache.units[b"".join(n.to_bytes(4, "big") for n in (1, 2, 3))].segment
    assert shared.returns >= 8


def test_a_preempted_sequence_that_resumes_is_no_return() -> None:
    cache = Cache(100)
    use = PrefixUse("chat", 1)
    cache.run([1, 2], use)
    tables = cache.order.times._tables
    counted = [sum(table.returned) for table in tables.values()]
    cache.run([1, 2], PrefixUse("chat", 1, resumes=True))
    assert [sum(table.returned) for table in tables.values()] == counted


def test_conversations_whose_template_rewrites_the_end_of_the_prompt_are_continued() -> None:
    cache = Cache(1000)
    body = list(range(1, 20))
    cache.run([*body, 900], PrefixUse("chat"))
    cache.run([*body, 20, 21, 901], PrefixUse("chat"))
    assert {unit.segment.part for unit in cache.units.values()} == {"prompt"}
    last = max(cache.units.values(), key=lambda unit: unit.depth)
    assert last.segment.returns == 1


def test_scores_fall_to_nothing_for_a_class_that_never_returns() -> None:
    times = ReturnTimes()
    for _ in range(1000):
        for band in range(len(BAND_ENDS) + 1):
            times.note_reached(("prompt", "never", 0), band)
    for _ in range(1000):
        times.note_reached(("prompt", "soon", 0), 0)
        times.note_returned(("prompt", "soon", 0), 0)
    scores = dict(times.scores())
    assert max(scores["prompt", "never", 0]) < 0.1 * scores["prompt", "soon", 0][0]


def test_old_counts_fade() -> None:
    """Traffic that changes is followed: after as many others again, a class has forgotten half of what it knew."""
    times, of = ReturnTimes(), ("prompt", "x", 0)
    for returns in (True, False):
        for _ in range(20_000):
            times.note_reached(of, 0)
            if returns:
                times.note_returned(of, 0)
    [(_, scores)] = list(times.scores())
    assert scores[0] < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_parts_together(seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(40, quota=15)
    for _ in range(600):
        cache.now += rng.choice([0.0, 0.1, 1, 30, 3000])
        names = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        use = PrefixUse(
            rng.choice(["", "chat", "calls"]),
            rng.choice([None, len(names)]),
            retain_s=rng.choice([0, 0, 1, 100]),
            retains_output=rng.random() < 0.5,
            owner=rng.choice("ab"),
        )
        cache.run(names, use, num_output=rng.randrange(3))
        held = {unit.segment for unit in cache.units.values()}
        assert len(cache.queue) == len(cache.units)
        assert cache.order.retention.num_pages <= 15
        assert sum(s.retained_pages for s in held if s.retained_until) <= cache.order.retention.num_pages


# ---- retention ----


def test_retained_prefixes_go_last_and_only_until_their_time_is_up() -> None:
    cache = Cache(6, quota=2)
    cache.run([1, 2], PrefixUse(retain_s=100))
    cache.now += 50
    for i in range(20):
        cache.run([10 + i])
    assert cache.has([1, 2]) == 2
    cache.now += 51
    for i in range(20):
        cache.run([40 + i])
    assert cache.has([1, 2]) == 0


def test_what_running_sequences_need_is_taken_from_retained_prefixes() -> None:
    cache = Cache(6, quota=6)
    cache.run([1, 2, 3, 4, 5, 6], PrefixUse(retain_s=100))
    assert cache.run([11, 12, 13, 14, 15, 16]) == 0
    assert cache.has([1, 2, 3, 4, 5, 6]) == 0
    assert cache.order.retention.num_pages == 0


def test_beyond_the_quota_the_largest_tenant_loses_its_oldest_prefix() -> None:
    cache = Cache(100, quota=5)
    cache.run([1, 2], PrefixUse(retain_s=100, owner="big"))
    cache.run([3, 4], PrefixUse(retain_s=100, owner="big"))
    cache.run([5], PrefixUse(retain_s=100, owner="small"))
    cache.run([6], PrefixUse(retain_s=100, owner="small"))
    for _ in range(len(cache.units) - 4):
        cache.evict()
    assert [cache.has(names) for names in ([1, 2], [3, 4], [5], [6])] == [0, 2, 1, 1]


def test_a_prefix_larger_than_the_quota_takes_nothing_from_others() -> None:
    cache = Cache(100, quota=3)
    cache.run([1, 2], PrefixUse(retain_s=100))
    cache.run([11, 12, 13, 14], PrefixUse(retain_s=100))
    for _ in range(4):
        cache.evict()
    assert cache.has([1, 2]) == 2


def test_outputs_are_retained_in_conversations_only() -> None:
    for retains_output in (False, True):
        cache = Cache(100, quota=50)
        cache.run([1], PrefixUse("chat", 1, retain_s=100, retains_output=retains_output), num_output=2)
        assert cache.order.retention.num_pages == 1 + 2 * retains_output


def test_a_shorter_time_does_not_end_a_longer_one() -> None:
    cache = Cache(10, quota=5)
    cache.run([1], PrefixUse(retain_s=100))
    cache.run([1], PrefixUse(retain_s=1))
    cache.now += 50
    cache.order.advance()
    assert cache.order.retention.num_pages == 1


def test_ends_are_forgotten_of_prefixes_retained_again_and_again() -> None:
    """Their heap stays small, whatever the number of requests."""
    cache = Cache(10, quota=5)
    for i in range(2000):
        cache.run([1], PrefixUse(retain_s=100 + i))
    assert len(cache.order.retention._ends) < 100


# ---- in a memory ----


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retained_blocks_outlive_pressure_and_yield_to_need(make: Make) -> None:
    clock = Clock()
    memory = make(num_pages=12, retain_quota=0.5, clock=clock)
    serve(memory, prompt(64), use=PrefixUse(retain_s=60))
    for seed in range(1, 6):
        clock.now += 1
        serve(memory, prompt(96, seed))
    serve(memory, prompt(65), found=64)
    assert memory.num_free_pages == 12, "retained blocks count as free"
    sequences = [memory.create_sequence("block_table") for _ in range(2)]
    memory.append(sequences[0], 96)
    memory.append(sequences[1], 96)  # all pages: the retained ones as well
    with pytest.raises(OutOfPages):
        memory.append(sequences[1], 112)
    for sequence in sequences:
        memory.free(sequence)
    memory.check_integrity()
    serve(memory, prompt(64), found=0)


def test_idle_memory_goes_back_when_the_time_is_up_and_not_before(still: Make) -> None:
    clock = Clock()
    memory = still(num_pages=12, retain_quota=0.5, clock=clock, idle_release_s=1.0, cache_release_s=1.0)
    serve(memory, prompt(64), use=PrefixUse(retain_s=60))
    serve(memory, prompt(64, 1))
    clock.now += 10
    do_background(memory)
    assert memory.held_bytes == 4 * PAGE_BYTES
    assert memory.policy.wait_s(clock.now) is not None, "the mapper must wake when the retention ends"
    clock.now += 51
    do_background(memory)
    assert memory.held_bytes == 0
