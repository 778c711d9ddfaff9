"""Loads and wakes of models in threads of their own, one for each model. A load that hangs is given up."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.engine.shelf.shelved_model import ShelvedModel
from app.errors import ConfigError, ModelError, UnavailableError

logger = logging.getLogger(__name__)

# A load is given up after this time and that of its bytes at a rate below that of any disk or download.
_LOAD_S, _LOAD_BYTES_PER_S = 300.0, 1e7

Work = Callable[[], Callable[[], None]]


def longest_load_s(weight_bytes: int) -> float:
    """After this time a load of so many bytes hangs."""
    return _LOAD_S + weight_bytes / _LOAD_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class _Move:
    thread: threading.Thread
    gives_up_at: float


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
        self._hanging: set[ShelvedModel] = set()  # whose loads were given up: a thread cannot be ended

    def __contains__(self, model: ShelvedModel) -> bool:
        return model in self._moves

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def hang(self) -> bool:
        """Whether loads were given up and have not returned."""
        return bool(self._hanging)

    def hangs(self, model: ShelvedModel) -> bool:
        """Whether a load of the model was given up and has not returned. It is loaded by that one or not at all."""
        return model in self._hanging

    def load(self, model: ShelvedModel, work: Work, weight_bytes: int = 0) -> None:
        """As `begin`, for work that reads so many bytes of files which may not answer."""
        self.begin(model, work, longest_load_s(weight_bytes))

    def begin(self, model: ShelvedModel, work: Work, most_s: float = math.inf) -> None:
        """Do some work in a thread of its own, and then what it returns in this one.

        Args:
            most_s: after which it is given up.
        """

        def run() -> None:
            try:
                then = work()
            except (ConfigError, ModelError) as error:  # of its files: nothing of ours has failed
                logger.error("the model %r cannot be loaded or woken: %s", model.name, error)
                then = partial(self._fail, model, error)
            except BaseException as error:
                logger.exception("the model %r cannot be loaded or woken", model.name)
                then = partial(self._fail, model, error)

            def end() -> None:
                if model in self._hanging:
                    self._hanging.remove(model)
                else:
                    del self._moves[model]
                self._attempt(model, then)

            self._call(end)

        thread = threading.Thread(target=run, name=f"folio-move-{model.name}", daemon=True)
        self._moves[model] = _Move(thread, time.monotonic() + most_s)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            logger.exception("the model %r cannot be loaded or woken", model.name)
            del self._moves[model]
            self._fail(model, error)

    def give_up(self, now: float) -> None:
        """Fail models whose loads hang, as on a file system that does not answer."""
        for model in [model for model, move in self._moves.items() if now > move.gives_up_at]:
            del self._moves[model]
            self._hanging.add(model)
            error = self.error_of(model)
            logger.error("the model %r is given up: %s", model.name, error)
            self._fail(model, error)

    def error_of(self, model: ShelvedModel) -> UnavailableError:
        """Of a load that hangs."""
        return UnavailableError(f"its load hangs; do the files of {model.config.engine.model!r} answer?")

    def wait(self, model: ShelvedModel, timeout_s: float) -> bool:
        """Wait for the model's work; returns whether there was any, which may not have ended in this time."""
        move = self._moves.get(model)
        if move is not None:
            move.thread.join(timeout_s)
        return move is not None
