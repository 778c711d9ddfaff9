"""The ledger of a device as a Ray actor, and a replica's side of it.

The actor has a name, and whichever replica finds none creates and owns it: it ends with that replica, and so with the
application, and the others make a new one, which learns from their beats what they have. It runs on the replicas' own
node, where it sees for certain whether their processes have ended. A replica that cannot reach it keeps its budget.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.engine.report import ReplicaReport
from app.errors import ConfigError, UnavailableError
from app.fleet.ledger import BudgetLedger, BudgetOrder, LedgerHeartbeat, Membership, MemberUsage
from vmem.errors import BudgetError

logger = logging.getLogger(__name__)

# Often enough that a budget follows the load in a few seconds, and often when somebody waits for it to start.
BEAT_S, STARTING_BEAT_S = 1.0, 0.2
# An answer that takes longer is not waited for; the next beat makes it void.
ANSWER_TIMEOUT_S = 5.0
# How often a replica that waits for memory says so.
_SAY_S = 10.0
# Whatever driver or controller makes replicas, they look for the ledger in the same place.
NAMESPACE = "folio"


class Budgeted(Protocol):
    """What a member needs of its `KVMemory`, which the actor's process need not import."""

    @property
    def least_budget_bytes(self) -> int: ...

    @property
    def most_budget_bytes(self) -> int: ...

    @property
    def held_bytes(self) -> int: ...

    def set_budget(self, budget_bytes: int, revision: int) -> Any: ...


class LedgerActor:
    """`Ledger` of the processes of this node. Whom it counts is in a file, too, for the one that comes after it."""

    def __init__(self, name: str) -> None:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._roster = Roster(name)
        self._pids = self._roster.read()
        self._pidfds: dict[str, int] = {}  # they become readable when the process has ended
        for member, pid in list(self._pids.items()):
            if not self._watch(member, pid):
                del self._pids[member]
        self._ledger = BudgetLedger(time.monotonic(), awaits=self._pids)

    def beat(self, beat: LedgerHeartbeat, pid: int) -> BudgetOrder:
        """See `Ledger.beat`.

        Args:
            pid: of the process that holds the member's memory.
        """
        self._forget_dead()
        order = self._ledger.handle_heartbeat(beat, time.monotonic())
        if beat.member in self._ledger.members and beat.member not in self._pidfds:
            if not self._watch(beat.member, pid):
                self._ledger.remove_member(beat.member)
                return order
            self._pids[beat.member] = pid
            self._roster.write(self._pids)  # before the member hears of its grant
        return order

    def leave(self, member: str) -> None:
        """See `Ledger.leave`."""
        if member in self._pidfds:
            os.close(self._pidfds.pop(member))
        if self._pids.pop(member, None) is not None:
            self._roster.write(self._pids)
        self._ledger.remove_member(member)

    def members(self) -> tuple[str, ...]:
        """Who is counted."""
        self._forget_dead()
        return self._ledger.members

    def _watch(self, member: str, pid: int) -> bool:
        """False if the process has ended."""
        try:
            self._pidfds[member] = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        return True

    def _forget_dead(self) -> None:
        members, poll = {pidfd: member for member, pidfd in self._pidfds.items()}, select.poll()
        for pidfd in members:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            logger.warning("%s has died; its KV memory is for the others", members[pidfd])
            self.leave(members[pidfd])


class Roster:
    """Whom a ledger counts, with process ids, in a file of this node: a new ledger waits for a word of each before it
    grants anything. Names of ledgers have the id of their Ray node, so that no other cluster's is found."""

    def __init__(self, name: str) -> None:
        self._path = _private_folder() / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.json"

    def read(self) -> dict[str, int]:
        """Member → process id. One that has ended since may by now be another process: then its memory is free only
        when that ends, too."""
        try:
            return {str(member): int(pid) for member, pid in json.loads(self._path.read_text()).items()}
        except FileNotFoundError:
            return {}

    def write(self, pids: Mapping[str, int]) -> None:
        if not pids:
            self._path.unlink(missing_ok=True)
            return
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(dict(pids)))
        written.replace(self._path)


def _private_folder() -> Path:
    """Nobody else can put a link there. Raises `ConfigError` when somebody else has made it, or may write into it."""
    folder = Path(tempfile.gettempdir()) / f"folio-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a folder of this user's alone: remove it, or set TMPDIR to another place")
    return folder


def ledger_name(app_name: str, node_id: str, device: str) -> str:
    """Of the actor, in `NAMESPACE`."""
    return f"folio-ledger:{app_name}:{node_id}:{device}"


class BudgetMember:
    """This replica's part in the ledger of its device: a thread that sends beats and carries out orders.

    First `wait_for_budget`, so that nobody loads a model who cannot have memory; then make the engine, with a ceiling
    of `capacity_bytes` and `attach` as its `admit`; then `follow` its load. `close` when the engine has been closed.

    Args:
        capacity_bytes: KV memory of all replicas of the application on the device.
        device: its name on this node.
    """

    def __init__(self, capacity_bytes: int, device: str) -> None:
        context = serve.get_replica_context()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._name = ledger_name(context.app_name, self._node_id, device)
        self._membership = Membership(context.replica_id.unique_id, capacity_bytes)
        self._ledger: Any = None
        self._memory: Budgeted | None = None
        self._load: Callable[[], ReplicaReport] | None = None
        self._changed = threading.Condition()  # guards what follows
        self._budget_bytes = self._revision = 0
        self._attached = False  # the memory has the budget
        self._refusal: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="folio-budget", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether orders still arrive and are carried out."""
        return self._thread.is_alive()

    def wait_for_budget(self) -> None:
        """Return when the others have made room. Raises `ConfigError` if they never can."""
        self._wait(lambda: self._budget_bytes > 0)

    def attach(self, memory: Budgeted) -> None:
        """Set the budget of a memory that nothing has been taken from, from now on. Returns when it has one that it can
        work with. Raises `ConfigError` if it needs more than others can spare."""
        self._memory = memory
        self._wait(lambda: self._attached)

    def follow(self, load: Callable[[], ReplicaReport]) -> None:
        """Ask for memory as this load needs it."""
        self._load = load

    def close(self) -> None:
        """Stop, and give the budget to the others: the engine must hold nothing any more."""
        self._closing.set()
        self._thread.join()
        if self._ledger is not None:
            self._ledger.leave.remote(self._membership.member)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: done() or self._refusal is not None, _SAY_S):
                if not self._thread.is_alive():
                    raise UnavailableError("the thread that asks for a budget has ended, see the log")
                logger.info("waiting until other replicas on this device have given back KV memory")
            if self._refusal is not None:
                raise ConfigError(self._refusal)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._beat_until_closed()
        except Exception:  # the replica must not go on with a budget that nobody can change: see `healthy`
            logger.exception("the replica takes part in sharing memory no more")

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(BEAT_S if self._attached else STARTING_BEAT_S):
            try:
                self._exchange()
            except (RayActorError, LookupError) as error:
                logger.warning("the ledger cannot be reached, the budget stays as it is: %s", error)
                self._ledger = None
            except RayError as error:
                logger.warning("the ledger does not answer, the budget stays as it is: %s", error)
            except UnavailableError:
                return  # the engine has stopped, and this process ends, which the ledger sees

    def _exchange(self) -> None:
        if self._memory is not None and not self._attached:
            self._carry_out(self._memory, self._budget_bytes, self._revision)
        if self._ledger is None:
            self._ledger = self._find()
        beat = self._membership.next_heartbeat(self._holding())
        order: BudgetOrder = ray.get(self._ledger.beat.remote(beat, os.getpid()), timeout=ANSWER_TIMEOUT_S)
        if not self._membership.obeys(order):
            return
        if order.refusal is not None:
            with self._changed:
                self._refusal = order.refusal
                self._changed.notify_all()
        elif order.revision > self._revision:
            self._carry_out(self._memory, order.budget_bytes, order.revision)

    def _carry_out(self, memory: Budgeted | None, budget_bytes: int, revision: int) -> None:
        if memory is not None:
            try:
                memory.set_budget(min(budget_bytes, memory.most_budget_bytes), revision)
            except BudgetError as error:  # what it needs has become more; the next beat says so
                logger.info("not carried out: %s", error)
                return
        with self._changed:
            self._budget_bytes, self._revision = budget_bytes, revision
            self._attached = memory is not None
            self._changed.notify_all()

    def _holding(self) -> MemberUsage:
        memory = self._memory
        if memory is None:
            return MemberUsage(self._budget_bytes, revision=self._revision)
        demand_bytes = 0
        if self._load is not None:
            load = self._load()
            wanted_tokens = load.total_tokens - load.free_tokens + load.queued_tokens
            demand_bytes = wanted_tokens * load.budget_bytes // max(load.total_tokens, 1)
        return MemberUsage(
            budget_bytes=self._budget_bytes,
            held_bytes=memory.held_bytes,
            least_bytes=memory.least_budget_bytes,
            most_bytes=memory.most_budget_bytes,
            demand_bytes=demand_bytes,
            revision=self._revision,
        )

    def _find(self) -> Any:
        """The device's ledger; made, if there is none, on this node, which alone can see its processes."""
        options: Any = {
            "name": self._name,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": 0,  # members make a new one, also when its owner has gone
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node_id, soft=False),
        }
        try:
            return ray.remote(LedgerActor).options(**options).remote(self._name)
        except ValueError as error:  # somebody else made one, which has died since
            raise LookupError(f"{self._name} has gone") from error


def device_of_this_replica(device: str) -> str:
    """Name of a "cpu" or "cuda" device on this node: CPUs share the node's memory."""
    return f"cuda:{ray.get_gpu_ids()[0]}" if device == "cuda" else "cpu"
