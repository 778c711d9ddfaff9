"""Runs the blocks of a page against a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from tests.docs.blocks import ROOT, Block, is_as_expected, page_blocks

ADDRESS = "127.0.0.1:8000"  # in the pages
# They show the default model's answers, and run in `test_lifetime.py`.
FIRST_PAGES = ("README.md", "docs/start/first-model.md")
_BLOCK_S = 120.0
_NEEDS = re.compile(rf"{re.escape(ADDRESS)}|Folio\(|ray\.init")


def needs_server(blocks: Iterable[Block]) -> bool:
    """Whether one of the blocks calls a server, or is a command line."""
    return any(b.runs and (b.language != "python" or _NEEDS.search(b.text)) for b in blocks)


class Runner:
    """Runs blocks: Python in one further process, command lines in a shell of their own.

    Args:
        address: of the server, in place of `ADDRESS`.
        ray_variables: environment variables with which a driver finds its Ray cluster.
        folder: where command lines run; a page may leave files there.
        python: of the environment in which the blocks run.
        path: `PYTHONPATH` of the blocks.
    """

    def __init__(
        self,
        address: str,
        ray_variables: Mapping[str, str],
        folder: Path,
        python: Path = Path(sys.executable),
        path: Path = ROOT,
    ) -> None:
        self._address = address
        self._folder = folder
        bin_folder = python.parent
        self._environment = os.environ | {
            **ray_variables,
            "PYTHONPATH": str(path),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
        }
        command = [python, ROOT / "tests" / "docs" / "runner.py"]
        self._python = subprocess.Popen(
            command, cwd=folder, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        _pipe(self._python.stdin).close()
        try:
            self._python.wait(_BLOCK_S)
        finally:
            self._python.kill()

    def run_page(self, page: str) -> None:
        """Run the blocks of a page that run, in order; fail at the first that fails or prints something else."""
        for block in page_blocks(page):
            if block.runs:
                self._run(block)

    def _run(self, block: Block) -> None:
        for code, expected in block.steps():
            code = code.replace(ADDRESS, self._address)
            output = self._run_python(block, code) if block.language == "python" else self._run_shell(block, code)
            output = output.replace(self._address, ADDRESS)
            if expected is not None:
                assert is_as_expected(output, expected), f"{block.place} printed\n{output}\ninstead of\n{expected}"

    def _run_python(self, block: Block, code: str) -> str:
        stdin, stdout = _pipe(self._python.stdin), _pipe(self._python.stdout)
        print(json.dumps({"page": block.page, "code": code}), file=stdin, flush=True)
        late = threading.Timer(_BLOCK_S, self._python.kill)
        late.start()
        line = stdout.readline()
        late.cancel()
        assert line, f"{block.place} did not end within {_BLOCK_S:.0f} s, or ended the process"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{block.place}\n{answer['error']}"
        return str(answer["output"])

    def _run_shell(self, block: Block, code: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"{block.place} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
