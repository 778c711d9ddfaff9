"""Faults of tensor-parallel ranks under load: SIGKILL and SIGSTOP, one rank after the other.

A real Ray Serve application with the built-in model on two ranks. Clients ask over HTTP for a key that is in their
prompt, so that a wrong answer shows, and for long streams, so that some are always in flight. At random moments a rank,
the replica's own process or its peer's, gets SIGKILL or SIGSTOP. Every request must end with a right answer or a
retryable error; a new replica must answer; nothing of the old one may be left.

--replicas, --ingresses: see `benchmarks.chaos`. --parts: see `benchmarks.parts`.
--quick: 4 faults instead of 50, each kind once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import harness
from benchmarks.served import cluster, processes_called
from benchmarks.serving import chaos, parts
from benchmarks.serving.asking import DTYPE, OUTCOMES, Client, Outcomes
from folio.app.config.engine import EngineConfig

NUM_CLIENTS = 6
STEP_TIMEOUT_S = 5.0
BETWEEN_FAULTS_S = (0.5, 2.0)
BACK_TIMEOUT_S = 120.0
RANKS, SIGNALS = ("replica", "peer"), (signal.SIGKILL, signal.SIGSTOP)
NAME = "folio-faults"
PROCESS_TITLES = {"replica": f"ray::ServeReplica:{NAME}:EngineReplica", "peer": "ray::RankActor"}


def processes() -> dict[str, list[int]]:
    """Process ids of this cluster's replicas and peers, stopped ones included."""
    return {name: processes_called(title) for name, title in PROCESS_TITLES.items()}


def shared_files() -> int:
    """Ranks' shared files that have a name, or that a process still holds."""
    held: set[str] = set()
    for link in Path("/proc").glob("[0-9]*/maps"):
        try:
            held.update(line.split()[4] for line in link.read_text().splitlines() if "folio-ranks" in line)
        except OSError:
            continue
    return len(held) + sum("folio" in name for name in os.listdir("/dev/shm"))


def faults(count: int, seed: int = 0) -> Iterator[tuple[str, signal.Signals, float]]:
    """(rank, signal, seconds before it): all kinds about equally often, in random order."""
    rng = random.Random(seed)
    kinds = list(itertools.product(RANKS, SIGNALS)) * -(-count // 4)
    rng.shuffle(kinds)
    if count == 4:
        kinds = list(itertools.product(RANKS, SIGNALS))
    for rank, number in kinds[:count]:
        yield rank, number, rng.uniform(*BETWEEN_FAULTS_S)


def strike(rank: str, number: signal.Signals, outcomes: Outcomes) -> tuple[float, int]:
    """Inject a fault. Returns the seconds until a request sent afterwards is answered and no old process is left, or
    the number of old processes."""
    before = processes()
    at = time.monotonic()
    os.kill(before[rank][0], number)
    while time.monotonic() - at < BACK_TIMEOUT_S:
        sent, answered = outcomes.last_answered
        left = sum(pid in now for name, now in processes().items() for pid in before[name])
        if sent > at and not left:
            return answered - at, 0
        time.sleep(0.05)
    return float("inf"), left


def run(args: argparse.Namespace) -> None:
    """Faults of ranks."""
    from ray import serve

    from folio.app.config.args import AppArgs
    from folio.app.main import HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S, build

    count = 4 if args.quick else 50
    engine = EngineConfig(
        model="builtin",
        dtype=DTYPE,
        tensor_parallel_size=2,
        step_timeout_s=STEP_TIMEOUT_S,
        kv_memory_bytes=128 << 20,
    )
    outcomes, stop = Outcomes(), threading.Event()
    rows: list[tuple[str, str, float, int]] = []
    with cluster() as url:
        serve.run(build(AppArgs(engine=engine)), name=NAME, route_prefix="/")
        of_one_replica = shared_files()
        clients = [Client(url, seed, outcomes, stop) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        for rank, number, wait_s in faults(count):
            time.sleep(wait_s)
            back_s, left = strike(rank, number, outcomes)
            rows.append((rank, number.name, back_s, left))
            what = f"{len(rows):3} {rank:8} {number.name:8}"
            print(f"{what} back after {back_s:5.1f} s, {left} processes left", flush=True)
        stop.set()
        for client in clients:
            client.join()
        shared = shared_files()
        serve.shutdown()
        time.sleep(1.0)
        left_over = sum(map(len, processes().values()))

    models_own = outcomes.forgive_model()
    limit_s = 3 * (HEALTH_CHECK_PERIOD_S + HEALTH_CHECK_TIMEOUT_S)
    times = [row[2] for row in rows]
    show(outcomes, count, times, limit_s)
    figures = {
        "faults": count,
        "answered": outcomes.counts["answered"],
        "to_be_sent_again": outcomes.counts["to be sent again"],
        "broken_off": outcomes.counts["broken off"],
        "other_errors": outcomes.counts["other error"],
        "wrong": outcomes.counts["wrong"],
        "lost": outcomes.counts["lost"],
        "models_own_mistakes": models_own,
        "back_s_median": statistics.median(times),
        "back_s_max": max(times),
        "processes_left": left_over + sum(row[3] for row in rows),
        "shared_files_more_than_one_replica": shared - of_one_replica,
    }
    harness.finish("faults", args, figures, {"faults": rows, "strange": outcomes.strange})
    harness.fail_if_any(figures, "other_errors", "wrong", "lost", "processes_left")


def show(outcomes: Outcomes, count: int, times: list[float], limit_s: float) -> None:
    print(f"\n{count} faults, {sum(outcomes.counts.values())} requests of {NUM_CLIENTS} clients at once")
    for what in OUTCOMES:
        print(f"  {what:18} {outcomes.counts[what]}")
    for text in outcomes.strange[:10]:
        print(f"  {text}")
    print(f"back after {statistics.median(times):.1f} s (median), {max(times):.1f} s at most")
    print(f"three failed health checks take up to {limit_s:.0f} s")


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--replicas", action="store_true", help="kill, stop and replace one of two replicas")
    parser.add_argument("--ingresses", action="store_true", help="like --replicas, and kill one of two ingresses")
    parser.add_argument("--parts", action="store_true", help="kill each single point of failure")
    args = parser.parse_args()
    harness.needs("ray", "httpx", "psutil")
    if args.parts:
        parts.run(args)
    elif args.replicas or args.ingresses:
        chaos.run(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
