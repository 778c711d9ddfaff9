"""A real Ray Serve application whose replicas share the node's KV memory, and which the policy scales from one replica
to two: budgets add up through the death of a replica under load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError

from folio.app.config.engine import EngineConfig
from folio.app.engine import SamplingParams
from folio.app.fleet.ledger_file import LedgerFile
from folio.app.fleet.messages import GenerateRequest
from folio.app.main import AppArgs, replica_resources, served_shelf
from folio.app.serving.ledger import ledger_name
from folio.app.serving.replica import EngineReplica
from folio.vmem import MemoryReport
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

NAME = "folio-shared"
SHARED_BYTES = 64 << 20
# The least that needs a second replica: any two requests. It then stays for the rest of the test.
POLICY = {
    "policy_function": "folio.app.serving.autoscaling:KVAwareScaling",
    "policy_kwargs": {"kv_share": 0.001, "up_after_s": 1.0, "down_after_s": 600.0},
}
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
    "policy": POLICY,
}


@dataclass(frozen=True)
class Server:
    replicas: Any

    def budgets(self) -> list[int] | None:
        """Of all replicas, after checking that they add up; None while they change, or a replica is gone."""
        try:
            first, second = self._reports(), self._reports()
        except RayActorError:
            return None
        if [r.budget_revision for r in first] != [r.budget_revision for r in second]:
            return None
        budgets = [report.budget_bytes for report in first]
        assert sum(budgets) <= SHARED_BYTES
        assert sum(report.physical_bytes for report in first) <= SHARED_BYTES
        return budgets

    def members(self) -> set[str]:
        """Of the ledger."""
        name = ledger_name(NAME, ray.get_runtime_context().get_node_id(), "cpu")
        with LedgerFile(name).locked() as ledger:
            assert ledger.counted_bytes <= SHARED_BYTES
            return set(ledger.members)

    def _reports(self) -> list[MemoryReport]:
        return [status.memory for status in self.replicas.broadcast("status").results()]

    def is_shared_by_two(self) -> bool:
        members, budgets = self.members(), self.budgets()
        return len(members) == 2 and budgets is not None and len(budgets) == 2 and sum(budgets) > 0.9 * SHARED_BYTES


@pytest.fixture(scope="module")
def server(front: Front) -> Iterator[Server]:
    front.delete()
    args = AppArgs(engine=EngineConfig(model="builtin", max_model_len=1024), shared_kv_memory_bytes=SHARED_BYTES)
    shelf = served_shelf(args)
    resources = replica_resources(shelf.first.engine)
    deployment: Any = serve.deployment(autoscaling_config=AUTOSCALING, **resources)(EngineReplica)
    with deleted_at_the_end(NAME):
        yield Server(serve.run(deployment.bind(shelf, SHARED_BYTES), name=NAME, route_prefix="/shared"))


def test_budgets_add_up_while_replicas_are_replaced(server: Server) -> None:
    until(lambda: server.budgets() == [SHARED_BYTES])

    params = SamplingParams(max_tokens=900, ignore_eos=True)
    requests = [GenerateRequest(f"request {i}", [65 + i], params) for i in range(8)]
    replicas = server.replicas.options(stream=True)
    answers = [replicas.complete_as_stream.remote(request) for request in requests]
    until(server.is_shared_by_two)
    without_heartbeats = [item for answer in answers for item in answer if item]
    assert [len(piece.token_ids) for [piece] in without_heartbeats] == [900] * 8
    members = server.members()

    victim = sorted(members)[0]
    ray.kill(ray.get_actor(f"SERVE_REPLICA::{NAME}#EngineReplica#{victim}", namespace="serve"))
    until(lambda: victim not in server.members() and server.is_shared_by_two())
    assert len(server.members() & members) == 1
