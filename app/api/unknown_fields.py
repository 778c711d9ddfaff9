"""Unknown fields of bodies: dropped and reported, or refused. A field that looks like a misspelt one is an error."""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from folio.app.config.http import UnknownFieldsMode
from folio.app.http.request_context import EdgeObserver, current_context

logger = logging.getLogger(__name__)

# Different unknown fields of one body; a list's items count once.
MAX_UNKNOWN = 32
# The most different fields that are logged for a client, and the most clients that are remembered.
_MAX_LOGGED, _MAX_CLIENTS = 32, 1024
_MAX_NAME_CHARS, _MAX_HEADER_CHARS = 64, 1000
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
# Other names may be text of a prompt, which the log never has.
_LOGGED = re.compile(r"(.*\.)?[A-Za-z_][A-Za-z0-9_]*")
# Similarity of names without their separators. `max_token` has 0.94, `temprature` 0.95 and `stops` 0.89; `top_a`, of
# other servers, has 0.75.
_TYPO_CUTOFF = 0.88
# Fields of other servers that resemble one of Folio's, and are no misspelling of it.
_NO_TYPOS = frozenset({"models"})
# Fields of other servers with a label of their own in the metric. Others are "other", as clients may invent any number.
_LABELLED = {
    "cache_control",
    "guided_decoding_backend",
    "include_reasoning",
    "keep_alive",
    "kv_transfer_params",
    "logits_processors",
    "max_new_tokens",
    "models",
    "num_ctx",
    "num_predict",
    "options",
    "plugins",
    "prefix",
    "provider",
    "repeat_penalty",
    "route",
    "top_a",
    "transforms",
    "typical_p",
    "usage",
    "vllm_xargs",
}

Path = tuple[str | int, ...]


class UnknownFields:
    """Policy for unknown fields.

    Strict validation comes first, so that bodies without unknown fields cost nothing more. A body with unknown fields
    is validated a second time, which collects and removes them.

    Args:
        mode: "ignore": unknown fields are dropped, logged once for each field and client, counted, and named in the
            answer's header; "error": they are refused.
        observer: counts dropped fields.
    """

    def __init__(self, mode: UnknownFieldsMode = "ignore", observer: EdgeObserver | None = None) -> None:
        self._mode = mode
        self._observer = observer or EdgeObserver()
        self._logged: OrderedDict[str, set[str]] = OrderedDict()  # by client, the latest last

    def resolve(self, kind: type[BaseModel], given: Any, errors: Sequence[Any]) -> tuple[Any, list[str]]:
        """Validate a body without its unknown fields; returns it, and the fields' paths as printable ASCII.

        Args:
            errors: of the body's strict validation.

        Raises:
            RequestValidationError: the body has other errors, or fields that cannot be dropped.
        """
        if not any(error["type"] == "extra_forbidden" for error in errors):
            raise RequestValidationError(errors, body=given)
        try:
            value = kind.model_validate(given, extra="allow")
        except ValidationError as error:
            if self._mode == "ignore":
                errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            raise RequestValidationError(errors, body=given) from None
        found: dict[str, tuple[Path, type[BaseModel]]] = {}
        for path, owner in _take_unknown(value, ()):
            found.setdefault(_written(path), (path, owner))
            if len(found) > MAX_UNKNOWN:
                message = f"more than {MAX_UNKNOWN} different unknown fields; leave them out"
                raise RequestValidationError([{"type": "unknown_fields", "loc": ("body",), "msg": message}], body=given)
        refused = [_refusal(path, nearest(owner, str(path[-1]))) for path, owner in found.values()]
        if self._mode == "ignore":
            refused = [error for error in refused if error["type"] == "misspelt_field"]
        if refused:
            raise RequestValidationError(refused, body=given)
        return value, list(found)

    def note(self, fields: Sequence[str], address: str) -> None:
        """Report dropped fields of a request: log, metric, and the answer's header."""
        for field in fields:
            name = field.rpartition(".")[2]
            self._observer.on_ignored_field(name if name in _LABELLED else "other")
        context = current_context()
        client = address
        if context is not None:
            context.ignored_fields = _header(fields)
            if context.key is not None:
                client = context.key.name
        logged = self._logged.setdefault(client, set())
        self._logged.move_to_end(client)
        if len(self._logged) > _MAX_CLIENTS:
            self._logged.popitem(last=False)
        new = [field for field in fields if field not in logged and _LOGGED.fullmatch(field)]
        if new := new[: _MAX_LOGGED - len(logged)]:
            logged.update(new)
            logger.info("ignored unknown fields of %s: %s", client, ", ".join(new))


def _take_unknown(value: Any, path: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Remove all unknown fields from a body; yields their paths, and the object's model."""
    if isinstance(value, list):
        if value and isinstance(value[0], BaseModel | list):  # the items of a list are of one kind
            for i, item in enumerate(value):
                yield from _take_unknown(item, (*path, i))
    elif isinstance(value, BaseModel):
        if unknown := value.model_extra:
            for name in unknown:
                yield (*path, name), type(value)
            unknown.clear()
        for name, field in type(value).model_fields.items():
            child = getattr(value, name)
            if isinstance(child, BaseModel | list):
                yield from _take_unknown(child, (*path, field.alias or name))


@functools.lru_cache(maxsize=1024)
def nearest(kind: type[BaseModel], name: str) -> str | None:
    """The field of an object that an unknown name probably means; `None` if no field is near enough."""
    if name in _NO_TYPOS or len(name) > _MAX_NAME_CHARS:
        return None
    known = _normal_names(kind)
    near = difflib.get_close_matches(_normal(name), known, n=1, cutoff=_TYPO_CUTOFF)
    return known[near[0]] if near else None


@functools.cache
def _normal_names(kind: type[BaseModel]) -> dict[str, str]:
    return {_normal(field.alias or name): field.alias or name for name, field in kind.model_fields.items()}


def _normal(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def _refusal(path: Path, near: str | None) -> dict[str, Any]:
    kind = "extra_forbidden" if near is None else "misspelt_field"
    return {"type": kind, "loc": ("body", *path), "msg": "", "ctx": {"nearest": near}}


def _written(path: Path) -> str:
    """The path in printable ASCII, whatever the name: it goes into a header and into the log."""
    *above, name = path
    name = str(name)[:_MAX_NAME_CHARS]
    if not _PLAIN.fullmatch(name):
        name = quote(name, safe="", errors="replace")[:_MAX_NAME_CHARS].replace(".", "%2E")
    parts = ["[]" if isinstance(part, int) else f".{part}" for part in (*above, name)]
    return "".join(parts).removeprefix(".")


def _header(fields: Sequence[str]) -> str:
    header = fields[0]
    for number, field in enumerate(fields[1:], 1):
        if len(header) + len(field) > _MAX_HEADER_CHARS:
            return f"{header}, and {len(fields) - number} more"
        header += f", {field}"
    return header
