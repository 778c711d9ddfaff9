"""Hosts and origins: a web page of another site reaches no route of a server that asks for no key.

A browser runs pages of strangers beside a server that listens for its user only. Such a page can send requests
here without reading the answers (a form, `fetch` with text/plain), or, after its host's name has been pointed at this
machine (DNS rebinding), read them, too. Browsers say in headers which host a page asked for and whose page it is.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from folio.app.config.http import HttpSettings
from folio.app.errors import ForbiddenError
from folio.app.http.errors import HttpRefusal

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST, _ORIGIN, _SITE, _MODE, _DEST = b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"
_READ = {_HOST, _ORIGIN, _SITE, _MODE, _DEST}
_PORTS = {"http": 80, "https": 443}
_MAX_SHOWN_CHARS = 100


class OriginPolicy:
    """Refuses requests by host and by origin.

    Args:
        hosts: names by which the server may be called; `None`: any.
        origins: of pages of other sites that may call; `None`: any, since callers need a key.
    """

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str] | None) -> None:
        self._hosts = hosts
        self._origins = origins

    @staticmethod
    def of(settings: HttpSettings, bound_to: str | None = None) -> OriginPolicy:
        """The policy of a server's settings. `bound_to`: the address at which it listens, if that is known."""
        hosts: Collection[str] | None = settings.allowed_hosts
        if hosts is None and settings.api_keys is None and bound_to is not None and is_loopback(bound_to):
            hosts = [bound_to, socket.gethostname()]
        if hosts is not None:
            hosts = None if "*" in hosts else _LOOPBACK.union(map(host_of, hosts))
        takes_all = settings.api_keys is not None or "*" in settings.cors_origins
        return OriginPolicy(hosts, None if takes_all else settings.cors_origins)

    def check(self, scope: Scope) -> None:
        """Raise `HttpRefusal` if a request is for a host of another name, or comes from another site's page."""
        if self._hosts is None and self._origins is None:
            return
        found: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            if name in _READ:
                found.setdefault(name, []).append(value.decode("latin-1").strip())
        named = found.get(_HOST, [])
        if self._hosts is not None and [host_of(host) in self._hosts for host in named] != [True]:
            shown = ", ".join(named)[:_MAX_SHOWN_CHARS]
            raise _refusal(
                f"the request's host is {shown!r}, which is not a name of this server; use localhost, or add it to "
                "http.allowed_hosts"
            )
        if self._origins is not None:
            self._check_origin(scope["method"], found, named)

    def _check_origin(self, method: str, found: dict[bytes, list[str]], named: list[str]) -> None:
        assert self._origins is not None
        [site, mode, dest] = [",".join(found.get(name, [])) for name in (_SITE, _MODE, _DEST)]
        if site in ("same-origin", "none"):  # which pages cannot claim: browsers write it
            return
        for origin in found.get(_ORIGIN, ()):
            if not (origin in self._origins or _is_program(origin) or _is_same(origin, named)):
                shown = origin[:_MAX_SHOWN_CHARS]
                raise _refusal(f"pages of {shown!r} may not call this server; add that origin to http.cors_origins")
        if site and _ORIGIN not in found and (method, mode, dest) != ("GET", "navigate", "document"):  # beyond links
            raise _refusal(f"pages of other sites may not call this server (sec-fetch-site: {site[:_MAX_SHOWN_CHARS]})")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except (OSError, ValueError, UnicodeError):
        return False


def host_of(authority: str) -> str:
    """The host in a `Host` header or in an origin, in one spelling: without port, brackets and a final dot."""
    host, colon, port = authority.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):
        host = authority  # also an IPv6 address without brackets
    return host.lower().strip("[]").removesuffix(".")


def _is_program(origin: str) -> bool:
    """Whether an origin is a desktop program's (such as vscode-webview://), which no web page has."""
    scheme, separator, _ = origin.partition("://")
    return bool(separator) and scheme.lower() not in ("http", "https", "file")


def _is_same(origin: str, named: list[str]) -> bool:
    """Whether an origin is this server's own page, for browsers without `sec-fetch-site`."""
    try:
        parts, [host] = urlsplit(origin), named
        given, usual = urlsplit(f"{parts.scheme}://{host}"), _PORTS[parts.scheme]
        return (parts.hostname, parts.port or usual) == (given.hostname, given.port or usual)
    except (ValueError, KeyError):
        return False


def _refusal(message: str) -> HttpRefusal:
    return HttpRefusal.from_error(ForbiddenError(message))
