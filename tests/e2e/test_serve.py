"""The command as a terminal runs it: Ctrl-C sends SIGINT to all processes of its group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.served import free_port
from tests.processes import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240  # of the start, too, on a machine that does much else
NUM_TOKENS = 1500  # of a stream that must still run when the signal arrives


@pytest.fixture
def command(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, the leader of its group, and where it serves; what it writes is in `output`."""
    port = free_port()
    engine = {"model": "builtin", "kv_memory_bytes": 64 << 20}
    application: dict[str, Any] = {"name": "folio", "import_path": "app.main:build", "args": {"engine": engine}}
    application["deployments"] = [{"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}}]
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    arguments = [sys.executable, "-m", "app.serve", str(tmp_path / "config.yaml"), "--grace-s", str(DEADLINE_S)]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def is_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    assert process.poll() is None, "it has ended"
    try:
        return httpx.get(f"{url}/ready", timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:  # nobody listens yet
        return False


def test_ctrl_c_finishes_streams_and_refuses_new_requests(
    command: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    """Regression: `serve run` broke streams off, since Serve takes its proxies away first. The output
    has a line for each request, no traceback for the client's mistake, and no error about a clean stop."""
    process, url = command
    written = tmp_path / "output"
    until(lambda: is_ready(process, url), DEADLINE_S)
    until(lambda: f"Folio is ready at {url}" in written.read_text(errors="replace"), DEADLINE_S)
    body = {"model": "builtin", "prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    mistake = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 10**6}, timeout=DEADLINE_S)
    assert mistake.status_code == 400
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=stream, timeout=DEADLINE_S) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        os.killpg(process.pid, signal.SIGINT)

        def refusal() -> httpx.Response | None:
            answer = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 1}, timeout=DEADLINE_S)
            return None if answer.status_code == 200 else answer

        refused = until(refusal, DEADLINE_S)
        assert refused is not None
        assert (refused.status_code, "draining" in refused.json()["error"]["message"]) == (503, True)
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/ready", timeout=DEADLINE_S).status_code == 503
        *_, usage, done = lines
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == NUM_TOKENS
    assert process.wait(DEADLINE_S) == 0
    output = written.read_text(errors="replace")
    assert len([line for line in output.splitlines() if mistake.headers["x-request-id"] in line]) == 1
    for complaint in ("Traceback", "graceful_shutdown failed", " ERROR "):
        assert complaint not in output
