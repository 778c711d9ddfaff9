"""A shelved model without a shelf: who changes its state, from which thread."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ModelConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.errors import UnavailableError
from folio.app.shelf import shelved_model
from folio.app.shelf.shelved_model import ShelvedModel
from tests.processes import until_async

ENGINE = cast(AsyncEngine, object())


@pytest.fixture
def model() -> ShelvedModel:
    model = ShelvedModel(ModelConfig(name="m", engine=EngineConfig(model="m")), lambda: None)
    model.set_failed(UnavailableError("its load hangs"), 0.0)
    return model


async def test_a_request_overwrites_no_change_by_the_shelf(
    model: ShelvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a request set a failed model to "new" after the shelf's thread had changed it. A load that hung and
    returned at that moment left a model with an engine that was not awake."""
    real = time.monotonic

    def monotonic() -> float:  # the request looks at the clock after it has read the state
        monkeypatch.setattr(shelved_model.time, "monotonic", real)
        model.set_loaded(ENGINE)
        return real()

    monkeypatch.setattr(shelved_model.time, "monotonic", monotonic)
    assert await model.ready() is ENGINE
    assert model.state == "awake"


async def test_a_failed_model_is_loaded_again_for_requests_only(model: ShelvedModel) -> None:
    """Requests that a failure has ended, and that their event loop has not looked at, call for no load."""
    first = asyncio.create_task(model.ready())
    await until_async(lambda: model.is_wanted)
    model.try_again()
    assert model.state == "new"
    model.set_failed(UnavailableError("no memory"), 0.0)
    model.try_again()
    assert (model.state, model.num_pending) == ("failed", 0)
    with pytest.raises(UnavailableError, match="no memory"):
        await first
    second = asyncio.create_task(model.ready())
    await until_async(lambda: model.is_wanted)
    model.try_again()
    model.set_loaded(ENGINE)
    assert await second is ENGINE
    assert model.num_pending == 0


def test_a_turn_begins_once_adapters_are_back(model: ShelvedModel) -> None:
    """Else a model whose adapters take longer than a turn would never compute a step. One whose reads hang holds up
    the others for a bounded time."""
    model.note_awake(0.01)
    woken_at = model.turn_since
    model.put_off_turn(woken_at + 5.0)
    assert model.turn_since == woken_at + 5.0
    model.put_off_turn(woken_at + 15.0)
    assert model.turn_since == woken_at + 5.0
