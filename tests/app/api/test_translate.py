"""Threads in which requests are translated."""

from __future__ import annotations

import threading

import pytest

from folio.app.api.input.translate import Translator
from folio.app.config.http import HttpSettings
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.http.request_context import CURRENT, RequestContext


@pytest.mark.parametrize(
    ("num_bytes", "at_once"), [(300, True), (2048, True), (2049, False), (1 << 20, False), (0, False)]
)
async def test_small_bodies_do_not_change_threads(num_bytes: int, at_once: bool) -> None:
    """Regression: every request waited for a thread. `0`: a request by handle, whose size is not known."""
    translator = Translator(load_tokenizer("builtin"), "builtin", ())
    exchange = RequestContext(HttpSettings(), "id")
    exchange.num_body_bytes = num_bytes
    token = CURRENT.set(exchange)
    try:
        assert (await translator.in_thread(threading.get_ident) == threading.get_ident()) == at_once
    finally:
        CURRENT.reset(token)
