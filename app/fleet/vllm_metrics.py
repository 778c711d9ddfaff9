"""Folio's measurements under vLLM's names, for its dashboards and for gateways' endpoint pickers.

Nothing is measured here: values are those of Folio's own metrics, summed over the labels that vLLM does not have.
Names, kinds and labels are those of vLLM 0.33. docs/reference/metrics.md says where a value differs, and which names
are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from folio.app.errors import FolioError, NoReplicaError
from folio.app.fleet.status import ReplicaStatus

_PREFIX = "ray_folio_"  # Ray adds `ray_`
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_SUCCESS = "vllm:request_success"
_ABOUT = {
    _RUNNING: "Sequences that have blocks.",
    _WAITING: "Sequences without blocks: not begun yet, or preempted.",
    _USAGE: "Share of the KV cache's budget that requests and pins own; 1 is all of it.",
    _CACHE: "Tokens of a block, and blocks that fit into the KV cache's budget.",
    _SUCCESS: "Ended outputs by finish reason; abort, error: cancelled and failed requests.",
}
# The same quantity from an engine replica, which is vLLM's engine: vLLM's name → Folio's.
OF_ENGINES = {
    _RUNNING: "running_sequences",
    _WAITING: "waiting_sequences",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_queried_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
    "vllm:iteration_tokens_total": "step_tokens",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_prefill_time_seconds": "prefill_seconds",
    "vllm:spec_decode_num_drafts": "verified_drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
# The same from an ingress. Sums over ingresses are left to Prometheus: a sum would drop when an ingress ends.
OF_INGRESSES = {
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:prompt_tokens_cached": "prompt_cached_tokens",
    "vllm:generation_tokens": "output_tokens",
    "vllm:request_prompt_tokens": "prompt_length_tokens",
    "vllm:request_generation_tokens": "output_length_tokens",
    "vllm:request_params_n": "requested_outputs",
    "vllm:request_params_max_tokens": "requested_tokens",
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "vllm:request_decode_time_seconds": "decode_seconds",
    "vllm:e2e_request_latency_seconds": "request_seconds",
}
# Outcomes of requests without a finish reason, and vLLM's reasons for them.
_REASONS = {"cancelled": "abort", "failed": "error"}


@dataclass(slots=True)
class _Sums:
    """Samples with equal names and labels, added."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        key = name, frozenset(labels.items())
        self.values[key] = self.values.get(key, 0.0) + value

    @property
    def samples(self) -> list[Sample]:
        return [Sample(name, dict(labels), value) for (name, labels), value in self.values.items()]


def vllm_families(families: Mapping[str, Metric]) -> list[Metric]:
    """vLLM's metrics from Folio's on the page, by their names there."""
    made = []
    for names, kept in ((OF_ENGINES, {"replica": "engine"}), (OF_INGRESSES, {"replica": "replica"})):
        for name, source in names.items():
            if (family := families.get(_PREFIX + source)) is not None:
                made.append(_copied(name, family, kept | {"model_name": "model_name", "le": "le"}))
    made += [_success(families), _usage(families), _cache(families)]
    return [family for family in made if family.samples]


def load_families(answers: Sequence[ReplicaStatus | FolioError], models: Sequence[str]) -> list[Metric]:
    """The gauges that endpoint pickers read, of all engine replicas together: pickers read one series of each gauge and
    model. A model that has not been loaded has no cache yet.

    Raises:
        FolioError: a replica has not answered, and the sums would be too low.
    """
    if not answers:
        raise NoReplicaError("there is no engine replica; try again later")
    statuses = []
    for answer in answers:
        if isinstance(answer, FolioError):
            raise answer
        statuses.append(answer)
    samples = [sample for model in models for sample in _load_of(model, statuses)]
    gauges = [_gauge(name, []) for name in (_RUNNING, _WAITING, _USAGE, _CACHE)]
    for gauge in gauges:
        gauge.samples = [sample for sample in samples if sample.name == gauge.name]
    return gauges


def _load_of(model: str, statuses: Sequence[ReplicaStatus]) -> Iterator[Sample]:
    reports = [report for status in statuses for report in status.models if report.name == model]
    loads = [report.load for report in reports]
    memories = [report.memory for report in reports if report.memory is not None]
    labels = {"model_name": model}
    yield Sample(_RUNNING, labels, sum(load.num_running for load in loads))
    yield Sample(_WAITING, labels, sum(load.num_waiting for load in loads))
    # A model that sleeps at all replicas has no cache.
    usage = sum(memory.active_bytes for memory in memories) / max(sum(memory.budget_bytes for memory in memories), 1)
    yield Sample(_USAGE, labels, usage)
    if unit_tokens := max((load.unit_tokens for load in loads), default=0):
        yield Sample(_CACHE, labels | _sizes(unit_tokens, sum(load.total_tokens for load in loads)), 1.0)


def _copied(name: str, family: Metric, kept: Mapping[str, str]) -> Metric:
    """The family under another name, with these labels (Folio's → vLLM's), summed over all others."""
    sums = _Sums()
    for sample in family.samples:
        labels = {kept[label]: value for label, value in sample.labels.items() if label in kept}
        sums.add(name + sample.name.removeprefix(family.name), labels, sample.value)
    copy = Metric(name, family.documentation, family.type)
    copy.samples = sums.samples
    return copy


def _success(families: Mapping[str, Metric]) -> Metric:
    sums = _Sums()
    for source, tag, reasons in (("outputs", "reason", None), ("requests", "outcome", _REASONS)):
        for sample in _samples(families, source):
            reason = sample.labels[tag] if reasons is None else reasons.get(sample.labels[tag])
            if reason is not None:
                labels = {name: sample.labels[name] for name in ("model_name", "replica") if name in sample.labels}
                sums.add(f"{_SUCCESS}_total", labels | {"finished_reason": reason}, sample.value)
    success = Metric(_SUCCESS, _ABOUT[_SUCCESS], "counter")
    success.samples = sums.samples
    return success


def _usage(families: Mapping[str, Metric]) -> Metric:
    of_engines = _by_engine(families, "kv_bytes", {"active", "budget"})
    return _gauge(_USAGE, [(labels, of["active"] / max(of["budget"], 1)) for labels, of in of_engines])


def _cache(families: Mapping[str, Metric]) -> Metric:
    of_engines = _by_engine(families, "kv_tokens", {"block", "total"})
    return _gauge(
        _CACHE, [(labels | _sizes(int(of["block"]) or 1, int(of["total"])), 1.0) for labels, of in of_engines]
    )


def _sizes(block_tokens: int, total_tokens: int) -> dict[str, str]:
    """Labels of `vllm:cache_config_info`."""
    return {"block_size": str(block_tokens), "num_gpu_blocks": str(total_tokens // block_tokens)}


def _by_engine(
    families: Mapping[str, Metric], source: str, kinds: Collection[str]
) -> list[tuple[dict[str, str], dict[str, float]]]:
    """Labels of each engine, and the values of a gauge for it by kind, where none of these kinds is missing."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for sample in _samples(families, source):
        key = sample.labels["model_name"], sample.labels["replica"]
        found.setdefault(key, {})[sample.labels["kind"]] = sample.value
    return [
        ({"model_name": model, "engine": replica}, values)
        for (model, replica), values in found.items()
        if values.keys() >= set(kinds)
    ]


def _samples(families: Mapping[str, Metric], source: str) -> list[Sample]:
    family = families.get(_PREFIX + source)
    return [] if family is None else family.samples


def _gauge(name: str, values: Iterable[tuple[dict[str, str], float]]) -> Metric:
    gauge = Metric(name, _ABOUT[name], "gauge")
    gauge.samples = [Sample(name, labels, value) for labels, value in values]
    return gauge
