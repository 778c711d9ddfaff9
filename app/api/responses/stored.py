"""Stored responses at an ingress: looked up for requests that refer to them, and kept once they have ended."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from folio.app.api.openai.chat_body import MAX_MESSAGES
from folio.app.api.responses.answers import document_key
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.items import InputItem, InputMessage, ItemReference
from folio.app.api.responses.replies import ResponseObject
from folio.app.api.responses.store import ResponseStore
from folio.app.errors import PreviousResponseError, RequestError, UnknownResponseError
from folio.app.http.request_context import current_context, note_ignored

logger = logging.getLogger(__name__)

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_SWEEP_S = 60.0
_OFF = "responses are not stored here (http.responses)"


class StoredResponses:
    """Looks up and keeps responses. Args: `store`: with `None` nothing is stored."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Delete old responses from now on, also while there are no new ones."""
        if self._store is not None and self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(self._store), name="folio-responses")

    async def resolve(self, request: ResponsesRequest) -> ResponsesRequest:
        """The request with its whole conversation, and with `store` set to whether it will be stored.

        Raises:
            RequestError: the request refers to a response or an item that is not stored, or has too many items.
        """
        if self._store is None and request.store:
            note_ignored(["store"])
        update: dict[str, Any] = {"store": self._store is not None and request.store is not False}
        references = [item.id for item in request.items if isinstance(item, ItemReference)]
        if references or request.previous_response_id is not None:
            owner = _owner()
            update["input"] = await asyncio.to_thread(self._conversation, owner, request, references)
        return request.model_copy(update=update)

    async def keep(self, request: ResponsesRequest, response: ResponseObject) -> None:
        """Store a response that has ended, if its `store` is set; clear `store` if that is not possible."""
        if response.store:
            response.store = await asyncio.to_thread(self._keep, _owner(), request, response)

    async def response(self, response_id: str) -> ResponseObject:
        return await asyncio.to_thread(self._opened().response, _owner(), response_id)

    async def input_of(self, response_id: str) -> list[dict[str, Any]]:
        """The items of the conversation before a response, the first one first."""
        return await asyncio.to_thread(self._opened().input_of, _owner(), response_id)

    async def delete(self, response_id: str) -> None:
        await asyncio.to_thread(self._opened().delete, _owner(), response_id)

    def _opened(self) -> ResponseStore:
        if self._store is None:
            raise UnknownResponseError(_OFF, "response_id")
        return self._store

    def _conversation(self, owner: str, request: ResponsesRequest, references: Sequence[str]) -> list[InputItem]:
        earlier = self._earlier(owner, request.previous_response_id)
        known = {} if self._store is None else self._store.items(owner, references)
        if (context := current_context()) is not None:  # its size decides in which thread it is translated
            context.num_body_bytes += len(json.dumps([earlier, known]))
        items = _ITEMS.validate_python(earlier)
        for item in request.items:
            if not isinstance(item, ItemReference):
                items.append(item)
            elif item.id in known:
                items += _ITEMS.validate_python([known[item.id]])
            elif item.id.startswith("rs_"):  # earlier reasoning may be missing
                items.append(item)
            else:
                raise RequestError(
                    f"input refers to the item {item.id!r}, which is not stored here; send the item itself, as clients "
                    "do with `store: false`",
                    "input",
                )
        if len(items) > MAX_MESSAGES:
            raise RequestError(f"the conversation has {len(items)} items; at most {MAX_MESSAGES} are allowed", "input")
        return items

    def _earlier(self, owner: str, response_id: str | None) -> list[dict[str, Any]]:
        if response_id is None:
            return []
        name = "previous_response_id"
        if self._store is None:
            raise PreviousResponseError(f"{name} is {response_id!r}, but {_OFF}; send the whole conversation", name)
        try:
            return self._store.conversation(owner, response_id)
        except UnknownResponseError as error:
            raise PreviousResponseError(f"{error.message}; send the whole conversation as input", name) from error

    def _keep(self, owner: str, request: ResponsesRequest, response: ResponseObject) -> bool:
        assert self._store is not None
        try:
            return self._store.add(owner, response, list(_written(request, response.id)))
        except OSError as error:
            logger.warning("response %s could not be stored: %s", response.id, error.strerror)
            return False

    async def _sweep(self, store: ResponseStore) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await asyncio.to_thread(store.delete_old)
            except OSError as error:
                logger.warning("old responses could not be deleted, trying again in %g s: %s", _SWEEP_S, error.strerror)


def _owner() -> str:
    """The name of the caller's API key; empty without keys."""
    context = current_context()
    return "" if context is None or context.key is None else context.key.name


def _written(request: ResponsesRequest, response_id: str) -> Iterator[dict[str, Any]]:
    """The items of a conversation as JSON. Those without an id get one by which a store finds them."""
    for number, item in enumerate(request.items):
        if isinstance(item, ItemReference):  # to reasoning that is not known
            continue
        fields = item.model_dump(mode="json", exclude_none=True)
        if isinstance(item, InputMessage):
            fields["type"] = "message"
            if not isinstance(item.content, list):
                kind = "output_text" if item.role == "assistant" else "input_text"
                fields["content"] = [{"type": kind, "text": item.text}]
        kind = "msg" if isinstance(item, InputMessage) else "item"
        yield {"id": f"{kind}_{document_key(response_id)}_i{number}"} | fields
