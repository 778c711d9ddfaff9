"""A router's state: the replicas' last load reports, and the requests that the router has sent since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from folio.app.engine.report import ReplicaReport, StepTimes
from folio.app.fleet.cost import LOAD_FIELDS, Array, LoadArrays
from folio.app.fleet.directory import PrefixDirectory

# Step times until a replica has measured some. Only the order of the costs matters then.
_FIRST_GUESS = StepTimes(fixed_s=0.01, token_s=1e-4)
# Least delay of a report through Serve's controller to a router. A report with more delay than the fastest one is late;
# a lateness above the second bound means that a clock had stopped, as on a suspended machine.
_LEAST_LAG_S, _MOST_LATE_S = 0.1, 2.0
# A resync drops the expectations about a replica's cache: when expected and actual cached tokens between two reports
# differ by more than this share, and by more than a step's tokens.
_DRIFT_SHARE = 0.3
# Largest drift between two clocks, in seconds per second.
_CLOCK_DRIFT = 1e-3
# Time constant of `assigned_share`.
ASSIGNED_MEMORY_S = 60.0
_QUEUED_TOKENS, _QUEUED_S, _NUM_REQUESTS, _SLEEPING_S = map(
    LOAD_FIELDS.index, ("queued_tokens", "queued_s", "num_requests", "sleeping_s")
)
# Bound of the cached sets of replicas: policies ask for all replicas, all but one or two, and single ones.
_MOST_SETS = 1000

SlotArray = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as a router sees it.

    Attributes:
        num_tokens: length of the prompt.
        keys: keys of its whole units from the beginning on (`folio.vmem.key_of`); empty until `unit_tokens` is known.
        session: the client's name for related requests, a hint.
        is_begun: another replica has computed the prompt, and its blocks follow.
        stays: the replica that computes the prompt decodes it.
    """

    request_id: str
    num_tokens: int
    keys: Sequence[bytes] = ()
    session: str | None = None
    is_begun: bool = False
    stays: bool = False


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request on its way to a replica, or in flight there. `keys`: prefixes that it is expected to leave in the
    cache. `at`: when it was sent."""

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
    received_at: float = 0.0  # on the router's clock
    least_lag_s: float = math.inf
    sent: dict[SentRequest, None] = field(default_factory=dict)  # ordered, so that sums of floats are reproducible
    num_in_flight: int = 0
    is_gone: bool = False


class Fleet:
    """The replicas as one router knows them, for one model. Times are seconds of its monotonic clock. One thread at a
    time.

    Replicas have other clocks. The time of a report on the router's clock follows from its arrival and from its delay
    beyond that replica's fastest report.

    A request adds to its replica's load from `note_sent` until a report made later includes it. Its prefixes count as
    cached from `note_sent` until a report made after `note_ended` says which are left.

    Args:
        stale_after_s: age at which a report is ignored.
    """

    def __init__(self, *, stale_after_s: float = 5.0) -> None:
        self._stale_after_s = stale_after_s
        self._replicas: dict[str, _Replica] = {}
        self._sets: dict[tuple[str, ...], tuple[SlotArray, int]] = {}
        self._directory = PrefixDirectory()
        self._free_slots: list[int] = []
        self._loads = np.zeros((len(LOAD_FIELDS), 0))
        self._assigned = np.zeros(0)
        self._assigned_at = 0.0
        self._step: StepTimes | None = _FIRST_GUESS  # None: to be computed from the reports
        self.unit_tokens: int | None = None
        self.num_resyncs = 0

    # ---- events ----

    def update(self, replica_ids: Iterable[str]) -> None:
        """Set the present replicas."""
        wanted = set(replica_ids)
        self._sets.clear()
        for replica_id in self._replicas.keys() - wanted:
            replica = self._replicas.pop(replica_id)
            replica.is_gone = True
            self._directory.remove_replica(replica.slot)
            self._free_slots.append(replica.slot)
        for replica_id in sorted(wanted - self._replicas.keys()):
            if not self._free_slots:
                more = max(8, len(self._assigned))
                self._free_slots = list(range(len(self._assigned), len(self._assigned) + more))
                self._loads = np.concatenate([self._loads, np.zeros((len(LOAD_FIELDS), more))], axis=1)
                self._assigned = np.concatenate([self._assigned, np.zeros(more)])
            slot = self._free_slots.pop()
            self._loads[:, slot] = 0
            self._assigned[slot] = 0
            self._replicas[replica_id] = _Replica(slot)

    def apply_report(self, replica_id: str, report: ReplicaReport, now: float) -> None:
        """Take a replica's report, which may be a repetition."""
        replica = self._replicas.get(replica_id)
        if replica is None or report.made_at <= replica.reported_at:
            return
        lag_s = now - report.made_at  # the delay plus the difference of the clocks
        least_s = replica.least_lag_s + _CLOCK_DRIFT * (now - replica.received_at)
        replica.least_lag_s = lag_s if lag_s - least_s > _MOST_LATE_S else min(lag_s, least_s)
        replica.reported_at, replica.received_at = report.made_at, now
        report = replace(report, made_at=report.made_at + replica.least_lag_s - _LEAST_LAG_S)
        last, replica.report = replica.report, report
        self.unit_tokens = report.unit_tokens or self.unit_tokens  # 0: the model has not been loaded there
        self._step = None
        self._directory.apply_keys(replica.slot, report.keys, report.changes, report.stride, report.keys_version)
        resync = last is not None and self._has_drifted(last, report)
        self.num_resyncs += resync
        for sent in list(replica.sent):
            if sent.ended_at is not None and (resync or sent.ended_at <= report.made_at):
                self._forget(sent)
        if resync:  # requests in flight may not be cached either
            for sent in replica.sent:
                self._directory.undo_expected(replica.slot, sent.keys)
                sent.keys = ()
        self._enter(replica)

    def note_sent(self, request: RoutedRequest, replica_id: str, cached_tokens: int, now: float) -> SentRequest | None:
        """Note that a request was sent to a replica. `note_ended` or `withdraw` must follow. `None`: the replica is
        gone."""
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
        replica = sent.replica
        if replica.is_gone:
            return
        replica.num_in_flight -= 1
        sent.ended_at = now
        self._loads[_NUM_REQUESTS, replica.slot] -= 1
        if replica.report is None or now - replica.report.made_at >= self._stale_after_s:
            self._forget(sent)  # the next report may be far off

    def withdraw(self, sent: SentRequest, now: float) -> None:
        """Undo `note_sent`: the replica did not take the request."""
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

    # ---- queries ----

    @property
    def num_known_prefixes(self) -> int:
        return len(self._directory)

    def num_requests(self, replica_ids: Sequence[str], now: float) -> list[float]:
        """Unfinished requests at each replica: the reported ones and those sent since. If one replica has no fresh
        report, this router's own requests at all of them, for the sake of comparison."""
        if len(self.fresh(replica_ids, now)) == len(replica_ids):
            return [float(self._loads[_NUM_REQUESTS, self._replicas[r].slot]) for r in replica_ids]
        return [float(self._replicas[r].num_in_flight) for r in replica_ids]

    def num_waiting(self, replica_id: str) -> int:
        """Sequences that wait at a replica, as it has reported."""
        report = self._replicas[replica_id].report
        return 0 if report is None else report.num_waiting

    def fresh(self, replica_ids: Iterable[str], now: float) -> list[str]:
        """The replicas with a fresh report."""
        known, oldest = self._replicas.get, now - self._stale_after_s
        return [
            r
            for r in replica_ids
            if (replica := known(r)) is not None and replica.report is not None and replica.report.made_at > oldest
        ]

    def cached_tokens(self, request: RoutedRequest, replica_ids: Sequence[str]) -> Array:
        """Prompt tokens expected to be cached at each replica; never all, because the last token is always computed."""
        if not request.keys or self.unit_tokens is None:
            return np.zeros(len(replica_ids))
        slots, bits = self._slots(replica_ids)
        tokens, most = np.zeros(len(self._assigned)), max(request.num_tokens - 1, 0) // self.unit_tokens
        for units, having in self._directory.match(request.keys, bits):
            tokens[_set_bits(having, len(tokens))] = min(units, most) * self.unit_tokens
        return tokens[slots]

    def loads(self, replica_ids: Sequence[str], now: float) -> LoadArrays:
        """The loads of these replicas, in this order.

        Step times are the median over all replicas, which run the same model on the same kind of device: measurements
        of few steps vary more than replicas do. A slow replica shows by its longer queue.
        """
        slots, _ = self._slots(replica_ids)
        self._decay(now)
        columns = self._loads[:, slots]
        step = self._median_step()
        columns[0], columns[1], columns[2] = step.fixed_s, step.token_s, step.attended_s
        columns[-1] = self._assigned[slots]
        return LoadArrays(*columns)

    def _slots(self, replica_ids: Sequence[str]) -> tuple[SlotArray, int]:
        key = tuple(replica_ids)
        if (known := self._sets.get(key)) is None:
            if len(self._sets) >= _MOST_SETS:
                self._sets.clear()
            slots = [self._replicas[r].slot for r in key]
            known = self._sets[key] = np.array(slots, dtype=np.intp), sum(1 << slot for slot in slots)
        return known

    def _median_step(self) -> StepTimes:
        if self._step is None:  # computed once for the many reports that arrive together
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
        """Enter the replica's load: its report and the requests sent since."""
        report = replica.report
        if report is None:
            return
        known: Mapping[str, float] = {
            **dict.fromkeys(("fixed_s", "token_s", "attended_s", "assigned_share"), 0.0),  # set by `loads`
            "num_requests": report.num_running + report.num_waiting,
            "sleeping_s": 0.0 if report.is_waking else report.wake_s,
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
            self._loads[_SLEEPING_S, slot] = 0.0
        self._loads[_NUM_REQUESTS, slot] += 1

    def _forget(self, sent: SentRequest) -> None:
        del sent.replica.sent[sent]
        self._directory.undo_expected(sent.replica.slot, sent.keys)

    def _decay(self, now: float) -> None:
        self._assigned *= math.exp(-max(now - self._assigned_at, 0.0) / ASSIGNED_MEMORY_S)
        self._assigned_at = now


def _set_bits(bits: int, most: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The lowest `most` bits, a multiple of 8, as a mask."""
    content = np.frombuffer(bits.to_bytes(most // 8, "little"), dtype=np.uint8)
    return np.unpackbits(content, bitorder="little").view(np.bool_)
