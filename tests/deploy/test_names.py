"""Names in code, documentation, Grafana and alerts are the same: metrics, their kinds and labels, and pages."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import ray.serve
import yaml

from tests.declared_metrics import declared_metrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/folio.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
PAGE = ROOT / "docs/reference/metrics.md"
ALERTS_PAGE = ROOT / "docs/operate/alerts.md"
# Labels of every metric of a Serve application, and those that Prometheus and histograms add.
COMMON = {"application", "deployment", "replica", "NodeAddress", "WorkerId", "instance", "job"}
GRAFANA = {"$__rate_interval": "5m", "$application": "x", "$replica": "x"}


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def on_dashboard() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return found


def in_documentation() -> list[str]:
    table = PAGE.read_text().partition("## Queries")[2]
    return re.findall(r"^\|[^|]+\| `([^`]+)` \|$", table.replace("\\|", "¦"), re.MULTILINE)


def parsed(expression: str) -> Any:
    if variable := re.fullmatch(r"label_values\((.+), (\w+)\)", expression):  # Grafana's own
        expression = f"count by ({variable[2]}) ({variable[1]})"
    for name, value in GRAFANA.items():
        expression = expression.replace(name, value)
    return promql.parse(expression.replace("¦", "|"))


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and type(child).__module__.startswith("promql_parser"):
            yield from nodes(child)
    for child in getattr(node, "args", ()) or ():
        yield from nodes(child)


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels used with it) of each selector."""
    for node in nodes(parsed(expression)):
        if isinstance(node, promql.VectorSelector):
            yield node.name, {matcher.name for matcher in node.matchers.matchers}


def grouped(expression: str) -> set[str]:
    """Labels by which anything is grouped or joined."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", expression))))


def of_serve() -> dict[str, tuple[str, set[str]]]:
    """Metrics of Ray Serve → (kind, labels), from its source."""
    found = {}
    for path in (Path(ray.serve.__file__).parent / "_private").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                name, kind = node.args[0], node.func.attr
                if isinstance(name, ast.Constant) and str(name.value).startswith("serve_") and kind[0].isupper():
                    found[str(name.value)] = (kind.lower(), set())
    return found


@cache
def exposed() -> dict[str, tuple[str, set[str]]]:
    """Names as Prometheus scrapes them → (kind, labels)."""
    names: dict[str, tuple[str, set[str]]] = {"up": ("gauge", set())}
    made = {name: (kind, set(labels)) for name, kind, labels in declared_metrics()} | of_serve()
    for name, (kind, labels) in made.items():
        if kind == "counter":
            names[f"ray_{name.removesuffix('_total')}_total"] = kind, labels
        elif kind == "histogram":
            names[f"ray_{name}_bucket"] = kind, labels | {"le"}
            names |= {f"ray_{name}_{part}": (kind, labels) for part in ("count", "sum")}
        else:
            names[f"ray_{name}"] = kind, labels
    return names


QUERIES = [*on_dashboard(), *(rule["expr"] for rule in RULES), *in_documentation()]


def test_there_are_queries_in_each_place() -> None:
    assert len(on_dashboard()) > 40
    assert len(RULES) > 10
    assert len(in_documentation()) > 5


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_promql_over_metrics_and_labels_that_exist(query: str) -> None:
    used = list(selectors(query))
    assert used
    for metric, labels in used:
        assert metric in exposed(), f"{metric} does not exist"
        assert labels <= COMMON | exposed()[metric][1], (
            f"{metric} has no labels {labels - COMMON - exposed()[metric][1]}"
        )
    known = COMMON.union(*(exposed()[metric][1] for metric, _ in used))
    assert grouped(query) <= known, f"unknown labels {grouped(query) - known}"


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_read_as_rates_and_gauges_are_not(query: str) -> None:
    """The rate of a gauge, or the value of a counter, parses and says nothing."""
    rated = {
        inner.name
        for node in nodes(parsed(query))
        if isinstance(node, promql.Call) and node.func.name in ("rate", "increase")
        for inner in nodes(node)
        if isinstance(inner, promql.VectorSelector)
    }
    for metric, _ in selectors(query):
        is_born = f"{metric} unless {metric} offset" in query  # the first value of a counter is no increase
        is_gauge = exposed()[metric][0] == "gauge"
        assert (metric in rated) != is_gauge or (is_born and not is_gauge), metric


def test_every_metric_of_folio_is_on_the_dashboard() -> None:
    shown = {metric for query in on_dashboard() for metric, _ in selectors(query)}
    for name, kind, _ in declared_metrics():
        suffix = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[kind]
        assert f"ray_{name}{suffix}" in shown, f"no panel shows {name}"


def result_labels(node: Any) -> set[str]:
    """Labels of a query's result."""
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels) if node.modifier is not None else set()
    if isinstance(node, promql.Call):  # the last argument has the series
        return result_labels(node.args[-1])
    if isinstance(node, promql.VectorSelector):
        return COMMON | exposed()[node.name][1]
    return result_labels(
        next(getattr(node, part) for part in ("lhs", "expr", "vector_selector") if hasattr(node, part))
    )


def test_every_label_in_a_legend_is_in_its_querys_result() -> None:
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= result_labels(parsed(target["expr"])), target


def test_panels_have_ids_of_their_own_titles_and_the_chosen_data_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "application", "replica"]


def test_no_panels_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_page_and_a_test(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert f"\n## {rule['alert']}\n" in (ROOT / page).read_text()
    assert rule["labels"]["severity"] in ("critical", "warning")
    tested = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yml").read_text())["tests"]
    outcomes = [
        bool(t["alert_rule_test"][0]["exp_alerts"]) for t in tested if t["name"].startswith(f"{rule['alert']},")
    ]
    assert sorted(outcomes) == [False, True]


def test_the_page_of_alerts_has_no_others() -> None:
    assert re.findall(r"^## (Folio\w+)$", ALERTS_PAGE.read_text(), re.MULTILINE) == [rule["alert"] for rule in RULES]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")], ids="-".join
)
def test_prometheus_itself_accepts_the_files(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=ROOT / "deploy/prometheus", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
