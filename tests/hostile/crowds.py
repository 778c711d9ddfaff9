"""Attacks by crowds: valid requests that together exceed the resources."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

from benchmarks.serving import disconnects
from tests.hostile.attacker import DEADLINE_S, Attack, Attacker
from tests.hostile.wire import Dropped, connected, request

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"


def _text(**more: Any) -> dict[str, Any]:
    return {"model": "builtin", "prompt": "x", "max_tokens": 16, "ignore_eos": True} | more


async def outputs(a: Attacker) -> None:
    """40 requests for 32 outputs each, and beams, where 32 sequences can run."""
    bodies = [_text(n=32, seed=i, max_tokens=8, temperature=2.0) for i in range(a.many(40, 400))]
    bodies += [_text(use_beam_search=True, temperature=0, n=8, best_of=32, max_tokens=8) for _ in range(a.many(4, 40))]
    bodies += [_text(prompt=["x", "y"] * 128, n=2, max_tokens=1) for _ in range(a.many(2, 20))]
    await a.all((a.post(_TEXT, body, "outputs") for body in bodies), at_once=len(bodies))


async def flood(a: Attacker) -> None:
    """More requests than the queue holds: some are refused with Retry-After."""
    bodies = [_text(prompt=f"{i}", max_tokens=4, priority=-i, stream=i % 3 == 0) for i in range(a.many(260, 5000))]
    await a.all((a.post(_TEXT, body, "flood") for body in bodies), at_once=a.many(200, 600))


async def memory(a: Attacker) -> None:
    """Prompts and outputs that fill the KV cache several times over."""
    rng = a.random
    bodies = [
        _text(
            prompt=[rng.randrange(5, 2000) for _ in range(3000)],
            max_tokens=rng.randrange(1, 300),
            priority=rng.randrange(-2, 3),
        )
        for _ in range(a.many(6, 200))
    ]
    await a.all((a.post(_TEXT, body, "memory") for body in bodies), at_once=16)


async def deadlines(a: Attacker) -> None:
    """Requests with very short timeouts."""
    times = [1e-9, 0.001, 0.05, 0.3, 1.0]
    bodies = [
        _text(timeout_s=times[i % 5], max_tokens=3000, stream=i % 2 == 0, n=1 + i % 3) for i in range(a.many(60, 1000))
    ]
    await a.all((a.post(_TEXT, body, "deadlines") for body in bodies), at_once=30)


async def leaving(a: Attacker) -> None:
    """Disconnections in every phase and manner."""
    count = a.many(48, 1000)
    outcomes = await disconnects.break_off_many(a.port, count, seed=a.random.randrange(1 << 30))
    a.record.num_made += count
    a.record.answers["left"] += outcomes.total()


async def cancellations(a: Attacker) -> None:
    """Hundreds of requests at once, reset just after they were sent."""
    rng = a.random
    bodies = [
        _text(prompt=f"{i}", max_tokens=2000, n=rng.choice((1, 8)), stream=rng.random() < 0.5)
        for i in range(a.many(200, 4000))
    ]
    await a.all((a.post(_TEXT, body, "cancelled", patience_s=rng.uniform(0.001, 0.3)) for body in bodies), at_once=60)


async def stalled(a: Attacker) -> None:
    """Readers that pause: their streams wait, and are complete in the end."""
    body = json.dumps(_text(prompt="What is Folio?", max_tokens=a.many(300, 1000), stream=True, seed=1)).encode()
    release = asyncio.Event()

    async def one() -> None:
        a.record.num_made += 1
        try:
            async with asyncio.timeout(2 * DEADLINE_S), connected(a.port, receive_buffer_bytes=4096) as connection:
                await connection.send(request("POST", _TEXT, body))
                connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await release.wait()
                connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
                answer = await connection.answer()
        except (Dropped, TimeoutError) as error:
            a.note(f"a stalled reader: {error!r}")
            return
        a.judge(answer, "a stalled reader")
        if answer.status == 200 and not answer.body.endswith(b"data: [DONE]\n\n"):
            a.note(f"a stalled reader's stream ends with {answer.body[-100:]!r}")

    readers = [asyncio.create_task(one()) for _ in range(a.many(12, 60))]
    await asyncio.sleep(a.many(3, 20))
    release.set()
    await asyncio.gather(*readers)


async def unread(a: Attacker) -> None:
    """Clients that read nothing of long streams, of several outputs each, and leave: nothing is kept for them."""
    body = json.dumps(_text(prompt="What is Folio?", max_tokens=a.many(500, 3000), n=4, stream=True)).encode()
    release = asyncio.Event()

    async def one() -> None:
        a.record.num_made += 1
        async with connected(a.port, receive_buffer_bytes=4096) as connection:
            connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await connection.send(request("POST", _TEXT, body))
            await release.wait()

    clients = [asyncio.create_task(one()) for _ in range(a.many(40, 1000))]
    await asyncio.sleep(a.many(3, 20))
    release.set()
    await asyncio.gather(*clients)


async def identities(a: Attacker) -> None:
    """A new tenant, user, salt, session and address with each request: what is kept for each must be bounded."""

    def body(i: int) -> dict[str, Any]:
        name = f"{i}-{a.random.random()}" + "x" * 200
        return _text(
            max_tokens=1, tenant=name, user=name, cache_salt=name, prompt_cache_key=name, safety_identifier=name
        )

    def headers(i: int) -> dict[str, str]:
        return {
            "X-Session-Id": f"{i}" * 50,
            "X-Forwarded-For": f"10.{i >> 16 & 255}.{i >> 8 & 255}.{i & 255}",
            "X-Request-Id": f"id{i}",
        }

    await a.all(a.post(_TEXT, body(i), "identities", headers=headers(i)) for i in range(a.many(200, 10_000)))


async def pins(a: Attacker) -> None:
    """Concurrent pins under any name, unpinned by others."""
    text = "Rules of the house: nobody sleeps, everybody dances, the door stays open all night long. " * 4
    names = [
        "a",
        "A",
        "a/b",
        "..",
        "%00",
        "é" * 60,
        "x" * 200,
        "x" * 5000,
        "",
        "\n",
        "\0",
        "a" * 64,
        "'; DROP TABLE pins",
    ]
    names += [f"pin {i}" for i in range(a.many(30, 500))]
    long = [a.random.randrange(5, 2000) for _ in range(4000)]
    await a.all(
        a.post("/v1/pins", {"name": name, "prompt": f"{name[:50]} {text}"}, f"pin {name[:30]!r}") for name in names
    )
    await a.all(
        a.post("/v1/pins", {"name": f"long {i}", "prompt": [5 + i, *long[i:]]}, "a long pin")
        for i in range(a.many(12, 100))
    )
    await a.all(a.post("/v1/pins", {"name": "same", "prompt": f"{i} {text}"}, "the same pin") for i in range(20))
    await a.all(
        a.post(_TEXT, _text(pin=f"by request {i}", prompt=f"{i} {text}", max_tokens=1), "pin") for i in range(20)
    )
    listed = await a.send(request("GET", "/v1/pins"), "pins", "GET")
    ids = [card["id"] for card in listed.json["data"]] if listed is not None and listed.status == 200 else []
    await a.all(
        a.send(request("DELETE", f"/v1/pins/{quote(name, safe='')}"), f"unpin {name[:30]!r}", "DELETE")
        for name in ids * 2 + names
    )
    listed = await a.send(request("GET", "/v1/pins"), "pins", "GET")
    if listed is None or listed.status != 200 or listed.json["data"]:
        a.note(f"pins are left: {listed}")


async def operators(a: Attacker) -> None:
    """Operators' requests, too often."""
    paths = ["/metrics", "/v1/load", "/v1/pins", "/openapi.json", "/ready", "/v1/models"]
    await a.all((a.send(request("GET", path), path, "GET") for path in paths * a.many(15, 300)), at_once=30)


ATTACKS: dict[str, Attack] = {
    "n = 32, 40 times": outputs,
    "flood": flood,
    "memory": memory,
    "deadlines": deadlines,
    "leaving": leaving,
    "cancellations": cancellations,
    "stalled readers": stalled,
    "unread streams": unread,
    "identities": identities,
    "pins": pins,
    "operators": operators,
}
