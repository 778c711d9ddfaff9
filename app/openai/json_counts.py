"""How much there is in a JSON text, told before it is parsed."""

from __future__ import annotations

import re

# The cost of a body is that of its values, not of its bytes: 8 MiB of `{"role":"user","content":""}` take a second to
# parse and validate, 8 MiB of prose a few milliseconds. Prompts of token ids are many values, and cheap ones.
MAX_OBJECTS, MAX_STRINGS, MAX_VALUES = 1 << 15, 1 << 17, 1 << 19

_STRING = re.compile(rb'"[^"]*"?')  # without escapes


def too_much(text: bytes) -> str | None:
    """Why a JSON text is not to be parsed; `None` if it may be. It is looked at in steps of one string, between which
    other threads run, and not further than to the bound."""
    num_objects, num_values = text.count(b"{") + text.count(b"["), text.count(b",")
    if num_objects <= MAX_OBJECTS and num_values <= MAX_VALUES and text.count(b'"') <= 2 * MAX_STRINGS:
        return None  # even if none of them is within a string
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_objects = num_values = num_strings = end = 0
    for string in _STRING.finditer(text):
        begin = string.start()
        num_objects += text.count(b"{", end, begin) + text.count(b"[", end, begin)
        num_values += text.count(b",", end, begin)
        num_strings += 1
        end = string.end()
        if reason := _reason(num_objects, num_strings, num_values):
            return reason
    num_objects += text.count(b"{", end) + text.count(b"[", end)
    return _reason(num_objects, num_strings, num_values + text.count(b",", end))


def _reason(num_objects: int, num_strings: int, num_values: int) -> str | None:
    counts = (
        (num_objects, MAX_OBJECTS, "objects and arrays"),
        (num_strings, MAX_STRINGS, "strings, names of fields included"),
        (num_values, MAX_VALUES, "values"),
    )
    for number, most, what in counts:
        if number > most:
            return f"there are more than {most} {what}; send less in one request"
    return None
