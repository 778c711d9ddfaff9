"""Whose processor time and memory `benchmarks.serving` reports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.serving.usage import OTHERS, Meter, kind_of
from tests.processes import until


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::ServeReplica:folio:EngineReplica", "EngineReplica"),
        ("ray::ServeReplica:folio:Ingress.handle_request", "Ingress"),  # while a method runs; it was lost then
        ("ray::ProxyActor", "serve_proxy"),
        ("/usr/sbin/haproxy -db -f haproxy.cfg -sf 12", "haproxy"),
        ("ray::HAProxyManager.ready", "haproxy_manager"),
        ("ray::ServeController.listen_for_change", "controller"),
        ("ray::IDLE", OTHERS),
        ("/usr/bin/gcs_server --log_dir=x", OTHERS),
        ("", OTHERS),
    ],
)
def test_titles(title: str, kind: str) -> None:
    assert kind_of(title) == kind


@pytest.mark.processes
def test_children_are_counted_but_for_the_one_to_skip() -> None:
    other_mib = Meter(skip=None).read().private_mib.get(OTHERS, 0.0)  # of earlier tests, such as a fork server
    busy = subprocess.Popen([sys.executable, "-c", "x = bytearray(b'1') * (64 << 20)\nwhile True: pass"])
    try:
        meter = Meter(skip=None)
        before = meter.read()

        def is_counted() -> bool:
            now = meter.read()
            return now.private_mib[OTHERS] >= other_mib + 64 and now.cpu_since(before)[OTHERS] >= 0.05

        until(is_counted)
        assert Meter(skip=busy.pid).read().private_mib.get(OTHERS, 0.0) < other_mib + 64
    finally:
        busy.kill()
        busy.wait()
