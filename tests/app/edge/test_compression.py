"""Compressed bodies are read within the bounds of plain ones."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from folio.app.config.http import BatchSettings, HttpSettings
from folio.app.edge.compression import decompressed, known_codings
from tests.fakes.replicas import Engines, ingress_with
from tests.local_server import guarded_api

BODY = json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 2}).encode()
MOST = 1 << 20

needs_zstd = pytest.mark.skipif("zstd" not in known_codings(), reason="backports.zstd is not installed")


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


def zstd(body: bytes) -> bytes:
    from backports import zstd  # type: ignore[import-not-found,unused-ignore]

    packed: bytes = zstd.compress(body)
    return packed


CODINGS: list[Any] = [
    ("gzip", gzip.compress),
    ("GZip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    pytest.param("zstd", zstd, marks=needs_zstd),
]


def post(body: bytes, coding: str, path: str = "/v1/completions", **settings: Any) -> Any:
    api = guarded_api(ingress_with(Engines()), HttpSettings(max_body_bytes=MOST, **settings))
    return TestClient(api).post(
        path, content=body, headers={"Content-Type": "application/json", "Content-Encoding": coding}
    )


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_a_compressed_body_is_that_of_a_plain_one(coding: str, compress: Callable[[bytes], bytes]) -> None:
    assert post(compress(BODY), coding).json()["choices"][0]["text"] == "00"
    whole, name = compress(BODY), coding.lower()
    assert decompressed(whole, name, len(BODY)) == BODY
    with pytest.raises(OverflowError):
        decompressed(whole, name, len(BODY) - 1)
    for broken in (whole[:-1], whole[: len(whole) // 2], b"", b"\0" + whole, whole + b"x"):
        with pytest.raises(ValueError, match=r"."):
            decompressed(broken, name, MOST)
    answer = post(whole[:-1], coding)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        f"the body is not valid {name}: its end is missing",
    )


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_bombs_are_refused_within_bounded_memory(coding: str, compress: Callable[[bytes], bytes]) -> None:
    bomb = compress(b" " * (200 << 20))
    assert len(bomb) < MOST
    answer = post(bomb, coding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    tracemalloc.start()
    with pytest.raises(OverflowError):
        decompressed(bomb, coding.lower(), MOST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MOST


@pytest.mark.parametrize(("coding", "compress"), [CODINGS[0], CODINGS[-1]])
def test_parts_are_joined_and_bounded(coding: str, compress: Callable[[bytes], bytes]) -> None:
    """Each part costs a copy of the rest: 400,000 empty ones would take minutes."""
    assert decompressed(compress(BODY[:9]) + compress(BODY[9:]), coding, MOST) == BODY
    with pytest.raises(ValueError, match="more than 16 parts"):
        decompressed(compress(b"") * 17, coding, MOST)


@needs_zstd
def test_windows_of_zstd_are_bounded() -> None:
    from backports import zstd  # type: ignore[import-not-found,unused-ignore]

    options = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    packed = compressor.compress(b"x" * (12 << 20)) + compressor.flush()
    with pytest.raises(ValueError, match=r"(?i)memory|window"):
        decompressed(packed, "zstd", 64 << 20)


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "x"])
def test_other_codings_are_refused(coding: str, tmp_path: Path) -> None:
    answer = post(BODY, coding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert answer.headers["accept-encoding"] == ", ".join(known_codings())
    assert repr(coding) in answer.json()["error"]["message"]
    uploads = BatchSettings(store=tmp_path)
    assert post(gzip.compress(BODY), "gzip", "/v1/files", batches=uploads).status_code == 415
    assert post(BODY, "identity").status_code == 200
