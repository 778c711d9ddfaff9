"""Handover: cached prefixes for another process of this machine, whose requests continue what this one has begun.

    receiver                                                        giver
      tokens, keys, units that it has ──────── Unix socket ───────> finds the cached units, copies them into a memfd
      <── which units, and the memfd (SCM_RIGHTS) ──────────────────┤
      maps the memfd, copies the units into its own blocks

The socket has a random abstract name, and both ends take only processes of their own user. Whatever goes wrong, the
units are computed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from folio.vmem.errors import MapError, VmemError
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.installer import FoundPrefix, Item, PrefixInstaller
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.token_chain import TokenChain, decode_tokens

logger = logging.getLogger(__name__)

# Bounds of the wait for the other process, of messages, and of the prefixes received at once.
_CONNECT_S, _ANSWER_S = 1.0, 5.0
_MOST_BYTES = 64 << 20
_MOST_FETCHES = 4
# Longest wait for a step that may still write what is to be copied.
_FENCE_S, _POLL_S = 1.0, 0.001

_LENGTHS = struct.Struct("<II")  # of a message's JSON, and of the bytes after it


class PrefixGiver:
    """Gives cached prefixes to other processes, in a thread of its own.

    Args:
        fingerprint: of all that gives the content of blocks its meaning; called at the first request.
        gives: given the keys of a prefix, whether others may have it.

    Attributes:
        address: where `PrefixReceiver` asks.
    """

    def __init__(
        self,
        memory: KVMemory,
        records: Records,
        fingerprint: Callable[[], str],
        gives: Callable[[tuple[str, ...]], bool] = lambda keys: True,
    ) -> None:
        self._memory, self._records, self._fingerprint, self._gives = memory, records, fingerprint, gives
        self._parts = PrefixInstaller(memory, records)
        self.address = f"folio-kv-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="folio-handover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests; the one in hand is finished."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for the next one
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(_ANSWER_S)
                    if _is_own(connection):
                        self._answer(connection)
                except (OSError, ValueError, KeyError, TypeError, VmemError) as error:
                    logger.info("no prefix is handed over: %s: %s", type(error).__name__, error)

    def _answer(self, connection: socket.socket) -> None:
        asked, content = _receive(connection)
        keys, first = tuple(map(str, asked["keys"])), int(asked["first_units"])
        if asked["fingerprint"] != self._fingerprint() or not self._gives(keys):
            raise ValueError("another model or layout, or an adapter")
        chain, token_ids = self._memory.prefixes.chain(keys), decode_tokens(content)
        nodes = self._memory.prefixes.match(chain, [*token_ids, 0]).nodes
        self._wait_for_fence()
        with _memfd() as fd:
            num_units, items = self._copy(fd, nodes, first)
            reply = {"num_units": num_units, "items": [(item.index, item.group, item.offset) for item in items]}
            _send(connection, reply, fd=fd)

    def _wait_for_fence(self) -> None:
        deadline = time.monotonic() + _FENCE_S
        while not self._memory.backend.completed(self._memory.mapper.fence):
            if time.monotonic() > deadline:
                raise VmemError("a step takes long")
            time.sleep(_POLL_S)

    def _copy(self, fd: int, nodes: Sequence[PrefixNode], first: int) -> tuple[int, list[Item]]:
        """Copy the units from `first` on, as many as a prompt can continue after."""
        for num_units in range(len(nodes), first, -1):
            needed = list(self._parts.needed(num_units, first))
            if all(nodes[i].blocks[g] is not None for i, g in needed):
                break
        else:
            return first, []
        offsets = [0]
        for _, g in needed:
            offsets.append(offsets[-1] + self._records.num_bytes[g])
        os.ftruncate(fd, offsets[-1])
        items: list[Item] = []
        with mmap.mmap(fd, offsets[-1]) as content:
            for (i, g), offset, end in zip(needed, offsets, offsets[1:], strict=False):
                if not self._copy_unit(nodes[i], g, memoryview(content)[offset:end]):
                    return (i, items) if len(self._records.num_bytes) == 1 else (first, [])
                items.append(Item(i, g, offset))
        return num_units, items

    def _copy_unit(self, node: PrefixNode, g: int, target: memoryview) -> bool:
        """Copy a unit's blocks, unless they have been evicted, or are being written."""
        memory = self._memory
        with memory.lock.exclusive():  # nothing is evicted until the blocks are copied
            block_ids = node.blocks[g]
            if block_ids is None or node.pending:
                return False
            try:
                memory.regions.map_homes(memory.group_memories[g], block_ids)
            except MapError:
                return False
            with memory.lock.unlocked():
                self._records.copy_into(target, g, block_ids)
        return True


class PrefixReceiver(PrefixInstaller):
    """Gets prefixes from a `PrefixGiver`. `read` fetches in a thread; all else is called by the engine's thread.

    Attributes:
        num_bytes: received so far.
    """

    def __init__(self, memory: KVMemory, records: Records, fingerprint: Callable[[], str]) -> None:
        super().__init__(memory, records)
        self._fingerprint = fingerprint
        self.num_bytes = 0
        self._pool = ThreadPoolExecutor(_MOST_FETCHES, "folio-handover")

    def find(self, chain: TokenChain, token_ids: Sequence[int]) -> FoundPrefix | None:
        """The units of these tokens that are not cached here; `None` if another sequence computes them. Extends the
        chain."""
        match = self._memory.prefixes.match(chain, token_ids)
        num_units = (len(token_ids) - 1) // chain.unit_tokens
        first = len(match.nodes)
        if match.is_being_computed or num_units <= first:
            return None
        return FoundPrefix(chain, first, num_units, (num_units - first) * self._unit_bytes, ())

    def read(self, prefix: FoundPrefix, address: str) -> None:
        """Fetch a prefix; the memory's lock is notified when it is done."""
        units = b"".join(prefix.chain.units[: prefix.num_units])
        self._pool.submit(self._fetch, prefix, units, address)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _fetch(self, prefix: FoundPrefix, units: bytes, address: str) -> None:
        began, num_units = time.perf_counter(), prefix.first_units
        try:
            asked = {
                "fingerprint": self._fingerprint(),
                "keys": prefix.chain.keys,
                "first_units": prefix.first_units,
            }
            if not prefix.is_cancelled:
                reply, prefix.buffer = _ask(address, asked, units)
                num_units, items = int(reply["num_units"]), [Item(*map(int, item)) for item in reply["items"]]
                self._check(prefix, num_units, items)
                prefix.items = items
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("no prefix was handed over: %s: %s", type(error).__name__, error)
            num_units = prefix.first_units
        prefix.is_intact, prefix.num_units = num_units == prefix.num_units, num_units
        prefix.num_bytes = 0 if prefix.buffer is None else len(prefix.buffer)
        self.num_bytes += prefix.num_bytes
        prefix.seconds = time.perf_counter() - began
        prefix.is_done = True
        with self._memory.lock:
            self._memory.lock.notify_all()

    def _check(self, prefix: FoundPrefix, num_units: int, items: Sequence[Item]) -> None:
        """Raise `ValueError` unless these are the records that so many units need."""
        size = 0 if prefix.buffer is None else len(prefix.buffer)
        needed = list(self.needed(num_units, prefix.first_units)) if num_units > prefix.first_units else []
        if not prefix.first_units <= num_units <= prefix.num_units or [(i.index, i.group) for i in items] != needed:
            raise ValueError("other units than needed")
        if any(item.offset < 0 or item.offset + self._records.num_bytes[item.group] > size for item in items):
            raise ValueError("units outside of the buffer")


def _ask(address: str, asked: dict[str, Any], content: bytes) -> tuple[Any, mmap.mmap | None]:
    """The answer of the giver at an address, with the memory that it hands over, if any."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(f"\0{address}")
        if not _is_own(connection):
            raise PermissionError("the address is another user's")
        connection.settimeout(_ANSWER_S)
        _send(connection, asked, content)
        first, fds, _, _ = socket.recv_fds(connection, _LENGTHS.size, 1)
        try:
            reply, _ = _receive(connection, first)
            size = os.fstat(fds[0]).st_size if fds else 0
            return reply, mmap.mmap(fds[0], size, access=mmap.ACCESS_COPY) if size else None
        finally:
            for fd in fds:
                os.close(fd)


def _send(connection: socket.socket, message: dict[str, Any], content: bytes = b"", fd: int | None = None) -> None:
    document = json.dumps(message).encode()
    lengths = _LENGTHS.pack(len(document), len(content))
    if fd is None:
        connection.sendall(lengths)
    else:
        socket.send_fds(connection, [lengths], [fd])
    connection.sendall(document + content)


def _receive(connection: socket.socket, begun: bytes = b"") -> tuple[Any, bytes]:
    """A message's JSON and bytes."""
    lengths = _LENGTHS.unpack(begun + _read(connection, _LENGTHS.size - len(begun)))
    if sum(lengths) > _MOST_BYTES:
        raise ValueError("the message is too long")
    return json.loads(_read(connection, lengths[0])), _read(connection, lengths[1])


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        if not (part := connection.recv(num_bytes - len(content))):
            raise ConnectionError("the other process has gone")
        content += part
    return bytes(content)


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())


@contextmanager
def _memfd() -> Iterator[int]:
    fd = os.memfd_create("folio-handover", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
