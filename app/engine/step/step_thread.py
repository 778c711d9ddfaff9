"""Step thread: one thread computes the steps of one or several engines on a device, and gives them turns.

The order is deficit round robin (Shreedhar and Varghese, 1995) in seconds: in each round an engine may compute for its
share of a quantum, and the excess of a long step is deducted from its next rounds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from folio.app.errors import UnavailableError

# Quantum: seconds per round of an engine with share 1. About one step, so that the steps of several engines alternate.
_QUANTUM_S = 0.02
_ENDED = "the engine has stopped; send the request again"

T = TypeVar("T")


class Sharer(Protocol):
    """A member of a round.

    Attributes:
        share: its part of the time, relative to other members; above 0.
    """

    share: float


S = TypeVar("S", bound=Sharer)


class Member(Sharer, Protocol):
    """An engine in the thread. All methods are called by the thread."""

    def take_commands(self) -> bool:
        """Execute the commands since the last call; false once the member has stopped and freed its memory."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether there is a step to compute now."""
        ...

    def step(self) -> None:
        """Compute a step. Never raises: a member whose steps fail stops."""
        ...


class StepThread:
    """Executes members' commands between steps, and computes their steps in turns.

    Args:
        control: called between two steps; returns the seconds until it must be called again although no member has
            work, or `None`.

    Attributes:
        progress_at: when the thread last looked for work or ended a step, by `time.monotonic`; during a call that may
            take long, the end of that time.
        device_lost: whether the device has failed and no member's step will succeed any more; set by members.
    """

    def __init__(self, control: Callable[[], float | None] | None = None) -> None:
        self._control = control
        self._members: list[Member] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any], float]] = []
        self._guard = threading.Lock()  # protects the lists, which other threads extend
        self._event = threading.Event()
        self._closing = self._ended = False
        self._turns = DeficitRoundRobin[Member]()
        self.progress_at = time.monotonic()
        self.device_lost = False
        self._thread = threading.Thread(target=self._run, name="folio-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[[], T], most_s: float = 0.0) -> Future[T]:
        """Call a function in the thread, between two steps. The future fails once the thread has ended.

        Args:
            most_s: the thread counts as making progress for this long, whether or not the call has returned.
        """
        outcome: Future[T] = Future()
        with self._guard:
            if self._ended:
                outcome.set_exception(UnavailableError(_ENDED))
                return outcome
            self._calls.append((function, outcome, most_s))
        self.wake()
        return outcome

    def add(self, member: Member) -> None:
        """Add a member; the thread computes its steps until it stops."""
        with self._guard:
            self._members.append(member)
        self.wake()

    def wake(self) -> None:
        """Let the thread look for commands. From any thread."""
        self._event.set()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread once all members have stopped; wait for it at most `timeout_s`."""
        self._closing = True
        self.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:  # a caller must not wait for a call that is never made
            with self._guard:
                self._ended, calls, self._calls = True, self._calls, []
            for _, outcome, _ in calls:
                if outcome.set_running_or_notify_cancel():
                    outcome.set_exception(UnavailableError(_ENDED))

    def _run_until_closed(self) -> None:
        while True:
            self.progress_at = time.monotonic()
            if self._calls:
                self._run_calls()
            members = [member for member in tuple(self._members) if self._keeps(member)]
            wait_s = None if self._control is None else self._control()
            ready = [member for member in members if member.is_ready]
            if ready:
                member = self._turns.next(ready)
                start = time.perf_counter()
                member.step()
                if len(members) > 1:
                    self._turns.charge(member, time.perf_counter() - start)
            elif self._closing and self._ends():
                return
            else:
                self._event.wait(wait_s)
                self._event.clear()

    def _ends(self) -> bool:
        with self._guard:
            self._ended = not self._members and not self._calls
            return self._ended

    def _keeps(self, member: Member) -> bool:
        if member.take_commands():
            return True
        with self._guard:
            self._members.remove(member)
        self._turns.forget(member)
        return False

    def _run_calls(self) -> None:
        with self._guard:
            calls, self._calls = self._calls, []
        for function, outcome, most_s in calls:
            self.progress_at = time.monotonic() + most_s
            run_call(function, outcome)
        self.progress_at = time.monotonic()


class DeficitRoundRobin(Generic[S]):
    """Deficit round robin over device time. A member with nothing to compute loses its deficit, as in the original."""

    def __init__(self) -> None:
        self._deficits: dict[S, float] = {}  # in the order of the round
        self._current: S | None = None

    def next(self, ready: Sequence[S]) -> S:
        """The member that computes next, of at least one that is ready."""
        if len(ready) == 1:
            self._deficits.clear()  # while it is alone, its time costs no other member
            self._current = ready[0]
            return ready[0]
        waiting = set(ready)
        for member in [m for m in self._deficits if m not in waiting]:
            del self._deficits[member]
        for member in ready:
            self._deficits.setdefault(member, 0.0)
        current = self._current
        if current is not None and self._deficits.get(current, 0.0) > 0:
            return current
        order = list(self._deficits)
        if current in self._deficits:
            at = order.index(current) + 1
            order = order[at:] + order[:at]
        # Skip whole rounds in which no member could begin.
        rounds = min(max(math.ceil(-self._deficits[m] / (_QUANTUM_S * m.share)), 0) for m in order)
        if rounds > 1:
            for member in order:
                self._deficits[member] += (rounds - 1) * _QUANTUM_S * member.share
        while True:
            for member in order:
                self._deficits[member] += _QUANTUM_S * member.share
                if self._deficits[member] > 0:
                    self._current = member
                    return member

    def charge(self, member: S, seconds: float) -> None:
        """Deduct the seconds for which a member has computed."""
        if member in self._deficits:
            self._deficits[member] -= seconds

    def forget(self, member: S) -> None:
        self._deficits.pop(member, None)
        if self._current is member:
            self._current = None


def run_call(function: Callable[[], T], outcome: Future[T]) -> None:
    """Call a function for a caller that may have stopped waiting."""
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        outcome.set_exception(error)
