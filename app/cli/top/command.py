"""`folio top`: a live view of a server's replicas, from the state behind its dashboard."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Server, Url
from folio.app.cli.text import console
from folio.app.errors import FolioError, UnavailableError

EXAMPLES = """
folio top
folio top --url http://10.0.0.5:8000 --api-key KEY --interval 5
folio top --once
folio top --json | head -n 1
"""

# Silence after which the server counts as not reachable, the pause between two attempts, and the period of drawing,
# which also follows the terminal's size.
_SILENCE_S, _RETRY_S, _DRAW_S = 10.0, 1.0, 0.25


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each state as a JSON line.")] = False,
) -> None:
    """Watch the replicas: memory by kind, queue, batch, tokens/s, TTFT and TPOT, hit rate; GPUs by part; and the models
    of a shelf. q ends it.

    With API keys, for operators. Latencies are those of requests that ended while this, or a dashboard, was open.
    """
    server = Server(url, api_key, silence_s=_SILENCE_S)
    if once or as_json:
        asyncio.run(_print(server, interval, once=once, as_json=as_json))
    elif not sys.stdout.isatty():
        raise typer.BadParameter("the view needs a terminal; use --once or --json")
    else:
        asyncio.run(_live(server, interval))


async def states(server: Server, interval_s: float) -> AsyncGenerator[dict[str, Any], None]:
    """The server's states, at intervals, without an end. Raises `FolioError`."""
    due_s = 0.0
    while True:  # the server ends each stream after a while
        state = None
        async with aclosing(server.stream("/dashboard/events")) as events:
            async for state in events:
                if (now_s := time.monotonic()) >= due_s:
                    due_s = now_s + interval_s - 0.5 * state.get("period_s", 1.0)
                    yield state
        if state is None:
            raise UnavailableError(f"{server.url} is stopping")


async def _print(server: Server, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Print states as JSON lines or tables; with `once` only the second one, which has the steps of a whole period."""
    from folio.app.cli.top.view import view

    screen = console(0)
    async with server, aclosing(states(server, 0.0 if once else interval_s)) as found:
        if once:
            await anext(found)
        async for state in found:
            if as_json:
                print(json.dumps(state), flush=True)
            else:
                screen.print(view(state, screen.width, None))
            if once:
                return


async def _live(server: Server, interval_s: float) -> None:
    """Draw until q or a signal."""
    watch = Watch()
    async with server:
        following = asyncio.create_task(watch.follow(server, interval_s))
        while not (watch.state or following.done()):
            await asyncio.sleep(0.02)
        if not following.done():
            await _draw(watch, following)
        if following.done():
            await following
        following.cancel()


async def _draw(watch: Watch, following: asyncio.Task[None]) -> None:
    from rich.live import Live

    from folio.app.cli.top.view import view

    screen = console(0)
    with _end() as end, Live(console=screen, screen=True, auto_refresh=False) as live:
        while not (following.done() or end.done()):
            live.update(view(watch.state, screen.width, watch.problem, screen.height), refresh=True)
            await asyncio.wait([following, end], timeout=_DRAW_S, return_when=asyncio.FIRST_COMPLETED)


@dataclass
class Watch:
    """The newest state of a server.

    Attributes:
        state: the last one, empty before the first.
        problem: since when (seconds since 1970) and why there has been no newer one.
    """

    state: dict[str, Any] = field(default_factory=dict)
    problem: tuple[float, str] | None = None

    async def follow(self, server: Server, interval_s: float) -> None:
        """Read the states until cancelled, with retries while the server cannot be reached. Raises `FolioError` if the
        first attempt fails: the user can correct it."""
        while True:
            try:
                async with aclosing(states(server, interval_s)) as found:
                    async for self.state in found:
                        self.problem = None
            except FolioError as error:
                if not self.state:
                    raise
                self.problem = self.problem[0] if self.problem else time.time(), str(error)
            await asyncio.sleep(_RETRY_S)


@contextmanager
def _end() -> Iterator[asyncio.Future[None]]:
    """A future that is done when q is pressed, without echo, or at a signal: the terminal must be restored."""
    loop = asyncio.get_running_loop()
    end = loop.create_future()

    def set_end() -> None:
        if not end.done():
            end.set_result(None)

    def read() -> None:
        if set(os.read(keyboard, 64) or b"q") & set(b"qQ\x04"):  # Ctrl-D; nothing is read if it is closed
            loop.remove_reader(keyboard)
            set_end()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, set_end)
    try:
        if not sys.stdin.isatty():
            yield end
            return
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, read)
        try:
            yield end
        finally:
            loop.remove_reader(keyboard)
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
