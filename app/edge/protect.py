"""Puts the guard around an application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app.edge.guard import Guard
from app.edge.keys import KeyRing
from app.edge.settings import HttpSettings
from app.edge.shares import Shares
from app.edge.watcher import Watcher

# Browsers show these to a page only when they are named.
_EXPOSED = [
    "x-request-id",
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]


def protect(
    api: FastAPI,
    settings: HttpSettings,
    *,
    echoes_id: bool = True,
    watcher: Watcher | None = None,
    shares: Shares | None = None,
) -> FastAPI:
    """Add the middleware to it, as in `Guard`. Raises `ConfigError` when the API keys cannot be read."""
    keys = None if settings.api_keys is None else KeyRing(settings.api_keys, settings.key_limits, watcher, shares)
    api.add_middleware(Guard, settings=settings, keys=keys, echoes_id=echoes_id, watcher=watcher, shares=shares)
    if settings.cors_origins:  # outside of the guard: browsers ask without a key first, and want to read refusals
        api.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            max_age=3600,
        )
    return api
