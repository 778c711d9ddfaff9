"""Sizes as users write and read them."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from folio.app.config.sizes import Bytes, parse_size, show_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 1 << 30),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5Gi", 3 << 29),
        ("2k", 2000),
        ("1T", 10**12),
        ("7b", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == TypeAdapter(Bytes).validate_python(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4 gigs", "1e9", "4GiBB", "0x10", "9" * 400])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="such as 4GiB or 500MB"):
        parse_size(text)
    with pytest.raises(ValidationError, match="such as 4GiB or 500MB"):
        TypeAdapter(Bytes).validate_python(text)


def test_shown() -> None:
    shown = [show_size(size) for size in (0, 1023, 1536, 750 << 20, 80 << 30, 3 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "750 MiB", "80 GiB", "3 TiB"]
