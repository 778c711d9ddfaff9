"""The budget ledger of a device as a Ray actor, and a replica's side of it.

The first replica that finds no actor of this name creates and owns it. The actor ends with that replica, at the latest
with the application; the other replicas create a new one, which learns their usage from their heartbeats. The actor
runs on the replicas' node, where it sees reliably whether their processes have ended. A replica that cannot reach it
keeps its budget.
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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from folio.app.engine.report import ReplicaReport
from folio.app.errors import ConfigError, UnavailableError
from folio.app.fleet.ledger import BudgetLedger, BudgetOrder, LedgerHeartbeat, Membership, MemberUsage
from folio.vmem.errors import BudgetError

if TYPE_CHECKING:
    from folio.app.engine.model.memory_profile import DevicePlan
    from folio.vmem import KVMemory

logger = logging.getLogger(__name__)

# Intervals of heartbeats: budgets follow the load within a few seconds, and starting replicas wait for their first.
BEAT_S, STARTING_BEAT_S = 1.0, 0.2
# A later answer is void because of the next heartbeat.
ANSWER_TIMEOUT_S = 5.0
# Interval of log lines while a replica waits for memory.
_LOG_S = 10.0
# Of the actors: the same for replicas of every driver and controller.
NAMESPACE = "folio"


class LedgerActor:
    """`BudgetLedger` of the processes of this node, with a roster file for the actor that comes after this one."""

    def __init__(self, name: str) -> None:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._roster = Roster(name)
        self._pidfds: dict[str, int] = {}  # readable once the process has ended
        self._pids = {member: pid for member, pid in self._roster.read().items() if self._watch(member, pid)}
        self._ledger = BudgetLedger(time.monotonic(), awaits=self._pids)

    def handle_heartbeat(self, beat: LedgerHeartbeat, pid: int) -> BudgetOrder:
        """See `BudgetLedger.handle_heartbeat`. `pid`: the process that holds the member's memory."""
        self._forget_dead()
        order = self._ledger.handle_heartbeat(beat, time.monotonic())
        if beat.member in self._ledger.members and beat.member not in self._pidfds:
            if not self._watch(beat.member, pid):
                self._ledger.remove_member(beat.member)
                return order
            self._pids[beat.member] = pid
            self._roster.write(self._pids)  # before the member learns of its grant
        return order

    def remove_member(self, member: str) -> None:
        """See `BudgetLedger.remove_member`."""
        if member in self._pidfds:
            os.close(self._pidfds.pop(member))
        if self._pids.pop(member, None) is not None:
            self._roster.write(self._pids)
        self._ledger.remove_member(member)

    def members(self) -> tuple[str, ...]:
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
            logger.warning("%s has died; its KV memory goes to the other replicas", members[pidfd])
            self.remove_member(members[pidfd])


class Roster:
    """A ledger's members with their process ids, in a file on this node. A new ledger waits for a heartbeat of each
    before it grants anything. The name has the id of the Ray node, and so differs from those of other clusters."""

    def __init__(self, name: str) -> None:
        self._path = _private_folder() / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.json"

    def read(self) -> dict[str, int]:
        """Member → process id. If the id of an ended process has been reused, its memory counts until that process
        ends."""
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
    """A folder in which no other user can place a link. Raises `ConfigError` if another user owns it or may write to
    it."""
    folder = Path(tempfile.gettempdir()) / f"folio-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a private folder of this user (mode 700): remove it, or change TMPDIR")
    return folder


def find_actor(kind: type, name: str, *args: Any, **options: Any) -> Any:
    """The actor of this name, created if there is none. It is never restarted: its users create a new one, also after
    its owner has gone. Raises `ValueError` if another process created one that has died since."""
    fixed: Any = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0, "max_restarts": 0}
    return ray.remote(kind).options(**fixed, **options).remote(*args)


def ledger_name(app_name: str, node_id: str, device: str) -> str:
    return f"folio-ledger:{app_name}:{node_id}:{device}"


class BudgetMember:
    """This replica's membership in its device's ledger: a thread that sends heartbeats and carries out orders.

    First `wait_for_budget`, before a model is loaded in vain; then create the engine, with a ceiling of
    `capacity_bytes` and `attach` as its `admit`; then `follow` its load. `close` after the engine has been closed.

    Args:
        capacity_bytes: KV memory of all replicas of the application on the device.
        device: the device's name on this node.
    """

    def __init__(self, capacity_bytes: int, device: str) -> None:
        context = serve.get_replica_context()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._name = ledger_name(context.app_name, self._node_id, device)
        self._membership = Membership(context.replica_id.unique_id, capacity_bytes)
        self._ledger: Any = None
        self._memory: KVMemory | None = None
        self._load: Callable[[], ReplicaReport] | None = None
        self._plan: DevicePlan | None = None
        self._changed = threading.Condition()  # guards the next five
        self._budget_bytes = self._revision = 0
        self._attached = False  # the memory has the budget
        self._plan_accepted = False  # the ledger knows the plan
        self._refusal: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="folio-budget", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread still carries out orders."""
        return self._thread.is_alive()

    def wait_for_budget(self) -> None:
        """Return when the other replicas have made room. Raises `ConfigError` if they never can."""
        self._wait(lambda: self._budget_bytes > 0)

    def attach(self, memory: KVMemory, plan: DevicePlan | None) -> None:
        """Let orders set the budget of an unused memory. Returns when the budget suffices. Raises `ConfigError` if the
        memory needs more than other replicas can spare, or the device cannot hold this process, by its plan, beside
        theirs."""
        if plan is not None:
            self._plan = plan
            self._wait(lambda: self._plan_accepted)
        self._memory = memory
        self._wait(lambda: self._attached)

    def follow(self, load: Callable[[], ReplicaReport]) -> None:
        """Report the demand of this load."""
        self._load = load

    def close(self) -> None:
        """Leave the ledger. The engine must have released its memory."""
        self._closing.set()
        self._thread.join()
        if self._ledger is not None:
            self._ledger.remove_member.remote(self._membership.member)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: done() or self._refusal is not None, _LOG_S):
                if not self._thread.is_alive():
                    raise UnavailableError("the thread that requests a budget has ended, see the log")
                logger.info("waiting for other replicas on this device to give back KV memory")
            if self._refusal is not None:
                raise ConfigError(self._refusal)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._beat_until_closed()
        except Exception:  # a replica with a budget that cannot change must be replaced: see `healthy`
            logger.exception("the replica no longer takes part in sharing memory")

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(BEAT_S if self._attached else STARTING_BEAT_S):
            try:
                self._send_heartbeat()
            except (RayActorError, LookupError) as error:
                logger.warning("the ledger cannot be reached, the budget stays as it is: %s", error)
                self._ledger = None
            except RayError as error:
                logger.warning("the ledger does not answer, the budget stays as it is: %s", error)
            except UnavailableError:
                return  # the engine has stopped; the ledger will see the end of this process

    def _send_heartbeat(self) -> None:
        if self._memory is not None and not self._attached:
            self._carry_out(self._memory, self._budget_bytes, self._revision)
        if self._ledger is None:
            self._ledger = self._find()
        usage = self._usage()
        beat = self._membership.next_heartbeat(usage)
        reference = self._ledger.handle_heartbeat.remote(beat, os.getpid())
        order: BudgetOrder = ray.get(reference, timeout=ANSWER_TIMEOUT_S)
        if not self._membership.obeys(order):
            return
        if order.refusal is not None:
            with self._changed:
                self._refusal = order.refusal
                self._changed.notify_all()
            return
        if order.revision > self._revision:
            self._carry_out(self._memory, order.budget_bytes, order.revision)
        if usage.device_bytes and not self._plan_accepted:
            with self._changed:
                self._plan_accepted = True
                self._changed.notify_all()

    def _carry_out(self, memory: KVMemory | None, budget_bytes: int, revision: int) -> None:
        if memory is not None:
            try:
                memory.set_budget(min(budget_bytes, memory.most_budget_bytes), revision)
            except BudgetError as error:  # the need has grown; the next heartbeat reports it
                logger.info("budget not applied: %s", error)
                return
        with self._changed:
            self._budget_bytes, self._revision = budget_bytes, revision
            self._attached = memory is not None
            self._changed.notify_all()

    def _usage(self) -> MemberUsage:
        memory, plan = self._memory, self._plan
        usage = MemberUsage(self._budget_bytes, revision=self._revision)
        if plan is not None:
            usage = replace(usage, device_bytes=plan.total_bytes, beside_bytes=plan.beside_bytes)
        if memory is None:
            return usage
        demand_bytes = 0
        if self._load is not None:
            load = self._load()
            tokens = load.total_tokens - load.free_tokens + load.queued_tokens
            demand_bytes = tokens * load.budget_bytes // max(load.total_tokens, 1)
        return replace(
            usage,
            held_bytes=memory.held_bytes,
            least_bytes=memory.least_budget_bytes,
            most_bytes=memory.most_budget_bytes,
            demand_bytes=demand_bytes,
        )

    def _find(self) -> Any:
        """The device's ledger, created if there is none, on this node: only there can it see the processes."""
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        try:
            return find_actor(LedgerActor, self._name, self._name, scheduling_strategy=here)
        except ValueError as error:  # another member created one, which has died since
            raise LookupError(f"{self._name} is gone") from error


def device_of_this_replica(device: str) -> str:
    """The device's name on this node: one "cpu", because CPUs share the node's memory, or a GPU's."""
    return f"cuda:{ray.get_gpu_ids()[0]}" if device == "cuda" else "cpu"
