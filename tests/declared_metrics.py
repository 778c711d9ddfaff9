"""The metrics that the code declares."""

from __future__ import annotations

import ast
from pathlib import Path

from folio.app.serving import engine_metrics, metrics
from folio.app.serving.metric_rows import Gauge, Histogram, Row

ROOT = Path(__file__).parents[1]


def declared_metrics() -> set[tuple[str, str, tuple[str, ...]]]:
    """(name, kind, tags) of every metric in the code, as Prometheus knows it."""
    tables = [value for module in (engine_metrics, metrics) for value in vars(module).values()]
    rows = [row for table in tables if isinstance(table, tuple) for row in table if isinstance(row, Row)]
    kinds = {Gauge: "gauge", Histogram: "histogram"}
    made = {(row.name, kinds.get(type(row), "counter"), tuple(sorted(row.tags))) for row in rows}
    num_calls = 0
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.args[0].value
            num_calls += isinstance(node.func, ast.Name) and str(name).startswith("folio_")
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "metrics":
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                tags = keywords.get("tag_keys") or (node.args[2] if len(node.args) > 2 else ast.Tuple([]))
                made.add((name, node.func.attr.lower(), tuple(sorted(ast.literal_eval(tags)))))
    assert num_calls == len(rows), "a row is in no table of these modules"
    return made
