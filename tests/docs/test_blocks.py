"""Blocks of README.md and docs/ that need no server: YAML against the checks of settings, JSON, and Python alone."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from folio.app.checks import load_config
from folio.app.config.args import AppArgs
from folio.app.config.engine import EngineConfig
from folio.app.config.http import KeyFile
from tests.docs.blocks import PAGES, Block, blocks_of, is_as_expected, page_blocks, valid_pages
from tests.docs.runner import Page
from tests.e2e.pages import needs_server

# Files of other programs, known by a key.
FOREIGN = {"apiVersion", "kind", "scrape_configs", "services"}
ENGINE = set(EngineConfig.__dataclass_fields__)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_keeps_to_the_rules(page: str) -> None:
    for block in page_blocks(page):
        if block.language == "python":
            compile(
                block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )  # awaits outside of functions are allowed


CHECKED = [block for _, blocks in valid_pages() for block in blocks if block.reason is None]


@pytest.mark.parametrize("block", [b for b in CHECKED if b.language == "json"], ids=lambda block: block.place)
def test_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", [b for b in CHECKED if b.language == "yaml"], ids=lambda block: block.place)
def test_yaml(block: Block, tmp_path: Path) -> None:
    value = yaml.safe_load(block.text)
    if FOREIGN & value.keys():
        value = yaml.safe_load(value.get("spec", {}).get("serveConfigV2", "null"))
    if value is not None and "keys" in value:
        KeyFile.model_validate(value)
    elif value is not None:
        check(value, tmp_path)


def check(value: dict[str, Any], folder: Path) -> None:
    """Check a configuration file, or a part of one at its place."""
    if value.keys() <= ENGINE:
        value = {"engine": value}
    if value.keys() <= AppArgs.model_fields.keys():
        value = {"args": value}
    if value.keys() <= {"args", "deployments"}:
        value = {"applications": [{"name": "folio", "import_path": "folio.app.main:build"} | value]}
    value.setdefault("applications", [{"import_path": "folio.app.main:build"}])
    for application in value["applications"]:
        args = application.setdefault("args", {})
        if "models" not in args:
            args.setdefault("engine", {}).setdefault("model", "builtin")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(value))
    load_config(path, is_local=False)  # models and sizes of a page are not this machine's


ALONE = [page for page, blocks in valid_pages() if any(b.runs for b in blocks) and not needs_server(blocks)]


@pytest.mark.parametrize("page", ALONE)
def test_python_without_a_server(page: str) -> None:
    state = Page(page)
    for block in page_blocks(page):
        if block.runs:
            assert block.language == "python", f"{block.place}: a page without Python needs a server"
            answer = state.run(block.text)
            assert "error" not in answer, f"{block.place}\n{answer['error']}"
            if block.output is not None:
                assert is_as_expected(answer["output"], block.output), f"{block.place} printed\n{answer['output']}"
    state.close()


def test_a_fragment_with_a_fault_is_found(tmp_path: Path) -> None:
    for value in ({"max_num_seq": 1}, {"engine": {"max_num_seqs": 0}}, {"args": {"routing": {"policy": "x"}}}):
        with pytest.raises(Exception, match=r"max_num_seq|policy"):
            check(dict(value), tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<!-- not run: x -->\n\ntext\n\n```bash\nls\n```", "not right before"),
        ("<!-- not run: -->\n```bash\nls\n```", "without a reason"),
        ("```ruby\n```", "is one of"),
        ("```\nmake serve\n```", "so that it runs"),
        ("```text\nx\n```\n<!-- output -->\n```text\ny\n```", "without a block that runs"),
        ("```bash\nls", "does not end"),
        ("```console\nls\n```", "begins with"),
        ("<!-- output -->", "not right before"),
    ],
)
def test_faults_of_pages(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        blocks_of("page.md", text)


def test_blocks_of_a_page() -> None:
    text = (
        "- x\n\n  ```python\n  print(1)\n  ```\n\n<!-- output -->\n```text\n1\n```\n```console\n$ a b\n1\n2\n$ c\n```\n"
    )
    first, second = blocks_of("page.md", text + "<!-- not run: no -->\n```bash\nls\n```")[:2]
    assert list(first.steps()) == [("print(1)", "1")]
    assert list(second.steps()) == [("a b", "1\n2\n"), ("c", "")]
    assert [block.runs for block in blocks_of("page.md", text)] == [True, True]


def test_outputs() -> None:
    assert is_as_expected('{"id": 7, "x": 2}\n', '{"id": …, "x": 2}')
    assert is_as_expected("a \nb\n", "a\nb")
    assert not is_as_expected("a\nb", "a")
    assert not is_as_expected("abc", "a.c")


def test_blocks_share_state() -> None:
    page = Page("x")
    assert page.run("import asyncio\na = 1") == {"output": ""}
    assert page.run("a += await asyncio.sleep(0, 2)\nprint(a)") == {"output": "3\n"}
    assert "ZeroDivisionError" in page.run("1 / 0")["error"]
    page.close()
