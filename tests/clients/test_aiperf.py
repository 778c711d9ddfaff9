"""NVIDIA's AIPerf, with prompts that it makes up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.client import MODEL, Client
from tests.clients.run_tool import run_tool

pytest.importorskip("aiperf")

CLIENT = Client("AIPerf", ("aiperf",))
NUM_REQUESTS = 6


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_run(url: str, checkpoint: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")  # with it AIPerf takes a folder for the name of a repository
    options = {
        "model": MODEL,
        "url": url,
        "endpoint-type": kind,
        "tokenizer": checkpoint,
        "isl": 64,
        "osl": 16,
        "extra-inputs": "ignore_eos:true",
        "request-count": NUM_REQUESTS,
        "concurrency": 2,
        "workers-max": 1,
        "ui": "none",
        "artifact-dir": tmp_path,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    run_tool("aiperf", "profile", "--streaming", *arguments, folder=tmp_path)
    [path] = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert "error_request_count" not in report
