"""Lines of batches' files: requests, answers and errors.

input   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
output  {"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}},
         "error": null}
"""

from __future__ import annotations

import json
import uuid
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError

from folio.app.api.base import StrictBody, Text, parse_json
from folio.app.api.batches.endpoints import ENDPOINTS
from folio.app.api.batches.replies import BatchError
from folio.app.api.events import on_one_line
from folio.app.api.unknown_fields import UnknownFields
from folio.app.http.errors import ErrorBody, validation_error

# OpenAI's bound.
MAX_LINES = 50_000
# The most errors that a batch reports of its input file.
MAX_ERRORS, _MAX_MESSAGE_CHARS = 100, 1000


class RequestLine(StrictBody):
    """A line of the input file, apart from its body."""

    custom_id: Annotated[Text, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Text
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Position of a request in the input file."""

    custom_id: str
    offset: int
    num_bytes: int

    def read(self, file: BinaryIO) -> RequestLine:
        """The request, from a line that was valid when the batch began."""
        file.seek(self.offset)
        return RequestLine.model_validate(parse_json(file.read(self.num_bytes)))


class InputReader:
    """Reads the lines of an input file in order. `places` has the positions of requests, `errors` the faults, `dropped`
    the unknown fields without which requests are computed.

    Args:
        max_line_bytes: longer lines are faults.
        max_lines: most requests; with empty lines twice as many.
    """

    def __init__(
        self, file: BinaryIO, endpoint: str, max_line_bytes: int, unknown: UnknownFields, max_lines: int = MAX_LINES
    ) -> None:
        self._file = file
        _skip_bom(file)
        self._endpoint = endpoint
        self._unknown = unknown
        self._max_line_bytes, self._max_lines = max_line_bytes, max_lines
        self._number = 0
        self._custom_ids: set[str] = set()
        self.places: list[LinePlace] = []
        self.errors: list[BatchError] = []
        self.dropped: set[str] = set()

    def read_some(self, num_bytes: int) -> bool:
        """Read lines of about so many bytes; returns whether to go on."""
        left = num_bytes
        while left > 0:
            offset = self._file.tell()
            line = self._file.readline(self._max_line_bytes + 1)
            if not line:
                if not self.places and not self.errors:
                    self._fail("empty_file", "the file has no request; write one to each line")
                return False
            self._number += 1
            left -= len(line)
            if (len(self.places) == self._max_lines and line.strip()) or self._number > 2 * self._max_lines:
                self._fail("too_many_lines", f"there are more than {self._max_lines} requests; split the file")
                return False
            if len(line) > self._max_line_bytes:
                most = self._max_line_bytes
                self._fail("line_too_long", f"the line is longer than {most} bytes (max_body_bytes); shorten it")
                left -= self._skip_line(line)
            elif line.strip():
                self._read_line(line, offset)
            if len(self.errors) == MAX_ERRORS:
                return False
        return True

    def _skip_line(self, part: bytes) -> int:
        """Skip the rest of a line that begins with `part`; returns its bytes."""
        skipped = 0
        while part and not part.endswith(b"\n"):
            part = self._file.readline(1 << 20)
            skipped += len(part)
        return skipped

    def _read_line(self, line: bytes, offset: int) -> None:
        given: Any = None
        try:
            given = parse_json(line)
            request = RequestLine.model_validate(given)
            if problem := self._problem(request):
                self._fail(*problem)
                return
            given = request.body
            _, dropped = ENDPOINTS[self._endpoint].read(given, self._unknown)
        except RequestValidationError as error:
            self._fail_as(validation_error(error.errors(), given))
        except ValidationError as error:
            found = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
            self._fail_as(validation_error(found, given))
        else:
            self.dropped.update(dropped)
            self._custom_ids.add(request.custom_id)
            self.places.append(LinePlace(request.custom_id, offset, len(line)))

    def _problem(self, request: RequestLine) -> tuple[str, str, str] | None:
        """Code, message and field of a request's first fault outside its body."""
        if request.url != self._endpoint:
            return "mismatched_url", f"url is {request.url!r:.200}; the batch's endpoint is {self._endpoint!r}", "url"
        if request.custom_id in self._custom_ids:
            return (
                "duplicate_custom_id",
                f"custom_id {request.custom_id!r} was used before; make it unique",
                "custom_id",
            )
        if request.body.get("stream"):
            return "invalid_value", "stream: answers of batches are whole; leave it out", "stream"
        return None

    def _fail_as(self, answer: ErrorBody) -> None:
        error = answer.error
        self._fail(error.code or "invalid_value", error.message, error.param)

    def _fail(self, code: str, message: str, param: str | None = None) -> None:
        message = message[:_MAX_MESSAGE_CHARS]
        self.errors.append(BatchError(code=code, message=message, param=param, line=self._number or None))


def _skip_bom(file: BinaryIO) -> int:
    """Skip the byte order mark with which some programs begin a file; returns its length. At the file's beginning."""
    if file.read(len(BOM_UTF8)) == BOM_UTF8:
        return len(BOM_UTF8)
    file.seek(0)
    return 0


def places_in(path: Path) -> Iterator[LinePlace]:
    """The requests of a file that was valid when its batch began, without validating their bodies again."""
    with path.open("rb") as file:
        offset = _skip_bom(file)
        for line in file:
            if line.strip():
                yield LinePlace(RequestLine.model_validate(parse_json(line)).custom_id, offset, len(line))
            offset += len(line)


def answer_line(custom_id: str, request_id: str, status: int, body: BaseModel) -> bytes:
    """A line of the output file, or with an error status of the error file."""
    dumped = on_one_line(body.model_dump_json())
    head = f'{{"id": "batch_req_{uuid.uuid4().hex}", "custom_id": {json.dumps(custom_id)}, "response": '
    response = f'{{"status_code": {status}, "request_id": {json.dumps(request_id)}, "body": {dumped}}}'
    return f'{head}{response}, "error": null}}\n'.encode()


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request that was not computed."""
    line = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return json.dumps(line).encode() + b"\n"
