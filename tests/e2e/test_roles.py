"""A real Ray Serve application of which one replica computes prompts and the other decodes: the tokens are those of an
engine alone, also when either replica is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.served import Served
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.model.tokenizer import load_tokenizer
from tests.cluster import Front, deleted_at_the_end
from tests.processes import until

pytestmark = pytest.mark.third_day(1)
DEADLINE_S = 90
NUM_REQUESTS, NUM_TOKENS = 6, 150
PROMPTS = [" ".join(f"{i}, {j}: a line of the list." for j in range(60)) for i in range(NUM_REQUESTS)]
ENGINE = {"model": "builtin", "dtype": "float32", "kv_memory_bytes": 96 << 20, "num_threads": 1, "warm_up": False}
ARGS = {"engine": ENGINE, "routing": {"report_period_s": 0.2, "prefill_share": 0.5}}


@pytest.fixture(scope="module")
def server(cluster_url: str, front: Front) -> Iterator[Served]:
    front.delete()
    server = Served("folio-roles", cluster_url, ARGS)
    with deleted_at_the_end(server.name):
        server.deploy(num_replicas=2)
        yield server


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The texts of an engine alone."""
    tokenizer: Any = load_tokenizer("builtin")
    with LLM("builtin", dtype="float32", kv_memory_bytes=64 << 20) as llm:
        params = [SamplingParams(seed=i, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS) for i in range(NUM_REQUESTS)]
        return [output.text for output in llm.generate([tokenizer(p)["input_ids"] for p in PROMPTS], params)]


def ask(server: Served, number: int, salt: str) -> Any:
    """The answer to a prompt. `salt`: of its cached prefix."""
    limits = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS}
    body = {"model": "builtin", "prompt": PROMPTS[number], "seed": number, "cache_salt": salt, **limits}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status().json()


def received_tokens(server: Served) -> list[int]:
    """Prompt tokens that each replica has found in its cache, which begins empty."""
    return sorted(report.cached_tokens for report in server.reports())


def test_prompts_are_computed_at_one_replica_and_decoded_at_the_other(server: Served, alone: list[str]) -> None:
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda number: ask(server, number, "first"), range(NUM_REQUESTS)))
    assert [answer["choices"][0]["text"] for answer in answers] == alone
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {NUM_TOKENS}
    assert {answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers} == {0}
    num_tokens = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    prefill, decode = received_tokens(server)
    assert prefill == 0
    assert 0.5 * num_tokens < decode <= num_tokens, "blocks have moved with the calls"


@pytest.mark.parametrize("which", [0, 1])
def test_no_answer_is_lost_with_a_replica(server: Served, alone: list[str], which: int) -> None:
    until(lambda: server.num_running == 2 and len(server.processes()) == 2, DEADLINE_S)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, server, number, f"killed {which}") for number in range(NUM_REQUESTS)]
        until(lambda: any(report.num_running for report in server.reports()), DEADLINE_S)
        os.kill(sorted(server.processes())[which], signal.SIGKILL)
        assert [answer.result()["choices"][0]["text"] for answer in answers] == alone
