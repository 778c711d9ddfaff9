"""Hostile and faulty input files."""

from __future__ import annotations

import io
import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from folio.app.api.batches.lines import MAX_ERRORS, InputReader, answer_line, places_in
from folio.app.api.openai.replies import Completion
from folio.app.api.unknown_fields import UnknownFields

from .fake import CHAT, USAGE, jsonl, request_line

MOST = 1 << 20


def read(content: bytes, piece: int = 1 << 16, **bound: int) -> InputReader:
    reader = InputReader(io.BytesIO(content), CHAT, MOST, UnknownFields(), **bound)
    while reader.read_some(piece):
        pass
    return reader


def codes(content: bytes, **bound: int) -> list[tuple[int | None, str]]:
    return [(error.line, error.code) for error in read(content, **bound).errors]


@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_places_of_requests(piece: int, mark: bytes, tmp_path: Path) -> None:
    """Empty lines, line ends and the first mark of Windows, and a last line without an end are allowed."""
    content = mark + request_line("a").encode() + b"\r\n\n  \n" + request_line("b", "\u2028\n").encode()
    reader = read(content, piece)
    assert reader.errors == []
    file = io.BytesIO(content)
    bodies = [place.read(file) for place in reader.places]
    assert [(place.custom_id, body.custom_id) for place, body in zip(reader.places, bodies, strict=True)] == [
        ("a", "a"),
        ("b", "b"),
    ]
    assert bodies[1].body["messages"][0]["content"] == "\u2028\n"
    (tmp_path / "input.jsonl").write_bytes(content)
    assert list(places_in(tmp_path / "input.jsonl")) == reader.places


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b"{", "invalid_json", "JSON"),
        (b"\xff\xfe", "invalid_json", "JSON"),
        (b'"text"', "invalid_value", "object"),
        (b"[" * 100_000, "invalid_value", "objects and arrays"),
        (b"[" * 5_000, "invalid_json", "recursion"),
        (b'{"a": NaN}', "invalid_json", "JSON"),
        (request_line("").encode(), "invalid_value", "custom_id"),
        (request_line("x" * 513).encode(), "invalid_value", "custom_id: must have at most 512 characters"),
        (request_line("b", method="GET").encode(), "invalid_value", "method: must be 'POST'"),
        (request_line("b", url="/v1/completions").encode(), "mismatched_url", CHAT),
        (request_line("b", more=1).encode(), "invalid_value", "more: unknown field"),
        (request_line("b", body={"temperature": "hot"}).encode(), "invalid_value", "temperature"),
        (request_line("b", body={"stream": True}).encode(), "invalid_value", "stream"),
        (json.dumps({"custom_id": "b", "method": "POST", "url": CHAT, "body": 1}).encode(), "invalid_value", "body"),
        (request_line("a").encode(), "duplicate_custom_id", "'a'"),
        (b"x" * (10 << 20), "line_too_long", "max_body_bytes"),
        (request_line("b", "y" * MOST).encode(), "line_too_long", "max_body_bytes"),
    ],
)
def test_a_faulty_line_is_named_and_the_others_are_read(line: bytes, code: str, message: str) -> None:
    reader = read(request_line("a").encode() + b"\n" + line + b"\n" + request_line("z").encode())
    [error] = reader.errors
    assert (error.line, error.code) == (2, code)
    assert message in error.message
    assert len(error.message) <= 1000
    assert [place.custom_id for place in reader.places] == ["a", "z"]


def test_the_field_at_fault_is_named() -> None:
    [error] = read(jsonl(request_line("a", body={"temperature": -1.0, "messages": [{"role": "king"}]}))).errors
    assert error.param in ("temperature", "messages")


def test_unknown_fields_are_dropped_as_by_the_routes() -> None:
    """But not near misses, and not those of the line itself."""
    reader = read(jsonl(request_line("a", body={"top_a": 1, "options": {}}), request_line("b", body={"temprature": 1})))
    assert reader.dropped == {"top_a", "options"}
    [error] = reader.errors
    assert (error.line, error.param) == (2, "temprature")


def test_errors_are_bounded() -> None:
    assert len(read(b"{\n" * 1000).errors) == MAX_ERRORS


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_a_file_without_requests(content: bytes) -> None:
    assert [code for _, code in codes(content)] == ["empty_file"]


def test_requests_and_lines_are_bounded() -> None:
    three = [request_line(f"r{i}") for i in range(3)]
    assert codes(jsonl(*three, ""), max_lines=3) == []
    assert codes(jsonl(*three, request_line("r3")), max_lines=3) == [(4, "too_many_lines")]
    assert codes(b"\n" * 100, max_lines=3) == [(7, "too_many_lines")]


def test_answers_are_one_line_for_every_client() -> None:
    """Regression for clients that split lines as Python's `splitlines` does: U+2028 is a line end there."""
    body = Completion.model_construct(
        id="c", object="text_completion", created=0, model="a\u2028b\u0085c\nd", choices=[], usage=USAGE
    )
    line = answer_line("a\u2028", "request", 200, body).decode()
    assert len(line.splitlines()) == 1
    answer: dict[str, Any] = json.loads(line)
    assert answer["custom_id"] == "a\u2028"
    assert answer["response"]["body"]["model"] == "a\u2028b\u0085c\nd"
