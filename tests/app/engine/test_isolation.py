"""No request ever reads what another one, or nobody, has written: everything else is not a number.

Before each step all memory of the KV cache is poisoned but what has been written for those who may read it: the
computed tokens of each sequence, and what the prefix cache knows. One read of anything else would change outputs or end
requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from tests.app.engine.all_kinds import prompt, small_engine, work
from tests.app.engine.engines import greedy, run, tokens_of
from tests.conftest import MakeCheckpoint
from tests.vmem.backends.stand_in_driver import StandInDriver

# (model, view, backend)
CASES = [
    ("llama", "region", "host"),
    ("llama", "block_table", "host"),
    ("gemma2", "auto", "host"),
    ("gpt_oss", "block_table", "host"),
    ("bamba", "auto", "host"),
    ("llama", "auto", "cuda"),
    ("gemma2", "region", "cuda"),
]


def written_rows(engine: Engine, g: int) -> dict[int, int]:
    """Block → how many of its rows hold what somebody may read, of a layer group."""
    memory = engine.memory
    group = memory.groups[g]
    block_tokens = 1 if group.is_state else group.layout.block_tokens
    node_of, rows = memory.tree._node_of[g], defaultdict[int, int](int)
    for block_id, node in node_of.items():
        rows[block_id] = 0 if node.pending else block_tokens
    # What the coming step writes is there for others of the same step, but not yet.
    starts = {
        block_id: pending.end - pending.num_tokens
        for pending in memory.prefixes._pending
        for node, at in pending.indexed
        if at == g
        for block_id in node.blocks[g] or ()
    }
    owners = [(r.memory, r.num_computed) for r in engine.scheduler.unfinished() if r.memory is not None]
    owners += [(pinned, pinned.num_tokens) for pinned in memory.pins.sequences]
    for sequence, num_computed in owners:
        table = sequence.groups[g]
        for i, block_id in enumerate(table.block_ids[table.first :], table.first):
            computed = min(num_computed, starts.get(block_id, num_computed))
            rows[block_id] = max(rows[block_id], min(computed - i * block_tokens, block_tokens))
    return rows


def poison(engine: Engine, written: Callable[[Engine, int], dict[int, int]]) -> int:
    """Fill what nobody may read, beside these rows of a layer group; returns how many places that were."""
    memory, count = engine.memory, 0
    with memory.mapper.call():
        memory.mapper.wait_until_idle()
        for group_memory in memory.group_memories:
            memory.regions.map_homes(group_memory, group_memory.handles)
    with memory.lock:
        memory.mapper.wait_until_idle()
        for g, group in enumerate(memory.groups):
            rows = written(engine, g)
            for block_id in (0, *memory.group_memories[g].at_home):
                start = rows.get(block_id, 0)
                if group.is_state:
                    if start <= 0:
                        memory.tensors.state_view()[block_id] = 0xFF  # not a number in any format
                        count += 1
                    continue
                for layer in group.layers:
                    for side in memory.tensors.home_view(layer):
                        side[block_id, max(start, 0) :] = float("nan")
                        count += side.shape[1] - max(start, 0)
    return count


class Poisoned:
    """An engine whose memory is poisoned before each step, if `on`."""

    def __init__(self, engine: Engine, written: Callable[[Engine, int], dict[int, int]] = written_rows) -> None:
        self.engine = engine
        self.on = False
        self.num_places = 0
        launch = engine.executor.launch

        def poison_and_launch(*args: Any) -> Any:
            if self.on:
                self.num_places += poison(engine, written)
            return launch(*args)

        engine.executor.launch = poison_and_launch  # type: ignore[method-assign]


@pytest.mark.thirds
@pytest.mark.parametrize(("model", "view", "backend"), CASES)
def test_only_what_was_written_is_read(
    model: str, view: str, backend: str, make_checkpoint: MakeCheckpoint, use_driver: Callable[[StandInDriver], None]
) -> None:
    if backend == "cuda":
        use_driver(StandInDriver(16 << 20))
    poisoned = Poisoned(small_engine(make_checkpoint, model, view))
    for way in ("swap", "recompute"):
        poisoned.on = False
        expected = work(poisoned.engine, way)
        assert {name for name, _ in expected} >= {"first", "samples", "beams", "long", "best"}
        poisoned.on, poisoned.num_places = True, 0
        assert work(poisoned.engine, way) == expected
        assert poisoned.num_places > 10_000
    poisoned.engine.memory.tree.clear()
    poisoned.engine.close()


@pytest.mark.parametrize("model", ["llama", "bamba"])
def test_the_poison_is_noticed(model: str, make_checkpoint: MakeCheckpoint) -> None:
    """What one sequence has written counts as not written: then the test above must fail."""
    poisoned = Poisoned(small_engine(make_checkpoint, model, "auto"), lambda *_: {})
    poisoned.on = True
    with pytest.raises(AssertionError):
        work(poisoned.engine, "swap")
    poisoned.engine.close()


@pytest.mark.parametrize("model", ["llama", "gemma2", "bamba"])
def test_tenants_of_one_step_share_nothing(model: str, make_checkpoint: MakeCheckpoint) -> None:
    """Neither what is computed at the same time, nor a unit that is partly alike, nor a state."""
    engine = small_engine(make_checkpoint, model, "auto", step_tokens=1024)
    whose: dict[str, dict[str, Any]] = {
        "a": {"tenant": "a"},
        "b": {"tenant": "b"},
        "a, salted": {"tenant": "a", "cache_salt": "x"},
        "nobody": {"user": "a"},
    }
    for turn in range(3):
        for name, options in whose.items():
            engine.submit(name, prompt(100)[: 100 - 7 * turn] + prompt(5, turn), greedy(2), **options)
        deltas = run(engine)
        assert all(len(tokens_of(deltas[name])) == 2 for name in whose)
        cached = {name: deltas[name][-1].num_cached_tokens for name in whose}
        assert len(set(cached.values())) == 1
        assert bool(cached["a"]) == (turn > (model == "bamba"))  # a state is kept where a second prompt branches
    engine.close()
