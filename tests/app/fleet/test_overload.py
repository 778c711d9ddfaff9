"""Load shedding, alone and by several ingresses."""

from __future__ import annotations

import random

import pytest

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.fleet.overload import LoadShedder


def test_a_replica_that_refused_is_ranked_last_for_a_while() -> None:
    shedder = LoadShedder()
    shedder.note_refusal("a", 60.0, 8, 10.0)
    shedder.note_refusal("b", 0.2, 8, 10.2)
    assert shedder.recent_refusers(10.24) == ("a", "b")
    assert shedder.recent_refusers(10.26) == ("b",)
    assert shedder.admission_delay_s(10.26) is None  # not all have refused


def test_the_delay_is_that_of_the_first_replica_with_room() -> None:
    shedder = LoadShedder()
    shedder.note_refusal("a", 8.0, 8, 10.0)
    shedder.note_refusal("b", 3.0, 8, 10.1)
    assert shedder.note_all_refused(10.1) == pytest.approx(3.0)
    assert shedder.admission_delay_s(10.1) == pytest.approx(3.0)
    assert shedder.admission_delay_s(10.11) == pytest.approx(2.99)
    assert shedder.admission_delay_s(12.2) is None  # no refusal since


class Crowd:
    """Replicas at which `begin_per_s` requests begin, and ingresses at which 4 times as many arrive. Each ingress
    learns its share of arrivals from a `LimitLedger` four times a second."""

    def __init__(
        self, num_ingresses: int, num_replicas: int, begin_per_s: float, where: str, said: float = 1.0
    ) -> None:
        self.ingresses = [LoadShedder() for _ in range(num_ingresses)]
        self.begun = self.dry = self.admitted = self.offers = self.vain = 0
        self._queued = [24] * num_replicas
        self._begin_per_s, self._where, self._said = begin_per_s, where, said
        self._rng, self._now = random.Random(0), 10.0
        self._ledger = LimitLedger(clock=lambda: self._now)

    def run(self, seconds: float) -> None:
        num_ingresses = len(self.ingresses)
        for ms in range(10_000, 10_000 + int(1000 * seconds)):
            self._now = ms / 1000
            for i in range(ms % 250, num_ingresses, 250):
                share = self._ledger.settle_usage(str(i), ms, {}, self.ingresses[i].num_arrived).arrival_share
                self.ingresses[i].arrival_share = share
            for i in range(len(self._queued)):
                if self._rng.random() < self._begin_per_s / 1000:
                    self.begun += 1
                    self.dry += not self._queued[i]
                    self._queued[i] -= self._queued[i] > 0
            arrive = 4 * self._begin_per_s * len(self._queued) / 1000
            for _ in range(int(arrive) + (self._rng.random() < arrive % 1)):
                hot = self._where == "hot" and self._rng.random() < 0.9
                moving = int(self._now / 5) % num_ingresses if self._where == "moving" else None
                self._arrive(
                    self.ingresses[0 if hot else self._rng.randrange(num_ingresses) if moving is None else moving]
                )

    def _arrive(self, ingress: LoadShedder) -> None:
        if ingress.admission_delay_s(self._now) is not None:
            return
        late = ingress.recent_refusers(self._now)
        for i in sorted(range(len(self._queued)), key=lambda i: (str(i) in late, self._rng.random())):
            self.offers += 1
            if self._queued[i] < 24:
                self._queued[i] += 1
                self.admitted += 1
                return
            ingress.note_refusal(str(i), 12 / (self._begin_per_s * self._said), 24, self._now)
        self.vain += 1
        ingress.note_all_refused(self._now)


@pytest.mark.thirds
@pytest.mark.parametrize("said", [0.3, 0.7, 1.0, 1.5], ids=lambda said: f"reports {said} of the rate")
@pytest.mark.parametrize("num_ingresses", [1, 4])
@pytest.mark.parametrize("begin_per_s", [2, 20, 200])
def test_queues_stay_filled_and_few_calls_are_refused(begin_per_s: int, num_ingresses: int, said: float) -> None:
    """One replica with four times as many requests as begin there, over all ingresses."""
    crowd = Crowd(num_ingresses, 1, begin_per_s, "equal", said)
    crowd.run(60.0)
    assert crowd.dry <= (0.01 if said > 0.5 else 0.06) * crowd.begun
    most_vain = 6 if begin_per_s == 2 else 0.5 * begin_per_s  # of three times as many
    assert crowd.vain / 60 <= most_vain


@pytest.mark.parametrize("where", ["equal", "hot", "moving"])
@pytest.mark.parametrize("num_replicas", [2, 8])
def test_many_ingresses_make_no_more_refused_calls_than_one(num_replicas: int, where: str) -> None:
    """Regression: 16 ingresses at the rate, or growth, of a lone one made 3 times as many offers for each request."""
    alone = Crowd(1, num_replicas, 20.0, where)
    alone.run(12.0)
    for num_ingresses in (4, 16):
        crowd = Crowd(num_ingresses, num_replicas, 20.0, where)
        crowd.run(12.0)
        assert crowd.dry <= 0.03 * crowd.begun  # of what the replicas could begin
        assert crowd.offers / crowd.admitted <= 1.4 * alone.offers / alone.admitted


def test_no_burst_after_a_pause() -> None:
    shedder = LoadShedder()
    shedder.note_refusal("a", 1.0, 80, 10.0)  # 40 a second
    shedder.note_all_refused(10.0)
    assert 10 <= sum(shedder.admission_delay_s(11.9) is None for _ in range(1000)) <= 25  # a quarter of a second


def test_a_replica_without_a_known_rate_is_offered_some_requests() -> None:
    shedder = LoadShedder()
    shedder.note_refusal("a", 60.0, 1, 10.0)
    shedder.note_all_refused(10.0)
    assert shedder.admission_delay_s(10.0) is not None
    assert shedder.admission_delay_s(11.0) is None


def test_old_refusals_are_forgotten() -> None:
    shedder = LoadShedder()
    shedder.note_refusal("a", 2.0, 8, 10.0)
    assert shedder.note_all_refused(20.0) == 0.0
    assert shedder.recent_refusers(20.0) == ()
