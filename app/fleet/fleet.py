"""The replicas as one router sees them: their last reports, and what this router has sent them since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from app.engine.report import ReplicaReport, StepTimes
from app.fleet.cost import LOAD_FIELDS, Array, LoadArrays
from app.fleet.directory import PrefixDirectory

# Until the first replica has computed something. Only which costs are greater matters then.
_FIRST_GUESS = StepTimes(fixed_s=0.01, token_s=1e-4)
# A report takes this long at least from the replica through Serve's controller to a router. What one takes more than
# the quickest is late; later than the second bound is none, but one of the clocks stood still meanwhile.
_LEAST_LAG_S, _MOST_LATE_S = 0.1, 2.0
# When expected and actual cached tokens of a replica's requests differ by this share between two reports, and by more
# than a step's tokens, what was expected there is forgotten.
_DRIFT_SHARE = 0.3
# Seconds a second by which two clocks may run apart.
_CLOCK_DRIFT = 1e-3
# What this router sent so long ago counts for a third in `assigned_share`.
ASSIGNED_MEMORY_S = 60.0
_QUEUED_TOKENS, _QUEUED_S, _NUM_REQUESTS = map(LOAD_FIELDS.index, ("queued_tokens", "queued_s", "num_requests"))


# Sets of replicas that a policy asks about: all, those without an exception or two, and each of them.
_MOST_ASKED = 1000

SlotArray = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as a router sees it.

    Attributes:
        num_tokens: of the prompt.
        keys: of its whole units, from the beginning on (`vmem.key_of`); none when units are not known yet.
        session: what the client says belongs together; a hint.
    """

    request_id: str
    num_tokens: int
    keys: Sequence[bytes] = ()
    session: str | None = None


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request on its way to a replica, or there. `keys`: of prefixes that are expected to be cached by it."""

    keys: Sequence[bytes]
    replica: _Replica
    at: float
    new_tokens: int
    seconds: float
    ended_at: float | None = None


@dataclass(slots=True, eq=False)
class _Replica:
    slot: int
    report: ReplicaReport | None = None
    reported_at: float = -math.inf  # on the replica's clock
    heard_at: float = 0.0
    least_lag_s: float = math.inf
    sent: dict[SentRequest, None] = field(default_factory=dict)  # in order: sums of floats must not depend on addresses
    num_in_flight: int = 0
    num_resyncs: int = 0
    is_gone: bool = False


class Fleet:
    """Books of one router. Times are seconds of its monotonic clock. One thread at a time.

    A replica's clock is another one: when a report was made, on the router's clock, is known from when it was heard,
    and from how much longer it took than the quickest of that replica's reports.

    A request counts as sent from `sent` until a report made after it says what it did to the replica's load, and its
    prefixes count as cached there until a report made after `ended` says what is left of them.

    Args:
        stale_after_s: a report this old is none.
    """

    def __init__(self, *, stale_after_s: float = 5.0) -> None:
        self._stale_after_s = stale_after_s
        self._replicas: dict[str, _Replica] = {}
        self._asked: dict[tuple[str, ...], tuple[SlotArray, int]] = {}
        self._directory = PrefixDirectory()
        self._free_slots: list[int] = []
        self._loads = np.zeros((len(LOAD_FIELDS), 0))
        self._assigned = np.zeros(0)
        self._assigned_at = 0.0
        self._step: StepTimes | None = _FIRST_GUESS  # None: to be taken from the reports
        self.unit_tokens: int | None = None

    # ---- what happens ----

    def update(self, replica_ids: Iterable[str]) -> None:
        """These are the replicas now."""
        wanted = set(replica_ids)
        self._asked.clear()
        for replica_id in self._replicas.keys() - wanted:
            replica = self._replicas.pop(replica_id)
            replica.is_gone = True
            self._directory.remove_replica(replica.slot)
            self._free_slots.append(replica.slot)
        for replica_id in sorted(wanted - self._replicas.keys()):
            if not self._free_slots:
                more = max(8, len(self._assigned))
                self._free_slots = list(range(len(self._assigned), len(self._assigned) + more))[::-1]
                self._loads = np.concatenate([self._loads, np.zeros((len(LOAD_FIELDS), more))], axis=1)
                self._assigned = np.concatenate([self._assigned, np.zeros(more)])
            slot = self._free_slots.pop()
            self._loads[:, slot] = 0
            self._assigned[slot] = 0
            self._replicas[replica_id] = _Replica(slot)

    def apply_report(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """A replica's report has arrived, perhaps once more."""
        replica = self._replicas.get(replica_id)
        if replica is None or report.made_at <= replica.reported_at:
            return
        lag_s = now - report.made_at  # and by how much the clocks differ
        least_s = replica.least_lag_s + _CLOCK_DRIFT * (now - replica.heard_at)
        replica.least_lag_s = lag_s if lag_s - least_s > _MOST_LATE_S else min(lag_s, least_s)
        replica.reported_at, replica.heard_at = report.made_at, now
        report = replace(report, made_at=report.made_at + replica.least_lag_s - _LEAST_LAG_S)
        last, replica.report = replica.report, report
        self.unit_tokens = report.unit_tokens
        self._step = None
        self._directory.apply_keys(replica.slot, report.keys, report.changes, report.stride, report.keys_version)
        resync = last is not None and self._has_drifted(last, report)
        replica.num_resyncs += resync
        for sent in list(replica.sent):
            if sent.ended_at is not None and (resync or sent.ended_at <= report.made_at):
                self._forget(sent)
        if resync:  # what is still under way there may not be cached either
            for sent in replica.sent:
                self._directory.undo_expected(replica.slot, sent.keys)
                sent.keys = ()
        self._enter(replica)

    def note_sent(self, request: RoutedRequest, replica_id: str, cached_tokens: int, now: float) -> SentRequest | None:
        """A request was sent to a replica that is expected to have so much of it cached. `ended` or `withdraw` must
        follow. `None`: the replica is gone."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        seconds = 0.0
        if replica.report is not None:
            new = request.num_tokens - cached_tokens
            seconds = self._median_step().prefill_s(new, cached_tokens, replica.report.step_tokens)
        noted = self._directory.add_expected(replica.slot, request.keys)
        sent = SentRequest(noted, replica, now, request.num_tokens - cached_tokens, seconds)
        replica.sent[sent] = None
        replica.num_in_flight += 1
        self._decay(now)
        self._assigned[replica.slot] += seconds / ASSIGNED_MEMORY_S
        self._add(replica.slot, sent)
        return sent

    def note_ended(self, sent: SentRequest, now: float) -> None:
        """A request is over."""
        replica = sent.replica
        if replica.is_gone:
            return
        replica.num_in_flight -= 1
        sent.ended_at = now
        self._loads[_NUM_REQUESTS, replica.slot] -= 1
        if replica.report is None or now - replica.report.made_at >= self._stale_after_s:
            self._forget(sent)  # it may be long until a report says what has become of it

    def withdraw(self, sent: SentRequest, now: float) -> None:
        """A replica did not take a request after all."""
        replica = sent.replica
        if replica.is_gone:
            return
        replica.num_in_flight -= 1
        self._decay(now)
        forgotten = math.exp(-max(now - sent.at, 0.0) / ASSIGNED_MEMORY_S)
        self._assigned[replica.slot] = max(
            self._assigned[replica.slot] - sent.seconds / ASSIGNED_MEMORY_S * forgotten, 0.0
        )
        self._forget(sent)
        self._enter(replica)

    # ---- what is known ----

    @property
    def num_known_prefixes(self) -> int:
        return len(self._directory)

    @property
    def num_resyncs(self) -> int:
        """How often what replicas had cached was too far from what was expected."""
        return sum(replica.num_resyncs for replica in self._replicas.values())

    def num_requests(self, replica_ids: Sequence[str], now: float) -> list[float]:
        """Unfinished requests at each: the reported ones and what was sent since. When one of them has not reported
        lately, this router's own at all of them: others cannot be compared."""
        if len(self.fresh(replica_ids, now)) == len(replica_ids):
            return [float(self._loads[_NUM_REQUESTS, self._replicas[r].slot]) for r in replica_ids]
        return [float(self._replicas[r].num_in_flight) for r in replica_ids]

    def fresh(self, replica_ids: Iterable[str], now: float) -> list[str]:
        """Those that have reported lately."""
        known, oldest = self._replicas.get, now - self._stale_after_s
        return [
            r
            for r in replica_ids
            if (replica := known(r)) is not None and replica.report is not None and replica.report.made_at > oldest
        ]

    def cached_tokens(self, request: RoutedRequest, replica_ids: Sequence[str]) -> Array:
        """Of the request's prompt, tokens that each replica is expected to have cached: never all of them, because a
        prompt's last token is computed in any case."""
        if not request.keys or self.unit_tokens is None:
            return np.zeros(len(replica_ids))
        slots, asked = self._slots(replica_ids)
        tokens, most = np.zeros(len(self._assigned)), max(request.num_tokens - 1, 0) // self.unit_tokens
        for units, having in self._directory.match(request.keys, asked):
            tokens[_set_bits(having, len(tokens))] = min(units, most) * self.unit_tokens
        return tokens[slots]

    def loads(self, replica_ids: Sequence[str], now: float) -> LoadArrays:
        """Their loads, in this order.

        Step times are the median of all replicas, which run the same model on the same kind of device: what one of them
        has measured in its few last steps differs by chance more than it does. One that is slow has a longer queue.
        """
        slots, _ = self._slots(replica_ids)
        self._decay(now)
        columns = self._loads[:, slots]
        step = self._median_step()
        columns[0], columns[1], columns[2] = step.fixed_s, step.token_s, step.attended_s
        columns[-1] = self._assigned[slots]
        return LoadArrays(*columns)

    # ---- inside ----

    def _slots(self, replica_ids: Sequence[str]) -> tuple[SlotArray, int]:
        """Of these replicas, as numbers and as bits of one."""
        key = tuple(replica_ids)
        if (known := self._asked.get(key)) is None:
            if len(self._asked) >= _MOST_ASKED:
                self._asked.clear()
            slots = [self._replicas[r].slot for r in key]
            known = self._asked[key] = np.array(slots, dtype=np.intp), sum(1 << slot for slot in slots)
        return known

    def _median_step(self) -> StepTimes:
        if self._step is None:  # reports come many at a time, each of which may change it
            reported = [r.report.step for r in self._replicas.values() if r.report is not None]
            known = [(s.fixed_s, s.token_s, s.attended_s) for s in reported if s.token_s > 0]
            self._step = StepTimes(*np.median(known, axis=0).tolist()) if known else _FIRST_GUESS
        return self._step

    def _has_drifted(self, last: ReplicaReport, report: ReplicaReport) -> bool:
        expected = report.expected_cached_tokens - last.expected_cached_tokens
        cached = report.cached_tokens - last.cached_tokens
        missed = report.missed_tokens - last.missed_tokens
        return missed > report.step_tokens and missed > _DRIFT_SHARE * max(expected, cached)

    def _enter(self, replica: _Replica) -> None:
        """The replica's load: its report and what has been sent since."""
        report = replica.report
        if report is None:
            return
        known: Mapping[str, float] = {
            "fixed_s": 0.0,  # these three: see `loads`
            "token_s": 0.0,
            "attended_s": 0.0,
            "num_requests": report.num_running + report.num_waiting,
            "assigned_share": 0.0,
        }
        self._loads[:, replica.slot] = [known[name] if name in known else getattr(report, name) for name in LOAD_FIELDS]
        for sent in replica.sent:
            if sent.at > report.made_at:
                self._add(replica.slot, sent)
            if sent.ended_at is not None:
                self._loads[_NUM_REQUESTS, replica.slot] -= 1

    def _add(self, slot: int, sent: SentRequest) -> None:
        if sent.ended_at is None:
            self._loads[_QUEUED_TOKENS, slot] += sent.new_tokens
            self._loads[_QUEUED_S, slot] += sent.seconds
        self._loads[_NUM_REQUESTS, slot] += 1

    def _forget(self, sent: SentRequest) -> None:
        del sent.replica.sent[sent]
        self._directory.undo_expected(sent.replica.slot, sent.keys)

    def _decay(self, now: float) -> None:
        self._assigned *= math.exp(-max(now - self._assigned_at, 0.0) / ASSIGNED_MEMORY_S)
        self._assigned_at = now


def _set_bits(bits: int, most: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where the number has ones, lowest first; `most` places, a multiple of 8."""
    content = np.frombuffer(bits.to_bytes(most // 8, "little"), dtype=np.uint8)
    return np.unpackbits(content, bitorder="little").view(np.bool_)
