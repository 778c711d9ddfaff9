"""Run coding agents against a server, without a network: `python -m tests.agents [AGENT …]`; `make agents` does.

The whole run is in a namespace of its own, whose only network device is the loopback. Each agent has a relay to the
server, which keeps what both say: `--bodies FOLDER` writes the requests.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from tests.agents import script
from tests.agents.agents import AGENTS, Agent, filled, steps
from tests.agents.server import ROOT, Server, kill, served
from tests.agents.wire import Connection, Wire

HERE = Path(__file__).parent
PATHS = [HERE / "node_modules" / ".bin", ROOT / ".venv-agents" / "bin"]
RECORD = HERE / "results.json"
# Processes that agents leave behind end with the namespace.
_NAMESPACE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
_INSIDE = "FOLIO_AGENTS_INSIDE"
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP
# In this order: the first three are one session. The last one disturbs other agents.
CHECKS = ("chat", "cached", "overflow", "stream", "tools", "real", "killed")
_TIMEOUT_S = 600.0
_STREAMED_EVENTS = 20
_CACHED_SHARE = 0.8
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# How an agent tells its user that a conversation is too long.
_TOO_LONG = ("context", "too long", "token limit", "maximum length", "compact")


@dataclass(frozen=True, slots=True)
class Turn:
    """What an agent printed. `status`: its exit status, `None` if it had to be killed."""

    status: int | None
    output: str

    def says(self, *texts: str) -> bool:
        return any(text.lower() in self.output.lower() for text in texts)


class Run:
    """One agent's checks: each returns "passed", with the agent's choice if it has one, or what went wrong."""

    def __init__(self, agent: Agent, server: Server, folder: Path, bodies: Path | None) -> None:
        self.agent, self._server, self._bodies = agent, server, bodies
        self.wire, self.outcomes = Wire(server.port), dict[str, str]()
        self._usual = set[str]()  # lines that the agent prints in each turn
        self._home = folder / agent.name.replace(" ", "-")
        self.work = self._home / "work"
        self.work.mkdir(parents=True)
        (self.work / "one.txt").write_text(f"The word is {script.FIRST}.\n")
        (self.work / "two.txt").write_text(f"The word is {script.SECOND}.\n")
        subprocess.run(["git", "init", "--quiet", self.work], check=True)

    def check(self, names: Iterable[str]) -> None:
        """Run checks, one after the other, and note their outcomes."""
        for name in names:
            self.wire.clear()
            check: Callable[[], str] = getattr(self, name)
            self.outcomes[name] = check()
            print(f"{self.agent.name}: {name}: {self.outcomes[name]}", flush=True)
            if self._bodies is not None:
                sent = [body for one in self.wire.connections for body in one.bodies()]
                path = self._bodies / f"{self.agent.name.replace(' ', '-')}-{name}.json"
                path.write_text(json.dumps(sent, indent=1, ensure_ascii=False))

    def record(self) -> dict[str, Any]:
        return {
            "version": versions()[self.agent.package],
            "day": datetime.now(UTC).date().isoformat(),
            "api": self.agent.api,
            "outcomes": self.outcomes,
            "env": self.agent.env,
            "files": self.agent.files,
            "command": self.agent.first,
        }

    def chat(self) -> str:
        turn = self._turn("Say hello.")
        self._usual = set(turn.output.splitlines())
        return self._expect(turn, script.HELLO)

    def cached(self) -> str:
        """The second turn of `chat`'s session, or else the second request of a loop, finds the prefix."""
        goes_on = bool(self.agent.again)
        turn = self._turn("Say hello again." if goes_on else f"Do the {self.agent.errand}.", again=goes_on)
        cached, prompt = self.wire.cached_tokens, self.wire.prompt_tokens
        prompt += cached if self.agent.api == "messages" else 0
        if cached < _CACHED_SHARE * prompt:
            return f"{cached} of {prompt} prompt tokens were cached"
        return self._expect(turn, script.HELLO if goes_on else script.READ)

    def overflow(self) -> str:
        """A further turn exceeds the context: the agent says so, or makes room and goes on."""
        noise = random.Random(0).randbytes(60_000).hex()
        turn = self._turn(f"Say hello. Ignore this: {noise}", again=bool(self.agent.again))
        if turn.status is None:
            return f"hangs for {_TIMEOUT_S:.0f} s"
        if turn.says(script.HELLO) and self.wire.statuses[-1:] == [200]:
            return "passed: makes room"
        new = Turn(turn.status, "\n".join(set(turn.output.splitlines()) - self._usual))
        return "passed: says so" if new.says(*_TOO_LONG) else self._failure(turn)

    def stream(self) -> str:
        turn = self._turn(f"Count {script.SLOW}.")
        if self.wire.num_events < _STREAMED_EVENTS:
            return f"{self.wire.num_events} events: " + self._failure(turn)
        return self._expect(turn, script.COUNTED)

    def tools(self) -> str:
        """Two calls in a row; the answer needs the results of both."""
        return self._expect(self._turn(f"Do the {self.agent.errand}."), script.READ)

    def killed(self) -> str:
        """The replica is killed in the middle of an answer: the agent asks again, or tells its user."""
        self._server.await_replicas()
        killed: list[str] = []

        def kill_once(connection: Connection) -> None:
            is_main = b'"tools":' in connection.sent or isinstance(self.agent.steps[0], str)  # not that for a title
            if is_main and connection.num_events > 3 and not killed:
                kill(connection.replica)
                killed.append(connection.replica)

        self.wire.on_event = kill_once
        turn = self._turn(f"Count {script.SLOW}.")
        self.wire.on_event = lambda _: None
        if not killed or turn.status is None:
            return "nothing to kill: " + self._failure(turn) if not killed else f"hangs for {_TIMEOUT_S:.0f} s"
        if turn.says(script.COUNTED):
            sizes = [len(json.dumps(body)) for one in self.wire.connections for _, body in one.bodies()]
            is_again = sum(size > max(sizes) / 2 for size in sizes) > 1
            return "passed: asks again" if is_again else "the answer was complete"
        return "passed: says so" if turn.status or turn.says("error", "failed") else self._failure(turn)

    def real(self) -> str:
        turn = self._turn("What is the capital of France?", model="smollm2")
        if turn.status != 0 or set(self.wire.statuses) != {200} or self.wire.num_events < 4:
            return self._failure(turn)
        return "passed"

    def _turn(self, prompt: str, *, model: str = "scripted", again: bool = False) -> Turn:
        url = f"http://127.0.0.1:{self.wire.port}"
        for name, text in self.agent.files.items():
            path = self._home / name.removeprefix("~/") if name.startswith("~/") else self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text, model=model, url=url))
        environment = {name: filled(value, model=model, url=url) for name, value in self.agent.env.items()}
        environment |= {"HOME": str(self._home), "PATH": ":".join([*map(str, PATHS), os.environ["PATH"]])}
        environment |= {"NO_PROXY": "127.0.0.1", "TERM": "dumb", "LANG": "C.UTF-8"}
        command = self.agent.command(prompt, model, url, again)
        with TemporaryFile() as output:  # not a pipe: what an agent leaves behind would keep it open
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                status = None
            output.seek(0)
            printed = output.read().decode(errors="replace")
        return Turn(status, _COLOUR.sub("", printed))

    def _expect(self, turn: Turn, text: str) -> str:
        return "passed" if turn.status == 0 and turn.says(text) else self._failure(turn)

    def _failure(self, turn: Turn) -> str:
        statuses = [status for status in self.wire.statuses if status >= 400]
        return f"exit status {turn.status}, HTTP {statuses}: {' '.join(turn.output.split())[-400:]}"


def versions() -> dict[str, str]:
    """Package → version, as it is pinned."""
    pinned = json.loads((HERE / "package.json").read_text())["dependencies"]
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return pinned | dict(line.split("==") for line in lines)


def write_record(runs: Sequence[Run]) -> None:
    """Put outcomes over the file's; agents and checks that did not run keep what the file has."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for run in runs:
        before = record.get(run.agent.name, {}).get("outcomes", {})
        record[run.agent.name] = run.record() | {"outcomes": before | run.outcomes}
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__.partition("\n")[0])
    parser.add_argument("agents", nargs="*", metavar="AGENT", help="names of some agents; by default all")
    parser.add_argument("--real", action="store_true", help="try smollm2, too, which `folio pull` has fetched")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="some checks; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="agents at a time")
    parser.add_argument("--bodies", type=Path, help="folder for the requests")
    options = parser.parse_args()
    chosen = [agent for agent in AGENTS if not options.agents or agent.name in options.agents]
    if _INSIDE not in os.environ:
        if subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode:
            print(f"skipped: {', '.join(agent.name for agent in chosen)}: this machine allows no namespaces")
            return
        os.environ[_INSIDE] = "1"
        os.execvp(_NAMESPACE[0], [*_NAMESPACE, sys.executable, "-m", "tests.agents", *sys.argv[1:]])
    with socket.socket() as device:
        fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))
    with TemporaryDirectory(prefix="agents-") as name, ExitStack() as stack:
        folder = Path(name)
        errands = {agent.errand: steps(agent, folder / agent.name.replace(" ", "-") / "work") for agent in chosen}
        server = stack.enter_context(served(folder, errands, options.real))
        runs = [Run(agent, server, folder, options.bodies) for agent in chosen]
        checks = [name for name in CHECKS if name in options.checks and (options.real or name != "real")]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda run: run.check(name for name in checks if name != "killed"), runs))
        write_record(runs)
        for run in runs:
            run.check(name for name in checks if name == "killed")
        write_record(runs)
    outcomes = [(f"{run.agent.name}: {name}", outcome) for run in runs for name, outcome in run.outcomes.items()]
    if failed := [check for check, outcome in outcomes if not outcome.startswith("passed")]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
