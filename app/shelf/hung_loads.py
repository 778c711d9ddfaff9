"""Loads that hung in processes of this machine: each ended its process, and its model is refused for a while.

Else files that do not answer would end every new process at the first request for their model, with all other models.
A file in memory, which answers when disks do not, has the number of a checkpoint's hangs; its time is that of the last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from folio.app.config.shelf import ModelConfig

logger = logging.getLogger(__name__)

# A model is refused for this long after a hang, doubled by each further one up to the second number.
_FIRST_S, _LONGEST_S = 300.0, 3600.0


class HungLoads:
    """Hangs of checkpoints since each was last loaded. From any thread.

    Args:
        folder: the same for all processes of a machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, model: ModelConfig) -> float:
        """Note a hang; returns the seconds for which the model is refused."""
        path, count = self._path(model), self._read(model)[0] + 1
        try:  # in a folder of all users another one's link is not followed
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(str(count))
        except OSError as error:  # the file is another user's, or there is no room
            logger.warning("cannot note in %s that loading %r hung (%s): no pause", path, model.name, error.strerror)
            return 0.0
        return _refused_s(count)

    def refused_s(self, model: ModelConfig) -> float:
        """Seconds for which the model is still refused; 0 if it is not."""
        count, noted_at = self._read(model)
        if not count:
            return 0.0
        most_s = _refused_s(count)
        return min(max(noted_at + most_s - time.time(), 0.0), most_s)  # the clock may be set

    def forget(self, model: ModelConfig) -> None:
        """Note that the model has been loaded."""
        if self._read(model)[0]:
            self._path(model).unlink(missing_ok=True)

    def _read(self, model: ModelConfig) -> tuple[int, float]:
        """Number and time of the hangs; 0 without a note of this user's. Another process may remove it meanwhile."""
        path = self._path(model)
        with suppress(OSError, ValueError):
            info = path.lstat()
            if info.st_uid == os.geteuid():
                return int(path.read_text()), info.st_mtime
        return 0, 0.0

    def _path(self, model: ModelConfig) -> Path:
        digest = hashlib.blake2b(model.engine.model.encode(), digest_size=8).hexdigest()
        return self._folder / f"folio-hung-{os.geteuid()}-{digest}"


def _refused_s(count: int) -> float:
    return min(_FIRST_S * 2 ** min(count - 1, 30), _LONGEST_S)
