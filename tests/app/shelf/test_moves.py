"""Loads that hang: which one is blamed, and for how long its model is refused by the next processes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ModelConfig
from folio.app.shelf import moves as moves_module
from folio.app.shelf.hung_loads import HungLoads
from folio.app.shelf.moves import Moves
from folio.app.shelf.shelved_model import ShelvedModel


def shelved(name: str) -> ShelvedModel:
    return ShelvedModel(ModelConfig(name=name, engine=EngineConfig(model=f"/models/{name}")), lambda: None)


def test_only_the_oldest_load_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may wait for it, since transformers loads one model at a time; each then has its whole time."""
    clock, calls, hung = [1000.0], list[Callable[[], None]](), HungLoads(tmp_path)
    monkeypatch.setattr(moves_module.time, "monotonic", lambda: clock[0])
    moves = Moves(calls.append, lambda _, then: then(), lambda *_: None, hung)
    large, small, end = shelved("large"), shelved("small"), threading.Event()

    def work() -> Callable[[], None]:
        assert end.wait(60)
        return lambda: None

    moves.load(large, work, 4 * 10**9)  # 700 s
    clock[0] += 100
    moves.load(small, threading.Event().wait, 0)  # type: ignore[arg-type]
    clock[0] = 1699.0
    assert moves.check() is None
    end.set()
    moves.wait(large)
    calls.pop()()
    assert large not in moves
    clock[0] += 299
    assert moves.check() is None
    clock[0] += 2
    with ThreadPoolExecutor(8) as threads:  # health checks and statuses ask in different threads
        [reason] = set(threads.map(lambda _: moves.check(), range(8)))
    assert reason == (
        "the load of the model 'small' hangs: it has taken 301 s, and at most 300 s are allowed; check the files of "
        "'/models/small'. A new process loads it after 300 s"
    )
    assert moves.check() is reason
    assert (hung.refused_s(large.config), hung.refused_s(small.config)) == (0, pytest.approx(300, abs=5))
    [fail] = calls
    fail()
    assert (small.state, small.error) == ("failed", reason)


@pytest.mark.parametrize(
    ("hangs", "later_s", "left_s"),
    [(0, 0, 0), (1, 0, 300), (1, 100, 200), (1, 301, 0), (2, 0, 600), (9, 0, 3600), (1, -10_000, 300)],
)
def test_a_model_is_refused_for_longer_after_each_hang(
    tmp_path: Path, hangs: int, later_s: float, left_s: float
) -> None:
    """The last case: the clock has been set."""
    config, other = shelved("mine").config, shelved("other").config
    for _ in range(hangs):
        noted_s = HungLoads(tmp_path).note(config)
        assert HungLoads(tmp_path).refused_s(config) == pytest.approx(noted_s, abs=5)
    for path in tmp_path.iterdir():
        os.utime(path, (0, time.time() - later_s))
    assert HungLoads(tmp_path).refused_s(config) == pytest.approx(left_s, abs=5)
    assert HungLoads(tmp_path).refused_s(other) == 0
    HungLoads(tmp_path).forget(config)
    assert HungLoads(tmp_path).refused_s(config) == 0
    assert list(tmp_path.iterdir()) == []


def test_another_process_removes_the_note_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the plan failed, and with it all models of the process."""
    config, read = shelved("m").config, Path.read_text
    HungLoads(tmp_path).note(config)

    def read_and_remove(path: Path) -> str:
        text = read(path)
        path.unlink()
        return text

    monkeypatch.setattr(Path, "read_text", read_and_remove)
    assert HungLoads(tmp_path).refused_s(config) == pytest.approx(300, abs=5)
    assert HungLoads(tmp_path).refused_s(config) == 0
    HungLoads(tmp_path).forget(config)


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """The folder is everybody's, and the name can be guessed."""
    config, target = shelved("m").config, tmp_path / "target"
    target.write_text("mine")
    HungLoads(tmp_path).note(config)
    [note] = (path for path in tmp_path.iterdir() if path != target)
    note.unlink()
    note.symlink_to(target)
    assert HungLoads(tmp_path).note(config) == 0
    assert target.read_text() == "mine"


def test_a_hang_that_cannot_be_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    hung = HungLoads(tmp_path / "none")
    assert (hung.note(shelved("m").config), hung.refused_s(shelved("m").config)) == (0, 0)
    assert "that loading 'm' hung (No such file or directory)" in caplog.text
