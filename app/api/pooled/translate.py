"""Translator of requests for embeddings and scores into calls of engine replicas, and of the pieces into answers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence

from folio.app.api.input.prompts import PromptEncoder
from folio.app.api.pooled.answers import EmbeddingAnswer, RankingAnswer, ScoreAnswer
from folio.app.api.pooled.bodies import MAX_INPUTS, EmbeddingRequest, PooledBody, RerankRequest, ScoreRequest
from folio.app.api.pooled.inputs import InputEncoder
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import RequestError
from folio.app.fleet.messages import GenerateRequest, ServedPooling
from folio.app.http.request_context import current_context

# A pooled request generates nothing.
_PARAMS = SamplingParams(max_tokens=1)


class PooledTranslator:
    """Translates with a model's tokenizer. Methods may take long, and raise `RequestError`.

    Args:
        adapter_of: the adapter of a model's name.
        key_of: `GenerateRequest.adapter_key` of an adapter.
        model_name: the model's name at replicas.
    """

    def __init__(
        self,
        prompts: PromptEncoder,
        adapter_of: Callable[[str], str | None],
        key_of: Callable[[str | None], str | None],
        model_name: str,
    ) -> None:
        self._prompts = prompts
        self._adapter_of = adapter_of
        self._key_of = key_of
        self._model_name = model_name

    def translate_embeddings(
        self, request: EmbeddingRequest, max_model_len: int, served: ServedPooling
    ) -> tuple[list[GenerateRequest], EmbeddingAnswer]:
        """A call for each input, and the answer."""
        encoder = self._encoder(request, max_model_len)
        prompts = [encoder.encode(given, "input") for given in _inputs(request)]
        request_id = _new_id("embd")
        calls = self._calls(request_id, request, prompts, PoolingParams("embedding", request.dimensions))
        return calls, EmbeddingAnswer(request_id, request, calls)

    def translate_score(
        self, request: ScoreRequest, max_model_len: int, served: ServedPooling
    ) -> tuple[list[GenerateRequest], ScoreAnswer]:
        """A call for each pair of a classifier, or for each text of an embedding model; and the answer."""
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (request.text_1, request.text_2))
        if len(first) == 1:
            first = first * len(second)
        if not second or len(first) != len(second):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}; send one and several, or two lists of "
                "the same length",
                "text_1",
            )
        request_id = _new_id("score")
        calls, pairs = self._pairs(
            request_id, request, zip(first, second, strict=True), max_model_len, served, ("text_1", "text_2")
        )
        return calls, ScoreAnswer(request_id, request, calls, pairs)

    def translate_rerank(
        self, request: RerankRequest, max_model_len: int, served: ServedPooling
    ) -> tuple[list[GenerateRequest], RankingAnswer]:
        """Calls as for scores, of the query with each document; and the answer."""
        documents = [given if isinstance(given, str) else given.text for given in request.documents]
        if not documents:
            raise RequestError("documents is empty; it needs at least one document", "documents")
        request_id = _new_id("rerank")
        queried = ((request.query, document) for document in documents)
        calls, pairs = self._pairs(request_id, request, queried, max_model_len, served, ("query", "documents"))
        return calls, RankingAnswer(request_id, request, calls, pairs, documents)

    def _pairs(
        self,
        request_id: str,
        request: ScoreRequest | RerankRequest,
        texts: Iterable[tuple[str, str]],
        max_model_len: int,
        served: ServedPooling,
        fields: tuple[str, str],
    ) -> tuple[list[GenerateRequest], list[tuple[int, ...]]]:
        """The calls, and for each pair the numbers of its calls. Each text is embedded once.

        Args:
            fields: names of the two texts in the request.
        """
        encoder = self._encoder(request, max_model_len)
        if served.kind == "score":
            prompts = [encoder.encode_pair(query, text, served.score_template, fields[1]) for query, text in texts]
            numbers: list[tuple[int, ...]] = [(number,) for number in range(len(prompts))]
            return self._calls(request_id, request, prompts, PoolingParams("score")), numbers
        places: dict[str, tuple[int, str]] = {}  # text → number of its call, and its field
        pairs = []
        for pair in texts:
            for text, field in zip(pair, fields, strict=True):
                places.setdefault(text, (len(places), field))
            pairs.append(tuple(places[text][0] for text in pair))
        if len(places) > 1 + MAX_INPUTS:
            raise RequestError(
                f"there are {len(places)} different texts; at most {1 + MAX_INPUTS} are allowed", fields[1]
            )
        prompts = [encoder.encode(text, field) for text, (_, field) in places.items()]
        return self._calls(request_id, request, prompts, PoolingParams()), pairs

    def _encoder(self, request: PooledBody, max_model_len: int) -> InputEncoder:
        return InputEncoder(self._prompts, max_model_len, request.truncate_prompt_tokens)

    def _calls(
        self, request_id: str, request: PooledBody, prompts: Sequence[list[int]], pooling: PoolingParams
    ) -> list[GenerateRequest]:
        """A call for each prompt, as far as the caller's API key allows it."""
        adapter = self._adapter_of(request.model)
        tenant, timeout_s, attempt_of = request.tenant, request.timeout_s, None
        priority = request.priority or 0
        if (context := current_context()) is not None:
            attempt_of = context.attempt_of
            tenant, timeout_s = context.authorize(
                request_id, model=request.model, tenant=tenant, priority=priority, pins=False, timeout_s=timeout_s
            )
        return [
            GenerateRequest(
                request_id=f"{request_id}-{number}" if number else request_id,
                prompt_token_ids=prompt,
                params=_PARAMS,
                priority=priority,
                cache_salt=request.cache_salt,
                adapter=adapter,
                adapter_key=self._key_of(adapter),
                tenant=tenant,
                user=request.user or None,
                timeout_s=timeout_s,
                repeat_key=None if attempt_of is None else f"{attempt_of} {number}",
                pooling=pooling,
                model=self._model_name,
            )
            for number, prompt in enumerate(prompts)
        ]


def _inputs(request: EmbeddingRequest) -> list[str] | list[list[int]]:
    """The inputs as a list."""
    given = request.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("input is empty; it needs at least one text, or one token", "input")
    return [given] if isinstance(given[0], int) else given


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
