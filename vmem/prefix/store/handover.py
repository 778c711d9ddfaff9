"""Handover: cached prefixes for another process, whose requests continue what this one has begun.

    receiver                                                        giver
      tokens, keys, units that it has ───────── link ─────────────> finds the cached units
      on the same machine:
      <── how many units, and a memfd (SCM_RIGHTS) ─────────────────┤ copies all into a memfd
      maps the memfd, copies the units into its own blocks
      both on GPUs: `exported_pages`, and as above where that is refused
      from another machine:
      <── how many units, then one after the other, checked ────────┤ copies each, and sends it
      copies them into its own blocks

A receiver may also ask for units that are still to be computed: each comes when its step has ended, so that most are
there before the request is. Whatever goes wrong, the units are computed.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from folio.vmem.errors import MapError, VmemError
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.exported_pages import NotImported, PageExporter, PageImporter
from folio.vmem.prefix.store.installer import FoundPrefix, Item, PrefixInstaller
from folio.vmem.prefix.store.link import Address, Link, check_user, connect, listen
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.token_chain import Digest, TokenChain, decode_tokens

logger = logging.getLogger(__name__)

# Asks a giver for a prefix: its asked units, their tokens, the address, and the records that have come.
_Ask = Callable[[FoundPrefix, int, bytes, str, list[Item]], None]

# Prefixes received at once, those that are received or given while they are computed, and prefixes given at once.
_MOST_FETCHES, _MOST_AHEAD, _MOST_GIVEN = 4, 8, 16
# Host memory of prefixes that are fetched ahead; one may have more.
_MOST_AHEAD_BYTES = 2 << 30
# Longest wait for a step that may still write what is to be copied.
_FENCE_S, _POLL_S = 1.0, 0.001
# Interval between looks at units that are being computed, between signs of life meanwhile, and longest wait for a unit.
_LOOK_S, _BEAT_S, _UNIT_S = 0.01, 0.5, 60.0


class PrefixGiver:
    """Gives cached prefixes to other processes, in threads of its own, a few at once.

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
        self._exporter = PageExporter(memory, self._parts)
        self._copying = threading.Lock()  # records have one buffer
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []
        self._pool = ThreadPoolExecutor(_MOST_GIVEN, "folio-giver")
        self._places_ahead = threading.BoundedSemaphore(_MOST_AHEAD)
        self._is_closed = False
        self.address = Address(f"folio-kv-{uuid.uuid4().hex}")
        self._listen(self.address)

    def listen(self, host: str) -> None:
        """Give prefixes to other machines, too, at this address of the machine. Raises `OSError`."""
        remote = replace(self.address, host=host, key=secrets.token_hex(32))
        self.address = replace(remote, port=self._listen(remote))

    def close(self) -> None:
        """Take no more requests; those in hand are finished, as far as their units are computed."""
        self._is_closed = True
        for listener, thread in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next one
            thread.join()
            listener.close()
        self._pool.shutdown()

    def _listen(self, address: Address) -> int:
        """Returns the port of a TCP socket."""
        listener = listen(address)
        thread = threading.Thread(target=self._serve, args=(listener, address.key), name="folio-handover", daemon=True)
        self._listeners.append((listener, thread))
        thread.start()
        return int(listener.getsockname()[1]) if address.host else 0

    def _serve(self, listener: socket.socket, key: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._pool.submit(self._give, connection, key)

    def _give(self, connection: socket.socket, key: str) -> None:
        with connection:
            try:
                if not key:
                    check_user(connection)
                self._answer(Link(connection, key, gives=True))
            except (OSError, ValueError, KeyError, TypeError, VmemError) as error:
                logger.info("no prefix is handed over: %s: %s", type(error).__name__, error)

    def _answer(self, link: Link) -> None:
        asked, content = link.receive_json(), link.receive()
        if "export" in asked:
            link.send_json({"num_intact": self._exporter.num_intact(int(asked["export"]))})
            return
        keys, first = tuple(map(str, asked["keys"])), int(asked["first_units"])
        if asked["fingerprint"] != self._fingerprint() or not self._gives(keys):
            raise ValueError("another model or layout, or an adapter")
        chain, token_ids = self._memory.prefixes.chain(keys), decode_tokens(content)
        if asked["ahead"]:
            chain.extend(token_ids)
            if not self._places_ahead.acquire(blocking=False):
                raise ValueError("as many prefixes as may be are given while they are computed")
            try:
                self._give_ahead(link, chain, first)
            finally:
                self._places_ahead.release()
            return
        nodes = self._memory.prefixes.match(chain, [*token_ids, 0]).nodes
        num_units = self._num_units(nodes, first)
        needed = list(self._parts.needed(num_units, first))
        export = self._exporter.note(nodes, num_units, first) if asked["imports"] else None
        self._wait_for_fence()
        if export is not None:
            self._exporter.give(link, export)
            return
        if link.is_remote:
            link.send_json({"num_units": num_units})
            for i, g in needed:
                record = bytearray(self._records.num_bytes[g])
                if not self._copy_unit(nodes[i], g, memoryview(record)):
                    return  # what has been sent may do
                link.send(record)
            return
        with _memfd() as fd:
            num_copied = self._copy(fd, nodes, needed)
            link.send_json({"num_units": self._parts.units_after(num_units, first, num_copied)})
            link.send_fds([fd])

    def _give_ahead(self, link: Link, chain: TokenChain, first: int) -> None:
        """Give the chain's units from `first` on, each as soon as it is computed."""
        size, sizes = self._parts.unit_bytes, self._records.num_bytes
        with _memfd() as fd:
            os.ftruncate(fd, size * (1 if link.is_remote else len(chain.units) - first))
            if not link.is_remote:
                link.send_fds([fd])
            with mmap.mmap(fd, 0) as content, memoryview(content) as target:
                for i, node in self._computed(link, chain, first):
                    at = 0 if link.is_remote else size * (i - first)
                    for g, num_bytes in enumerate(sizes):
                        if not self._copy_unit(node, g, target[at : at + num_bytes]):
                            return
                        at += num_bytes
                    link.send_json({"num_units": i + 1})
                    if link.is_remote:
                        link.send(target)

    def _computed(self, link: Link, chain: TokenChain, first: int) -> Iterator[tuple[int, PrefixNode]]:
        """Units from `first` on, when the steps that compute them have ended; meanwhile signs of life."""
        memory, i = self._memory, first
        token_ids = [*decode_tokens(b"".join(chain.units)), 0]
        while i < len(chain.units):
            nodes: Sequence[PrefixNode] = ()
            began, fence, num_beats = time.monotonic(), 0, 0
            while not nodes or not memory.backend.completed(fence):
                waited_s = time.monotonic() - began
                if not nodes and memory.prefixes.is_computed(chain.digests[i]):
                    found = memory.prefixes.match(chain, token_ids).nodes[i:]
                    launched = itertools.takewhile(lambda node: memory.prefixes.is_computed(node.digest), found)
                    nodes, fence = list(launched), memory.mapper.fence
                    if not nodes:
                        return  # evicted
                elif self._is_closed or waited_s > _UNIT_S:
                    return
                else:
                    if waited_s > (num_beats + 1) * _BEAT_S:
                        link.send_json({"num_units": i})
                        num_beats += 1
                    time.sleep(_LOOK_S)
            yield from enumerate(nodes, i)
            i += len(nodes)

    def _wait_for_fence(self) -> None:
        deadline, fence = time.monotonic() + _FENCE_S, self._memory.mapper.fence
        while not self._memory.backend.completed(fence):
            if time.monotonic() > deadline:
                raise VmemError("a step takes long")
            time.sleep(_POLL_S)

    def _num_units(self, nodes: Sequence[PrefixNode], first: int) -> int:
        """The most units that a prompt can continue after, of which all from `first` on are cached."""
        for num_units in range(len(nodes), first, -1):
            if all(nodes[i].blocks[g] is not None for i, g in self._parts.needed(num_units, first)):
                return num_units
        return first

    def _copy(self, fd: int, nodes: Sequence[PrefixNode], needed: Sequence[tuple[int, int]]) -> int:
        """Copy records, and return their number."""
        if not needed:
            return 0
        os.ftruncate(fd, sum(self._records.num_bytes[g] for _, g in needed))
        with mmap.mmap(fd, 0) as content, memoryview(content) as target:
            at = 0
            for number, (i, g) in enumerate(needed):
                end = at + self._records.num_bytes[g]
                if not self._copy_unit(nodes[i], g, target[at:end]):
                    return number
                at = end
        return len(needed)

    def _copy_unit(self, node: PrefixNode, g: int, target: memoryview) -> bool:
        """Copy a unit's blocks, unless they have been evicted, or are being written."""
        memory = self._memory
        with self._copying, memory.lock.exclusive():  # nothing is evicted until the blocks are copied
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


class PrefixReceiver(PageImporter):
    """Gets prefixes from a `PrefixGiver`. `read` fetches in a thread; all else is called by the engine's thread.

    Attributes:
        host: of this machine; a giver of another one is asked over TCP.
        num_bytes: received so far.
    """

    def __init__(self, memory: KVMemory, records: Records, fingerprint: Callable[[], str]) -> None:
        super().__init__(memory, records)
        self._fingerprint = fingerprint
        self.host = ""
        self.num_bytes = 0
        self._pool = ThreadPoolExecutor(_MOST_FETCHES, "folio-handover")
        self._ahead: dict[Digest, FoundPrefix] = {}  # by the last unit's digest
        self._ahead_pool = ThreadPoolExecutor(_MOST_AHEAD, "folio-ahead")

    def find(self, chain: TokenChain, token_ids: Sequence[int]) -> FoundPrefix | None:
        """The units of these tokens that are not cached here, or those that come since `fetch_ahead`; `None` if another
        sequence computes them. Extends the chain."""
        chain.extend(token_ids)
        for digest in reversed(chain.digests) if self._ahead else ():
            if (ahead := self._ahead.pop(digest, None)) is not None:
                ahead.is_awaited = True
                return ahead
        return self._missing(chain, token_ids)

    def _missing(self, chain: TokenChain, token_ids: Sequence[int]) -> FoundPrefix | None:
        match = self._memory.prefixes.match(chain, token_ids)
        num_units = (len(token_ids) - 1) // chain.unit_tokens
        first = len(match.nodes)
        if match.is_being_computed or num_units <= first:
            return None
        return FoundPrefix(chain, first, num_units, (num_units - first) * self.unit_bytes, ())

    def fetch_ahead(self, chain: TokenChain, token_ids: Sequence[int], address: str) -> FoundPrefix | None:
        """Begin to fetch a prefix that its giver computes now, for a request that comes later, until `drop`. From any
        thread. `None` if nothing is to be fetched, if enough is, or if layers read only a window or a state, so that it
        cannot be used in parts."""
        prefix = self._missing(chain, token_ids)
        if prefix is None or not self.reads_all_units:
            return None
        num_bytes = sum(other.num_bytes for other in list(self._ahead.values()))
        if len(self._ahead) >= _MOST_AHEAD or (num_bytes and num_bytes + prefix.num_bytes > _MOST_AHEAD_BYTES):
            return None
        if self._ahead.setdefault(chain.digests[prefix.num_units - 1], prefix) is not prefix:
            return None
        units = b"".join(chain.units[: prefix.num_units])
        self._ahead_pool.submit(self._fetch, prefix, units, address, self._ask_ahead)
        return prefix

    def drop(self, prefix: FoundPrefix | None) -> None:
        """Forget what `fetch_ahead` has returned, unless its request has come."""
        for digest, other in list(self._ahead.items()):
            if other is prefix:
                self._ahead.pop(digest, None)
        if prefix is not None and not prefix.is_awaited:
            prefix.is_cancelled = True

    def is_remote(self, address: str) -> bool:
        """Whether a giver is asked over TCP."""
        parts = address.split(" ")
        return len(parts) > 1 and parts[1] != self.host

    def read(self, prefix: FoundPrefix, address: str) -> None:
        """Fetch a prefix, unless it is coming; the memory's lock is notified when it is done."""
        if not prefix.is_awaited:
            units = b"".join(prefix.chain.units[: prefix.num_units])
            self._pool.submit(self._fetch, prefix, units, address, self._ask)

    def close(self) -> None:
        for prefix in list(self._ahead.values()):
            prefix.is_cancelled = True
        self._ahead_pool.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _fetch(self, prefix: FoundPrefix, units: bytes, address: str, ask: _Ask) -> None:
        began, first, asked_units = time.perf_counter(), prefix.first_units, prefix.num_units
        prefix.num_units, items = first, list[Item]()
        try:
            if not prefix.is_cancelled:
                ask(prefix, asked_units, units, address, items)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("a prefix was not handed over: %s: %s", type(error).__name__, error)
        prefix.num_units = self.units_after(prefix.num_units, first, len(items))
        prefix.is_intact = prefix.num_units == asked_units
        prefix.items = items if prefix.num_units > first else []
        prefix.num_bytes = sum(self._records.num_bytes[item.group] for item in prefix.items)
        self.num_bytes += prefix.num_bytes
        prefix.seconds = time.perf_counter() - began
        prefix.is_done = True
        if prefix.is_cancelled:
            self.cancel(prefix)
        with self._memory.lock:
            self._memory.lock.notify_all()

    @contextmanager
    def _asked(
        self, prefix: FoundPrefix, units: bytes, address: str, *, ahead: bool = False, imports: bool = False
    ) -> Iterator[Link]:
        """A link to a giver that has been asked."""
        with connect(Address.parse(address), remote=self.is_remote(address)) as link:
            asked = {"keys": prefix.chain.keys, "first_units": prefix.first_units, "ahead": ahead, "imports": imports}
            link.send_json({"fingerprint": self._fingerprint(), **asked})
            link.send(units)
            yield link

    def _ask_ahead(self, prefix: FoundPrefix, most_units: int, units: bytes, address: str, items: list[Item]) -> None:
        """`_ask`, for units that are being computed, until all have come, or those that had when the request came."""
        first = done = prefix.first_units
        prefix.num_units = most_units
        with self._asked(prefix, units, address, ahead=True) as link:
            num_bytes = (most_units - first) * self.unit_bytes
            prefix.buffer = mmap.mmap(-1, num_bytes) if link.is_remote else _mapped(link.receive_fds(1)[0], num_bytes)
            while done < most_units and not prefix.is_cancelled:
                num_units = int(link.receive_json()["num_units"])
                if num_units == done:
                    if prefix.is_awaited:
                        return
                    continue
                if num_units != done + 1:
                    raise ValueError("another unit than the next one")
                at = (done - first) * self.unit_bytes
                if link.is_remote:
                    link.receive_into(memoryview(prefix.buffer)[at : at + self.unit_bytes])
                for g, size in enumerate(self._records.num_bytes):
                    items.append(Item(done, g, at))
                    at += size
                done = num_units

    def _ask(self, prefix: FoundPrefix, most_units: int, units: bytes, address: str, items: list[Item]) -> None:
        """Ask for units, and set how many the giver has; append the records that have come to `items`."""
        imports = self.imports and not self.is_remote(address)
        try:
            self._ask_for(prefix, most_units, units, address, items, imports=imports)
        except NotImported as error:
            logger.info("blocks come through host memory, for pages cannot be imported: %s", error)
            self._ask_for(prefix, most_units, units, address, items, imports=False)

    def _ask_for(
        self, prefix: FoundPrefix, most_units: int, units: bytes, address: str, items: list[Item], *, imports: bool
    ) -> None:
        first = prefix.first_units
        with self._asked(prefix, units, address, imports=imports) as link:
            reply = link.receive_json()
            num_units = int(reply["num_units"])
            if not first <= num_units <= most_units:
                raise ValueError("other units than asked for")
            needed, sizes = list(self.needed(num_units, first)), self._records.num_bytes
            offsets = [0]
            for _, g in needed:
                offsets.append(offsets[-1] + sizes[g])
            prefix.num_units = num_units
            if not needed:
                return
            if "export" in reply:
                items += self.import_pages(prefix, link, reply, needed, Address.parse(address))
                return
            records = [Item(i, g, offset) for (i, g), offset in zip(needed, offsets, strict=False)]
            if not link.is_remote:
                prefix.buffer = _mapped(link.receive_fds(1)[0], offsets[-1])
                items += records
                return
            prefix.buffer = mmap.mmap(-1, offsets[-1])
            for record in records:
                link.receive_into(self.part(prefix, record))
                items.append(record)


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """The memory of a descriptor, which is closed. Raises `ValueError` if it is shorter."""
    try:
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


@contextmanager
def _memfd() -> Iterator[int]:
    fd = os.memfd_create("folio-handover", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
