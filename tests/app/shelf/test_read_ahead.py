"""Read-ahead: the first models' weights, beside steps slowly, and never to anyone's harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from folio.app.shelf.read_ahead import ReadAhead
from tests.processes import until

PIECE_S = 0.005


class Weights:
    """Pieces that take `PIECE_S` each."""

    weight_bytes = 20

    def __init__(self, error: Exception | None = None, num_pieces: int = 20) -> None:
        self._error, self._num_pieces = error, num_pieces
        self.num_read = 0
        self.ended = threading.Event()

    def read_ahead(self) -> Iterator[int]:
        try:
            for _ in range(self._num_pieces):
                if self._error is not None:
                    raise self._error
                time.sleep(PIECE_S)
                self.num_read += 1
                yield 1
        finally:
            self.ended.set()


def is_running() -> bool:
    return any(thread.name == "folio-read-ahead" for thread in threading.enumerate())


@pytest.fixture
def room() -> list[int]:
    return [1000]


@pytest.fixture
def reads(room: list[int]) -> Iterator[ReadAhead]:
    reads = ReadAhead(lambda num_bytes: num_bytes <= room[0])
    yield reads
    reads.close()
    assert not is_running()


def test_the_first_models_are_read_once_each(reads: ReadAhead) -> None:
    models = [Weights() for _ in range(3)]
    wanted = {str(i): weights for i, weights in enumerate(models)}
    for _ in range(2):
        reads.want(wanted, beside_steps=False)
        until(lambda: models[1].ended.is_set(), 10)
    reads.close()
    assert [weights.num_read for weights in models] == [20, 20, 0]


def test_beside_steps_a_share_of_the_time(reads: ReadAhead) -> None:
    slow, began = Weights(), time.monotonic()
    reads.want({"slow": slow}, beside_steps=True)
    assert slow.ended.wait(10)
    assert time.monotonic() - began > 0.9 * 4 * 20 * PIECE_S


def test_beside_steps_at_most_so_many_bytes_a_second() -> None:
    """Pieces that the system had read before took no time, and so made no pause: steps had 0.85 of their rate."""
    reads, quick, began = ReadAhead(lambda _: True, bytes_per_s=20), Weights(num_pieces=20), time.monotonic()
    try:
        reads.want({"quick": quick}, beside_steps=True)
        assert quick.ended.wait(10)
        assert time.monotonic() - began > 0.9 * 20 / 20
    finally:
        reads.close()


@pytest.mark.parametrize("beside_steps", [False, True])
def test_a_model_that_is_not_wanted_any_more_is_left(beside_steps: bool, reads: ReadAhead) -> None:
    """As one that wakes."""
    first, second = Weights(num_pieces=10**6), Weights()
    reads.want({"first": first}, beside_steps=beside_steps)
    until(lambda: first.num_read > 2, 10)
    reads.want({"second": second}, beside_steps=False)
    assert first.ended.wait(10)
    assert second.ended.wait(10)
    assert first.num_read < 1000


def test_close_in_the_middle() -> None:
    reads, endless = ReadAhead(lambda _: True, share=1e-4), Weights(num_pieces=10**6)
    reads.want({"endless": endless}, beside_steps=True)
    until(lambda: endless.num_read > 0, 10)
    reads.close()
    assert not is_running()
    assert endless.ended.is_set()


def test_a_machine_without_room(reads: ReadAhead, room: list[int]) -> None:
    room[0] = 10
    kept_out, weights = Weights(), Weights()
    kept_out.weight_bytes = 11
    weights.weight_bytes = 9
    reads.want({"kept out": kept_out, "weights": weights}, beside_steps=False)
    assert weights.ended.wait(10)
    assert kept_out.num_read == 0
    room[0] = 11
    reads.want({"kept out": kept_out}, beside_steps=False)
    assert kept_out.ended.wait(10)


def test_errors_are_told_once_and_others_read(reads: ReadAhead, caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = [Weights(OSError(5, "Input/output error")) for _ in range(2)], Weights()
    reads.want({"a": broken[0], "whole": whole}, beside_steps=False)
    assert whole.ended.wait(10)
    reads.want({"b": broken[1]}, beside_steps=False)
    assert broken[1].ended.wait(10)
    reads.close()
    assert caplog.text.count("cannot be read ahead") == 1
    assert "the weights of 'a' cannot be read ahead: [Errno 5] Input/output error" in caplog.text
