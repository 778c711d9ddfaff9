"""docs/metrics.md lists what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[4]


def made_in_code() -> set[tuple[str, str, tuple[str, ...]]]:
    """(name, kind, tags) of every metric that some module makes."""
    made = set()
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            kind = node.func.attr
            if kind not in ("Counter", "Gauge", "Histogram") or ast.unparse(node.func.value) != "metrics":
                continue
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            tags = keywords.get("tag_keys") or (node.args[2] if len(node.args) > 2 else ast.Tuple([]))
            made.add((ast.literal_eval(node.args[0]), kind.lower(), tuple(sorted(ast.literal_eval(tags)))))
    return made


def test_the_page_lists_exactly_the_metrics_that_exist() -> None:
    """Each with its kind and its tags."""
    page = (ROOT / "docs/metrics.md").read_text()
    listed = {
        (name, kind, tuple(sorted(re.findall(r"`(\w+)`", tags))))
        for name, kind, tags in re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    }
    made = made_in_code()
    assert len(made) > 20
    assert listed == made
