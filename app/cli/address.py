"""The server's address, reserved before anything starts.

Serve's proxies listen with SO_REUSEPORT: another server may listen at the same address, and each then gets some of the
connections without an error. `reserve_address` therefore first binds without that option, which fails if there is any
listener. Seconds pass until the proxy listens, in which another Folio may start: a Unix socket named after the address
stays bound until the end. (Two commands that start in the same seconds, one with an address and one with all addresses,
are not detected.)
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException

from folio.app.errors import ConfigError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"

_ASK_S = 1.0  # timeout of another server at the address
_CONNECT_S, _AGAIN_S = 5.0, 0.5


def from_here(host: str) -> str:
    """The host in a URL from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def reserve_address(host: str, port: int) -> socket.socket | None:
    """Reserve an address. Returns a socket to keep open until the end; on Linux only, elsewhere `None`.

    Raises:
        ConfigError: the address is in use or invalid.
    """
    name = f"{host}:{port}"
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{name} is invalid; choose another port, between 1 and {(1 << 16) - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier connections may linger
            probe.bind(address)
            probe.listen()
    except (OSError, UnicodeError) as error:  # names with empty or long parts
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            server = _describe_server(host, port)
            raise ConfigError(
                f"{name} is in use{server}; stop that server, or choose another port with --port"
            ) from None
        raise ConfigError(f"{name} is no address of this machine ({error}); choose another with --host") from None
    if not sys.platform.startswith("linux"):
        return None
    reserved = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reserved.bind(f"\0folio:{name}")
    except OSError:
        reserved.close()
        raise ConfigError(
            f"{name} is reserved by another Folio that is starting; stop that, or choose another port with --port"
        ) from None
    return reserved


def wait_for_listener(address: str, own_host: str, timeout_s: float) -> None:
    """Wait until a process listens at `HOST:PORT`. Other forms of addresses are not checked.

    Args:
        own_host: another name of this machine, to try in place of a loopback address.

    Raises:
        OSError: none listens in time.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    hosts = [host.strip("[]"), *([own_host] if host.lower() in ("localhost", HOST) else [])]
    ends_at, has_warned = time.monotonic() + timeout_s, False
    while True:
        for at in hosts:
            try:
                socket.create_connection((at, int(port)), _CONNECT_S).close()
                return
            except OSError as error:
                refused = error
        if time.monotonic() >= ends_at:
            raise refused
        if not has_warned:
            logger.warning("no server listens at %s (%s); waiting up to %g s for it", address, refused, timeout_s)
            has_warned = True
        time.sleep(_AGAIN_S)


def _describe_server(host: str, port: int) -> str:
    """The kind of server at an address, if it answers soon."""
    try:
        with urllib.request.urlopen(f"http://{from_here(host)}:{port}/v1/models", timeout=_ASK_S) as answer:
            model = json.load(answer)["data"][0]
        return f" by a Folio that serves {model['id']}" if model["owned_by"] == "folio" else " by another LLM server"
    except urllib.error.HTTPError:
        return " by an HTTP server"
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return ""
