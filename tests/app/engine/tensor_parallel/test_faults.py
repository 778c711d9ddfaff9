"""Ranks that die, hang or cannot start: an error within the deadline, and all resources freed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.engine import AsyncEngine, EngineConfig, SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.ranks import processes as limits
from folio.app.engine.ranks import worker
from folio.app.engine.ranks.processes import ChildProcesses, RankSpec
from folio.app.engine.tensor_parallel.shared_memory import MemoryAddress
from folio.app.errors import ConfigError, ModelError, UnavailableError
from folio.vmem import KVMemory
from tests.app.engine.engines import broken_layer
from tests.app.engine.runs import run
from tests.app.engine.tensor_parallel.thread_ranks import ThreadRanks, thread_ranks
from tests.conftest import VOCAB_SIZE, MakeCheckpoint
from tests.processes import until

pytestmark = pytest.mark.processes

STEP_TIMEOUT_S = 10.0
DEADLINE_S = 60.0
GREEDY = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)


class Children(ChildProcesses):
    """Child processes with access for tests."""

    latest: Children

    def __init__(self, num_peers: int) -> None:
        super().__init__(num_peers)
        Children.latest = self

    def signal(self, number: signal.Signals) -> None:
        """To rank 1, unless it has ended."""
        self._children[0].send_signal(number)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_files() -> int:
    """Number of files that this process shares with its ranks, and of pidfds."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that this list is read from
            links.append(os.readlink(link))
    return sum("folio-ranks" in link or "pidfd" in link for link in links)


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        **({"kv_memory_bytes": 16 << 20, "max_model_len": 200} | settings),
    )


@pytest.fixture
def folder(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("llama")


@pytest.mark.daily(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_ends_requests_with_an_error(number: signal.Signals, folder: Path) -> None:
    """In or between steps: waiting requests get an error within the deadline, and memory is consistent."""

    async def ask(engine: AsyncEngine, seed: int) -> str:
        prompt = random.Random(seed).choices(range(1, VOCAB_SIZE - 1), k=20)
        try:
            async for _ in engine.generate(prompt, replace(GREEDY, max_tokens=150)):
                begun.set()
        except UnavailableError:
            return "unavailable"
        return "answered"

    async def ask_and_lose() -> list[str]:
        requests = [asyncio.create_task(ask(engine, seed)) for seed in range(4)]
        await begun.wait()
        Children.latest.signal(number)
        return list(await asyncio.wait_for(asyncio.gather(*requests), DEADLINE_S))

    engine = AsyncEngine(config(folder, step_timeout_s=STEP_TIMEOUT_S), Children)
    begun = asyncio.Event()
    assert asyncio.run(ask_and_lose()) == ["unavailable"] * 4
    assert not engine.healthy
    with pytest.raises(UnavailableError):
        engine.report()
    assert asyncio.run(ask(engine, 0)) == "unavailable"
    engine.close()
    engine.driver.engine.check_integrity()
    assert not any(map(is_there, Children.latest.pids))


@pytest.mark.daily(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_idle_engine_notices_too(number: signal.Signals, folder: Path) -> None:
    engine = AsyncEngine(config(folder, step_timeout_s=STEP_TIMEOUT_S), Children)
    Children.latest.signal(number)
    until(lambda: not engine.healthy, DEADLINE_S)
    engine.close()
    assert not any(map(is_there, Children.latest.pids))


@pytest.mark.thirds
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("after_s", [0.0, 2.0, 3.0])
def test_a_peer_lost_while_starting(
    number: signal.Signals, after_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails, or succeeds before the loss; all resources are freed."""

    class Lost(Children):
        def run(self, specs: Any) -> None:
            threading.Timer(after_s, self.signal, (number,)).start()
            super().run(specs)

    before, start = shared_files(), time.monotonic()
    monkeypatch.setattr(limits, "START_TIMEOUT_S", 8.0)
    monkeypatch.setattr(limits, "JOIN_TIMEOUT_S", 5.0)
    with suppress(UnavailableError, ModelError):
        Engine(config(folder, step_timeout_s=STEP_TIMEOUT_S), Lost).close()
    assert time.monotonic() - start < 60
    assert not any(map(is_there, Children.latest.pids))
    assert shared_files() == before


def test_a_peer_that_cannot_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ModelError("this shard is broken")

    monkeypatch.setattr(worker, "load_model", broken)
    with pytest.raises(ModelError, match="rank 1: this shard is broken"):
        Engine(config(folder), thread_ranks)


def test_peers_are_killed_before_the_shared_file_is_closed(folder: Path) -> None:
    """Else a late peer opens another file, which has the number by then."""
    kills = []

    class Broken(ThreadRanks):
        def run(self, specs: Sequence[RankSpec]) -> None:
            assert isinstance(specs[0].link, MemoryAddress)
            self.link = specs[0].link
            raise RuntimeError("for a test")

        def kill(self, peer: int) -> None:
            kills.append(os.readlink(f"/proc/self/fd/{self.link.fd}"))

    before = shared_files()
    with pytest.raises(UnavailableError, match="for a test"):
        Engine(config(folder), Broken)
    assert kills
    assert all("folio-ranks" in name for name in kills)
    assert shared_files() == before


def test_a_peer_lost_before_it_is_asked_to_join(folder: Path) -> None:
    """Rank 0 waited for it at the rendezvous, for a minute."""

    class Lost(ThreadRanks):
        def run(self, specs: Sequence[RankSpec]) -> None:
            super().run(specs)
            until(lambda: all(worker.stopping.is_set() for worker in self.workers) and self.workers, DEADLINE_S)

        def is_alive(self, peer: int) -> bool:
            return not self.workers

    start = time.monotonic()
    with pytest.raises(UnavailableError, match="rank 1 died"):
        Engine(config(folder), Lost)
    assert time.monotonic() - start < limits.JOIN_TIMEOUT_S / 2


def test_ranks_that_cannot_be_started(folder: Path) -> None:
    def fail(_: int) -> Any:
        raise ConfigError("there is no room")

    with pytest.raises(ConfigError, match="there is no room"):
        Engine(config(folder), fail)


def test_an_interrupted_step_ends_the_ranks(folder: Path) -> None:
    """The next step's collectives met those of the step that Ctrl-C had interrupted."""
    engine = Engine(config(folder), thread_ranks)
    engine.submit("0", [1, 2, 3], GREEDY)
    with broken_layer(engine, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):  # the peers go on
        engine.step()
    with pytest.raises(UnavailableError):
        engine.step()
    engine.check_integrity()
    engine.close()


def test_two_memories_call_at_once(folder: Path) -> None:
    """The mapper of one took the answers to the self-test's memory for its own."""
    engine = Engine(config(folder, kv_memory_bytes=64 << 20, kv_memory_floor_bytes=64 << 20), thread_ranks)
    run(engine, [[1, 2, 3]], GREEDY)
    until(lambda: engine.report().physical_bytes >= 60 << 20, DEADLINE_S)
    engine.check_integrity()
    engine.close()


def test_memory_goes_on_alone_when_peers_are_lost(folder: Path) -> None:
    """Sequences can be freed and memory be closed after the ranks have ended."""
    engine = Engine(config(folder), thread_ranks)
    engine.submit("0", [1, 2, 3], GREEDY)
    for _ in range(3):
        engine.step()
    peers = engine.executor.ranks
    assert peers is not None
    peers.fail("for a test")
    with pytest.raises(UnavailableError, match="for a test"):
        engine.step()
    engine.check_integrity()
    engine.cancel("0")
    engine.check_integrity()
    memory: KVMemory = engine.memory
    sequence = memory.create_sequence()
    memory.append(sequence, 100)
    memory.free(sequence)
    engine.close()


def test_defaults_and_conversion(checkpoint: MakeCheckpoint) -> None:
    """The checkpoint's own dtype is loaded as such, and converted when another is asked for."""
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        engine = Engine(config(checkpoint("qwen2"), dtype=dtype), thread_ranks)
        assert engine.model.dtype == expected
        assert {p.dtype for p in engine.model.module.parameters()} == {expected}
        run(engine, [[1, 2, 3]], replace(GREEDY, max_tokens=2))
        engine.close()
