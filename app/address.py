"""The server's address, taken before anything starts.

Serve's proxies listen with SO_REUSEPORT: another server may listen at the same address, and each then gets some of the
connections, without an error anywhere. So whoever is about to start proxies asks without that option first, which
tells of every listener. Between that and the proxy pass seconds, in which another Folio may ask, too: so a Folio also
binds a Unix socket named after the address, from the first moment to the last. Only one can, and it goes with the
process. (Two that start in the same seconds, one at an address and one at all of them, are not told apart.)
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

from app.errors import ConfigError

_ASK_S = 1.0


def claim(host: str, port: int) -> socket.socket | None:
    """A socket to be kept for as long as the address is wanted; none where there are no such sockets (not Linux).

    Raises:
        ConfigError: the address is in use, or cannot be had.
    """
    name = f"{host}:{port}"
    if not 0 < port < 1 << 16:
        raise ConfigError(f"http_options: {name} cannot be; choose another port, between 1 and {(1 << 16) - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what lingers of earlier connections is fine
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = f"is in use{_who_answers(host, port)}; stop that, or choose" if in_use else f"({error}); choose"
        raise ConfigError(f"http_options: {name} {reason} another port, with --port or in the file") from None
    if not sys.platform.startswith("linux"):
        return None
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claimed.bind(f"\0folio:{name}")
    except OSError:
        claimed.close()
        raise ConfigError(
            f"http_options: {name} is taken by another Folio that is starting; stop that, or choose another port, with "
            "--port or in the file"
        ) from None
    return claimed


def _who_answers(host: str, port: int) -> str:
    """As far as it is soon found out."""
    where = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{where}]' if ':' in where else where}:{port}/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
            model = json.load(answer)["data"][0]
        return f" by a Folio that serves {model['id']}" if model["owned_by"] == "folio" else " by another LLM server"
    except urllib.error.HTTPError:
        return " by an HTTP server"
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return ""
