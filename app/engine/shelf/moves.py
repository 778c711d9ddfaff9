"""Loads and wakes of models in threads of their own, one for each model. One that hangs is given up.

A thread cannot be ended. Whatever a thread that hangs has is its own until it returns, its part of the device's memory
included: no plan counts on it, and nothing is unmapped that it may still write to (`WeightArena`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from folio.app.engine.shelf.shelved_model import ShelvedModel
from folio.app.errors import ConfigError, ModelError, UnavailableError

logger = logging.getLogger(__name__)

# A load is given up after this time and that of its bytes at a rate below that of any disk or download; a wake, too,
# which makes weights again whose file is lost.
_LOAD_S, _LOAD_BYTES_PER_S = 300.0, 1e7
# So long a model that has been removed waits for either. Callers wait for the removal.
_REMOVED_S = 30.0

Work = Callable[[], Callable[[], None]]


def longest_load_s(weight_bytes: int) -> float:
    """After this time a load of so many bytes hangs."""
    return _LOAD_S + weight_bytes / _LOAD_BYTES_PER_S


@dataclass(slots=True, eq=False)
class _Move:
    """A thread's work for a model.

    Attributes:
        num_bytes: of the device's memory that it may take.
        error: for requests, once it is given up.
    """

    num_bytes: int
    error: UnavailableError
    gives_up_at: float
    thread: threading.Thread


class Moves:
    """The work in progress. All methods but `wait` are called by the shelf's thread.

    Args:
        call: has a function called by the shelf's thread, from any thread.
        attempt: calls what some work returned, for the model.
        fail: notes that some work failed.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], None]], object],
        attempt: Callable[[ShelvedModel, Callable[[], None]], object],
        fail: Callable[[ShelvedModel, BaseException], None],
    ) -> None:
        self._call, self._attempt, self._fail = call, attempt, fail
        self._moves: dict[ShelvedModel, _Move] = {}
        self._hanging: dict[ShelvedModel, _Move] = {}  # given up, and not returned

    def __contains__(self, model: ShelvedModel) -> bool:
        return model in self._moves

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def hang(self) -> bool:
        """Whether loads or wakes were given up and have not returned."""
        return bool(self._hanging)

    @property
    def hanging_bytes(self) -> int:
        """Memory of the device that these may have, or take once they go on."""
        return sum(move.num_bytes for move in self._hanging.values())

    def hanging_error(self, model: ShelvedModel) -> UnavailableError | None:
        """Of a model whose load or wake was given up and has not returned. It is loaded once that has."""
        move = self._hanging.get(model)
        return None if move is None else move.error

    def load(self, model: ShelvedModel, work: Work, weight_bytes: int = 0) -> None:
        """Do some work in a thread of its own, and then what it returns in this one. It is given up if it takes longer
        than a load of so many bytes may."""
        self._begin(model, work, weight_bytes, f"its load hangs; do the files of {_checkpoint(model)} answer?")

    def wake(self, model: ShelvedModel, work: Work) -> None:
        """As `load`, for a model that is loaded."""
        error = f"its wake hangs; do weights_dir and the files of {_checkpoint(model)} answer?"
        self._begin(model, work, model.weight_bytes, error)

    def _begin(self, model: ShelvedModel, work: Work, num_bytes: int, error: str) -> None:
        def run() -> None:
            failed = True
            try:
                then = work()
                failed = False
            except (ConfigError, ModelError) as error:  # of its files: nothing of ours has failed
                logger.error("the model %r cannot be loaded or woken: %s", model.name, error)
                then = partial(self._fail, model, error)
            except BaseException as error:
                logger.exception("the model %r cannot be loaded or woken", model.name)
                then = partial(self._fail, model, error)

            def end() -> None:
                if self._moves.get(model) is move:
                    del self._moves[model]
                else:
                    del self._hanging[model]
                    logger.warning("the load or wake of the model %r, which was given up, has returned", model.name)
                    if failed:  # as was noted when it was given up
                        return
                self._attempt(model, then)

            self._call(end)

        thread = threading.Thread(target=run, name=f"folio-move-{model.name}", daemon=True)
        gives_up_at = time.monotonic() + longest_load_s(num_bytes)
        move = self._moves[model] = _Move(num_bytes, UnavailableError(error), gives_up_at, thread)
        try:
            thread.start()
        except RuntimeError as failure:  # the system has no thread left
            logger.exception("the model %r cannot be loaded or woken", model.name)
            del self._moves[model]
            self._fail(model, failure)

    def give_up(self, now: float, models: Collection[ShelvedModel]) -> None:
        """Fail models whose loads or wakes hang, as on a file system that does not answer.

        Args:
            now: by `time.monotonic`.
            models: of the shelf; others have been removed.
        """
        for model, move in list(self._moves.items()):
            if model not in models:
                move.gives_up_at = min(move.gives_up_at, now + _REMOVED_S)
            if now > move.gives_up_at:
                self._hanging[model] = self._moves.pop(model)
                logger.error(
                    "the model %r is given up: %s Up to %d bytes of memory are its thread's until it returns",
                    model.name,
                    move.error,
                    move.num_bytes,
                )
                self._fail(model, move.error)

    def wait(self, model: ShelvedModel, timeout_s: float) -> bool:
        """Wait for the model's work; returns whether there was any, which may not have ended in this time."""
        move = self._moves.get(model)
        if move is not None:
            move.thread.join(timeout_s)
        return move is not None


def _checkpoint(model: ShelvedModel) -> str:
    return repr(model.config.engine.model)
