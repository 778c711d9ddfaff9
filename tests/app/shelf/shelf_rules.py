"""Rules of the random test of a shelf, and the checks after each of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import RequestError, UnavailableError, UnknownPinError
from folio.app.shelf.shelf import Shelf
from folio.app.shelf.shelved_model import ShelvedModel
from folio.vmem import OutOfPages
from tests.app.shelf import shelves
from tests.app.shelf.shelf_faults import Faults, damage_a_file
from tests.app.shelf.shelf_requests import (
    ADAPTERS,
    DOCUMENT,
    FORKED,
    GREEDY,
    LOADED,
    NAMES,
    Sent,
    adapter_of,
    case_of,
    config_of,
)
from tests.app.shelf.shelves import TinyModels, control_of, in_step_thread, mappings, put_to_sleep, stream_of

MOST_IN_FLIGHT = 24
DEADLINE_S = 60.0  # of any wait


class Play:
    """Rules on one shelf.

    Args:
        least_bytes: memory with which each model can be served beside the one that is kept always.
        always: the model that is kept always whenever it is on the shelf; `None`: no model is.
    """

    def __init__(
        self,
        models: TinyModels,
        shelf: Shelf,
        dice: random.Random,
        faults: Faults,
        *,
        least_bytes: int,
        always: str | None,
    ) -> None:
        self.models, self.shelf, self.dice, self.faults = models, shelf, dice, faults
        self.counts: Counter[str] = Counter()
        self.always = always
        self.of = {name: name for name in shelf.names}  # name → whose engine it has
        self.loaded: dict[ShelvedModel, str | None] = {}  # whose files its adapter `LOADED` has
        self.in_flight: list[Sent] = []
        self.pins: set[tuple[ShelvedModel, str]] = set()
        self.ids = map(str, itertools.count())
        self.pages = shelves.device_of(shelf).shared.pages
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
            (1, self.load_adapter),
            (0.5, self.resize),
            (0.5, self.take_memory),
            (0.4, self.add),
            (0.4, self.remove),
            (0.6, self.fail),
            (0.3, self.damage),
            (0.2, self.fill_disk),
            (0.2, self.idle),
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
                self.send(name, *self.case(name))
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
            name = self.dice.choice(self.shelf.names)
            self.send(name, *self.case(name), timeout_s)

    def case(self, name: str) -> tuple[list[int], SamplingParams, dict[str, Any]]:
        return case_of(self.of[name], self.dice)

    def send(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        options: dict[str, Any],
        timeout_s: float | None = None,
    ) -> None:
        model = self.shelf.model(name)
        loaded = [self.loaded.get(model)] if options.get("adapter") == LOADED else []
        sent = Sent(model, self.of[name], prompt, params, next(self.ids), options, timeout_s, loaded)
        others: dict[str, Any] = {"timeout_s": timeout_s, "tenant": name[:1], "priority": self.dice.randrange(3)}
        self.start(sent, stream_of(model, prompt, params, sent.request_id, **others, **options))
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
        sent = Sent(
            parent.model,
            parent.of,
            parent.prompt,
            params,
            next(self.ids),
            parent.options,
            loaded=parent.loaded,
            parent=parent,
        )
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
        options = adapter_of(self.of[model.name], self.dice)
        loaded = [self.loaded.get(model)] if options.get("adapter") == LOADED else []
        sent = Sent(model, "", DOCUMENT[:length], GREEDY, f"pin {name}", options, DEADLINE_S, loaded)
        sent.task = asyncio.create_task(engine.pin(name, sent.prompt, timeout_s=DEADLINE_S, **options))
        self.in_flight.append(sent)
        self.pins.add((model, name))

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
        """Wait until models sleep that are kept for a time, and the one that is kept always does not."""
        await self.finish()
        kept = [(model, model.config.keep) for model in map(self.shelf.model, self.shelf.names)]
        ends_at = time.monotonic() + DEADLINE_S
        while any(
            model.state in ("waking", "loading", "awake" if isinstance(keep, float) else "asleep")
            for model, keep in kept
            if keep != "auto"
        ):
            assert time.monotonic() < ends_at, "idle models do not sleep, or one sleeps that is kept always"
            await asyncio.sleep(0.01)
        self.counts["idle"] += 1

    async def resize(self) -> None:
        """Change the memory of the device, as far as it is not in use."""
        target = self.dice.randint(*self.sizes)

        def resize() -> None:
            self.pages.trim()
            with self.pages._lock:
                used_bytes = self.pages.used_bytes + self.pages.idle_bytes + self.pages.charged_bytes
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
        is_kept = of == self.always and self.always not in map(self.of.get, self.shelf.names)
        self.shelf.add(config_of(self.models, name, of, self.dice, "always" if is_kept else None))
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

    async def load_adapter(self) -> None:
        """Load an adapter at run time, in the place of another one of its name, or unload it."""
        names = [name for name in self.shelf.names if self.of[name] == "lora"]
        if not names:
            return
        model, files = self.shelf.model(self.dice.choice(names)), self.dice.choice([None, *ADAPTERS])
        for sent in self.in_flight:
            if sent.model is model and sent.options.get("adapter") == LOADED:
                sent.loaded.append(files)  # which it has if it has not begun
        self.loaded[model] = files
        model.loaded_adapters = []
        if files is not None:
            folder = self.models.adapter("lora", files)
            model.loaded_adapters = [AdapterSource(LOADED, str(folder), files_version(folder))]
        if model.engine is not None:
            with suppress(UnavailableError):  # it has just failed
                await model.engine.set_loaded(model.loaded_adapters)
        self.counts["unloaded an adapter" if files is None else f"loaded an adapter, {model.state}"] += 1

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
            end = await sent.check(self.models, self.faults)
            self.counts[end] += 1
            if end == "equal":
                self.counts.update([sent.of, *(f"adapter {name}" for name in sent.adapters)])
        assert not self.faults.unexplained, self.faults.unexplained
        for model in map(self.shelf.model, self.shelf.names):
            assert model.config.keep != "always" or model.evicted_for in (None, "another"), model.status

    def check_sums(self) -> None:
        """Bytes of the device are those of the models and the workspace, in the step thread."""
        pages, members = self.pages, shelves.members_of(self.shelf)
        models = [self.shelf.model(name) for name in self.shelf.names]
        engines = [model.engine.driver.engine for model in models if model.engine is not None]
        if members is None or any(m.closed.done() for m in members) or set(engines) != {m.engine for m in members}:
            return  # another thread maps, or an engine that has failed is closed next
        weight_bytes = sum(engine.footprint.weight_bytes for engine in engines if not engine.asleep)
        weight_bytes += sum(engine.adapter_bytes for engine in engines)
        workspace_bytes = shelves.device_of(self.shelf)._workspace_bytes
        assert pages.charged_bytes == weight_bytes + workspace_bytes + self.foreign_bytes
        mapped = mappings()
        for engine in engines:
            for arena in shelves.arenas_of(engine):
                assert (arena.contents.data_ptr() in mapped) != engine.asleep
        with ExitStack() as still:  # mappers create and destroy pages meanwhile, which they count in these locks
            memories = [memory for engine in engines for memory in engine.footprint._memories]
            for memory in memories:
                still.enter_context(memory.lock)
            held_bytes = sum(m.pages.num_committed * m.pages.page_bytes + m.anchor_bytes for m in memories)
            assert pages.used_bytes <= held_bytes
        self.counts["added up"] += 1
