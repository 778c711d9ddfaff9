"""Random rules on a shelf whose memory holds two of its models: requests, cancellations, forks, pins, adapters that are
loaded and unloaded, sleeps, memory that shrinks and grows, additions, removals and injected failures.

Each seed draws models of all kinds, whether one is kept always, and where weights of sleeping models are: in files of
an earlier shelf, in new ones, in memory, or in the checkpoint only.

Every request gets the tokens that its model gives alone, or a typed error that a failure of this model explains; memory
adds up after each rule, and nothing is left at the end.

CI plays a quarter of 2,000 rules; `pytest --hypothesis-profile=nightly tests/app/shelf/test_shelf_random.py`
100,000.
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

from tests.app.shelf.shelves import device_of

pytest.importorskip("hypothesis")

from folio.app.shelf import control, shelved_model, turns
from tests.app.shelf.shelf_faults import Faults
from tests.app.shelf.shelf_requests import ADAPTERS, CASES, IDLE_S, NAMES, RETRY_S, config_of
from tests.app.shelf.shelf_rules import Play
from tests.app.shelf.shelves import TinyModels, mappings
from tests.nightly import examples

SEEDS, RULES = range(examples(8, nightly=400)), 250
COVERED = [
    *("rules", "equal", "forked", "cancelled", "slept", "pinned", "idle", "resized", "added", "removed", "evictions"),
    *NAMES,
    *(f"adapter {name}" for name in ADAPTERS),
    *("unloaded an adapter", "loaded an adapter, awake", "kept always"),
    *("weights in a file", "loaded from a file", "weights in memory", "made again"),
    *("added up", "damaged", "write", "HostBackend.create OutOfPages"),
    *("DeadlineError", "EngineError", "UnavailableError"),
]
# A few times in 2,000 rules, or not at all: it depends on the threads.
RARE = ["loaded an adapter, asleep", "from memory", "WeightArena.map OutOfPages", "WeightArena.map MapError"]


def open_files() -> Counter[str]:
    """What file descriptors of this process are open for, by number of them."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelved_model, "_LONGEST_RETRY_S", RETRY_S)
    monkeypatch.setattr(turns, "LEAST_TURN_S", 0.05)
    monkeypatch.setattr(control, "_LEAST_AWAKE_S", IDLE_S)


@pytest.fixture(scope="module")
def covered() -> Iterator[Counter[str]]:
    """What all seeds have done."""
    counts: Counter[str] = Counter()
    yield counts
    if counts["rules"] == RULES * len(SEEDS):
        wanted = COVERED + RARE[: examples(0, nightly=len(RARE))]
        missing = [name for name in wanted if not counts[name]]
        assert not missing, f"the rules covered no {', '.join(missing)}"


@pytest.mark.daily(2)
@pytest.mark.parametrize("seed", SEEDS)
async def test_rules_in_any_order(
    models: TinyModels,
    covered: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    seed: int,
) -> None:
    dice = random.Random(seed)
    for name in NAMES:
        models.reference(name)
    await models.alone("lora", *CASES[0], adapter=ADAPTERS[0])  # which starts a thread
    names = dice.sample(NAMES, 4)
    always = dice.choice([None, names[0]])
    kept = [] if always is None else [always]
    room_bytes = 400 << 10 if always is None else 800 << 10  # pins of a model that is kept always stay, too
    least_bytes = max(models.memory_for(*kept, name, room_bytes=room_bytes, beside=NAMES) for name in NAMES)
    most_bytes = models.memory_for(*kept, *names[1:3], room_bytes=dice.choice([100, 300]) << 10, beside=NAMES)
    configs = [config_of(models, name, name, dice, "always" if name == always else None) for name in names]
    files, faults = open_files(), Faults(monkeypatch)
    folder = dice.choice([models.weights_dir, tmp_path])
    faults.disk_is_full = folder == tmp_path and dice.random() < 0.7
    host_bytes = dice.choice([0, models.weight_bytes(names[1]), 1 << 30])
    memory_bytes = max(least_bytes, most_bytes)
    async with models.opened(configs, memory_bytes, None, host_memory_bytes=host_bytes, weights_dir=folder) as shelf:
        store = device_of(shelf).shared.weights
        store._write = faults.write
        play = Play(models, shelf, dice, faults, least_bytes=least_bytes, always=always)
        try:
            for _ in range(RULES):
                await play.rule()
            await play.end()
            memfd = os.fstat(play.pages._shared.memfd)
            assert mappings(memfd)
        finally:
            print(dict(play.counts), dict(faults.counts))
            faults.disarm()
            await play.give_up()
    assert store._host_bytes_left == host_bytes
    gc.collect()
    assert open_files() - files == Counter()
    assert not mappings(memfd)
    warned = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert not warned, warned
    covered.update(play.counts + faults.counts + Counter({"kept always": len(kept)}))
