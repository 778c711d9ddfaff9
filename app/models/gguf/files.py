"""Files of GGUF models: one, or several parts (`NAME-00001-of-00003.gguf`)."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TypeVar

from folio.app.models.gguf.header import GgufHeader, GgufTensor, HeaderReader, shown

SUFFIX = ".gguf"
_Path = TypeVar("_Path", bound=PurePath)
_PART = re.compile(r"(?P<name>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def read_gguf(path: Path) -> GgufHeader:
    """The header of a file, or of all files of a model that is split (`NAME-00001-of-00003.gguf`), by any of them.

    Raises:
        ValueError: with a sentence for the user: a file is missing, truncated or damaged.
    """
    files = parts_of(path)
    for file in files:
        if not file.is_file():
            of = f", one of {len(files)} files of the model" if len(files) > 1 else ""
            raise ValueError(f"{file}{of} is not there")
    return joined([_read_file(file) for file in files])


def joined(headers: Sequence[GgufHeader]) -> GgufHeader:
    """The header of a model of these files. Raises `ValueError` if they are not all files of one model."""
    first, files = headers[0], tuple(header.files[0] for header in headers)
    tensors: dict[str, GgufTensor] = {}
    numbers: dict[str, tuple[float, ...]] = {}
    for number, header in enumerate(headers):
        if (count := header.settings.get("split.count", 1)) != len(files):
            raise ValueError(
                f"{header.files[0]} is of a model of {shown(count)} files (split.count), and there are {len(files)}"
            )
        if header.settings.get("split.no", number) != number:
            raise ValueError(f"{header.files[0]} is part {number + 1} by its name, and has another split.no")
        if twice := tensors.keys() & header.tensors.keys():
            raise ValueError(f"{header.files[0]} has the tensor {min(twice)!r}, and so has a file before it")
        tensors |= header.tensors
        numbers |= header.numbers
    if (count := first.settings.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ValueError(
            f"{files[0]} and its other files have {len(tensors)} tensors; split.tensors.count says {shown(count)}"
        )
    digest = hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()
    return replace(first, files=files, tensors=tensors, digest=digest, numbers=numbers)


def parts_of(path: _Path) -> tuple[_Path, ...]:
    """Paths of all files of the model that the file is a part of, by its name. Raises `ValueError` if it is wrong."""
    if (found := _PART.fullmatch(path.name)) is None:
        return (path,)
    part, parts = int(found["part"]), int(found["parts"])
    if not 1 <= part <= parts:
        raise ValueError(f"{path} is part {part} of {parts} by its name")
    name = f"{found['name']}-{{:05}}-of-{found['parts']}{path.suffix}"
    return tuple(path.with_name(name.format(number)) for number in range(1, parts + 1))


def is_first_or_whole(path: PurePath) -> bool:
    """Whether the file stands for a model: it is not split, or the first part."""
    return (found := _PART.fullmatch(path.name)) is None or int(found["part"]) == 1


def default_name(model: str) -> str:
    """The name to serve a model by: of its folder or Hub id, or of a GGUF file without suffix and number."""
    name = PurePath(model).name
    found = _PART.fullmatch(name)
    return found["name"] if found else name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name


def _read_file(path: Path) -> GgufHeader:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no regular file")
        return HeaderReader(path, found.st_size, lambda count, offset: os.pread(fd, count, offset)).header()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
