"""GuideLLM, with prompts that it makes up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.client import MODEL, Client
from tests.clients.run_tool import run_tool

pytest.importorskip("guidellm")

CLIENT = Client("GuideLLM", ("guidellm",))
NUM_REQUESTS = 6


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_run(url: str, checkpoint: Path, tmp_path: Path, route: str) -> None:
    options = {
        "backend": f"kind=openai_http,target={url},model={MODEL},request_format={route}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={checkpoint}",
        "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "output": "kind=json,path=report.json",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    run_tool("guidellm", "run", *arguments, "--disable-console-interactive", folder=tmp_path)
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16
