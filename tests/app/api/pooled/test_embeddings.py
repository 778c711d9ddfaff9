"""`/v1/embeddings`, `/v1/score` and `/v1/rerank` with OpenAI's client, over a real engine in this process."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from folio.app.client import ContextLengthError, EmbeddingRequest, Folio, RequestError, UnknownModelError
from folio.app.config.http import HttpSettings, RateLimits
from folio.app.models.builtin import BUILTIN_FOLDER
from folio.app.serving.metric_rows import MetricTable
from tests.grpc_server import grpc_listening
from tests.local_server import LocalServer, guarded_api, listening
from tests.processes import until_async

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64}
TEXTS = ["What is Folio?", "The key of room 417 is 93.", "A block is 16 positions of one sequence. " * 20]
# As in tests/app/engine/test_pooling.py, but of a model with larger activations.
TOLERANCE = 5e-5


@contextmanager
def serving(**settings: Any) -> Iterator[TestClient]:
    local = LocalServer(**SETTINGS | settings)
    yield TestClient(local.api)
    local.wait_until_idle()
    local.close()


@pytest.fixture(scope="module")
def embedder() -> Iterator[LocalServer]:
    """The built-in model, which was not trained for it, as an embedding model."""
    local = LocalServer(pooling="mean", matryoshka=True, **SETTINGS)
    yield local
    local.close()


@pytest.fixture
def server(embedder: LocalServer) -> Iterator[LocalServer]:
    yield embedder
    embedder.wait_until_idle()


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with (
        listening(server.api) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def http(server: LocalServer) -> TestClient:
    return TestClient(server.api)


EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
_tokenizer: Any = AutoTokenizer.from_pretrained(BUILTIN_FOLDER)


@cache
def _reference() -> Any:
    return AutoModel.from_pretrained(BUILTIN_FOLDER, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def wanted(text: str) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        mean = _reference()(torch.tensor([_tokenizer.encode(text)])).last_hidden_state[0].double().mean(0).numpy()
    return cast(Any, mean / np.linalg.norm(mean))


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    difference = float(np.abs(np.array(actual) - np.array(expected)).max())
    assert difference <= tolerance, difference


def error_of(answer: Any) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_openais_client_gets_the_embeddings_of_transformers(client: openai.OpenAI) -> None:
    """The client asks for base64, and decodes it, unless it is told otherwise. LangChain sends lists of token ids, and
    asks for floats."""
    token_ids: Any = [_tokenizer.encode(text) for text in TEXTS]
    for given, texts, form in (
        (TEXTS, TEXTS, openai.omit),
        (token_ids, TEXTS, "float"),
        (TEXTS[0], TEXTS[:1], "float"),
        (token_ids[0], TEXTS[:1], "float"),
        ([TEXTS[0]], TEXTS[:1], "float"),
        ([token_ids[0]], TEXTS[:1], "float"),
    ):
        answer = client.embeddings.create(model="builtin", input=given, encoding_format=form, user="me")
        assert (answer.object, answer.model) == ("list", "builtin")
        assert [item.index for item in answer.data] == list(range(len(texts)))
        assert {item.object for item in answer.data} == {"embedding"}
        for item, text in zip(answer.data, texts, strict=True):
            assert_close(item.embedding, wanted(text))
        num_tokens = sum(len(_tokenizer.encode(text)) for text in texts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_is_little_endian_float32(http: TestClient) -> None:
    body = {"model": "builtin", "input": TEXTS[1]}
    [coded] = http.post(EMBEDDINGS, json=body | {"encoding_format": "base64"}).json()["data"]
    [plain] = http.post(EMBEDDINGS, json=body).json()["data"]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4").tolist() == plain["embedding"]


def test_fewer_dimensions(client: openai.OpenAI) -> None:
    [item] = client.embeddings.create(model="builtin", input=TEXTS[0], dimensions=32).data
    cut = wanted(TEXTS[0])[:32]
    assert_close(item.embedding, cut / np.linalg.norm(cut))


def test_many_inputs(http: TestClient) -> None:
    """More than run at once; the answer is longer than the event loop writes itself."""
    texts = [f"Room {number}" for number in range(150)]
    answer = http.post(EMBEDDINGS, json={"model": "builtin", "input": texts}).json()
    assert [item["index"] for item in answer["data"]] == list(range(150))
    assert_close(answer["data"][149]["embedding"], wanted("Room 149"))


def test_truncation(http: TestClient) -> None:
    text = TEXTS[2] * 3
    body = {"model": "builtin", "input": text}
    refused = http.post(EMBEDDINGS, json=body)
    assert error_of(refused) == (400, "context_length_exceeded", "input")
    for given, most in ((-1, 512), (7, 7)):
        answer = http.post(EMBEDDINGS, json=body | {"truncate_prompt_tokens": given}).json()
        assert answer["usage"]["prompt_tokens"] == most
        kept = http.post(EMBEDDINGS, json=body | {"input": _tokenizer.encode(text)[-most:]}).json()
        assert_close(answer["data"][0]["embedding"], kept["data"][0]["embedding"])


INVALID = "invalid_value"


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        (EMBEDDINGS, {"input": ""}, INVALID, "input"),
        (EMBEDDINGS, {"input": []}, INVALID, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, INVALID, "input"),
        (EMBEDDINGS, {"input": [[]]}, INVALID, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, None, "input"),
        (EMBEDDINGS, {"input": [100_000]}, INVALID, None),
        (EMBEDDINGS, {"input": [-1]}, None, "input"),
        (EMBEDDINGS, {"input": ["a", 1]}, None, "input"),
        (EMBEDDINGS, {"input": None}, None, "input"),
        (EMBEDDINGS, {"dimensions": 257}, INVALID, "dimensions"),
        (EMBEDDINGS, {"dimensions": 0}, None, "dimensions"),
        (EMBEDDINGS, {"encoding_format": "hex"}, None, "encoding_format"),
        (EMBEDDINGS, {"truncate_prompt_tokens": 0}, INVALID, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"truncate_prompt_tokens": -2}, None, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"truncate_prompt_tokens": 513}, INVALID, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"tenant": ""}, None, "tenant"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, None, "text_1"),
        (SCORE, {"text_1": "a", "text_2": []}, None, "text_1"),
        (SCORE, {"text_1": [], "text_2": []}, None, "text_1"),
        (SCORE, {"text_1": "", "text_2": "b"}, None, "text_1"),
        (SCORE, {"text_1": "a"}, None, "text_2"),
        (SCORE, {"text_1": "a", "text_2": ["b"] * 2049}, None, "text_2"),
        (SCORE, {"text_1": [*map(str, range(1500))], "text_2": [*map(str, range(-1500, 0))]}, None, "text_2"),
        (RERANK, {"documents": []}, None, "documents"),
        (RERANK, {"documents": [""]}, None, "documents"),
        (RERANK, {"documents": [{"title": "b"}]}, None, "documents"),
        (RERANK, {"documents": ["b"], "top_n": -1}, None, "top_n"),
        (RERANK, {"documents": ["b" * 9000]}, None, "documents"),
    ],
)
def test_a_refusal(http: TestClient, path: str, fields: dict[str, Any], code: str | None, param: str | None) -> None:
    least = {EMBEDDINGS: {"input": "a"}, SCORE: {}, RERANK: {"query": "a"}}[path]
    status, given_code, given_param = error_of(http.post(path, json={"model": "builtin"} | least | fields))
    assert status == 400
    assert param is None or param in str(given_param)
    assert code is None or given_code == code


def test_a_generating_server_names_the_setting() -> None:
    with serving() as client:
        for path, body in ((EMBEDDINGS, {"input": "a"}), (RERANK, {"query": "a", "documents": ["b"]})):
            answer = client.post(path, json=body | {"model": "builtin"})
            assert error_of(answer) == (400, "invalid_value", "model")
            assert "pooling: last or mean" in answer.json()["error"]["message"]


# ---- scores of an embedding model ----


def test_scores_are_cosines(http: TestClient) -> None:
    body = {"model": "builtin", "text_1": TEXTS[0], "text_2": TEXTS}
    vectors = [wanted(text) for text in TEXTS]
    answer = http.post(SCORE, json=body).json()
    assert answer["id"].startswith("score-")
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert_close([item["score"] for item in answer["data"]], [vectors[0] @ vector for vector in vectors])
    # Each text is embedded once.
    assert answer["usage"]["prompt_tokens"] == sum(len(_tokenizer.encode(text)) for text in TEXTS)
    pairs = http.post(SCORE, json=body | {"text_1": TEXTS[::-1]}).json()
    expected = [a @ b for a, b in zip(vectors[::-1], vectors, strict=True)]
    assert_close([item["score"] for item in pairs["data"]], expected)


def test_a_ranking(http: TestClient) -> None:
    documents = ["It rains.", {"text": TEXTS[1]}, TEXTS[0], "It rains."]
    body = {"model": "builtin", "query": TEXTS[0], "documents": documents}
    texts = ["It rains.", TEXTS[1], TEXTS[0], "It rains."]
    scores = [float(wanted(TEXTS[0]) @ wanted(text)) for text in texts]
    answer = http.post(RERANK, json=body).json()
    assert answer["id"].startswith("rerank-")
    assert answer["model"] == "builtin"
    assert answer["results"][0]["index"] == 2
    ranked = [item["relevance_score"] for item in answer["results"]]
    assert ranked == sorted(ranked, reverse=True)
    for item in answer["results"]:
        assert item["document"] == {"text": texts[item["index"]]}
        assert_close(item["relevance_score"], scores[item["index"]])
    repeated = [item["index"] for item in answer["results"] if item["index"] in (0, 3)]
    assert repeated == [0, 3]  # equal scores stay in order
    best = http.post(RERANK, json=body | {"top_n": 1, "return_documents": False}).json()
    assert [item.keys() for item in best["results"]] == [{"index", "relevance_score"}]
    assert best["results"][0]["index"] == 2
    for top_n in (0, 10):
        assert len(http.post(RERANK, json=body | {"top_n": top_n}).json()["results"]) == 4


# ---- scores of a classifier ----


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(BUILTIN_FOLDER, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(std=0.05)
    model.save_pretrained(folder)
    _tokenizer.save_pretrained(folder)
    return folder


def test_a_classifier_ranks_joined_texts(classifier: Path) -> None:
    documents = [*TEXTS, "It rains."]
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    with torch.inference_mode():
        inputs = [torch.tensor([_tokenizer.encode(TEXTS[0], text)]) for text in documents]
        expected = [float(torch.sigmoid(model(given).logits[0, 0])) for given in inputs]
    body: dict[str, Any] = {"model": "builtin"}
    with serving(model=str(classifier)) as client:
        answer = client.post(SCORE, json=body | {"text_1": TEXTS[0], "text_2": documents}).json()
        assert_close([item["score"] for item in answer["data"]], expected)
        assert answer["usage"]["prompt_tokens"] == sum(given.shape[1] for given in inputs)
        ranking = client.post(RERANK, json=body | {"query": TEXTS[0], "documents": documents}).json()
        assert [item["index"] for item in ranking["results"]] == sorted(range(4), key=lambda i: -expected[i])
        for path, more in ((EMBEDDINGS, {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
            refused = client.post(path, json=body | more)
            assert error_of(refused) == (400, "invalid_value", "model")
        assert "use /v1/score" in refused.json()["error"]["message"]


def test_scores_of_two_tokens_after_a_template() -> None:
    """As Qwen3-Reranker: the probability of "yes" among the two, by the logits that the server itself gives."""
    no, yes = 76, 77
    tokens = tuple(_tokenizer.decode([token_id]) for token_id in (no, yes))
    template = "Does it answer?\n{query}\n{document}\n"
    model = AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER, dtype=torch.float32).eval()
    with serving(score_tokens=tokens, score_template=template) as client:
        answer = client.post(SCORE, json={"model": "builtin", "text_1": TEXTS[0], "text_2": TEXTS}).json()
        for item, text in zip(answer["data"], TEXTS, strict=True):
            prompt = template.replace("{query}", TEXTS[0]).replace("{document}", text)
            with torch.inference_mode():
                logits = model(torch.tensor([_tokenizer.encode(prompt)])).logits[0, -1]
            assert_close(item["score"], float(torch.softmax(logits[[no, yes]], 0)[1]))
        assert client.post("/v1/completions", json={"model": "builtin", "prompt": "a"}).status_code == 200


# ---- the edge, and other ways in ----


def test_prompt_tokens_are_charged(server: LocalServer) -> None:
    """A refused request is given back."""
    limits = HttpSettings(address_limits=RateLimits(tokens_per_minute=40))
    client = TestClient(guarded_api(server.ingress, limits))
    body = {"model": "builtin", "input": list(range(10, 30))}
    assert client.post(EMBEDDINGS, json=body | {"dimensions": 300}).status_code == 400
    answers = [client.post(EMBEDDINGS, json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[1].headers["x-ratelimit-remaining-tokens"] == "0"


async def test_errors_of_the_client(server: LocalServer) -> None:
    with listening(server.api) as url:
        async with Folio(url) as folio:
            with pytest.raises(ContextLengthError):
                await folio.embed(EmbeddingRequest(model="builtin", input=[5] * 600))
            with pytest.raises(UnknownModelError):
                await folio.embed(EmbeddingRequest(model="gpt", input="a"))
    with grpc_listening(server.api) as url:
        async with Folio(url) as folio:
            with pytest.raises(RequestError, match="embed is not available over gRPC"):
                await folio.embed(EmbeddingRequest(model="builtin", input="a"))


async def test_a_handle(server: LocalServer) -> None:
    """Methods of the ingress, as a handle calls them; a failing input ends the others of its request."""
    answer = await server.ingress.embed(EmbeddingRequest(model="builtin", input=TEXTS))
    assert len(answer.data) == 3
    long = [[7] * 500] * 20
    with pytest.raises(RequestError, match="token ids must be"):
        await server.ingress.embed(EmbeddingRequest(model="builtin", input=[*long, [100_000]]))


async def test_cancellation_frees_the_memory(server: LocalServer) -> None:
    request = EmbeddingRequest(model="builtin", input=[[5 + i] * 500 for i in range(200)])
    task = asyncio.create_task(server.ingress.embed(request))
    await until_async(lambda: server.engine.load(most_keys=0).num_running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_async(lambda: not server.engine.load(most_keys=0).num_running)
    assert server.engine.load(most_keys=0).num_waiting == 0


def test_metrics_count_the_route(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = []
    note = MetricTable.note
    monkeypatch.setattr(MetricTable, "note", lambda table, *args: (noted.append(args), note(table, *args)))
    client = TestClient(server.api)
    client.post(EMBEDDINGS, json={"model": "builtin", "input": [10, 11, 12]})
    client.post(RERANK, json={"model": "builtin", "query": "a", "documents": ["b"]})
    assert [route for _, route, _ in noted] == ["embeddings", "rerank"]
    measured = noted[0][0]
    assert (measured.prompt_tokens, measured.output_tokens, measured.outcome) == (3, 0, "ok")


def test_prefixes_stay_within_their_salt() -> None:
    """A model that pools the last token shares prefixes, as generating ones do."""
    body = {"model": "builtin", "input": list(range(10, 210))}
    with serving(pooling="last") as client:
        answers = [client.post(EMBEDDINGS, json=body | {"cache_salt": salt}).json() for salt in ("a", "a", "b")]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[::2] == [0, 0]
    assert cached[1] >= 192
    for first, second in itertools.pairwise(answers):
        assert_close(first["data"][0]["embedding"], second["data"][0]["embedding"])
