"""Uploads: forms (`multipart/form-data`) with a file and its purpose, written to the store as they arrive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import Request
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from folio.app.api.batches.body import ExpiresAfter
from folio.app.api.batches.replies import FileObject
from folio.app.api.batches.store import BatchStore, Upload
from folio.app.errors import ForbiddenError, RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Bytes that are written at once, in a thread.
_WRITTEN_BYTES = 1 << 20
_MAX_FIELD_BYTES, _MAX_NAME_CHARS = 1024, 255
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")


async def receive_file(request: Request, store: BatchStore, owner: str) -> FileObject:
    """Read a form and keep its file.

    Raises:
        RequestError: the form is not one of a file and its purpose.
        StoreFullError: there is no room for the file.
        ForbiddenError: a web page sends it without a preflight request.
        HTTPException: the body is not a form.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise HTTPException(415, f"content-type is {kind[:100].decode('latin-1')!r}; send multipart/form-data")
    headers = request.headers
    if "origin" in headers and not ("authorization" in headers or "x-api-key" in headers):
        # Browsers send a form to another origin without asking.
        raise ForbiddenError("uploads of web pages need an Authorization header; any will do where no keys are set")
    if not (boundary := options.get(b"boundary")):
        raise RequestError("the content-type names no boundary of the form's parts; send it as HTTP clients do")
    with await asyncio.to_thread(store.new_upload, owner) as upload:
        form = _Form(upload)
        try:
            parser = MultipartParser(boundary, form.callbacks())
            async for chunk in request.stream():
                parser.write(chunk)
                if len(form.unwritten) >= _WRITTEN_BYTES:
                    await asyncio.to_thread(form.write_file)
        except FormParserError as error:
            raise RequestError(f"the body is not a form: {error}") from error
        await asyncio.to_thread(form.write_file)
        return await asyncio.to_thread(form.keep)


class _Form:
    """The parts of a form as they arrive."""

    def __init__(self, upload: Upload) -> None:
        self.unwritten = bytearray()
        self._upload = upload
        self._header, self._value = b"", b""
        self._name = ""
        self._filename: str | None = None
        self._fields: dict[str, bytearray] = {}
        self._names: set[str] = set()
        self._is_complete = False

    def callbacks(self) -> MultipartCallbacks:
        """Callbacks for `MultipartParser`."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_to_header,
            "on_header_value": self._add_to_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add_content,
            "on_end": self._end,
        }

    def write_file(self) -> None:
        """Write what has arrived of the file."""
        if self.unwritten:
            self._upload.write(bytes(self.unwritten))
            self.unwritten.clear()

    def keep(self) -> FileObject:
        """Keep the file. Raises `RequestError` unless the form is complete and valid."""
        if not self._is_complete:
            raise RequestError("the form has no end; send all of it")
        fields = {name: value.decode(errors="replace") for name, value in self._fields.items()}
        if self._filename is None:
            raise RequestError("the form has no part file with a filename", "file")
        if (purpose := fields.get("purpose")) != "batch":
            raise RequestError(f"purpose is {purpose!r}; it must be 'batch'", "purpose")
        if not self._upload.num_bytes:
            raise RequestError("the file is empty; it needs a request on each line", "file")
        return self._upload.keep(self._filename, "batch", _keep_s(fields))

    def _begin_part(self) -> None:
        self._header = self._value = b""
        self._name = ""

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            if self._name == "file" and b"filename" in options:
                self._filename = options[b"filename"].decode(errors="replace")[:_MAX_NAME_CHARS]
        self._header = self._value = b""

    def _begin_content(self) -> None:
        if self._name not in _FIELDS:
            raise RequestError(f"the form has a part {self._name[:100]!r}; there are {', '.join(_FIELDS)}")
        if self._name in self._names:  # which also bounds the number of parts, as each takes microseconds
            raise RequestError(f"the form has two parts {self._name!r}; send each once", self._name)
        self._names.add(self._name)
        if self._name != "file":
            self._fields[self._name] = bytearray()

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.unwritten += data[start:end]
            return
        field = self._fields[self._name]
        field += data[start:end]
        if len(field) > _MAX_FIELD_BYTES:
            raise RequestError(f"{self._name} is longer than {_MAX_FIELD_BYTES} bytes", self._name)

    def _end(self) -> None:
        self._is_complete = True


def _keep_s(fields: dict[str, str]) -> float | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    try:
        return ExpiresAfter.model_validate({"anchor": anchor, "seconds": seconds}, strict=False).seconds
    except ValidationError as error:
        found = error.errors()[0]
        raise RequestError(f"expires_after.{found['loc'][0]}: {found['msg']}", "expires_after") from None
