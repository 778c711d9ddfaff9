"""Admission control: requests in flight, load shedding, draining."""

from __future__ import annotations

import time

import pytest

from folio.app.edge.admission import AdmissionControl
from folio.app.errors import OverloadedError, UnavailableError
from folio.app.fleet.overload import LoadShedder


def test_requests_are_in_flight_until_their_end() -> None:
    admission = AdmissionControl(LoadShedder())

    def fail() -> None:
        with admission.admitted(), admission.admitted():
            assert admission.num_in_flight == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert admission.num_in_flight == 0


def test_requests_are_shed_while_all_replicas_are_full() -> None:
    shedder = LoadShedder()
    admission = AdmissionControl(shedder)
    now = time.monotonic()
    shedder.note_refusal("a", 40.0, 8, now)
    shedder.note_all_refused(now)
    with pytest.raises(OverloadedError) as refused, admission.admitted():
        pass
    assert 30 < refused.value.retry_after_s <= 40  # type: ignore[operator]
    assert admission.num_in_flight == 0
    admission.check_open()  # full is not draining


def test_a_request_is_admitted_once() -> None:
    """From its head, and not again with its body. The place of an invalid request is given back."""
    shedder = LoadShedder()
    admission = AdmissionControl(shedder)
    now = time.monotonic()
    shedder.note_refusal("a", 40.0, 8, now)
    shedder.note_all_refused(now)
    shedder.return_admission()  # room for one
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is None  # its body is invalid
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is None
        with admission.admitted():
            assert admission.num_in_flight == 1
        with pytest.raises(OverloadedError), admission.admitted():  # the ticket was for one request
            pass
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is not None


def test_draining_admits_none_and_finishes_all() -> None:
    admission = AdmissionControl(LoadShedder())
    with admission.admitted():
        admission.start_draining()
        assert admission.num_in_flight == 1
        with pytest.raises(UnavailableError, match="draining") as refused, admission.admitted():
            pass
        assert refused.value.retry_after_s
        with pytest.raises(UnavailableError, match="draining"):
            admission.check_open()
    assert admission.num_in_flight == 0
