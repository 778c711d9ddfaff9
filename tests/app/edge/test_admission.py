from __future__ import annotations

import time

import pytest

from app.edge.admission import AdmissionControl
from app.errors import OverloadedError, UnavailableError
from app.fleet.overload import LoadShedder


def test_who_is_inside_is_counted_until_the_end() -> None:
    admission = AdmissionControl(LoadShedder())

    def fail() -> None:
        with admission.admitted(), admission.admitted():
            assert admission.num_in_flight == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert admission.num_in_flight == 0


def test_nothing_comes_in_while_all_refuse() -> None:
    refusals = LoadShedder()
    admission = AdmissionControl(refusals)
    now = time.monotonic()
    refusals.note_refusal("a", 40.0, 8, now)
    refusals.note_all_refused(now)
    with pytest.raises(OverloadedError) as refused, admission.admitted():
        pass
    assert 30 < refused.value.retry_after_s <= 40  # type: ignore[operator]
    assert admission.num_in_flight == 0
    admission.check_open()  # full is not closed


def test_a_request_pays_once_at_the_door() -> None:
    """When its head has come, not again when its body is there; and what comes to nothing is given back."""
    refusals = LoadShedder()
    admission = AdmissionControl(refusals)
    now = time.monotonic()
    refusals.note_refusal("a", 40.0, 8, now)
    refusals.note_all_refused(now)
    refusals.return_admission()  # room for one
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is None  # and its body is not valid
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is None
        with admission.admitted():
            assert admission.num_in_flight == 1
        with pytest.raises(OverloadedError), admission.admitted():  # it was for one
            pass
    with admission.try_admit() as retry_after_s:
        assert retry_after_s is not None


def test_who_drains_lets_nothing_in_and_all_out() -> None:
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
