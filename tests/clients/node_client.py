"""Clients for Node: a script in `node/` for each, with a feature's result as its output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.client import MODEL, Total
from tests.clients.scripted_model import ANSWER, HIDDEN_SIZE, THOUGHT

FOLDER = Path(__file__).with_name("node")
EXPECTED: dict[str, Any] = {
    "chat": ANSWER,
    "stream": ANSWER,
    "tools": ANSWER,
    "reasoning": [THOUGHT, ANSWER],
    "embeddings": [HIDDEN_SIZE] * 2,
}


def check(script: str, url: str, feature: str, **environment: str) -> None:
    """Run a script for a feature, and check its result."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules").exists():
        pytest.skip("needs Node and its packages: installed by `make clients` where there is npm")
    command = [node, script, url, MODEL, feature]
    variables = os.environ | environment
    done = subprocess.run(command, cwd=FOLDER, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if feature == "structured":
        Total.model_validate(result)
    else:
        assert result == EXPECTED[feature]
