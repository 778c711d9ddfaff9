"""Attacks on a real server, whose other clients must get the same answers as without attacks.

Small by default; `pytest tests/hostile --hypothesis-profile=nightly` runs full attacks and writes the counts to
`benchmarks/results/cpu/hostile.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import harness
from benchmarks.served import processes_called
from benchmarks.serving import disconnects
from tests.cluster import NAME, Front, shared_args
from tests.hostile import bodies, crowds, protocol, structures
from tests.hostile.attacker import Attacker, Record
from tests.hostile.bystanders import Bystanders, Tally, answers_in_peace
from tests.nightly import examples

ATTACKS = structures.ATTACKS | bodies.ATTACKS | protocol.ATTACKS | crowds.ATTACKS
ATTACK_DEADLINE_S = 1200.0
# Processes that must survive unchanged.
PROCESSES = {
    "fallback": "ray::ProxyActor",
    "haproxy_manager": "ray::HAProxyManager",
    "controller": "ray::ServeController",
    "ingress": f"ray::ServeReplica:{NAME}:Ingress",
    "replica": f"ray::ServeReplica:{NAME}:EngineReplica",
}
# Bound on the growth of a process: the largest body times the objects it becomes, a few at once, of which malloc keeps
# some.
MOST_GROWTH_BYTES = 512 << 20


@dataclass
class Battle:
    """The server, the innocent clients, and the results of attacks so far."""

    port: int
    handle: Any
    bystanders: Bystanders
    processes: dict[str, list[int]]
    rss_bytes: dict[str, int]
    num_connections: int
    rows: dict[str, tuple[Record, Tally, float]] = field(default_factory=dict)

    def table(self) -> str:
        columns = ("right", "sent again", "wrong", "lost", "hung")
        times_of = ("wait", "pause", "/health")
        lines = [f"{'attack':24}{'made':>7}{'bad':>5} |" + "".join(f"{name:>11}" for name in (*columns, *times_of))]
        for name, (record, tally, took_s) in self.rows.items():
            innocent = "".join(f"{tally.counts[column]:11}" for column in columns)
            times = "".join(f"{seconds:9.2f} s" for seconds in tally.longest_s)
            answers = " ".join(f"{status}×{count}" for status, count in sorted(record.answers.items()))
            lines.append(
                f"{name:24}{record.num_made:7}{len(record.bad):5} |{innocent}{times} | {answers} in {took_s:.0f} s"
            )
        return "\n".join([*lines, str(self.figures())])

    def figures(self) -> dict[str, float]:
        counts = sum((tally.counts for _, tally, _ in self.rows.values()), Counter[str]())
        longest_ms = [
            1e3 * max(seconds) for seconds in zip(*(t.longest_s for _, t, _ in self.rows.values()), strict=True)
        ]
        return {
            "attacks": sum(record.num_made for record, _, _ in self.rows.values()),
            "bad_answers": sum(len(record.bad) for record, _, _ in self.rows.values()),
            "innocent_requests": sum(counts[what] for what in ("right", "wrong", "lost", "hung")),
            "sent_again": counts["sent again"],
            "lost": counts["lost"],
            "wrong": counts["wrong"],
            "hung": counts["hung"],
            **dict(zip(("victim_wait_ms", "victim_pause_ms", "health_ms_max"), longest_ms, strict=True)),
        }


@pytest.fixture(scope="module")
def battle(request: pytest.FixtureRequest, cluster_url: str, front: Front) -> Iterator[Battle]:
    port = int(cluster_url.rpartition(":")[2])
    handle = front.run(shared_args())
    known = disconnects.num_connections(port)
    expected = asyncio.run(answers_in_peace(port))
    processes = {name: processes_called(title) for name, title in PROCESSES.items()}
    bystanders = Bystanders(port, expected)
    bystanders.start()
    in_peace = bystanders.take()
    found = Battle(port, handle, bystanders, processes, _rss_bytes(processes), known)
    found.rows["(peace)"] = Record(), in_peace, 0.0
    yield found
    bystanders.close()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{found.table()}", flush=True)
    if set(ATTACKS) <= set(found.rows) and examples(0, 1) and not request.session.testsfailed:
        raw = {
            name: {"answers": r.answers, "bad": r.bad, "innocent": t.counts, "wait_pause_health_s": t.longest_s}
            for name, (r, t, _) in found.rows.items()
        }
        harness.finish("hostile", argparse.Namespace(device="cpu", quick=False), found.figures(), raw)


def test_without_attacks_all_requests_are_answered(battle: Battle) -> None:
    """Bystanders alone get the expected tokens, so that later differences are due to attacks."""
    _, tally, _ = battle.rows["(peace)"]
    assert tally.counts["right"] == tally.counts.total(), tally.strange


@pytest.mark.thirds
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_changes_no_other_answer(battle: Battle, name: str) -> None:
    """Every answer to the attack is clean; innocent requests get the expected tokens in time."""
    attacker = Attacker(battle.port, seed=sum(name.encode()))
    start = time.monotonic()

    async def attack() -> None:
        async with asyncio.timeout(ATTACK_DEADLINE_S):
            await ATTACKS[name](attacker)

    try:
        asyncio.run(attack())
    finally:
        tally = battle.bystanders.take()
        battle.rows[name] = attacker.record, tally, time.monotonic() - start
    assert not attacker.record.bad, "\n".join(attacker.record.bad[:20])
    assert attacker.record.num_made, "nothing was sent"
    assert tally.counts["right"] == tally.counts.total() - tally.counts["sent again"], tally.strange
    assert battle.processes == {name: processes_called(title) for name, title in PROCESSES.items()}


def test_nothing_is_left_of_the_attacks(battle: Battle) -> None:
    """No page, request, connection or pin is left, the accounts agree, and no process has grown too much."""
    battle.bystanders.close()
    disconnects.wait_until_nothing_is_left(battle.handle, battle.port, NAME, battle.num_connections)
    url = f"http://127.0.0.1:{battle.port}"
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 200
    total = httpx.get(f"{url}/v1/load").json()["total"]
    assert (total["num_running"], total["num_waiting"], total["pinned_bytes"]) == (0, 0, 0)
    grown = {name: now - battle.rss_bytes[name] for name, now in _rss_bytes(battle.processes).items()}
    assert max(grown.values()) < MOST_GROWTH_BYTES, grown


def _rss_bytes(processes: dict[str, list[int]]) -> dict[str, int]:
    """Anonymous memory of the processes of each kind together."""

    def of(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) << 10

    return {name: sum(map(of, pids)) for name, pids in processes.items()}
