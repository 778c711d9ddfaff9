"""Files of a checkpoint: read into the page cache before a load reads them.

A load blocks others: on CUDA the steps of all models (`AsyncEngine`), everywhere other loads (`checkpoint_module`).
Reading from a disk is its slow part, and is done before, while nothing is blocked.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from folio.app.config.engine import ResolvedConfig
from folio.app.models.builtin import resolve_model
from folio.app.models.weights.key import weight_files
from folio.vmem import MapError
from folio.vmem.weights import read_ahead

logger = logging.getLogger(__name__)


def read_checkpoint(config: ResolvedConfig) -> None:
    """Read the weights of a checkpoint into the page cache. A Hub model that is not downloaded yet has no files."""
    for path in weight_files(resolve_model(config.model)) if config.load_format == "auto" else ():
        try:
            _read(path)
        except (OSError, MapError) as error:  # the load fails in the same way, and reports the cause
            logger.info("%s cannot be read ahead: %s", path, error)


def read_contents(fd: int, offset: int, num_bytes: int) -> None:
    """Read a part of a file into the page cache, see `folio.vmem.weights.read_ahead`. Raises `MapError`."""
    for _ in read_ahead(fd, offset, num_bytes):
        pass


def _read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if num_bytes := os.fstat(fd).st_size:
            read_contents(fd, 0, num_bytes)
    finally:
        os.close(fd)
