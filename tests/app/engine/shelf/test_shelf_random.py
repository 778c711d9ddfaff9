"""Random rules on a shelf whose memory holds two of its models: requests, cancellations, forks, pins, sleeps, memory
that shrinks and grows, additions, removals and injected failures.

Every request gets the tokens that its model gives alone, or a typed error that a failure of this model explains; memory
adds up after each rule, and nothing is left at the end.

CI plays 2,000 rules; `pytest --hypothesis-profile=nightly tests/app/engine/shelf/test_shelf_random.py` 100,000.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from app.engine.shelf import control, shelved_model, turns
from tests.app.engine.shelf.shelf_faults import Faults
from tests.app.engine.shelf.shelf_rules import IDLE_S, NAMES, RETRY_S, Play, config_of
from tests.app.engine.shelf.shelves import TinyModels, control_of
from tests.nightly import examples

SEEDS, RULES = range(examples(8, nightly=400)), 250
COVERED = [
    *("rules", "equal", "forked", "cancelled", "slept", "pinned", "idle", "resized", "added", "removed", "evictions"),
    *("added up", "damaged", "write", "HostBackend.create OutOfPages", "WeightArena.map OutOfPages"),
    *("DeadlineError", "EngineError", "UnavailableError"),
]


def open_files() -> Counter[str]:
    """What file descriptors of this process are open for, by number of them."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


def mapped_by(inode: int) -> list[str]:
    """Mappings of weights, and of the KV memory in this memfd."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if ".weights" in line or "folio-weights" in line or f" {inode} " in line]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelved_model, "_FIRST_RETRY_S", RETRY_S)
    monkeypatch.setattr(shelved_model, "_LONGEST_RETRY_S", RETRY_S)
    monkeypatch.setattr(turns, "LEAST_TURN_S", 0.05)
    monkeypatch.setattr(control, "_LEAST_AWAKE_S", IDLE_S)


@pytest.fixture(scope="module")
def covered() -> Iterator[Counter[str]]:
    """What all seeds have done."""
    counts: Counter[str] = Counter()
    yield counts
    if counts["rules"] == RULES * len(SEEDS):
        missing = [name for name in COVERED if not counts[name]]
        assert not missing, f"the rules covered no {', '.join(missing)}"


@pytest.mark.parametrize("seed", SEEDS)
async def test_rules_in_any_order(
    models: TinyModels,
    covered: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    dice = random.Random(seed)
    for name in NAMES:
        models.reference(name)
    least_bytes = max(models.memory_for(name, room_bytes=400 << 10, beside=NAMES) for name in NAMES)
    most_bytes = models.memory_for(*dice.sample(NAMES, 2), room_bytes=dice.choice([100, 300]) << 10, beside=NAMES)
    configs = [config_of(models, name, name, dice) for name in dice.sample(NAMES, 4)]
    files, faults = open_files(), Faults(monkeypatch)
    host_bytes = dice.choice([0, 1 << 30])
    async with models.opened(configs, max(least_bytes, most_bytes), None, host_memory_bytes=host_bytes) as shelf:
        store = control_of(shelf)._device.shared.weights
        store._write = faults.write
        play = Play(models, shelf, dice, faults, least_bytes)
        try:
            for _ in range(RULES):
                await play.rule()
            await play.end()
            inode = os.fstat(play.pages._shared.memfd).st_ino
            assert mapped_by(inode)
        finally:
            print(dict(play.counts), dict(faults.counts))
            faults.disarm()
            await play.give_up()
    assert store._host_bytes_left == host_bytes
    gc.collect()
    assert open_files() - files == Counter()
    assert not mapped_by(inode)
    warned = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert not warned, warned
    covered.update(play.counts + faults.counts)
