"""Text of a custom tool's call: the one string in its JSON arguments, as it arrives. Parsers of calls have replaced
unpaired surrogates in it."""

from __future__ import annotations

import json
import re

from folio.app.api.tools.bodies import TEXT_ARGUMENT

_BEGIN = re.compile(rf'\s*\{{\s*"{TEXT_ARGUMENT}"\s*:\s*"')
# A string up to an escape that may continue, its end, or an escape that JSON does not have.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)
_CUT, _CLOSE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$"), re.compile(r'"\s*\}?\s*$')


class CallText:
    """The text of one call. Arguments that are not an object with this one text are the text themselves."""

    def __init__(self) -> None:
        self._arguments = ""
        self._end: int | None = None  # of the part that has been given out; `None` before the text begins
        self._given = 0

    def push(self, arguments: str) -> str:
        """Append arguments; returns the text that later arguments cannot change."""
        self._arguments += arguments
        if self._end is None:
            match = _BEGIN.match(self._arguments)
            if match is None:
                return ""
            self._end = match.end()
        match = _WHOLE.match(self._arguments, self._end)
        assert match is not None
        self._end = match.end()
        text: str = json.loads(f'"{match[0]}"', strict=False)
        self._given += len(text)
        return text

    def finish(self) -> str:
        """The rest of the text."""
        try:
            found = json.loads(self._arguments, strict=False)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and isinstance(text := found.get(TEXT_ARGUMENT), str):
            return text[self._given :]
        if self._end is None:
            texts = list(found.values()) if isinstance(found, dict) else []
            return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._arguments
        # Not JSON: cut off, or with an escape of another language.
        return _CUT.sub("", _CLOSE.sub("", self._arguments[self._end :]))
