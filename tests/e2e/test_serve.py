"""The command as a terminal runs it: Ctrl-C sends SIGINT to all processes of its group."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks.served import free_port
from tests.processes import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240  # of the start, too, on a machine that does much else
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NUM_TOKENS = 700  # of a stream that must still run when the signal arrives


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Span]]]:
    """The address of a collector of OpenTelemetry traces, and what it has got."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            plain = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(plain).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        thread.join()


# An application of the user's, in the working directory.
DESK = """
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Desk:
    def __call__(self, request):
        return "desk"

desk = Desk.bind()
"""


@pytest.fixture
def command(tmp_path: Path, collector: tuple[str, list[Span]]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, the leader of its group, and where it serves; what it writes is in `output`."""
    port = free_port()
    engine = {"model": "builtin", "kv_memory_bytes": 64 << 20}
    application: dict[str, Any] = {"name": "folio", "import_path": "folio.app.main:build", "args": {"engine": engine}}
    application["deployments"] = [{"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}}]
    tracing = {"enabled": True, "exporter_import_path": "folio.app.tracing:otlp", "sampling_ratio": 0.0}
    (tmp_path / "desk.py").write_text(DESK)
    desk = {"name": "desk", "route_prefix": "/desk", "import_path": "desk:desk"}
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "tracing_config": tracing,
        "applications": [application, desk],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector[0]
    file = str(tmp_path / "config.yaml")
    # The working directory's modules hide none of ours (-P: as the script `folio`, this process has none of them).
    for name in ("app", "vmem", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user's {name}')")
    environment["PYTHONPATH"] = str(ROOT)
    arguments = [sys.executable, "-P", "-m", "folio.app.cli", "serve", "--config", file, "--grace-s", str(DEADLINE_S)]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=tmp_path, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
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
    command: tuple[subprocess.Popen[bytes], str], collector: tuple[str, list[Span]], tmp_path: Path
) -> None:
    """Regression: `serve run` broke streams off, since Serve takes its proxies away first. The output
    has a line for each request, no traceback for the client's mistake, and no error about a clean stop. The trace that
    the stream's client has begun is complete."""
    process, url = command
    written = tmp_path / "output"
    until(lambda: is_ready(process, url), DEADLINE_S)
    until(lambda: f"Folio is ready at {url}" in written.read_text(errors="replace"), DEADLINE_S)
    assert httpx.get(f"{url}/desk", timeout=DEADLINE_S).text == "desk"
    body = {"model": "builtin", "prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    mistake = httpx.post(f"{url}/v1/completions", json=body | {"temperature": -1}, timeout=DEADLINE_S)
    assert mistake.status_code == 400
    stream = body | {"stream": True, "stream_options": {"include_usage": True}}
    traced = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    with httpx.stream("POST", f"{url}/v1/completions", json=stream, headers=traced, timeout=DEADLINE_S) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
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
    assert "graceful_shutdown failed" not in output
    # On a busy machine, calls of Serve's controller to Ray run out of time; each is an error line and its traceback.
    lines = [line for line in output.splitlines() if "Exception updating cluster node info cache" not in line]
    assert not [line for line in lines if " ERROR " in line]
    assert not [line for line in lines if "Traceback" in line and "(ServeController " not in line]
    check_trace(collector[1])


def check_trace(spans: list[Span]) -> None:
    """The spans are those of the stream, whose client has asked for a trace, in the order of its way; no other request
    has one, because none is sampled."""
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    by_name = {span.name: span for span in spans}
    way = [
        "replica_handle_request Ingress __call__",
        "route_to_replica EngineReplica generate_stream",
        "replica_handle_request EngineReplica generate_stream",
    ]
    ids = [bytes.fromhex(CALLER), *(by_name[name].span_id for name in way)]
    assert [by_name[name].parent_span_id for name in way] == ids[:-1]
    parts = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in parts} == {ids[-1]}
    assert all(not span.events for span in spans)
    attributes = {pair.key: pair.value for pair in [*by_name[way[0]].attributes, *parts[-1].attributes]}
    assert attributes["gen_ai.request.model"].string_value == "builtin"
    assert attributes["folio.output_tokens"].int_value == NUM_TOKENS
    assert attributes["folio.outcome"].string_value == "ok"
