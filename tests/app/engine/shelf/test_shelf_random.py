"""Random events on a shelf whose memory holds two of its models: requests, cancellations, forks, pins, sleeps,
additions, removals and injected failures. Every request gets the tokens that its model gives alone, or an error that an
event explains; memory adds up after each event, and nothing is left at the end.

CI plays 2,000 events; `pytest --hypothesis-profile=nightly tests/app/engine/shelf/test_shelf_random.py` 100,000.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.delta import Delta
from app.engine.engine import Engine
from app.engine.model.weight_arena import WeightArena
from app.engine.sampling.params import SamplingParams
from app.engine.shelf import control, shelved_model, turns
from app.engine.shelf.shelf import Shelf
from app.engine.shelf.shelved_model import ShelvedModel
from app.errors import (
    DeadlineError,
    EngineError,
    FolioError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownPinError,
)
from tests.app.engine.shelf.shelves import (
    Outputs,
    TinyModels,
    control_of,
    in_step_thread,
    outputs_of,
    put_to_sleep,
)
from tests.conftest import tokens
from tests.nightly import examples
from vmem import DevicePages, IntegrityError, MapError, OutOfPages

NAMES = ("llama", "qwen3", "gemma2", "int8", "ngram", "bamba")
EPISODES = 8
RETRY_S = 0.05  # of the shelf, after a failure
MOST_IN_FLIGHT = 24
DEADLINE_S = 20.0  # of any wait
FORKED = 6  # tokens of a fork
# Prompts begin like the same document, so that prefixes are shared.
DOCUMENT = tokens(80, 5)
PROMPTS = [[*DOCUMENT[:length], own] for length, own in ((0, 1), (5, 2), (17, 3), (33, 3), (48, 4), (70, 5))]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=9),
    replace(GREEDY, max_tokens=20, temperature=1.0, seed=4),
    replace(GREEDY, max_tokens=12, temperature=0.8, top_p=0.9, seed=5, n=3),
    replace(GREEDY, max_tokens=14, n=2, best_of=3, use_beam_search=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=6, stop=("a", "e", "t")),
]
COVERED = ("submitted", "equal", "forked", "cancelled", "slept", "pinned", "added", "removed", "evictions")


@dataclass(eq=False)
class Sent:
    """A request.

    Attributes:
        parent: of a fork.
        removed: its model was removed before it ended.
    """

    model: ShelvedModel
    of: str
    prompt: list[int]
    params: SamplingParams
    request_id: str
    timeout_s: float | None = None
    parent: Sent | None = None
    sent_at: float = field(default_factory=time.monotonic)
    removed: bool = False
    cancelled: bool = False
    deltas: list[Delta] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def collect(self, stream: Any) -> None:
        async for deltas in stream:
            self.deltas += deltas


class Faults:
    """Failures at a later call.

    Attributes:
        fired: time and model of each; no model: any may have been hit.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fired: list[tuple[float, EngineConfig | None]] = []
        self.counts: Counter[str] = Counter()
        self._armed: dict[str, tuple[int, BaseException]] = {}
        self._patch(monkeypatch, DevicePages, "create", lambda *_: None)
        self._patch(monkeypatch, WeightArena, "map", lambda *_: None)
        self._patch(monkeypatch, Engine, "step", lambda engine: engine.config)
        self._patch(monkeypatch, Engine, "sleep", lambda engine: engine.config)
        self._patch(monkeypatch, Engine, "wake", lambda engine: engine.config)
        real = AsyncEngine

        def load(config: EngineConfig, *args: Any, **kwargs: Any) -> AsyncEngine:
            self._call("load", config)
            return real(config, *args, **kwargs)

        monkeypatch.setattr(control, "AsyncEngine", load)

    def arm(self, kind: str, calls: int, error: BaseException) -> None:
        """Let the call after so many fail."""
        self._armed[kind] = calls, error

    def disarm(self) -> None:
        self._armed.clear()

    def explain(self, sent: Sent) -> bool:
        """Whether a request may have failed because of one of them."""
        own = sent.model.config.engine.model
        return any(
            at > sent.sent_at - 2 * RETRY_S and (config is None or config.model == own) for at, config in self.fired
        )

    def _patch(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, config_of: Callable[..., Any]) -> None:
        real = getattr(kind, name)

        def call(this: Any, *args: Any) -> Any:
            self._call(f"{kind.__name__}.{name}", config_of(this))
            return real(this, *args)

        monkeypatch.setattr(kind, name, call)

    def _call(self, kind: str, config: EngineConfig | None) -> None:
        if kind not in self._armed:
            return
        calls, error = self._armed[kind]
        if calls:
            self._armed[kind] = calls - 1, error
            return
        del self._armed[kind]
        self.fired.append((time.monotonic(), config))
        self.counts[kind] += 1
        raise error


FAULTS: list[tuple[str, int, Callable[[], BaseException]]] = [
    ("DevicePages.create", 40, lambda: OutOfPages(1, 0)),
    ("DevicePages.create", 40, lambda: MapError("injected")),
    ("WeightArena.map", 3, lambda: OutOfPages(1000, 0, unit="bytes")),
    ("WeightArena.map", 3, lambda: MapError("injected")),
    ("Engine.step", 60, lambda: RuntimeError("injected")),
    ("Engine.step", 60, lambda: IntegrityError("injected")),
    ("Engine.sleep", 2, lambda: MapError("injected")),
    ("Engine.wake", 2, lambda: MapError("injected")),
    ("load", 1, lambda: OSError("injected")),
]


class Play:
    """Events on one shelf."""

    def __init__(self, models: TinyModels, shelf: Shelf, dice: random.Random, faults: Faults) -> None:
        self.models, self.shelf, self.dice, self.faults = models, shelf, dice, faults
        self.counts: Counter[str] = Counter()
        self.of = {name: name for name in shelf.names}  # name → whose engine it has
        self.in_flight: list[Sent] = []
        self.pins: set[tuple[ShelvedModel, str]] = set()
        self.ids = map(str, itertools.count())
        self.evictions: Counter[str] = Counter()

    async def event(self) -> None:
        events: list[tuple[float, Callable[[], Any]]] = [
            (10, self.submit),
            (2, self.cancel),
            (1.5, self.fork),
            (4, self.wait),
            (3, self.sleep),
            (1, self.pin),
            (0.4, self.add),
            (0.4, self.remove),
            (0.6, self.fail),
        ]
        [event] = self.dice.choices([event for _, event in events], [weight for weight, _ in events])
        await event()
        await self.check()

    async def end(self) -> None:
        self.faults.disarm()
        while self.in_flight:
            await self.wait()
            await self.check()
        self.counts["evictions"] += sum(status.num_evictions for status in self.shelf.statuses())

    async def submit(self) -> None:
        if len(self.in_flight) >= MOST_IN_FLIGHT:
            await self.wait()
        name, params = self.dice.choice(self.shelf.names or ("none",)), self.dice.choice(PARAMS)
        if name == "none":
            return
        of = self.of[name]
        if of == "ngram" and params.use_beam_search:
            params = GREEDY
        timeout_s = self.dice.choice([None] * 8 + [0.001, 0.05, 1000.0])
        sent = Sent(self.shelf.model(name), of, self.dice.choice(PROMPTS), params, next(self.ids), timeout_s)
        self.start(
            sent, sent.model.generate(sent.prompt, params, sent.request_id, timeout_s=timeout_s, tenant=name[:1])
        )
        self.counts["submitted"] += 1

    def start(self, sent: Sent, stream: Any) -> None:
        sent.task = asyncio.create_task(sent.collect(stream))
        self.in_flight.append(sent)

    async def cancel(self) -> None:
        if not self.in_flight:
            return
        sent = self.dice.choice(self.in_flight)
        assert sent.task is not None
        sent.cancelled = sent.task.cancel()
        self.counts["cancelled"] += 1

    async def fork(self) -> None:
        parents = [s for s in self.in_flight if s.params is GREEDY and s.parent is None and not s.removed]
        if not parents:
            return
        parent = self.dice.choice(parents)
        engine = parent.model.engine
        if engine is None:
            return
        sent = Sent(
            parent.model,
            parent.of,
            parent.prompt,
            replace(GREEDY, max_tokens=FORKED, n=2),
            next(self.ids),
            parent=parent,
        )
        self.start(sent, engine.fork(parent.request_id, sent.params, sent.request_id))
        self.counts["forked"] += 1

    async def wait(self) -> None:
        if not self.in_flight:
            return
        tasks = [sent.task for sent in self.in_flight if sent.task is not None]
        done, _ = await asyncio.wait(tasks, timeout=DEADLINE_S, return_when="FIRST_COMPLETED")
        assert done, f"no request ends: {[(s.request_id, s.model.name) for s in self.in_flight]} {self.shelf.statuses()}"

    async def sleep(self) -> None:
        if self.shelf.names:
            self.counts["slept"] += await put_to_sleep(self.shelf, self.dice.choice(self.shelf.names))

    async def pin(self) -> None:
        """Pin what prompts begin with, or unpin it."""
        loaded = [
            (model, model.engine) for name in self.shelf.names if (model := self.shelf.model(name)).engine is not None
        ]
        if not loaded:
            return
        model, engine = self.dice.choice(loaded)
        assert engine is not None
        name, length = self.dice.choice([("short", 16), ("long", 48)])
        if (model, name) in self.pins:
            self.pins.discard((model, name))
            try:
                engine.unpin(name)
            except (UnknownPinError, UnavailableError):  # it was loaded again since
                self.counts["lost pins"] += 1
            return
        pinning = engine.pin(name, DOCUMENT[:length], timeout_s=20.0)
        sent = Sent(model, "", DOCUMENT[:length], PARAMS[1], f"pin {name}")
        sent.task = asyncio.create_task(pinning)
        self.in_flight.append(sent)
        self.pins.add((model, name))
        self.counts["pinned"] += 1

    async def add(self) -> None:
        name, of = self.dice.choice(("x", "y", "llama")), self.dice.choice(NAMES)
        if name in self.shelf.names:
            with pytest.raises(RequestError, match="already"):
                self.shelf.add(self.models.config(name, of=of))
            return
        self.shelf.add(self.models.config(name, of=of, keep=self.dice.choice(["auto", 0.05])))
        self.of[name] = of
        self.counts["added"] += 1

    async def remove(self) -> None:
        if len(self.shelf.names) < 3:
            return
        name = self.dice.choice(self.shelf.names)
        model = self.shelf.model(name)
        for sent in self.in_flight:
            sent.removed |= sent.model is model
        self.counts["evictions"] += model.num_evictions
        await asyncio.wait_for(self.shelf.remove(name), DEADLINE_S)
        self.counts["removed"] += 1

    async def fail(self) -> None:
        kind, calls, make = self.dice.choice(FAULTS)
        self.faults.arm(kind, self.dice.randrange(calls), make())

    async def check(self) -> None:
        """Memory adds up, and requests that have ended have ended well."""
        await asyncio.wait_for(self.shelf.check_integrity(), DEADLINE_S)
        await in_step_thread(self.shelf, partial(check_sums, self.shelf))
        ended = [sent for sent in self.in_flight if sent.task is not None and sent.task.done()]
        self.in_flight = [sent for sent in self.in_flight if sent not in ended]
        for sent in ended:
            await self.check_ended(sent)

    async def check_ended(self, sent: Sent) -> None:
        assert sent.task is not None
        if sent.task.cancelled():
            assert sent.cancelled
            return
        error = sent.task.exception()
        if error is None:
            await self.check_outputs(sent, outputs_of(sent.deltas))
            return
        assert isinstance(error, FolioError), error
        if isinstance(error, DeadlineError):
            assert sent.timeout_s is not None or not sent.of, error
        elif sent.parent is not None and isinstance(error, RequestError):
            self.counts["refused forks"] += 1  # the parent has not begun, or too many sequences run
        elif not sent.of and isinstance(error, RequestError):  # a quota, or the name is used
            self.counts["refused pins"] += 1
        else:
            assert isinstance(error, EngineError | UnknownModelError), error
            assert sent.removed or self.faults.explain(sent), f"{sent.model.name}: {error!r}"
        self.counts[type(error).__name__] += 1

    async def check_outputs(self, sent: Sent, found: Outputs) -> None:
        if not sent.of:
            return
        params = sent.params if sent.parent is None else replace(GREEDY, max_tokens=40 + FORKED)
        alone = await self.models.alone(sent.of, sent.prompt, params)
        if sent.parent is None:
            assert found == alone, f"{sent.model.name} ({sent.of}) {len(sent.prompt)} {sent.params}"
        else:
            assert len(found) == 2
            for output in found:  # parent and forks are greedy
                assert any(output == alone[0][i : i + FORKED] for i in range(41)), (output, alone)
        self.counts["equal"] += 1


def check_sums(shelf: Shelf) -> None:
    """Bytes of the device are those of the models and the workspace, in the step thread."""
    control = control_of(shelf)
    device, models = control._device, [shelf.model(name) for name in shelf.names]
    pages = device.shared.pages
    assert pages.used_bytes + pages.idle_bytes + pages.charged_bytes <= pages.capacity_bytes
    engines = [model.engine.driver.engine for model in models if model.engine is not None]
    members = {member.engine for member in control._thread._members}
    if control._moves or set(engines) != members:
        return  # another thread maps, or an engine that has failed is closed next
    weight_bytes = sum(engine.footprint.weight_bytes for engine in engines if not engine.asleep)
    assert pages.charged_bytes == weight_bytes + device._workspace_bytes
    assert pages.used_bytes <= sum(engine.footprint.held_bytes + engine.footprint.anchor_bytes for engine in engines)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelved_model, "_FIRST_RETRY_S", RETRY_S)
    monkeypatch.setattr(shelved_model, "_LONGEST_RETRY_S", RETRY_S)
    monkeypatch.setattr(turns, "LEAST_TURN_S", 0.05)


@pytest.mark.parametrize("episode", range(EPISODES))
async def test_events_in_any_order(models: TinyModels, monkeypatch: pytest.MonkeyPatch, episode: int) -> None:
    seed = episode if examples(0, nightly=1) == 0 else random.randrange(1 << 30)
    print(f"seed {seed}")
    dice, faults = random.Random(seed), Faults(monkeypatch)
    pair = dice.sample(NAMES, 2)
    memory_bytes = models.memory_for(*pair, room_bytes=dice.choice([100, 200, 400]) << 10, beside=NAMES)
    memory_bytes = max(memory_bytes, models.memory_for("bamba", room_bytes=160 << 10, beside=NAMES))
    for name in NAMES:
        models.reference(name)
    async with models.opened([models.config(name) for name in dice.sample(NAMES, 4)], memory_bytes, None) as shelf:
        play = Play(models, shelf, dice, faults)
        try:
            for _ in range(examples(2000, nightly=100_000) // EPISODES):
                await play.event()
            await play.end()
        finally:
            print(dict(play.counts), dict(faults.counts))
            faults.disarm()
    missing = [name for name in COVERED if not play.counts[name]]
    assert not missing, f"the events covered no {', '.join(missing)}"
