"""Compressed bodies of requests."""

from __future__ import annotations

import functools
import importlib
import zlib
from contextlib import suppress
from types import ModuleType
from typing import Any

# gzip's members and zstd's frames; clients send one. Each further one costs a copy of the rest.
_MOST_MEMBERS = 16
# RFC 9659: decoders need not support larger windows, and need the memory of one.
_ZSTD_WINDOW_LOG = 23


@functools.cache
def _zstd() -> ModuleType | None:
    for name in ("compression.zstd", "backports.zstd"):  # of Python 3.14; before
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    zstd = _zstd()
    return (zlib.error,) if zstd is None else (zlib.error, zstd.ZstdError)


def known_codings() -> tuple[str, ...]:
    """The values of `Content-Encoding` that are understood; zstd only where its library is installed."""
    return ("gzip", "deflate") if _zstd() is None else ("gzip", "deflate", "zstd")


def decompressed(body: bytes, coding: str, max_bytes: int) -> bytes:
    """The plain body. Memory and time are bounded by `max_bytes`.

    Raises:
        OverflowError: it has more than `max_bytes`.
        ValueError: it is broken, incomplete, or in too many parts.
    """
    plain, rest = bytearray(), body
    for _ in range(_MOST_MEMBERS):
        decoder = _decoder(coding, rest)
        try:
            plain += decoder.decompress(rest, max_bytes + 1 - len(plain))
        except _errors() as error:
            raise ValueError(str(error)) from None
        if len(plain) > max_bytes:
            raise OverflowError
        if not decoder.eof:
            raise ValueError("its end is missing")
        rest = decoder.unused_data
        if not rest:
            return bytes(plain)
    raise ValueError(f"it has more than {_MOST_MEMBERS} parts")


def _decoder(coding: str, body: bytes) -> Any:
    if coding == "zstd":
        zstd = _zstd()
        assert zstd is not None
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})
    if coding == "gzip":
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    # RFC 9110 means zlib's format; some clients send the bare one.
    has_head = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)
