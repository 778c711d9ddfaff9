"""From an adapter's name to weights that layers can use."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from app.engine.lora import LoRALayers, Updates, num_bytes
from app.engine.lora_weights import WEIGHTS_FILE, find_folder, read_config, read_weights
from app.errors import ModelError

logger = logging.getLogger(__name__)


class AdapterFiles:
    """Reads adapters for one model. Only one thread uses it.

    Args:
        sources: name → folder or Hub id.
        layers: the model's, observed.
    """

    def __init__(self, sources: Mapping[str, str], layers: LoRALayers) -> None:
        self._sources = sources
        self._layers = layers
        self._folders: dict[str, tuple[Path, tuple[int, int]]] = {}

    def read(self, name: str) -> Updates:
        """The adapter's weights, on the model's device.

        Raises:
            ModelError: it is not to be had, does not fit the model, or is another one than before.
        """
        start = time.monotonic()
        folder = self._find(name)
        layers = self._layers
        weights = read_weights(
            name,
            folder,
            read_config(name, folder),
            layers.shapes,
            head=layers.head,
            dtype=layers.dtype,
            device=layers.device,
        )
        updates = layers.stack(weights)
        seconds = time.monotonic() - start
        logger.info("loaded adapter %r: %.1f MiB in %.2f s", name, num_bytes(updates) / 2**20, seconds)
        return updates

    def _find(self, name: str) -> Path:
        """Its folder, the same as the first time: the prefix cache knows an adapter by its name."""
        if name not in self._folders:
            folder = find_folder(name, self._sources[name])
            self._folders[name] = folder, _version(folder)
        folder, version = self._folders[name]
        try:
            changed = _version(folder) != version
        except OSError as error:
            raise ModelError(f"adapter {name!r}: its file is gone: {error}") from error
        if changed:
            raise ModelError(
                f"adapter {name!r}: {str(folder)!r} has changed since it was first loaded, and what is cached would "
                "not fit any more; give it another name, or restart"
            )
        return folder


def _version(folder: Path) -> tuple[int, int]:
    stat = (folder / WEIGHTS_FILE).stat()
    return stat.st_mtime_ns, stat.st_size
