"""Departures: calls of this process that leave their replicas, and move to others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

from folio.app.errors import UnavailableError

# Replicas that have left and are remembered, for calls that are placed later.
_MOST_LEFT = 1000


class CallMovedError(UnavailableError):
    """The call has been ended at a replica, to continue at another one."""

    def __init__(self, replica: str) -> None:
        super().__init__(f"{replica} is to be left; send the request again")
        self.replica = replica


@dataclass(eq=False)
class PlacedCall:
    """A call of a model at a replica. `leave` ends it there; called in `loop`, once. `can_leave`: also where it could
    stay."""

    replica: str
    model: str
    leave: Callable[[], None]
    can_leave: bool = True
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_leaving: bool = False


class Departures:
    """The calls of this process, and the replicas as its routers see them. From any thread.

    A replica that stops gets no requests any more, and ends when its last one has ended; with a long stream, after
    minutes. Its calls leave it as soon as another replica with the same model is there. One that has died breaks its
    calls off itself.

    Attributes:
        num_replicas: of the router, those that leave included.
    """

    def __init__(self) -> None:
        self.num_replicas = 0
        self._lock = Lock()
        self._calls: dict[str, dict[PlacedCall, None]] = {}  # by replica; the latest is the last
        self._present: set[str] = set()
        self._left: dict[str, None] = {}  # the latest is the last
        # By replica: of each model the fingerprint of its outputs, and where their blocks are.
        self._outputs: dict[str, Mapping[str, tuple[str, str]]] = {}

    def has_replicas(self) -> bool:
        """Whether a call may be placed now: the router has any replica."""
        return self.num_replicas > 0

    def update(self, before: Collection[str], now: Collection[str]) -> None:
        """Take a router's replicas, before a change and after it."""
        with self._lock:
            gone = [name for name in before if name not in now]
            self._present = (self._present | {*now}) - {*gone}
            for name in self._present:
                self._left.pop(name, None)
            self._left |= dict.fromkeys(gone)
            while len(self._left) > _MOST_LEFT:
                oldest = next(iter(self._left))
                del self._left[oldest]
                self._outputs.pop(oldest, None)
            self._end_calls()

    def note_outputs(self, replica: str, outputs: Mapping[str, tuple[str, str]]) -> None:
        """Take of a replica's models, the first one first, the fingerprint of the outputs, and where others get their
        blocks (`EngineRequest.held_at`); empty while the model is not loaded."""
        with self._lock:
            if self._outputs.get(replica) != outputs:
                self._outputs[replica] = outputs
                self._end_calls()

    def may_continue(self, begun_by: str, model: str, replica: str) -> bool:
        """Whether a replica has the same model as another one, as far as is known. A replica that has not reported yet
        may be of another version."""
        first, second = (self._outputs.get(name) for name in (begun_by, replica))
        if first is None or second is None:
            return first is None
        (one, _), (other, _) = (_of_model(outputs, model) for outputs in (first, second))
        return not (one and other) or one == other

    def held_at(self, replica: str, model: str) -> str:
        """Where others get the blocks of a model's requests at a replica; empty if nowhere."""
        return _of_model(self._outputs.get(replica, {}), model)[1]

    def place(self, call: PlacedCall) -> PlacedCall:
        """Note a call at the replica that has it, until `remove`."""
        with self._lock:
            self._calls.setdefault(call.replica, {})[call] = None
            self._end_calls()
            return call

    def move(self, replica: str, models: Collection[str], num_calls: int) -> None:
        """End some of a model's calls at a replica, the latest ones, which wait there, so that they go on elsewhere.

        Args:
            models: the model's names.
        """
        with self._lock:
            latest = (
                call for call in reversed(self._calls.get(replica, {})) if call.model in models and call.can_leave
            )
            for call in itertools.islice(latest, num_calls):
                self._end(call)

    def remove(self, call: PlacedCall) -> None:
        """Forget a call that has ended."""
        with self._lock:
            of_replica = self._calls[call.replica]
            of_replica.pop(call, None)
            if not of_replica:
                del self._calls[call.replica]

    def __reduce__(self) -> tuple[Callable[[], Departures], tuple[()]]:
        return _of_this_process, ()  # Serve pickles the router's module by value, and the router needs no copy

    def _end_calls(self) -> None:
        for name in self._left.keys() & self._calls.keys():
            for call in self._calls[name]:
                others = (self.may_continue(name, call.model, other) for other in self._present)
                if any(others):
                    self._end(call)

    def _end(self, call: PlacedCall) -> None:
        if not call.is_leaving:
            call.is_leaving = True
            with suppress(RuntimeError):  # its loop has ended
                call.loop.call_soon_threadsafe(call.leave)


def _of_model(outputs: Mapping[str, tuple[str, str]], model: str) -> tuple[str, str]:
    return outputs.get(model or next(iter(outputs), ""), ("", ""))


def _of_this_process() -> Departures:
    return DEPARTURES


# Serve makes a process's routers. What they see reaches the process's calls through this.
DEPARTURES = Departures()
