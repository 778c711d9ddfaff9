"""Run a command-line tool of the clients' environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_tool(name: str, *arguments: object, folder: Path, timeout_s: float = 300) -> str:
    """Its output; the tool's whole output if it fails."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
