"""Files of Hub repositories by their quantisation: `owner/name:Q4_K_M`, `hf.co/owner/name`, `owner/name-GGUF`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, TypeVar

from folio.app.models.gguf.files import is_first_or_whole, joined, parts_of
from folio.app.models.gguf.header import GgufHeader, HeaderReader

_Path = TypeVar("_Path", bound=PurePath)
# Read at once of a remote file.
_BLOCK_BYTES = 1 << 20
_DEFAULT_KIND = "Q4_K_M"
_NAME = re.compile(
    r"(?P<host>(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repo>[\w.-]+/[\w.-]*?(?P<gguf>-gguf)?)(?::(?P<kind>[\w.-]+))?",
    re.IGNORECASE,
)
# Files of other parts of a model, its eyes among them, and of what it was quantised by.
_OTHER_PARTS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


def is_hub_file(model: str) -> bool:
    """Whether a name is that of a Hub repository's GGUF file; nothing is looked up."""
    found = _NAME.fullmatch(model)
    return found is not None and any(found.group("host", "gguf", "kind")) and not os.path.exists(model)


def models_among(files: Iterable[_Path]) -> list[_Path]:
    """Of each model its only or its first file."""
    return [file for file in files if is_first_or_whole(file) and not _OTHER_PARTS.search(file.name)]


def is_downloaded(model: str) -> bool:
    repo, kind = _parsed(model)
    return _cached(repo, kind or _DEFAULT_KIND) is not None


@lru_cache
def downloaded(model: str) -> Path:
    """The (first) file of a model in the Hub's cache, which has all of them. What is there is used as it is, so that a
    server starts without the Hub, and again with the same model; else it is fetched. Raises `ValueError`."""
    repo, kind = _parsed(model)
    if (file := _cached(repo, kind or _DEFAULT_KIND)) is not None:
        return file
    try:
        return fetch(model)
    except ValueError:
        if (file := _cached(repo, kind)) is None:
            raise
        return file


def fetch(model: str) -> Path:
    """Download the newest files of a model into the Hub's cache. Returns the path of the (first) one there. Raises
    `ValueError`."""
    from huggingface_hub import HfApi, snapshot_download  # not with this module: it takes a while

    repo, kind = _parsed(model)
    try:
        name = chosen(repo, HfApi().list_repo_files(repo), kind)
        wanted = [glob.escape(str(part)) for part in parts_of(PurePosixPath(name))]
        return Path(snapshot_download(repo, allow_patterns=wanted)) / name
    except Exception as error:  # noqa: BLE001 - of httpx or httpx2, by the Hub client's version, among others
        raise _unreached(repo, error) from None


def remote_header(model: str) -> GgufHeader:
    """The header of a model on the Hub; nothing else of its files is read. Raises `ValueError`."""
    from huggingface_hub import HfApi, HfFileSystem  # not with this module: it takes a while

    repo, kind = _parsed(model)
    try:
        name = chosen(repo, HfApi().list_repo_files(repo), kind)
        files, headers = HfFileSystem(), []
        for part in parts_of(PurePosixPath(repo) / name):
            with files.open(str(part), "rb", block_size=_BLOCK_BYTES) as file:

                def read(count: int, offset: int, file: IO[bytes] = file) -> bytes:
                    file.seek(offset)
                    return file.read(count)

                headers.append(HeaderReader(Path(part), file.size, read).header())
        return joined(headers)
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreached(repo, error) from None


def _unreached(repo: str, error: Exception) -> ValueError:
    """What the Hub's client raised, in one line."""
    if isinstance(error, ValueError):
        return error
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(f"{repo} cannot be downloaded: {lines[0]}")


def _parsed(model: str) -> tuple[str, str | None]:
    found = _NAME.fullmatch(model)
    assert found is not None
    return found["repo"], found["kind"]


def chosen(repo: str, names: Iterable[str], kind: str | None) -> str:
    """The first file of a repository's model of a quantisation. Raises `ValueError` if there is none."""
    files = models_among(file for name in names if (file := PurePosixPath(name)).suffix.lower() == ".gguf")
    wanted = re.compile(rf"(.*[-._])?{re.escape(kind or _DEFAULT_KIND)}([-.]\d{{5}}-of-\d{{5}})?", re.IGNORECASE)
    found = [file for file in files if wanted.fullmatch(file.stem)]
    if not found and kind is None and len(files) == 1:
        found = files
    if not found:
        others = f"; it has {', '.join(str(file) for file in files[:12])}" if files else ""
        raise ValueError(f"the repository {repo} has no GGUF file in {kind or _DEFAULT_KIND}{others}")
    return str(min(found, key=lambda file: (len(file.name), str(file))))


def _cached(repo: str, kind: str | None) -> Path | None:
    """The file in the Hub's cache, if all parts of it are there."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [one for one in scan_cache_dir().repos if (one.repo_id, one.repo_type) == (repo, "model")]
    except CacheNotFound:
        return None
    for revision in sorted((each for one in repos for each in one.revisions), key=lambda each: -each.last_modified):
        paths = {str(file.file_path.relative_to(revision.snapshot_path)): file.file_path for file in revision.files}
        try:
            name = chosen(repo, paths, kind)
        except ValueError:
            continue
        if all(str(part) in paths for part in parts_of(PurePosixPath(name))):
            return paths[name]
    return None
