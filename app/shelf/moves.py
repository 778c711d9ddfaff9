"""Loads and wakes of models in threads of their own, one for each model.

A thread cannot be ended. One that hangs, as on a network mount that does not answer, ends with its process: `check`
finds it, and `HungLoads` keeps the next process from the same files for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from folio.app.errors import ConfigError, ModelError, UnavailableError
from folio.app.shelf.hung_loads import HungLoads
from folio.app.shelf.shelved_model import ShelvedModel

logger = logging.getLogger(__name__)

# A load hangs after this time and that of its bytes at a rate below that of any disk or download; a wake, too, which
# makes weights again whose file is lost.
_LOAD_S, _LOAD_BYTES_PER_S = 300.0, 1e7

Work = Callable[[], Callable[[], None]]


def longest_load_s(weight_bytes: int) -> float:
    """After this time a load of so many bytes hangs."""
    return _LOAD_S + weight_bytes / _LOAD_BYTES_PER_S


@dataclass(slots=True, eq=False)
class _Move:
    """A thread's work for a model.

    Attributes:
        phase, files: for messages.
        num_bytes: of the weights.
        since: when it became the oldest one, by `time.monotonic`.
        hang: why the process ends, once it has taken longer than it may.
    """

    model: ShelvedModel
    phase: str
    files: str
    num_bytes: int
    thread: threading.Thread | None = None
    since: float = 0.0
    hang: str | None = None


class Moves:
    """The work in progress. All methods but `check` and `wait` are called by the shelf's thread.

    Args:
        call: makes the shelf's thread call a function; may be called from any thread.
        attempt: calls what some work returned, for the model.
        fail: notes that some work failed.
        hung: loads that hung in processes that have ended.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], None]], object],
        attempt: Callable[[ShelvedModel, Callable[[], None]], object],
        fail: Callable[[ShelvedModel, BaseException], None],
        hung: HungLoads,
    ) -> None:
        self._call, self._attempt, self._fail, self._hung = call, attempt, fail, hung
        self._moves: dict[ShelvedModel, _Move] = {}  # in the order of their beginnings
        self._oldest: _Move | None = None
        self._checking = threading.Lock()  # so that a hang is noted once

    def __contains__(self, model: ShelvedModel) -> bool:
        return model in self._moves

    def __len__(self) -> int:
        return len(self._moves)

    def check(self) -> str | None:
        """Why the process must end: the oldest load or wake hangs. `None`: it does not. Younger ones may wait for it,
        since transformers loads one at a time. From any thread; does not block."""
        with self._checking:
            return None if (move := self._oldest) is None else move.hang or self._hang_of(move)

    def _hang_of(self, move: _Move) -> str | None:
        model, seconds, most_s = move.model, time.monotonic() - move.since, longest_load_s(move.num_bytes)
        if seconds < most_s:
            return None
        refused_s = self._hung.note(model.config)
        move.hang = (
            f"the {move.phase} of the model {model.name!r} hangs: it has taken {seconds:.0f} s, and at most "
            f"{most_s:.0f} s are allowed; check {move.files}. A new process loads it after {refused_s:.0f} s"
        )
        self._call(partial(model.fail_requests, UnavailableError(move.hang)))  # in the last second of the process
        return move.hang

    def load(self, model: ShelvedModel, work: Work, weight_bytes: int = 0) -> None:
        """Run `work` in a new thread, then the function that it returns in the shelf's thread. It counts as hung when
        it takes longer than a load of so many bytes may."""
        self._begin(model, work, _Move(model, "load", f"the files of {_checkpoint(model)}", weight_bytes))

    def wake(self, model: ShelvedModel, work: Work) -> None:
        """As `load`, for a model that is loaded."""
        files = f"weights_dir and the files of {_checkpoint(model)}"
        self._begin(model, work, _Move(model, "wake", files, model.weight_bytes))

    def wait(self, model: ShelvedModel) -> None:
        """Wait for the model's work, if there is any."""
        move = self._moves.get(model)
        if move is not None and move.thread is not None:
            move.thread.join()

    def _begin(self, model: ShelvedModel, work: Work, move: _Move) -> None:
        def run() -> None:
            try:
                then = work()
            except (ConfigError, ModelError) as error:  # a fault of its files: no traceback
                logger.error("the model %r cannot be loaded or woken: %s", model.name, error)
                then = partial(self._fail, model, error)
            except BaseException as error:
                logger.exception("the model %r cannot be loaded or woken", model.name)
                then = partial(self._fail, model, error)

            def end() -> None:
                self._set(model, None)
                self._attempt(model, then)

            self._call(end)

        move.thread = threading.Thread(target=run, name=f"folio-move-{model.name}", daemon=True)
        self._set(model, move)
        try:
            move.thread.start()
        except RuntimeError as failure:  # the system has no thread left
            logger.exception("the model %r cannot be loaded or woken", model.name)
            self._set(model, None)
            self._fail(model, failure)

    def _set(self, model: ShelvedModel, move: _Move | None) -> None:
        if move is None:
            del self._moves[model]
        else:
            self._moves[model] = move
        oldest = next(iter(self._moves.values()), None)
        if oldest is not None and oldest is not self._oldest:
            oldest.since = time.monotonic()
        self._oldest = oldest  # after its `since`, because `check` reads both from another thread


def _checkpoint(model: ShelvedModel) -> str:
    return repr(model.config.engine.model)
