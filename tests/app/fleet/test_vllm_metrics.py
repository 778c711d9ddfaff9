"""vLLM's names: each has the value of a metric of Folio's that exists, with vLLM's kind and labels."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from folio.app.config.engine import EngineConfig
from folio.app.engine.engine import Engine
from folio.app.engine.report import ReplicaReport
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import FolioError, NoReplicaError, UnavailableError
from folio.app.fleet.status import ModelReport, ReplicaStatus, unloaded_report
from folio.app.fleet.vllm_metrics import OF_ENGINES, OF_INGRESSES, load_families, vllm_families
from folio.app.serving.metrics_page import merge, render
from folio.app.shelf.status import ModelStatus
from folio.vmem import MemoryReport
from tests.declared_metrics import ROOT, declared_metrics

# Kinds in vLLM 0.33 (vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py).
KINDS = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
}


def family(name: str, kind: str, *samples: tuple[dict[str, str], float]) -> str:
    """A metric's part of a page. `samples`: labels, of which `part` is the end of the name, and values."""
    lines = [f"# HELP ray_folio_{name} X.", f"# TYPE ray_folio_{name} {kind}"]
    for labels, value in samples:
        inside = {"application": "folio"} | {label: text for label, text in labels.items() if label != "part"}
        of_series = ",".join(f'{label}="{text}"' for label, text in inside.items())
        lines.append(f"ray_folio_{name}{labels.get('part', '')}{{{of_series}}} {value}")
    return "\n".join([*lines, ""])


def derived(*pages: str, model: str | None = "toy") -> dict[str, Metric]:
    return {metric.name: metric for metric in vllm_families(merge(["".join(pages)], "folio", model))}


def values(metric: Metric) -> dict[frozenset[tuple[str, str]], float]:
    """By labels. A counter's samples have a suffix, others have none."""
    suffix = "_total" if metric.type == "counter" else ""
    assert {sample.name for sample in metric.samples} == {metric.name + suffix}
    return {frozenset(sample.labels.items()): sample.value for sample in metric.samples}


def labelled(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(({"model_name": "toy"} | labels).items())


def of(replica: str, **labels: str) -> dict[str, str]:
    return {"replica": replica} | labels


def test_sources_exist_and_have_vllms_kind() -> None:
    kinds = {name: kind for name, kind, _ in declared_metrics()}
    for name, source in (OF_ENGINES | OF_INGRESSES).items():
        assert kinds[f"folio_{source}"] == KINDS[name], name


def test_the_documentation_lists_exactly_these_names() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = dict(re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in listed.items()} == KINDS


def test_gauges_of_an_engine() -> None:
    made = derived(
        family("running_sequences", "gauge", (of("r1"), 1), (of("r2"), 2)),
        family("waiting_sequences", "gauge", (of("r1", NodeAddress="10.0.0.1"), 7)),
        family(
            "kv_bytes",
            "gauge",
            (of("r1", kind="active"), 30),
            (of("r1", kind="cached"), 50),
            (of("r2", kind="active"), 40),  # its budget is not on the page yet
            (of("r1", kind="budget"), 120),
        ),
        family("kv_tokens", "gauge", (of("r1", kind="block"), 16), (of("r1", kind="total"), 1000)),
    )
    r1 = labelled(engine="r1")
    assert values(made["vllm:num_requests_running"]) == {r1: 1, labelled(engine="r2"): 2}
    assert values(made["vllm:num_requests_waiting"]) == {r1: 7}
    assert values(made["vllm:kv_cache_usage_perc"]) == {r1: 0.25}
    sizes = labelled(engine="r1", block_size="16", num_gpu_blocks="62")
    assert values(made["vllm:cache_config_info"]) == {sizes: 1}
    assert {name: KINDS[name] for name in made} == {name: metric.type for name, metric in made.items()}


def test_counters_are_summed_over_labels_that_vllm_does_not_have() -> None:
    """Each ingress keeps its own series: a sum over ingresses would drop when one of them ends."""
    chat, completions = of("i1", route="chat"), of("i1", route="completions")
    tokens = (chat, 3.0), (completions, 4.0), (of("i2", route="chat"), 5.0)
    made = derived(
        family("prompt_tokens_total", "counter", *tokens),
        family("preemptions_total", "counter", (of("r1", way="swap"), 1), (of("r1", way="recompute"), 2)),
    )
    assert values(made["vllm:prompt_tokens"]) == {labelled(replica="i1"): 7, labelled(replica="i2"): 5}
    assert values(made["vllm:num_preemptions"]) == {labelled(engine="r1"): 3}


def test_histograms_are_summed_bucket_by_bucket() -> None:
    parts = [({"part": "_bucket", "le": "1.0"}, 2.0), ({"part": "_bucket", "le": "+Inf"}, 3.0)]
    parts += [({"part": "_sum"}, 4.5), ({"part": "_count"}, 3.0)]
    samples = [(of("i1", route=route) | part, value) for route in ("chat", "completions") for part, value in parts]
    page = render(derived(family("request_seconds", "histogram", *samples)).values())
    [parsed] = text_string_to_metric_families(page)
    assert parsed.name == "vllm:e2e_request_latency_seconds"
    by_part = [(s.name.removeprefix(parsed.name), s.labels.get("le"), s.value) for s in parsed.samples]
    assert by_part == [("_bucket", "1.0", 4), ("_bucket", "+Inf", 6), ("_sum", None, 9), ("_count", None, 6)]


def test_finished_reasons() -> None:
    outputs = [("chat", "stop", 5.0), ("completions", "stop", 6.0), ("chat", "length", 7.0)]
    requests = [("ok", 9.0), ("cancelled", 2.0), ("failed", 1.0), ("refused", 8.0)]
    made = derived(
        family("outputs_total", "counter", *((of("i1", route=r, reason=reason), n) for r, reason, n in outputs)),
        family("requests_total", "counter", *((of("i1", route="chat", outcome=what), n) for what, n in requests)),
    )
    reasons = {s.labels["finished_reason"]: s.value for s in made["vllm:request_success"].samples}
    assert reasons == {"stop": 11, "length": 7, "abort": 2, "error": 1}


def test_each_model_of_a_shelf_has_its_name() -> None:
    """Without a model, as in requests for unknown ones, there is no name. A metric without a source is left out: a name
    without a value would be taken for zero."""
    a, b = of("r1", model="a"), of("r1", model="b")
    budget = (a | {"kind": "budget"}, 4.0)
    failed = of("i1", route="chat", outcome="failed")
    made = derived(
        family("running_sequences", "gauge", (a, 1), (b, 2)),
        family("kv_bytes", "gauge", (a | {"kind": "active"}, 1), (b | {"kind": "active"}, 2), budget),
        family("requests_total", "counter", (failed | {"model": "a"}, 3), (failed | {"model": ""}, 4)),
        model=None,
    )
    found = {name: [(s.labels.get("model_name"), s.value) for s in metric.samples] for name, metric in made.items()}
    assert found == {
        "vllm:num_requests_running": [("a", 1), ("b", 2)],
        "vllm:kv_cache_usage_perc": [("a", 0.25)],
        "vllm:request_success": [("a", 3), (None, 4)],
    }


# ---- the page of endpoint pickers ----


def model_report(name: str, load: ReplicaReport, memory: MemoryReport | None = None) -> ModelReport:
    return ModelReport(ModelStatus(name=name, state="awake"), load, memory)


def one_model(replica: str, load: ReplicaReport, memory: MemoryReport) -> ReplicaStatus:
    return ReplicaStatus(replica, 1.0, (model_report("toy", load, memory),))


@pytest.fixture
def status() -> ReplicaStatus:
    engine = Engine(EngineConfig(model="builtin", kv_memory_bytes=16 << 20, max_num_seqs=1))
    try:
        for name in ("a", "b"):
            engine.submit(name, list(range(5, 45)), SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        return one_model("r1", engine.load.report(), engine.report())
    finally:
        engine.close()


def test_pickers_get_one_series_for_all_replicas(status: ReplicaStatus) -> None:
    """A picker reads one series of each name."""
    budget = status.memory.budget_bytes
    idle = one_model(
        "r2",
        replace(status.load, num_running=0, num_waiting=0),
        replace(status.memory, active_bytes=0, budget_bytes=3 * budget),
    )
    made = {metric.name: metric.samples for metric in load_families([status, idle], ["toy"])}
    assert made.keys() == {name for name, kind in KINDS.items() if kind == "gauge"}
    assert all(len(samples) == 1 for samples in made.values())
    by_name = {name: samples[0].value for name, samples in made.items()}
    assert (by_name["vllm:num_requests_running"], by_name["vllm:num_requests_waiting"]) == (1, 1)
    assert by_name["vllm:kv_cache_usage_perc"] == pytest.approx(status.memory.active_bytes / (4 * budget))
    assert 0 < by_name["vllm:kv_cache_usage_perc"] < 1
    assert made["vllm:cache_config_info"][0].labels == {
        "model_name": "toy",
        "block_size": "16",
        "num_gpu_blocks": str(2 * status.load.total_tokens // 16),
    }


def test_pickers_get_a_series_for_each_model(status: ReplicaStatus) -> None:
    """Regression: all models were one, with the name of the first. A busy model hid behind those that slept."""
    memory, asleep = status.memory, replace(status.memory, active_bytes=0, budget_bytes=0)
    waiting = replace(status.load, num_running=0, num_waiting=5, total_tokens=0)
    new = unloaded_report(ModelStatus(name="c", state="new", num_waiting=2), 0.0)
    here = ReplicaStatus(
        "r1", 1.0, (model_report("a", status.load, memory), model_report("b", waiting, asleep), model_report("c", new))
    )
    there = ReplicaStatus(
        "r2", 1.0, (model_report("a", new), model_report("b", status.load, memory), model_report("c", new))
    )
    made = {metric.name: metric.samples for metric in load_families([here, there], ["a", "b", "c", "added"])}
    found = {name: {sample.labels["model_name"]: sample.value for sample in samples} for name, samples in made.items()}
    usage = memory.active_bytes / memory.budget_bytes
    assert found["vllm:num_requests_running"] == {"a": 1, "b": 1, "c": 0, "added": 0}
    assert found["vllm:num_requests_waiting"] == {"a": 3, "b": 6, "c": 4, "added": 0}
    assert found["vllm:kv_cache_usage_perc"] == {"a": usage, "b": usage, "c": 0, "added": 0}
    sizes = {sample.labels["model_name"]: sample.labels["num_gpu_blocks"] for sample in made["vllm:cache_config_info"]}
    assert sizes == dict.fromkeys("ab", str(status.load.total_tokens // 16))


@pytest.mark.parametrize(
    ("others", "error"), [([], NoReplicaError), ([UnavailableError("it hangs")], UnavailableError)]
)
def test_no_figures_without_all_replicas(
    status: ReplicaStatus, others: list[FolioError], error: type[FolioError]
) -> None:
    """A sum without a hanging replica would be low, and would draw more requests to it."""
    answers = [status, *others] if others else []
    with pytest.raises(error):
        load_families(answers, ["toy"])
