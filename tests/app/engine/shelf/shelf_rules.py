"""Rules of the random test of a shelf, and the checks after each of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from app.config.shelf import ModelConfig
from app.engine.delta import Delta
from app.engine.sampling.params import SamplingParams
from app.engine.shelf.shelf import Shelf
from app.engine.shelf.shelved_model import ShelvedModel
from app.errors import DeadlineError, EngineError, FolioError, RequestError, UnavailableError, UnknownPinError
from tests.app.engine.shelf.shelf_faults import Faults, damage_a_file
from tests.app.engine.shelf.shelves import Outputs, TinyModels, control_of, in_step_thread, outputs_of, put_to_sleep
from tests.conftest import tokens
from vmem import OutOfPages

NAMES = ("llama", "qwen3", "gemma2", "gpt2", "int8", "ngram", "draft", "bamba")
RETRY_S = 0.05  # of the shelf, after a failure
IDLE_S = 0.1  # with it, models sleep
MOST_IN_FLIGHT = 24
DEADLINE_S = 60.0  # of any wait
FORKED = 6  # tokens of a fork
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
# Prompts begin like the same document, so that prefixes are shared.
DOCUMENT = tokens(80, 5)
CASES = [
    ([*DOCUMENT[:length], length + 1], params)
    for length, params in (
        (0, GREEDY),
        (17, GREEDY),
        (70, GREEDY),
        (48, replace(GREEDY, max_tokens=1)),
        (5, replace(GREEDY, max_tokens=9)),
        (33, replace(GREEDY, max_tokens=12, temperature=1.0, seed=4)),
        (48, replace(GREEDY, max_tokens=9, temperature=0.8, top_p=0.9, seed=5, n=3)),
        (17, replace(GREEDY, max_tokens=8, n=2, best_of=3, use_beam_search=True)),
        (33, SamplingParams(max_tokens=16, temperature=1.0, seed=6, stop=("a", "e", "t"))),
    )
]


def config_of(models: TinyModels, name: str, of: str, dice: random.Random) -> ModelConfig:
    """A model with the engine of another one."""
    engine = models.engine(of, kv_memory_bytes=dice.choice([512, 2048]) << 10)
    return ModelConfig(name=name, engine=engine, keep=dice.choice(["auto", IDLE_S]))


@dataclass(eq=False)
class Sent:
    """A request.

    Attributes:
        of: the model that says what it gives; empty for a pin.
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
    task: asyncio.Task[None] = field(init=False)

    def start(self, stream: Any) -> None:
        self.task = asyncio.create_task(self._collect(stream))

    async def _collect(self, stream: Any) -> None:
        async for deltas in stream:
            self.deltas += deltas


class Play:
    """Rules on one shelf.

    Args:
        least_bytes: memory with which each model can be served.
    """

    def __init__(self, models: TinyModels, shelf: Shelf, dice: random.Random, faults: Faults, least_bytes: int) -> None:
        self.models, self.shelf, self.dice, self.faults = models, shelf, dice, faults
        self.counts: Counter[str] = Counter()
        self.of = {name: name for name in shelf.names}  # name → whose engine it has
        self.in_flight: list[Sent] = []
        self.pins: set[tuple[ShelvedModel, str]] = set()
        self.ids = map(str, itertools.count())
        self.pages = control_of(shelf)._device.shared.pages
        self.sizes = (least_bytes, self.pages.capacity_bytes)
        self.foreign_bytes = 0

    async def rule(self) -> None:
        rules: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (10, self.submit),
            (2, self.cancel),
            (1.5, self.fork),
            (4, self.wait),
            (3, self.sleep),
            (1, self.pin),
            (0.5, self.resize),
            (0.5, self.take_memory),
            (0.4, self.add),
            (0.4, self.remove),
            (0.6, self.fail),
            (0.3, self.damage),
            (0.2, self.fill_disk),
            (0.06, self.idle),
        ]
        [rule] = self.dice.choices([rule for _, rule in rules], [weight for weight, _ in rules])
        try:
            await rule()
            await self.check()
            self.counts["rules"] += 1
        except BaseException:
            print(f"at {rule.__name__}: {self.state()}")
            raise

    async def end(self) -> None:
        """Serve each model, without further failures; one that is being loaded may still fail once."""
        self.faults.disarm()
        await self.finish()
        for name in self.shelf.names:
            ends_at, num_equal = time.monotonic() + DEADLINE_S, self.counts["equal"]
            while self.counts["equal"] == num_equal:
                assert time.monotonic() < ends_at, f"{name} does not recover: {self.state()}"
                self.send(name, *CASES[0])
                await self.finish()
        self.counts["evictions"] += sum(status.num_evictions for status in self.shelf.statuses())

    def state(self) -> str:
        pages = self.pages
        in_flight = [(s.request_id, s.model.name, s.params.max_tokens, len(s.deltas)) for s in self.in_flight]
        memory = pages.capacity_bytes, pages.used_bytes, pages.idle_bytes, pages.charged_bytes, self.foreign_bytes
        return "\n".join(map(str, (in_flight, memory, *self.shelf.statuses())))

    # ---- requests ----

    async def submit(self) -> None:
        if len(self.in_flight) >= MOST_IN_FLIGHT:
            await self.wait()
        if self.shelf.names:
            timeout_s = self.dice.choice([None] * 8 + [0.001, 0.05, 1000.0])
            self.send(self.dice.choice(self.shelf.names), *self.dice.choice(CASES), timeout_s)

    def send(self, name: str, prompt: list[int], params: SamplingParams, timeout_s: float | None = None) -> None:
        model, of, tenant, priority = self.shelf.model(name), self.of[name], name[:1], self.dice.randrange(3)
        if of in ("ngram", "draft") and params.n > 1:
            params = GREEDY
        sent = Sent(model, of, prompt, params, next(self.ids), timeout_s)
        options: dict[str, Any] = {"timeout_s": timeout_s, "tenant": tenant, "priority": priority}
        self.start(sent, model.generate(prompt, params, sent.request_id, **options))
        self.counts["submitted"] += 1

    def start(self, sent: Sent, stream: Any) -> None:
        sent.start(stream)
        self.in_flight.append(sent)

    async def cancel(self) -> None:
        if self.in_flight:
            sent = self.dice.choice(self.in_flight)
            sent.cancelled |= sent.task.cancel()
            self.counts["cancelled"] += 1

    async def fork(self) -> None:
        parents = [s for s in self.in_flight if s.of and s.params is GREEDY and s.parent is None and not s.removed]
        if not parents:
            return
        parent = self.dice.choice(parents)
        engine = parent.model.engine
        if engine is None:
            return
        params = replace(GREEDY, max_tokens=FORKED, n=2)
        sent = Sent(parent.model, parent.of, parent.prompt, params, next(self.ids), parent=parent)
        self.start(sent, engine.fork(parent.request_id, params, sent.request_id))
        self.counts["forked"] += 1

    async def pin(self) -> None:
        """Pin what prompts begin with, or unpin it."""
        loaded = [model for name in self.shelf.names if (model := self.shelf.model(name)).engine is not None]
        if not loaded:
            return
        model = self.dice.choice(loaded)
        engine = model.engine
        if engine is None:
            return
        name, length = self.dice.choice([("short", 16), ("long", 48)])
        if (model, name) in self.pins:
            self.pins.discard((model, name))
            with suppress(UnknownPinError, UnavailableError):  # it was loaded again since
                engine.unpin(name)
            return
        sent = Sent(model, "", DOCUMENT[:length], GREEDY, f"pin {name}", timeout_s=DEADLINE_S)
        sent.task = asyncio.create_task(engine.pin(name, sent.prompt, timeout_s=DEADLINE_S))
        self.in_flight.append(sent)
        self.pins.add((model, name))
        self.counts["pinned"] += 1

    async def wait(self) -> None:
        """Wait until a request ends; its model may need all of the memory for that."""
        if self.in_flight:
            self.return_memory()
            tasks = [sent.task for sent in self.in_flight]
            done, _ = await asyncio.wait(tasks, timeout=DEADLINE_S, return_when="FIRST_COMPLETED")
            assert done, f"no request ends: {self.state()}"

    async def give_up(self) -> None:
        """End what a failure of the test has left."""
        for sent in self.in_flight:
            sent.task.cancel()
        await asyncio.gather(*(sent.task for sent in self.in_flight), return_exceptions=True)
        self.return_memory()

    async def finish(self) -> None:
        while self.in_flight:
            await self.wait()
            await self.check()

    # ---- memory ----

    async def sleep(self) -> None:
        if self.shelf.names:
            self.counts["slept"] += await put_to_sleep(self.shelf, self.dice.choice(self.shelf.names))

    async def idle(self) -> None:
        """Wait until models sleep that are kept for a time."""
        await self.finish()
        names = [name for name in self.shelf.names if isinstance(self.shelf.model(name).config.keep, float)]
        ends_at = time.monotonic() + DEADLINE_S
        while any(self.shelf.model(name).state in ("awake", "waking", "loading") for name in names):
            assert time.monotonic() < ends_at, "idle models do not sleep"
            await asyncio.sleep(0.01)
        self.counts["idle"] += 1

    async def resize(self) -> None:
        """Change the memory of the device, as far as it is not in use."""
        target = self.dice.randint(*self.sizes)

        def resize() -> None:
            self.pages.trim()
            with self.pages._lock:
                used_bytes = self.pages._used_bytes + self.pages._idle_bytes + self.pages._charged_bytes
                self.pages.capacity_bytes = max(target, used_bytes)
            control_of(self.shelf).note_change()

        await in_step_thread(self.shelf, resize)
        self.counts["resized"] += 1

    async def take_memory(self) -> None:
        """Take memory that the shelf counts on, until a rule waits."""
        with suppress(OutOfPages):
            num_bytes = self.dice.randint(0, self.pages.available_bytes)
            self.pages.charge(num_bytes)
            self.foreign_bytes += num_bytes

    def return_memory(self) -> None:
        self.pages.discharge(self.foreign_bytes)
        self.foreign_bytes = 0

    # ---- models and failures ----

    async def add(self) -> None:
        name, of = self.dice.choice(("x", "y", *NAMES[:2])), self.dice.choice(NAMES)
        if name in self.shelf.names:
            with pytest.raises(RequestError, match="already"):
                self.shelf.add(self.models.config(name, of=of))
            return
        self.shelf.add(config_of(self.models, name, of, self.dice))
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
        async with asyncio.timeout(DEADLINE_S):
            await self.shelf.remove(name)
        self.counts["removed"] += 1

    async def fail(self) -> None:
        self.faults.arm(self.dice)

    async def damage(self) -> None:
        damage = await in_step_thread(self.shelf, partial(damage_a_file, self.shelf, self.dice))
        if damage is not None:
            self.counts["damaged"] += 1

    async def fill_disk(self) -> None:
        self.faults.disk_is_full = not self.faults.disk_is_full

    # ---- checks ----

    async def check(self) -> None:
        """Memory adds up, and requests that have ended have ended well."""
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(self.shelf.check_integrity(), in_step_thread(self.shelf, self.check_sums))
        ended = [sent for sent in self.in_flight if sent.task.done()]
        self.in_flight = [sent for sent in self.in_flight if sent not in ended]
        for sent in ended:
            await self.check_ended(sent)
        assert not self.faults.unexplained, self.faults.unexplained

    def check_sums(self) -> None:
        """Bytes of the device are those of the models and the workspace, in the step thread."""
        control_, pages = control_of(self.shelf), self.pages
        models = [self.shelf.model(name) for name in self.shelf.names]
        engines = [model.engine.driver.engine for model in models if model.engine is not None]
        members: list[Any] = control_._thread._members
        if control_._moves or any(m.closed.done() for m in members) or set(engines) != {m.engine for m in members}:
            return  # another thread maps, or an engine that has failed is closed next
        weight_bytes = sum(engine.footprint.weight_bytes for engine in engines if not engine.asleep)
        weight_bytes += sum(engine.adapter_bytes for engine in engines)
        workspace_bytes = control_._device._workspace_bytes
        assert pages.charged_bytes == weight_bytes + workspace_bytes + self.foreign_bytes
        assert pages.used_bytes <= sum(e.footprint.held_bytes + e.footprint.anchor_bytes for e in engines)
        self.counts["added up"] += 1

    async def check_ended(self, sent: Sent) -> None:
        if sent.task.cancelled():
            assert sent.cancelled
            return
        error = sent.task.exception()
        if error is None:
            await self.check_outputs(sent, outputs_of(sent.deltas))
            return
        assert isinstance(error, FolioError), error
        if isinstance(error, DeadlineError):
            assert sent.timeout_s is not None, error
        elif isinstance(error, RequestError):  # of a fork: the parent has not begun; of a pin: the name is in use
            assert sent.parent is not None or not sent.of, error
        else:
            assert isinstance(error, EngineError), error
            is_explained = sent.removed or self.faults.hit(sent.model.name, sent.sent_at - RETRY_S)
            assert is_explained, f"{sent.model.name}: {error!r}"
        self.counts[type(error).__name__] += 1

    async def check_outputs(self, sent: Sent, found: Outputs) -> None:
        if not sent.of:
            return
        params = sent.params if sent.parent is None else replace(GREEDY, max_tokens=GREEDY.max_tokens + FORKED)
        alone = await self.models.alone(sent.of, sent.prompt, params)
        if sent.parent is None:
            assert found == alone, f"{sent.model.name} ({sent.of}) {len(sent.prompt)} {sent.params}"
        else:
            assert len(found) == 2
            for output in found:  # parent and forks are greedy
                assert any(output == alone[0][i : i + FORKED] for i in range(GREEDY.max_tokens + 1)), (output, alone)
        self.counts["equal"] += 1
