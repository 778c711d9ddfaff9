"""Answers on disk, and what crashes leave of them."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from folio.app.api.batches.answer_log import AnswerLog

IDS = ("a", "b", "c", "d")


def line(custom_id: str, text: str = "") -> bytes:
    return json.dumps({"custom_id": custom_id, "text": text}).encode() + b"\n"


def opened(folder: Path, ids: tuple[str, ...] = IDS) -> AnswerLog:
    return AnswerLog(folder / "output", folder / "errors", ids, lambda _: None)


def test_answers_are_found_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append("a", line("a"), is_error=False)
    log.append("b", line("b"), is_error=True)
    log.append("a", line("a", "again"), is_error=True)  # has an answer
    log.close()
    again = opened(tmp_path)
    assert again.answered == {"a", "b"}
    assert again.num_failed == 1
    assert (tmp_path / "output").read_bytes() == line("a")
    assert (tmp_path / "errors").read_bytes() == line("b")


@pytest.mark.parametrize("cut", range(1, len(line("b"))))
def test_a_torn_line_is_cut_off_wherever_it_ends(tmp_path: Path, cut: int) -> None:
    """Also without its newline only: the next line would be appended to it."""
    (tmp_path / "output").write_bytes(line("a") + line("b")[:cut])
    log = opened(tmp_path)
    assert log.answered == {"a"}
    log.append("b", line("b"), is_error=False)
    assert (tmp_path / "output").read_bytes() == line("a") + line("b")


@pytest.mark.parametrize(
    "tail",
    [
        b"\0" * 4096,
        b"\0" * 100 + line("c"),
        line("unknown"),
        line("a"),
        b'{"custom_id": ["b"]}\n',
        b"[]\n",
        b"\xff\n",
        b"\n",
        b"[" * 10_000 + b"\n",
    ],
)
def test_what_is_no_answer_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    """A loss of power may leave any bytes after the last flush."""
    (tmp_path / "output").write_bytes(line("a") + tail + line("d"))
    assert opened(tmp_path).answered == {"a"}
    assert (tmp_path / "output").read_bytes() == line("a")


def test_a_full_disk_leaves_a_part_of_a_line_that_the_next_log_cuts_off(tmp_path: Path) -> None:
    """A limit of the file's size stands for the disk's."""
    log = opened(tmp_path)
    log.append("a", line("a"), is_error=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(line("a")) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="only a part"):
            log.append("b", line("b"), is_error=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.answered == {"a"}
    log.close()
    assert (tmp_path / "output").read_bytes() == line("a") + line("b")[:5]
    assert opened(tmp_path).answered == {"a"}
    assert (tmp_path / "output").read_bytes() == line("a")


def test_nothing_is_appended_after_the_end(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.append("a", line("a"), is_error=False)
    assert (tmp_path / "output").read_bytes() == b""
