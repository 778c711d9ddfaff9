"""`folio top`: a live view of a server's replicas, from the state behind its dashboard."""

from __future__ import annotations

import asyncio
import json
import select
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any

import typer

from app.cli.connection import DEFAULT_URL, ApiKey, Server, Url

EXAMPLES = """
folio top
folio top --url http://10.0.0.5:8000 --api-key KEY --interval 5
folio top --once
folio top --json | head -n 1
"""

_EVENTS = "/dashboard/events"
# Silence after which the server counts as not reachable, and the pause between two tries.
_SILENCE_S, _RETRY_S = 10.0, 1.0


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print a table, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each state as a JSON line.")] = False,
) -> None:
    """Watch the replicas: memory by kind, queue, batch, tokens/s, TTFT and TPOT, hit rate. q ends it.

    With API keys, for operators. Latencies are those of requests that ended while somebody watched.
    """
    server = Server(url, api_key)
    if once:
        asyncio.run(_once(server, as_json))
    elif as_json:
        asyncio.run(_print_states(server, interval))
    elif not sys.stdout.isatty():
        raise typer.BadParameter("the view needs a terminal; use --once or --json")
    else:
        _live(server, interval)


async def states(server: Server) -> AsyncGenerator[dict[str, Any], None]:
    """The server's states, about one a second, without an end. Raises `FolioError`."""
    from app.errors import RequestError, UnavailableError
    from app.event_stream import event_data

    while True:  # the server ends each stream after a while
        try:
            async with server.answer("GET", _EVENTS) as response:
                events, is_empty = event_data(response.content.iter_any()), True
                while True:
                    async with asyncio.timeout(_SILENCE_S):
                        data = await anext(events, None)
                    if data is None:
                        break
                    is_empty = False
                    yield json.loads(data)
            if is_empty:
                raise UnavailableError(f"{server.url} is stopping")
        except TimeoutError:
            raise UnavailableError(f"{server.url} has sent nothing for {_SILENCE_S:g} s") from None
        except RequestError as error:
            raise UnavailableError(
                f"{server.url} has no {_EVENTS}: it is no Folio server, or its setting http.dashboard is off"
            ) from error


async def _once(server: Server, as_json: bool) -> None:
    from rich.console import Console

    from app.cli.top_view import view

    async with server, aclosing(states(server)) as found:
        await anext(found)
        state = await anext(found)  # with the steps of a whole period
    if as_json:
        print(json.dumps(state))
    else:
        console = Console(markup=False, highlight=False)
        console.print(view(state, console.width, None))


async def _print_states(server: Server, interval_s: float) -> None:
    due = 0.0
    async with server, aclosing(states(server)) as found:
        async for state in found:
            if time.monotonic() >= due:
                due = time.monotonic() + interval_s - 0.5 * state["period_s"]
                print(json.dumps(state), flush=True)


def _live(server: Server, interval_s: float) -> None:
    """Draw until q or Ctrl-C. A server that cannot be reached is tried again; the last state stays in sight."""
    from rich.console import Console
    from rich.live import Live

    from app.cli.top_view import view

    console = Console(markup=False, highlight=False)
    watch = Watch(server, interval_s)
    watch.start()
    try:
        with _keys() as wait_for_key, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                state, problem = watch.latest
                live.update(view(state, console.width, problem, console.height), refresh=True)
                if wait_for_key(0.25) in ("q", "Q", "\x03", "\x04"):
                    return
    except KeyboardInterrupt:
        return
    finally:
        watch.stop()


class Watch:
    """Reads the states in a thread, so that the view stays alive while the server does not answer.

    Attributes:
        latest: the last state, and since when and why there has been no newer one.
    """

    def __init__(self, server: Server, interval_s: float) -> None:
        self._server = server
        self._interval_s = interval_s
        self._changed = threading.Event()
        self._is_stopped = False
        self.latest: tuple[dict[str, Any], tuple[float, str] | None] = ({}, None)

    def start(self) -> None:
        """Return after the first look. Raises `FolioError` if it fails: the user can correct it."""
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        self._changed.wait()
        if not self.latest[0] and self.latest[1] is not None:
            from app.errors import UnavailableError

            raise UnavailableError(self.latest[1][1])

    def stop(self) -> None:
        self._is_stopped = True

    async def _run(self) -> None:
        from app.errors import FolioError

        async with self._server:
            while not self._is_stopped:
                try:
                    await self._follow()
                except FolioError as error:
                    state, problem = self.latest
                    self.latest = state, (problem[0] if problem else time.time(), str(error))
                    self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        due = 0.0
        async with aclosing(states(self._server)) as found:
            async for state in found:
                if self._is_stopped:
                    return
                if time.monotonic() >= due or self.latest[1] is not None:
                    due = time.monotonic() + self._interval_s - 0.5 * state["period_s"]
                    self.latest = state, None
                    self._changed.set()


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key, without echo; `None` if none is pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda seconds: sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else None
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
