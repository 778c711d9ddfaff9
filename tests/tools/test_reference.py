"""The reference pages are those that the code makes, and every setting has a meaning."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from folio.app.checks import _settings
from tools.reference import FOLDER, PAGES
from tools.settings import GROUPS, SERVE, Group, settings_of


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run python -m tools.reference"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.anchor)
def test_every_setting_has_a_meaning_and_a_range(group: Group) -> None:
    settings = list(settings_of(group.model))
    assert settings
    assert [name for name, _, values, meaning in settings if not values or not meaning] == []


@pytest.mark.parametrize("path", [path for path, _, _ in SERVE])
def test_serve_has_the_setting(path: str) -> None:
    model: Any = ServeDeploySchema
    *above, name = path.split(".")
    for key in above:
        [model] = [part for part in (_settings(model)[key],) if part is not None]
        model = getattr(model, "__args__", (model,))[0]
    assert name in _settings(model)
