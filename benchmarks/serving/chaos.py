"""Faults of whole replicas under load: kills, scaling down, replacement.

`python -m benchmarks.faults --replicas`. A real Ray Serve application with the built-in model on two replicas, later
on one. Whichever replica dies, every request must end with the answer that it would have had without that.

--ingresses: only with two ingresses, one of which is killed, too. HAProxy retries its requests on the other one, except
streams that have begun, which lose their connection. At last the only HAProxy is killed: clients are refused until
Serve has started another one.
--quick: 5 kills instead of 30.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.served import Served, processes_called, served
from benchmarks.serving.asking import DTYPE, OUTCOMES, Client, Outcomes
from benchmarks.serving.usage import PROXY, kind_of

NAME = "folio-chaos"
NUM_CLIENTS = 8
KILLED = "two replicas, killed one after the other"
INGRESSES, HAPROXY = "two ingresses, killed one after the other", "HAProxy, killed"
BETWEEN_KILLS_S = (2.0, 6.0)
BACK_TIMEOUT_S = 300.0
SETTLED_S = 3.0  # of load before and after each change


def run(args: argparse.Namespace) -> None:
    """Args: of `benchmarks.faults`."""
    engine = {"model": "builtin", "dtype": DTYPE, "kv_memory_bytes": 128 << 20}
    phases: dict[str, Outcomes] = {}
    num_ingresses = 2 if args.ingresses else 1
    kills: list[float] = []
    with served(NAME, {"engine": engine}) as app:
        deploy = partial(Served.deploy, timeout_s=BACK_TIMEOUT_S, num_ingresses=num_ingresses)
        deploy(app, num_replicas=2)
        if args.ingresses:
            count = 3 if args.quick else 15
            with _asked(app, phases, INGRESSES):
                _kill(app, count, "Ingress", 2)
            with _asked(app, phases, HAPROXY):
                _kill_haproxy(app, count)
        else:
            with _asked(app, phases, "two replicas, one is stopped"):
                deploy(app, num_replicas=1)
                app.wait_until(lambda: len(app.processes()) == 1, BACK_TIMEOUT_S)
            changed = replace(app, args={"engine": engine | {"max_num_seqs": 48}})
            with _asked(app, phases, "one replica, replaced by another version"):
                deploy(changed, num_replicas=1)
                app.wait_until(lambda: len(app.processes()) == 1, BACK_TIMEOUT_S)
            with _asked(app, phases, "one replica, killed"):
                _kill(app, 2 if args.quick else 8, "EngineReplica", 1)
            deploy(changed, num_replicas=2)
            with _asked(app, phases, KILLED):
                kills = _kill(app, 5 if args.quick else 30, "EngineReplica", 2)
        sent_again, continued = app.counted("folio_repeated_calls"), app.counted("folio_continued_calls")
    for outcomes in phases.values():
        outcomes.check_sampled()
    pauses = sorted(
        longest_s
        for begun, end, longest_s in phases.get(KILLED, Outcomes()).streams
        if any(begun < at < end for at in kills)
    )
    models_own = sum(outcomes.forgive_model() for outcomes in phases.values())
    _print(phases, sent_again, models_own)
    keys = [what.replace(" ", "_") for what in OUTCOMES]
    counts = {key: sum(o.counts[what] for o in phases.values()) for key, what in zip(keys, OUTCOMES, strict=True)}
    figures: dict[str, Any] = counts | {"calls_sent_again": sent_again, "models_own_mistakes": models_own}
    if not args.ingresses:
        figures["calls_continued"] = continued
        figures |= {f"pause_p{share}_s": pauses[len(pauses) * share // 100] for share in (50, 99)}
    harness.finish(
        "chaos" if args.ingresses else "replicas",
        args,
        figures,
        {
            "phases": {name: dict(o.counts) for name, o in phases.items()},
            "strange": {name: o.strange for name, o in phases.items()},
        },
    )
    cut_off = sum(o.counts["cut off"] for name, o in phases.items() if name not in (INGRESSES, HAPROXY))
    no_connection = sum(o.counts["no connection"] for name, o in phases.items() if name != HAPROXY)
    unexpected = {"unexpected_cut_off": cut_off, "unexpected_no_connection": no_connection}
    failed = () if args.ingresses else ("to_be_sent_again", "broken_off")
    harness.fail_if_any(counts | unexpected, "other_error", "wrong", "lost", *failed, *unexpected)


@contextmanager
def _asked(app: Served, phases: dict[str, Outcomes], name: str) -> Iterator[None]:
    """Run clients within this context, and a while before and after it."""
    outcomes, stop = phases.setdefault(name, Outcomes()), threading.Event()
    clients = [Client(app.url, seed, outcomes, stop) for seed in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        time.sleep(SETTLED_S)
        yield
        time.sleep(SETTLED_S)
    finally:
        stop.set()
        for client in clients:
            client.join()
    print(f"{name}: {dict(outcomes.counts)}", flush=True)
    for message, count in outcomes.said.most_common():
        print(f"  {count:5} {message}", flush=True)
    for text in outcomes.strange[:5]:
        print(f"  {text}", flush=True)


def _kill(app: Served, count: int, deployment: str, num_replicas: int) -> list[float]:
    """Kill a process of the deployment whenever so many are running; returns the times (`time.monotonic`)."""
    rng = random.Random(0)
    title = f"ray::ServeReplica:{NAME}:{deployment}"

    def all_run() -> bool:  # the controller may not know yet
        return app.running(deployment) == num_replicas and len(processes_called(title)) == num_replicas

    kills: list[float] = []
    for number in range(count):
        app.wait_until(all_run, BACK_TIMEOUT_S)
        time.sleep(rng.uniform(*BETWEEN_KILLS_S))
        app.wait_until(all_run, BACK_TIMEOUT_S)
        pid = rng.choice(processes_called(title))
        kills.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)
        print(f"{number + 1}/{count}: killed {deployment} {pid}", flush=True)
        app.wait_until(partial(_has_ended, pid, title), BACK_TIMEOUT_S)
    app.wait_until(all_run, BACK_TIMEOUT_S)
    return kills


def _kill_haproxy(app: Served, count: int) -> None:
    """Kill every HAProxy, including old ones with last streams, once the server has been well for a while."""
    import httpx
    import psutil

    def is_well() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{app.url}/ready").status_code == 200
        return False

    rng = random.Random(1)
    for number in range(count):
        app.wait_until(is_well, BACK_TIMEOUT_S)
        time.sleep(rng.uniform(*BETWEEN_KILLS_S))
        killed = [p for p in psutil.Process().children(recursive=True) if kind_of(" ".join(p.cmdline())) == PROXY]
        begun = time.monotonic()
        for process in killed:
            process.kill()
        time.sleep(0.1)
        app.wait_until(is_well, BACK_TIMEOUT_S)
        print(f"{number + 1}/{count}: killed HAProxy, back after {time.monotonic() - begun:.1f} s", flush=True)


def _has_ended(pid: int, title: str) -> bool:
    return pid not in processes_called(title)


def _print(phases: dict[str, Outcomes], sent_again: int, models_own: int) -> None:
    print(f"\n{'':44}" + "".join(f"{what:>18}" for what in OUTCOMES))
    for name, outcomes in phases.items():
        print(f"{name:44}" + "".join(f"{outcomes.counts[what]:18}" for what in OUTCOMES))
    print(f"retried calls of replicas: {sent_again}")
    print(f"wrong answers that the model gives without faults, too: {models_own}")
