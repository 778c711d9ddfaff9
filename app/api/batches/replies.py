"""Files and batches as OpenAI's JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, computed_field

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]


class FileObject(BaseModel):
    """A file. `bytes` is its size; times are seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(BaseModel):
    """A page of files. If it `has_more`, a request with `last_id` as `after` gives the next page."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool

    @computed_field
    def first_id(self) -> str | None:
        return self.data[0].id if self.data else None

    @computed_field
    def last_id(self) -> str | None:
        return self.data[-1].id if self.data else None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(BaseModel):
    """An error that ended the batch. `line`: number of the line in the input file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Requests of a batch: all, answered, and those with a line in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(BaseModel):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchList(BaseModel):
    """A page of batches, latest first. If it `has_more`, a request with `last_id` as `after` gives the next page."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    has_more: bool

    @computed_field
    def first_id(self) -> str | None:
        return self.data[0].id if self.data else None

    @computed_field
    def last_id(self) -> str | None:
        return self.data[-1].id if self.data else None
