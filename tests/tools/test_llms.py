"""llms.txt lists every page of the navigation."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tools.llms import on_post_build, pages
from tools.reference import ROOT


def test_every_page_is_listed_with_a_sentence(tmp_path: Path) -> None:
    text = re.sub(r"^(validation|not_in_nav):.*?(?=^\w|\Z)", "", (ROOT / "mkdocs.yml").read_text(), flags=re.M | re.S)
    config = yaml.safe_load(text)
    listed = [path for part in config["nav"] for entries in part.values() for path in pages(entries)]
    for path in listed:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    on_post_build({**config, "docs_dir": ROOT / "docs", "site_dir": tmp_path})
    lines = (tmp_path / "llms.txt").read_text().splitlines()
    assert lines[0] == "# Folio"
    found = re.findall(r"^- \[[^]]+\]\((\S+)\): \S.{10,}$", "\n".join(lines), re.M)
    assert found == listed
    assert len(found) > 40
    assert (tmp_path / "llms-full.txt").read_text().count("\n# ") >= len(listed) - 1
