"""Pydantic models as JSON files, each replaced atomically."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)


def read_document(path: Path, kind: type[Model]) -> Model | None:
    """Read a file; `None` if it does not exist or is invalid. An invalid one is logged: no crash leaves one."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        logger.error("ignoring %s, which is invalid: %s", path, error.errors(include_input=False)[0]["msg"])
        return None


def write_document(path: Path, value: BaseModel, *, durable: bool = True) -> None:
    """Replace a file atomically. `durable`: even a loss of power leaves the old or the new content."""
    written = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        with written.open("xb") as file:
            file.write(value.model_dump_json().encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
    if not durable:
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
