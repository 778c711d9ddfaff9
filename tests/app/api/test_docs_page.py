"""The page `/docs` works without a network, and under any route prefix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from folio.app.api.http import build_api
from folio.app.api.reference import docs_page

FOLDER = Path(docs_page.__file__).parent / "swagger_ui"


@pytest.fixture(params=["", "/llm"])
def site(request: pytest.FixtureRequest) -> tuple[TestClient, str]:
    """The API below a route prefix, and the page's path."""
    api = build_api(cast(Any, None))
    if request.param:
        outer = FastAPI()
        outer.mount(request.param, api)
        api = outer
    return TestClient(api), f"{request.param}/docs"


def test_the_page_and_what_it_loads_are_here(site: tuple[TestClient, str]) -> None:
    client, path = site
    page = client.get(path)
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(loaded) == 4
    for link in loaded:
        if link != "data:,":
            answer = client.get(urljoin(f"http://testserver{path}", link))
            assert (answer.status_code, answer.content) == (200, (FOLDER / Path(link).name).read_bytes())
            again = client.get(answer.url, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")  # the bundle was sent again with every view
    document = re.search(r'url: "(.*)"', client.get(f"{path}/start.js").text)
    assert document is not None
    assert client.get(urljoin(f"http://testserver{path}", document[1])).json()["info"]["title"] == "Folio"


def test_the_page_names_no_other_host(site: tuple[TestClient, str]) -> None:
    """It was blank without a network: FastAPI's page loads its scripts from a CDN."""
    client, path = site
    own = (client.get(path).text, client.get(f"{path}/start.js").text)
    assert [link for text in own for link in re.findall(r"(?:https?:)?//\w[^\s\"']*", text)] == []
    style = client.get(f"{path}/swagger-ui.css").text
    assert [link for link in re.findall(r"url\(\"?(.{5})", style) if link != "data:"] == []
    policy = client.get(path).headers["content-security-policy"]
    assert set(re.findall(r"-src ([^;]*)", policy)) == {
        "'none'",
        "'self'",
        "'self' 'unsafe-inline'",  # styles
        "'self' data:",  # images
    }
