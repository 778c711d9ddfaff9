"""Settings of a GGUF header by their types."""

from __future__ import annotations

from typing import Any, TypeVar

from folio.app.models.gguf.header import GgufHeader, shown

_T = TypeVar("_T")
# Above the bases of all rotary embeddings, of which 1e11 is the largest known one.
_MOST_NUMBER = 1e15


class Settings:
    """Reads settings whose names begin with the architecture's, and others by their whole names.

    Every function raises `ValueError`, with the file and the setting, for another type, and if there is neither a
    setting nor a default.
    """

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header, self._architecture = header, architecture

    def integer(self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None) -> int:
        """Of a list for all layers, their common value."""
        value = self._get(name, int, default)
        if value < least:
            raise self._fault(name, value, f"at least {least}")
        if most is not None and value > most:
            raise self._fault(name, value, f"at most {most}")
        return value

    def number(
        self, name: str, default: float | None = None, *, least: float = 0.0, most: float = _MOST_NUMBER
    ) -> float:
        value = self._get(name, float, default)
        if not least <= value <= most:  # or no number
            raise self._fault(name, value, f"a number from {least:g} to {most:g}")
        return float(f"{value:.7g}")  # most are float32, and were decimals

    def text(self, name: str, default: str | None = None) -> str:
        return self._get(name, str, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._get(name, bool, default)

    def has(self, name: str) -> bool:
        return self._name(name) in self._header.settings

    def items(self, name: str, kind: type[_T]) -> list[_T]:
        """Of a list; none if it is missing."""
        values = self._header.settings.get(self._name(name), ())
        if not isinstance(values, tuple) or any(type(value) is not kind for value in values):
            raise self._fault(name, values, f"a list of {kind.__name__}")
        return list(values)

    def _name(self, name: str) -> str:
        return name if name.startswith(("general.", "tokenizer.")) else f"{self._architecture}.{name}"

    def _get(self, name: str, kind: type[_T], default: _T | None) -> _T:
        value: Any = self._header.settings.get(self._name(name), default)
        if value is None:
            raise ValueError(f"{self._header.files[0]} lacks {self._name(name)}")
        if kind is not str and isinstance(value, tuple):
            if len(set(value)) != 1:
                raise self._fault(name, value, "the same for all layers")
            value = value[0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise self._fault(name, value, f"of the type {kind.__name__}{', at least 0' * (kind is int)}")
        return value

    def _fault(self, name: str, value: object, bound: str) -> ValueError:
        return ValueError(f"{self._header.files[0]} has {self._name(name)} {shown(value)}; it must be {bound}")
