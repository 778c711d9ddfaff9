"""`llms.txt` and `llms-full.txt` (llmstxt.org) of the documentation's site: mkdocs' hook, from the navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SUMMARY = "An LLM server on Ray Serve with OpenAI's API, whose KV cache is mapped virtual memory."


def on_post_build(config: Any) -> None:
    """Write both files into the site, and the pages' Markdown beside them."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    listed, whole = [f"# {config['site_name']}", "", f"> {_SUMMARY}", ""], []
    for part in config["nav"]:
        [(title, entries)] = part.items()
        listed += [f"## {title}", ""]
        for path in pages(entries):
            text = (docs / path).read_text(encoding="utf-8")
            (site / path).write_text(text, encoding="utf-8")
            listed.append(f"- [{heading(text)}]({path}): {first_sentence(text)}")
            whole.append(text)
        listed.append("")
    (site / "llms.txt").write_text("\n".join(listed), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


def pages(entries: list[Any]) -> Iterator[str]:
    """The pages of a part of the navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            [below] = entry.values()
            yield from pages([below] if isinstance(below, str) else below)


def heading(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").replace("`", "")


def first_sentence(text: str) -> str:
    """The first sentence of a page's first paragraph or list, without marks."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraph = next(part for part in re.split(r"\n\n+", prose)[1:] if part.strip() and part.lstrip()[0] not in "#<|")
    sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.split()), maxsplit=1)[0]
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence).replace("**", "").removeprefix("- ").removesuffix(":")
