"""Routes of files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Body, FastAPI, Path, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from folio.app.api.batches.body import BatchRequest
from folio.app.api.batches.replies import BatchList, BatchObject, FileDeleted, FileList, FileObject, Purpose
from folio.app.api.batches.runner import BatchRunner
from folio.app.api.batches.upload import receive_file
from folio.app.errors import RequestError

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSON lines."},
                        "purpose": {"const": "batch", "description": 'Always "batch".'},
                        "expires_after[anchor]": {"const": "created_at", "description": 'Always "created_at".'},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 30 * 86400,
                            "description": "The file is deleted after this time, at most `batches.keep_s`.",
                        },
                    },
                }
            }
        },
    }
}
_BATCH = {
    "chat": {
        "summary": "Requests to /v1/chat/completions",
        "value": {
            "input_file_id": "file-00000000000000000000000000000000",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    }
}

Item = TypeVar("Item", FileObject, BatchObject)
Id = Annotated[str, Path(max_length=256)]
After = Annotated[str | None, Query(max_length=256, description="The last id of the previous page.")]


def add_batches(api: FastAPI, batches: BatchRunner | None) -> None:
    """Add the routes. With `None` they answer 404 and name the setting that is missing."""
    _add_files(api, batches)
    _add_batches(api, batches)


def _add_files(api: FastAPI, batches: BatchRunner | None) -> None:
    @api.post("/v1/files", tags=["batches"], openapi_extra=_FORM)
    async def upload_file(request: Request) -> FileObject:
        """Upload a file with the requests of a batch."""
        runner = _enabled(batches)
        return await receive_file(request, runner.store, runner.callers.current_name())

    @api.get("/v1/files", tags=["batches"])
    async def list_files(
        purpose: Purpose | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: After = None,
    ) -> FileList:
        """Your files, those with answers of batches included."""
        runner = _enabled(batches)
        found = await asyncio.to_thread(runner.store.files, runner.callers.current_name())
        found = [file for file in found if purpose in (None, file.purpose)]
        page, has_more = _page(found if order == "desc" else found[::-1], limit, after)
        return FileList(data=page, has_more=has_more)

    @api.get("/v1/files/{file_id}", tags=["batches"])
    async def get_file(file_id: Id) -> FileObject:
        """A file's description."""
        runner = _enabled(batches)
        return await asyncio.to_thread(runner.store.file, runner.callers.current_name(), file_id)

    @api.get("/v1/files/{file_id}/content", response_class=Response, tags=["batches"])
    async def get_content(file_id: Id) -> Response:
        """A file's content."""
        runner = _enabled(batches)
        owner = runner.callers.current_name()
        file = await asyncio.to_thread(runner.store.file, owner, file_id)
        return FileResponse(runner.store.content_path(owner, file.id), media_type="application/octet-stream")

    @api.delete("/v1/files/{file_id}", tags=["batches"])
    async def delete_file(file_id: Id) -> FileDeleted:
        """Delete a file that no open batch reads."""
        runner = _enabled(batches)
        await asyncio.to_thread(runner.store.delete_file, runner.callers.current_name(), file_id)
        return FileDeleted(id=file_id)


def _add_batches(api: FastAPI, batches: BatchRunner | None) -> None:
    @api.post("/v1/batches", tags=["batches"])
    async def create_batch(request: Annotated[BatchRequest, Body(openapi_examples=_BATCH)]) -> BatchObject:
        """Answer all requests of a file when replicas have room for them."""
        runner = _enabled(batches)
        batch = await asyncio.to_thread(runner.store.create_batch, runner.callers.current_name(), request)
        runner.wake()
        return batch

    @api.get("/v1/batches", tags=["batches"])
    async def list_batches(limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None) -> BatchList:
        """Your batches, the latest first."""
        runner = _enabled(batches)
        found = await asyncio.to_thread(runner.store.batches, runner.callers.current_name())
        page, has_more = _page(found, limit, after)
        return BatchList(data=page, has_more=has_more)

    @api.get("/v1/batches/{batch_id}", tags=["batches"])
    async def get_batch(batch_id: Id) -> BatchObject:
        """A batch's state."""
        runner = _enabled(batches)
        return await asyncio.to_thread(runner.store.batch, runner.callers.current_name(), batch_id)

    @api.post("/v1/batches/{batch_id}/cancel", tags=["batches"])
    async def cancel_batch(batch_id: Id) -> BatchObject:
        """Cancel a batch; the answers so far are kept."""
        runner = _enabled(batches)
        batch = await asyncio.to_thread(runner.store.cancel_batch, runner.callers.current_name(), batch_id)
        runner.wake()
        return batch


def _enabled(batches: BatchRunner | None) -> BatchRunner:
    if batches is None:
        raise HTTPException(404, "files and batches are off here; the setting http.batches.store turns them on")
    return batches


def _page(found: Sequence[Item], limit: int, after: str | None) -> tuple[list[Item], bool]:
    """The next items, and whether more follow. Raises `RequestError` if `after` is not one of them."""
    begin = 0
    if after is not None:
        begin = next((i for i, item in enumerate(found, 1) if item.id == after), 0)
        if not begin:
            raise RequestError("after is not in the list; begin again without it", "after")
    return list(found[begin : begin + limit]), len(found) > begin + limit
