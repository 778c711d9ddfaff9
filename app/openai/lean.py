"""Parts of answers that leave out what is absent."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from pydantic import BaseModel, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class LeanReply(BaseModel):
    """Fields named in `_left_out` are not in the JSON when they are `None`; of all others OpenAI sends a null."""

    _left_out: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _leave_out(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = serialize(self)
        return {name: value for name, value in fields.items() if value is not None or name not in self._left_out}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Of the fields: of what the serializer returns nothing would be known."""
        return handler(cast(CoreSchema, {key: value for key, value in core_schema.items() if key != "serialization"}))
