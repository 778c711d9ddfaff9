"""Routes of stored responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, Path, Query

from folio.app.api.responses.replies import ItemList, ResponseDeleted, ResponseObject
from folio.app.errors import RequestError

Id = Annotated[str, Path(max_length=256)]


class StoredService(Protocol):
    """The methods behind the routes. All raise `UnknownResponseError`."""

    async def response(self, response_id: str) -> ResponseObject: ...
    async def response_input(self, response_id: str) -> list[dict[str, Any]]: ...
    async def delete_response(self, response_id: str) -> None: ...


def add_stored_responses(api: FastAPI, service: StoredService) -> None:
    """Add the routes. Without a store they answer 404 and name the setting."""

    @api.get("/v1/responses/{response_id}", tags=["generation"])
    async def get_response(response_id: Id, stream: bool = False) -> ResponseObject:
        """A stored response."""
        if stream:
            raise RequestError("a stored response has ended, and is not streamed again; leave stream out", "stream")
        return await service.response(response_id)

    @api.delete("/v1/responses/{response_id}", tags=["generation"])
    async def delete_response(response_id: Id) -> ResponseDeleted:
        """Delete a stored response."""
        await service.delete_response(response_id)
        return ResponseDeleted(id=response_id)

    @api.get("/v1/responses/{response_id}/input_items", tags=["generation"])
    async def list_input_items(
        response_id: Id,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=256, description="The last id of the previous page.")] = None,
    ) -> ItemList:
        """The items of the conversation before a stored response."""
        items = await service.response_input(response_id)
        found = items if order == "asc" else items[::-1]
        begin = 0
        if after is not None:
            begin = next((number for number, item in enumerate(found, 1) if item["id"] == after), 0)
            if not begin:
                raise RequestError("after is not in the list; begin again without it", "after")
        page = found[begin : begin + limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(found) > begin + limit)
