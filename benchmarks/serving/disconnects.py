"""Client disconnects: at random moments, in every phase of a request.

A real Ray Serve application with the built-in model. Many connections at once send requests of all kinds, whole and
streamed, and break off: in the middle of the request, while it waits, during its prefill, between two events. Some
reset the connection, some close it, some half-close it, some stop reading for a while. Other clients ask for keys in
their prompts throughout, and must get the right ones. Afterwards nothing may be left: no page in use, no request in a
replica, no open connection, and the engine's integrity check must pass.

--quick: 60 disconnects instead of 500.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.served import cluster
from folio.app.config.engine import EngineConfig
from tools.builtin_model import corpus

NAME = "folio-disconnects"
AT_ONCE = 24
DEADLINE_S = 120.0
# Times between sending and disconnecting: from at once until requests of all kinds are in flight.
PATIENCE_S = (0.0, 0.02, 0.1, 0.5, 1.5)
PHASES = ("headers", "body", "sent", "events")
MANNERS = ("reset", "close", "half-close", "stall")
_SCHEMA = {"type": "object", "properties": {"room": {"type": "integer"}}, "required": ["room"]}
_TOOL = {"type": "function", "function": {"name": "find_key", "parameters": _SCHEMA}}


@dataclass(frozen=True)
class Disconnect:
    """A request whose client disconnects.

    Attributes:
        phase: of the disconnection: within the headers, within the body, a time after sending, or after some bytes of
            the answer.
        manner: of the disconnection.
        patience_s: wait after sending, and while stalling or half closed.
        num_bytes: bytes of the streamed answer to read in the phase "events".
    """

    path: str
    body: dict[str, Any]
    phase: str
    manner: str
    patience_s: float
    num_bytes: int


def disconnects(count: int, seed: int) -> Iterator[Disconnect]:
    """Disconnections of every phase and manner, about equally often."""
    rng = random.Random(seed)
    pairs = list(itertools.product(PHASES, MANNERS)) * -(-count // (len(PHASES) * len(MANNERS)))
    rng.shuffle(pairs)
    for phase, manner in pairs[:count]:
        path, body = _request(rng)
        if phase == "events":
            body["stream"] = True
        yield Disconnect(path, body, phase, manner, rng.choice(PATIENCE_S), rng.randrange(1, 4000))


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    long: dict[str, Any] = {"model": "builtin", "max_tokens": rng.randrange(100, 900), "ignore_eos": True}
    long |= {"stream": rng.random() < 0.6}
    text = " ".join(f"The key of room {rng.randrange(100, 999)} is {rng.randrange(10, 99)}." for _ in range(20))
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "What is Folio?"}),
        ("completions", {"prompt": text * 4, "max_tokens": 8}),  # all prefill
        ("completions", {"prompt": text, "n": 4, "temperature": 2.0}),
        ("completions", {"prompt": [text, "a", text + " b"], "n": 2, "logprobs": 2, "echo": True}),
        ("completions", {"prompt": text, "use_beam_search": True, "best_of": 4, "max_tokens": 60, "ignore_eos": False}),
        ("completions", {"prompt": text, "timeout_s": 0.3}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}], "n": 2, "logprobs": True}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": text}], "tools": [_TOOL], "tool_choice": "required"},
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": text}], "guided_json": _SCHEMA}),
    ]
    path, more = rng.choice(kinds)
    if "tools" in more or "guided_json" in more:
        more["ignore_eos"] = False
    return f"/v1/{path}", long | more


async def break_off(port: int, what: Disconnect) -> str:
    """Send the request and disconnect. Returns the state of the answer: "nothing", "begun", "complete"."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(what.body).encode()
    head = f"POST {what.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n"
    request = head.encode() + b"Connection: close\r\n\r\n" + content
    cut = {"headers": len(head) // 2, "body": len(request) - len(content) // 2}.get(what.phase, len(request))
    writer.write(request[:cut])
    await writer.drain()
    answer = b""
    ended = False
    if what.phase == "events":
        async with asyncio.timeout(DEADLINE_S):
            while len(answer) < what.num_bytes and not ended:
                more = await reader.read(what.num_bytes - len(answer))
                answer, ended = answer + more, not more
    else:
        await asyncio.sleep(what.patience_s)
    if what.manner == "half-close" and not ended:
        writer.write_eof()
        try:
            async with asyncio.timeout(what.patience_s * 4):
                while more := await reader.read(1 << 16):
                    answer += more
                ended = True
        except (TimeoutError, ConnectionError):
            pass
    elif what.manner == "stall":
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(what.patience_s * 2)
    if what.manner in ("reset", "stall"):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()
    return "complete" if ended else "begun" if answer else "nothing"


async def break_off_many(port: int, count: int, seed: int = 0, at_once: int = AT_ONCE) -> Counter[str]:
    """`break_off` for `count` requests. Returns the number of each state, by phase and manner."""
    outcomes: Counter[str] = Counter()
    slots = asyncio.Semaphore(at_once)

    async def one(what: Disconnect) -> None:
        async with slots:
            outcomes[f"{what.phase} {what.manner}: {await break_off(port, what)}"] += 1

    async with asyncio.TaskGroup() as tasks:
        for what in disconnects(count, seed):
            tasks.create_task(one(what))
    return outcomes


async def ask_meanwhile(port: int, done: asyncio.Event, seed: int = 0) -> Counter[str]:
    """Send look-ups one after the other until `done`. Returns the number of "right" answers, and of other outcomes."""
    import httpx

    rng, outcomes = random.Random(seed), Counter[str]()
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        while not done.is_set():
            [turn] = corpus.look_up_conversation(rng, 10, 1)[:1]
            body = {"model": "builtin", "messages": [{"role": "user", "content": turn.question}], "temperature": 0}
            answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
            text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text
            outcomes["right" if text == turn.answer else text] += 1
    return outcomes


def leftovers(handle: Any, port: int, application: str, known_connections: int = 0) -> dict[str, int]:
    """Nonzero leftovers: bytes owned by requests, requests in replicas, and connections to the server beyond the known
    ones."""
    import ray

    connections = num_connections(port)
    found = {"bytes": sum(report.active_bytes for report in handle.reports.remote().result().values())}
    if connections > known_connections:  # some known ones may have been closed
        found["connections"] = connections
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"SERVE_REPLICA::{application}#"):
            replica = ray.get_actor(actor["name"], namespace=actor["namespace"])
            found[actor["name"].split("#")[1]] = ray.get(replica.get_num_ongoing_requests.remote())
    return {name: number for name, number in found.items() if number}


def wait_until_nothing_is_left(handle: Any, port: int, application: str, known_connections: int = 0) -> float:
    """Wait until there are no leftovers, and check the memory of every engine. Returns the seconds waited.

    Raises:
        TimeoutError: there are leftovers after `DEADLINE_S`.
        EngineError: an engine's memory is inconsistent.
    """
    start = time.monotonic()
    while left := leftovers(handle, port, application, known_connections):
        if time.monotonic() - start > DEADLINE_S:
            raise TimeoutError(f"{DEADLINE_S} s after the last client went there still is {left}")
        time.sleep(0.05)
    return time.monotonic() - start


def num_connections(port: int) -> int:
    """Open connections of the server at `port`, by the kernel's table."""
    count = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            # 0A is LISTEN; 06, TIME_WAIT, has no owner.
            count += int(local.split(":")[1], 16) == port and state not in ("0A", "06")
    return count


async def crowd(port: int, count: int, seed: int = 0) -> tuple[Counter[str], Counter[str]]:
    """Run disconnections while four other clients ask. Returns the outcomes of both."""
    done = asyncio.Event()
    asking = [asyncio.create_task(ask_meanwhile(port, done, seed + i)) for i in range(4)]
    try:
        outcomes = await break_off_many(port, count, seed)
    finally:
        done.set()
    return outcomes, sum(await asyncio.gather(*asking), Counter())


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    harness.needs("ray", "httpx")
    from ray import serve

    from folio.app.main import AppArgs, build

    count = 60 if args.quick else 500
    # Little memory: requests wait, and are preempted.
    engine = EngineConfig(model="builtin", dtype="float32", kv_memory_bytes=24 << 20, max_num_seqs=12)
    with cluster() as url:
        port = int(url.rpartition(":")[2])
        handle = serve.run(build(AppArgs(engine=engine)), name=NAME, route_prefix="/")
        outcomes, answers = asyncio.run(crowd(port, count))
        empty_after_s = wait_until_nothing_is_left(handle, port, NAME)

    for phase, manner in itertools.product(PHASES, MANNERS):
        of = {what: outcomes[f"{phase} {manner}: {what}"] for what in ("nothing", "begun", "complete")}
        print(f"{phase:8} {manner:11} {of['nothing']:4} nothing {of['begun']:4} begun {of['complete']:4} complete")
    wrong = {text: number for text, number in answers.items() if text != "right"}
    print(f"meanwhile {answers['right']} right answers, and {sum(wrong.values())} others {list(wrong)[:5]}")
    print(f"nothing was left {empty_after_s:.2f} s after the last one; the memory is consistent")
    figures = {
        "disconnects": sum(outcomes.values()),
        "right_answers": answers["right"],
        "other_answers": sum(wrong.values()),
        "empty_after_s": empty_after_s,
    }
    harness.finish("disconnects", args, figures, {"outcomes": outcomes, "others": wrong})
    harness.fail_if_any(figures, "other_answers")


if __name__ == "__main__":
    main()
