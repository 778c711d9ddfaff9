"""A replica's membership in the budget ledger of its device: a thread reports the memory and carries out the budget."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray import serve

from folio.app.engine.report import ReplicaReport
from folio.app.errors import ConfigError, UnavailableError
from folio.app.fleet.ledger import MemberUsage
from folio.app.fleet.ledger_file import LedgerFile, this_process
from folio.vmem.errors import BudgetError

if TYPE_CHECKING:
    from folio.app.engine.memory.memory_profile import DevicePlan
    from folio.vmem import KVMemory

logger = logging.getLogger(__name__)

# Intervals of exchanges: budgets follow the load within a few seconds, and starting replicas wait for their first.
BEAT_S, STARTING_BEAT_S = 1.0, 0.2
# Interval of log lines while a replica waits for memory.
_LOG_S = 10.0


def ledger_name(app_name: str, node_id: str, device: str) -> str:
    """Name of a device's ledger. The id of the Ray node keeps clusters on one machine apart."""
    return f"folio-ledger:{app_name}:{node_id}:{device}"


def member_of_this_replica(capacity_bytes: int, device: str) -> BudgetMember:
    """This replica's membership. A GPU ("cuda") has a ledger of its own; all CPUs of a node ("cpu") share one."""
    context = serve.get_replica_context()
    device = f"cuda:{ray.get_gpu_ids()[0]}" if device == "cuda" else "cpu"
    name = ledger_name(context.app_name, ray.get_runtime_context().get_node_id(), device)
    return BudgetMember(LedgerFile(name), context.replica_id.unique_id, capacity_bytes)


class BudgetMember:
    """A thread that reports usage to the ledger, gets a budget in return, and applies it to the memory.

    Call `wait_for_budget` first, so that no model is loaded in vain; create the engine, with a ceiling of
    `capacity_bytes` and `attach` as its `admit`; then `follow` its load. `close` after the engine has been closed.

    Args:
        name: unique among the replicas.
        capacity_bytes: KV memory of all replicas of the application on the device.
    """

    def __init__(self, ledger: LedgerFile, name: str, capacity_bytes: int) -> None:
        self._ledger, self._name, self._capacity_bytes = ledger, name, capacity_bytes
        self._process = this_process()
        self._memory: KVMemory | None = None
        self._load: Callable[[], ReplicaReport] | None = None
        self._plan: DevicePlan | None = None
        self._changed = threading.Condition()  # guards the next five
        self._budget_bytes = self._revision = 0
        self._attached = False  # the memory has the budget
        self._plan_accepted = False  # the ledger knows the plan
        self._refusal: str | None = None
        self._is_silent = False  # the last exchange has failed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="folio-budget", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread still follows the ledger."""
        return self._thread.is_alive()

    def wait_for_budget(self) -> None:
        """Return when the other replicas have made room. Raises `ConfigError` if they never can."""
        self._wait(lambda: self._budget_bytes > 0)

    def attach(self, memory: KVMemory, plan: DevicePlan | None) -> None:
        """Let the ledger set the budget of a memory that is not in use yet. Returns when the budget suffices. Raises
        `ConfigError` if the memory needs more than other replicas can spare, or if by its plan this process does not
        fit on the device beside theirs."""
        if plan is not None:
            self._plan = plan
            self._wait(lambda: self._plan_accepted)
        self._memory = memory
        self._wait(lambda: self._attached)

    def follow(self, load: Callable[[], ReplicaReport]) -> None:
        """Report the demand from now on by the load that this function returns."""
        self._load = load

    def close(self) -> None:
        """Leave the ledger. The engine must have released its memory."""
        self._closing.set()
        self._thread.join()
        try:
            with self._ledger.locked() as ledger:
                ledger.members.pop(self._name, None)
        except OSError as error:
            logger.warning("cannot leave the budget ledger; this replica's memory counts until it exits: %s", error)

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
            logger.exception("the exchange with the budget ledger failed; this replica is unhealthy and is replaced")

    def _beat_until_closed(self) -> None:
        while not self._closing.wait(BEAT_S if self._attached else STARTING_BEAT_S):
            try:
                self._exchange()
            except OSError as error:
                if not self._is_silent:
                    logger.warning("cannot read or write the budget ledger; the budget stays as it is: %s", error)
                self._is_silent = True
            except UnavailableError:
                return  # the engine has stopped; the others will see the end of this process
            else:
                self._is_silent = False

    def _exchange(self) -> None:
        if self._memory is not None and not self._attached:
            self._carry_out(self._memory, self._budget_bytes, self._revision)
        usage = self._usage()
        with self._ledger.locked() as ledger:
            order = ledger.exchange(self._name, self._process, self._capacity_bytes, usage, time.monotonic())
        if order.refusal is None and order.budget_bytes != self._budget_bytes:
            self._carry_out(self._memory, order.budget_bytes, self._revision + 1)
        with self._changed:
            self._refusal = order.refusal or self._refusal
            self._plan_accepted |= order.refusal is None and usage.device_bytes > 0
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
        usage = MemberUsage(self._budget_bytes)
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
