"""KV store: opens the store of an engine's cached prefixes on disk, and their handover to other processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from ipaddress import ip_address
from pathlib import Path

import torch

from folio.app import VERSION
from folio.app.config.engine import ResolvedConfig
from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.request.prefix_keys import adapter_of
from folio.app.errors import ConfigError
from folio.app.models.weights.file_digests import FileDigests
from folio.app.models.weights.key import weight_key
from folio.vmem import KVMemory, VmemError
from folio.vmem.prefix.store.handover import PrefixGiver, PrefixReceiver
from folio.vmem.prefix.store.kept_prefixes import KeptPrefixes
from folio.vmem.prefix.store.prefix_store import PrefixStore
from folio.vmem.prefix.store.records import Records

logger = logging.getLogger(__name__)

# Keys of the warm-up's prefixes. No request has them, so that no request finds these prefixes in the cache.
WARM_UP_KEYS = ("warm-up",)


def open_kept(memory: KVMemory, is_worth: Callable[[int, int], bool]) -> KeptPrefixes:
    """Prefixes that a model keeps while it sleeps. Those of adapters are among them: an adapter whose files have
    changed is refused when it is read again (`RankAdapters`)."""
    return KeptPrefixes(memory, Records(memory), is_worth, lambda keys: tuple(keys) != WARM_UP_KEYS)


def open_store(
    config: ResolvedConfig, model: LoadedModel, memory: KVMemory, kept: KeptPrefixes | None
) -> PrefixStore | None:
    """The store of `kv_store`, if it is set. Raises `ConfigError`."""
    if (settings := config.kv_store) is None:
        return None
    folder = Path(settings.dir).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"kv_store.dir is {str(folder)!r}, which belongs to another user, or others can write to it; give it "
                "to this user alone (mode 0700)"
            )
        fingerprint = store_fingerprint(config, model, memory, FileDigests(folder))
        return PrefixStore(memory, folder, settings.bytes, fingerprint, _is_stored, kept)
    except (OSError, VmemError) as error:
        raise ConfigError(f"kv_store cannot be used: {error}; set another dir, more bytes, or leave it out") from error


class Handover:
    """Cached prefixes from and to other engines."""

    def __init__(self, giver: PrefixGiver, receiver: PrefixReceiver) -> None:
        self.giver, self.receiver = giver, receiver
        self._lock = threading.Lock()

    def address(self, host: str = "") -> str:
        """Where other engines get prefixes. From any thread.

        Args:
            host: this machine's address, where those of other machines get them, unless it is a loopback address.
        """
        with self._lock:
            if host and host != self.receiver.host:
                self.receiver.host = host
                if ip_address(host).is_loopback:
                    return str(self.giver.address)
                try:
                    self.giver.listen(host)
                except OSError as error:
                    logger.warning("requests that move to other machines are computed there again: %s", error)
            return str(self.giver.address)

    def close(self) -> None:
        self.receiver.close()
        self.giver.close()


def open_handover(config: ResolvedConfig, memory: KVMemory, outputs: Callable[[], str]) -> Handover | None:
    """The handover of an engine's prefixes; `None` with several ranks, each of which has a share, and without a prefix
    cache.

    Args:
        outputs: returns the fingerprint of the engine's outputs.
    """
    if config.tensor_parallel_size > 1 or not memory.prefixes.enabled:
        return None
    records = Records(memory)

    def fingerprint() -> str:
        layouts = [[group.layers, group.window_tokens, asdict(group.layout)] for group in memory.groups]
        parts = [outputs(), VERSION, config.device, memory.prefixes.unit_tokens, layouts]
        return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()

    known = cache(fingerprint)
    try:
        return Handover(PrefixGiver(memory, records, known, _is_stored), PrefixReceiver(memory, records, known))
    except OSError as error:
        logger.warning(
            "requests that move to other processes are computed there again: no socket for blocks: %s", error
        )
        return None


def store_fingerprint(config: ResolvedConfig, model: LoadedModel, memory: KVMemory, digests: FileDigests) -> bytes:
    """Of all that the content of a block depends on, beside its tokens and keys: weights and how they are loaded,
    versions of Folio and its libraries, kernels, device, dtype and layout. Raises `OSError`."""
    key = weight_key(config, digests.of, pools=model.pooling is not None)
    device = model.module.device
    parts = [
        {name: value for name, value in key.place.items() if name != "model"},
        key.version,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        [config.kv_dtype, config.attention, config.batch_invariant, memory.prefixes.unit_tokens],
        [[group.layers, group.window_tokens, asdict(group.layout)] for group in memory.groups],
    ]
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).digest()


def _is_stored(keys: Sequence[str]) -> bool:
    """An adapter's name does not tell its weights: prefixes with one are not stored."""
    return tuple(keys) != WARM_UP_KEYS and adapter_of(keys) is None
