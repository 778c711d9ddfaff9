"""The rules of `promtool check metrics` (client_golang's promlint), for machines without promtool."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

_BASE_OF = {
    "minutes": "seconds",
    "hours": "seconds",
    "days": "seconds",
    "weeks": "seconds",
    "kelvins": "kelvin",
    "fahrenheit": "celsius",
    "rankine": "celsius",
    "inches": "meters",
    "yards": "meters",
    "miles": "meters",
    "bits": "bytes",
    "calories": "joules",
    "pounds": "grams",
    "ounces": "grams",
}
_BASES = ("amperes", "bytes", "celsius", "grams", "joules", "kelvin", "meters", "metres", "moles", "seconds", "volts")
_PREFIXES = ("pico", "nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "mega", "giga", "tera", "peta")
_PREFIXES += ("kibi", "mebi", "mibi", "gibi", "tebi", "pebi")
_ABBREVIATIONS = ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d")
_TYPES = ("counter", "gauge", "summary", "untyped", "histogram")
_CAMEL_CASE = re.compile("[a-z][A-Z]")


def complaints(page: str) -> list[str]:
    """promtool's complaints about a page in Prometheus' text format, one a line: the metric's name and the fault."""
    names = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))  # the parser takes `_total` off
    found = []
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if f"{family.name}_total" in names else family.name
        found += [f"{name} {fault}" for fault in dict.fromkeys(_faults(name, family))]
    return sorted(found)


def _faults(name: str, family: Metric) -> Iterator[str]:
    if not family.documentation:
        yield "no help text"
    words = name.split("_")
    for prefix in ("", *_PREFIXES):
        for unit, base in (*_BASE_OF.items(), *((unit, unit) for unit in _BASES)):
            if prefix + unit in words and prefix + unit != base:
                yield f'use base unit "{base}" instead of "{prefix}{unit}"'
    if any(word in _ABBREVIATIONS for word in name.lower().split("_")[1:]):
        yield "metric names should not contain abbreviated units"
    is_counter, is_histogram, is_summary = (family.type == kind for kind in ("counter", "histogram", "summary"))
    if is_counter and not name.endswith("_total"):
        yield 'counter metrics should have "_total" suffix'
    if not is_counter and name.endswith("_total"):
        yield 'non-counter metrics should not have "_total" suffix'
    if not is_histogram and name.endswith("_bucket"):
        yield 'non-histogram metrics should not have "_bucket" suffix'
    for suffix in ("_count", "_sum"):
        if not (is_histogram or is_summary) and name.endswith(suffix):
            yield f'non-histogram and non-summary metrics should not have "{suffix}" suffix'
    for kind in _TYPES:
        if kind in words[1:]:
            yield f"metric name should not include type '{kind}'"
    if ":" in name:
        yield "metric names should not contain ':'"
    if _CAMEL_CASE.search(name):
        yield "metric names should be written in 'snake_case' not 'camelCase'"
    labels = {label for sample in family.samples for label in sample.labels}
    if any(_CAMEL_CASE.search(label) for label in labels):
        yield "label names should be written in 'snake_case' not 'camelCase'"
    if "le" in labels and not is_histogram:
        yield 'non-histogram metrics should not have "le" label'
    if "quantile" in labels and not is_summary:
        yield 'non-summary metrics should not have "quantile" label'
