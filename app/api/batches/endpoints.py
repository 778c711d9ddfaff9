"""Routes that the requests of batches may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pydantic import BaseModel, ValidationError

from folio.app.api.operators.replies import LoadReport
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.routes import ROUTES
from folio.app.api.unknown_fields import UnknownFields
from folio.app.http.operations import OPERATIONS

# Requests with a lower number go first: those of batches are last.
LAST_PRIORITY = 2**31 - 1


class BatchService(Protocol):
    """The method that batches call besides the operations of `ENDPOINTS`."""

    async def load(self) -> LoadReport: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: the name of its operation, and the model of its body."""

    name: str
    body: type[BaseModel]

    def read(self, given: dict[str, Any], unknown: UnknownFields) -> tuple[BaseModel, Sequence[str]]:
        """Validate a body, and give it the last priority. Returns it, and its unknown fields that were dropped.

        Raises:
            RequestValidationError: the body is not valid.
        """
        dropped: Sequence[str] = ()
        try:
            body = self.body.model_validate(given)
        except ValidationError as error:
            errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)]
            body, dropped = unknown.resolve(self.body, given, errors)
        changes: dict[str, Any] = {"priority": LAST_PRIORITY}
        if isinstance(body, ResponsesRequest):
            changes["store"] = bool(body.store)  # the answer is in the batch's file
        return body.model_copy(update=changes), dropped

    async def call(self, service: BatchService, body: BaseModel) -> BaseModel:
        """The answer to a body."""
        return cast(BaseModel, await getattr(service, self.name)(body))


ENDPOINTS = {
    operation.path: Endpoint(operation.name, ROUTES[operation.name].body)
    for operation in OPERATIONS
    if operation.is_batchable
}
