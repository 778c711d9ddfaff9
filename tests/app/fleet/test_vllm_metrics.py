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


def sample(name: str, value: float, **labels: str) -> str:
    inside = ",".join(f'{label}="{text}"' for label, text in ({"application": "folio"} | labels).items())
    return f"ray_folio_{name}{{{inside}}} {value}\n"


def family(name: str, kind: str, *samples: str) -> str:
    return f"# HELP ray_folio_{name} X.\n# TYPE ray_folio_{name} {kind}\n" + "".join(samples)


def derived(*pages: str, model: str | None = "toy") -> dict[str, Metric]:
    return {metric.name: metric for metric in vllm_families(merge(["".join(pages)], "folio", model))}


def values(metric: Metric) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(s.name, frozenset(s.labels.items())): s.value for s in metric.samples}


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
        family("running_sequences", "gauge", *(sample("running_sequences", n, replica=f"r{n}") for n in (1, 2))),
        family("waiting_sequences", "gauge", sample("waiting_sequences", 7, replica="r1", NodeAddress="10.0.0.1")),
        family(
            "kv_bytes",
            "gauge",
            sample("kv_bytes", 30, replica="r1", kind="active"),
            sample("kv_bytes", 50, replica="r1", kind="cached"),
            sample("kv_bytes", 40, replica="r2", kind="active"),  # its budget is not on the page yet
            sample("kv_bytes", 120, replica="r1", kind="budget"),
        ),
        family(
            "kv_tokens",
            "gauge",
            sample("kv_tokens", 16, replica="r1", kind="block"),
            sample("kv_tokens", 1000, replica="r1", kind="total"),
        ),
    )
    r1 = {("model_name", "toy"), ("engine", "r1")}
    running = "vllm:num_requests_running"
    assert values(made[running])[running, frozenset(r1)] == 1
    assert len(made[running].samples) == 2
    waiting, usage = "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    assert values(made[waiting]) == {(waiting, frozenset(r1)): 7}
    assert values(made[usage]) == {(usage, frozenset(r1)): 0.25}
    info, sizes = "vllm:cache_config_info", {("block_size", "16"), ("num_gpu_blocks", "62")}
    assert values(made[info]) == {(info, frozenset(r1 | sizes)): 1}
    assert {name: KINDS[name] for name in made} == {name: metric.type for name, metric in made.items()}


def test_counters_are_summed_over_labels_that_vllm_does_not_have() -> None:
    """Each ingress keeps its own series: a sum over ingresses would drop when one of them ends."""
    made = derived(
        family(
            "prompt_tokens_total",
            "counter",
            sample("prompt_tokens_total", 3, replica="i1", route="chat"),
            sample("prompt_tokens_total", 4, replica="i1", route="completions"),
            sample("prompt_tokens_total", 5, replica="i2", route="chat"),
        ),
        family(
            "preemptions_total",
            "counter",
            sample("preemptions_total", 1, replica="r1", way="swap"),
            sample("preemptions_total", 2, replica="r1", way="recompute"),
        ),
    )
    assert values(made["vllm:prompt_tokens"]) == {
        ("vllm:prompt_tokens_total", frozenset({("model_name", "toy"), ("replica", "i1")})): 7,
        ("vllm:prompt_tokens_total", frozenset({("model_name", "toy"), ("replica", "i2")})): 5,
    }
    preemptions = frozenset({("model_name", "toy"), ("engine", "r1")})
    assert values(made["vllm:num_preemptions"]) == {("vllm:num_preemptions_total", preemptions): 3}


def test_histograms_are_summed_bucket_by_bucket() -> None:
    name = "request_seconds"
    made = derived(
        family(
            name,
            "histogram",
            *(
                sample(f"{name}{part}", value, replica="i1", route=route, **({"le": le} if le else {}))
                for route in ("chat", "completions")
                for part, le, value in (
                    ("_bucket", "1.0", 2),
                    ("_bucket", "+Inf", 3),
                    ("_sum", "", 4.5),
                    ("_count", "", 3),
                )
            ),
        )
    )
    page = render(made.values())
    [parsed] = text_string_to_metric_families(page)
    assert parsed.name == "vllm:e2e_request_latency_seconds"
    by_part = [(s.name.removeprefix(parsed.name), s.labels.get("le"), s.value) for s in parsed.samples]
    assert by_part == [("_bucket", "1.0", 4), ("_bucket", "+Inf", 6), ("_sum", None, 9), ("_count", None, 6)]


def test_finished_reasons() -> None:
    made = derived(
        family(
            "outputs_total",
            "counter",
            sample("outputs_total", 5, replica="i1", route="chat", reason="stop"),
            sample("outputs_total", 6, replica="i1", route="completions", reason="stop"),
            sample("outputs_total", 7, replica="i1", route="chat", reason="length"),
        ),
        family(
            "requests_total",
            "counter",
            sample("requests_total", 9, replica="i1", route="chat", outcome="ok"),
            sample("requests_total", 2, replica="i1", route="chat", outcome="cancelled"),
            sample("requests_total", 1, replica="i1", route="chat", outcome="failed"),
            sample("requests_total", 8, replica="i1", route="chat", outcome="refused"),
        ),
    )
    success = made["vllm:request_success"]
    assert {s.labels["finished_reason"]: s.value for s in success.samples} == {
        "stop": 11,
        "length": 7,
        "abort": 2,
        "error": 1,
    }


def test_each_model_of_a_shelf_has_its_name() -> None:
    """Without a model, as in requests for unknown ones, there is no name."""

    def both(name: str, **labels: str) -> str:
        return "".join(sample(name, v, replica="r1", model=model, **labels) for v, model in ((1, "a"), (2, "b")))

    budget = sample("kv_bytes", 4, replica="r1", model="a", kind="budget")
    made = derived(
        family("running_sequences", "gauge", both("running_sequences")),
        family("kv_bytes", "gauge", both("kv_bytes", kind="active"), budget),
        family(
            "requests_total",
            "counter",
            sample("requests_total", 3, replica="i1", route="chat", model="a", outcome="failed"),
            sample("requests_total", 4, replica="i1", route="chat", model="", outcome="failed"),
        ),
        model=None,
    )
    found = {
        name: [(s.labels.get("model_name"), s.value) for s in made[name].samples]
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:request_success")
    }
    assert found == {
        "vllm:num_requests_running": [("a", 1), ("b", 2)],
        "vllm:kv_cache_usage_perc": [("a", 0.25)],
        "vllm:request_success": [("a", 3), (None, 4)],
    }


def test_a_metric_without_a_source_is_left_out() -> None:
    """Its name without a value would be taken for zero."""
    assert derived(family("running_sequences", "gauge", sample("running_sequences", 1, replica="r1"))).keys() == {
        "vllm:num_requests_running"
    }


# ---- the page of endpoint pickers ----


def of(name: str, load: ReplicaReport, memory: MemoryReport | None = None) -> ModelReport:
    return ModelReport(ModelStatus(name=name, state="awake"), load, memory)


def one_model(replica: str, load: ReplicaReport, memory: MemoryReport) -> ReplicaStatus:
    return ReplicaStatus(replica, 1.0, (of("toy", load, memory),))


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
    here = ReplicaStatus("r1", 1.0, (of("a", status.load, memory), of("b", waiting, asleep), of("c", new)))
    there = ReplicaStatus("r2", 1.0, (of("a", new), of("b", status.load, memory), of("c", new)))
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
