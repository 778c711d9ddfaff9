"""The page `/metrics`: the metrics of all processes of an application, from all nodes.

`ray.serve.metrics` sends a process's metrics to the agent of its node every 10 s (`metrics_report_interval_ms` of Ray),
and each agent serves those of all its processes. Every ingress merges the agents' pages, so that all ingresses have the
same page.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
import ray
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from folio.app.errors import UnavailableError
from folio.app.fleet.vllm_metrics import vllm_families

# Metrics of Folio, and of Serve.
_PREFIXES = ("ray_folio_", "ray_serve_")
# Labels that are equal for all processes of a session, in Ray's spelling.
_NOISE = {"Component", "SessionName", "Version", "otel_scope_name", "otel_scope_schema_url", "otel_scope_version"}
# The boundaries between the words of a label in camel case.
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# An agent that counts for hundreds of processes takes a second or so.
_TIMEOUT_S = 10.0
# Agents have new figures every few seconds, and their pages take time.
_FRESH_S = 1.0


class FreshPage:
    """A page that is made again once it is `fresh_s` seconds old. Callers at the same time get the same page."""

    def __init__(self, make: Callable[[], Awaitable[str]], fresh_s: float) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._page = ""
        self._made_at = -fresh_s

    async def text(self) -> str:
        """The page. Raises what making it raises."""
        async with self._lock:
            if time.monotonic() - self._made_at >= self._fresh_s:
                self._page = await self._make()
                self._made_at = time.monotonic()
            return self._page


class MetricsPage:
    """The page of all agents, merged.

    Args:
        application: name of the application whose metrics are shown.
        model: the only model's name for clients; `None`: there are several. It is the label `model_name` of metrics
            that have no label `model`; others repeat theirs.
        with_vllm: add the metrics under vLLM's names.
        agents: returns the addresses of the nodes' agents; may block.
        fresh_s: greatest age of the page.
    """

    def __init__(
        self,
        application: str,
        model: str | None,
        *,
        with_vllm: bool = False,
        agents: Callable[[], Sequence[str]] | None = None,
        fresh_s: float = _FRESH_S,
    ) -> None:
        self._application = application
        self._model = model
        self._with_vllm = with_vllm
        self._agents = agents or agents_of_this_cluster
        self._page = FreshPage(self._made, fresh_s)

    async def text(self) -> str:
        """The page in Prometheus' text format.

        Raises:
            UnavailableError: a node's agent does not answer, or no agent has metrics of this application yet.
        """
        return await self._page.text()

    async def _made(self) -> str:
        pages = await self._fetch(await asyncio.to_thread(self._agents))
        return await asyncio.to_thread(self._merged, pages)

    def _merged(self, pages: Iterable[str]) -> str:
        families = merge(pages, self._application, self._model)
        return render([*families.values(), *(vllm_families(families) if self._with_vllm else ())])

    async def _fetch(self, urls: Sequence[str]) -> list[str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            return await asyncio.gather(*(_get(session, url) for url in urls))


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url, raise_for_status=True) as answer:
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(
            f"Ray's metrics agent at {url} does not answer ({type(error).__name__}: {error}), and its metrics would be "
            "missing: try again later"
        ) from error


def agents_of_this_cluster() -> list[str]:
    """Addresses of the metrics agents of all living nodes."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


def merge(pages: Iterable[str], application: str, model: str | None) -> dict[str, Metric]:
    """The metrics of one application on the agents' pages, by name. Labels are in snake case; `model_name` is added
    where a model is known. Raises `UnavailableError` if there are none."""
    merged: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families("".join(_relevant(page))):
            of_application = [
                Sample(sample.name, _labels(sample.labels, model), sample.value)
                for sample in family.samples
                if sample.labels.get("application") == application
            ]
            if of_application:
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += of_application
    if not merged:
        raise UnavailableError(
            f"there are no metrics of {application!r} yet; the first appear seconds after the start: try again"
        )
    return {name: merged[name] for name in sorted(merged)}


def _labels(labels: Mapping[str, str], model: str | None) -> dict[str, str]:
    """Ray's `NodeAddress` becomes `node_address`, as is the custom for labels."""
    found = {_HUMP.sub("_", name).lower(): value for name, value in labels.items() if name not in _NOISE}
    name = labels.get("model") or model
    return found if name is None else found | {"model_name": name}


def render(families: Iterable[Metric]) -> str:
    """The page in Prometheus' text format."""
    registry: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(registry).decode()


def _relevant(page: str) -> Iterator[str]:
    """The lines of relevant metrics: an agent has thousands of others, and parsing takes time."""
    for line in page.splitlines(keepends=True):
        name = line.split(" ", 3)[2] if line.startswith("# ") else line
        if name.startswith(_PREFIXES):
            yield line
