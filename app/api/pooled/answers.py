"""Answers with embeddings and scores: the vectors of prompts as JSON bodies."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence

import numpy as np

from folio.app.api.openai.replies import PromptTokensDetails
from folio.app.api.pooled.bodies import EmbeddingRequest, PooledBody, RerankRequest, ScoreRequest
from folio.app.api.pooled.replies import (
    Embedding,
    EmbeddingList,
    PooledUsage,
    RankedDocument,
    RankedText,
    Ranking,
    Score,
    ScoreList,
)
from folio.app.engine.request.pooled import Array
from folio.app.fleet.messages import GenerateRequest, Piece
from folio.app.http.request_context import current_context


class PooledAnswer:
    """Base of all answers: the usage of all prompts, which is charged to the caller.

    Raises:
        RateLimitError: the caller may not have so many tokens now.
        RequestError: the caller may never have so many.
    """

    def __init__(self, request_id: str, request: PooledBody, calls: Sequence[GenerateRequest]) -> None:
        self._id = request_id
        self._created = int(time.time())
        self._model = request.model
        self._num_tokens = sum(len(call.prompt_token_ids) for call in calls)
        self._context = current_context()
        if self._context is not None:
            self._context.count_prompt(self._num_tokens)

    def _usage(self, outputs: Sequence[Sequence[Piece]]) -> PooledUsage:
        num_cached = sum(piece.num_cached_tokens for [piece] in outputs)
        if self._context is not None:
            self._context.count_output(0, num_cached)
        details = PromptTokensDetails(cached_tokens=num_cached)
        return PooledUsage(prompt_tokens=self._num_tokens, total_tokens=self._num_tokens, prompt_tokens_details=details)


class EmbeddingAnswer(PooledAnswer):
    """The answer to inputs, each of which has been one call."""

    def __init__(self, request_id: str, request: EmbeddingRequest, calls: Sequence[GenerateRequest]) -> None:
        super().__init__(request_id, request, calls)
        self._is_base64 = request.encoding_format == "base64"

    def full_answer(self, outputs: list[list[Piece]]) -> EmbeddingList:
        data = [
            # Not validated: that would look at every number of a long list.
            Embedding.model_construct(index=index, embedding=self._written(_bytes_of(piece)))
            for index, [piece] in enumerate(outputs)
        ]
        return EmbeddingList.model_construct(data=data, model=self._model, usage=self._usage(outputs))

    def _written(self, vector: bytes) -> list[float] | str:
        if self._is_base64:
            return base64.b64encode(vector).decode("ascii")
        numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
        return numbers


class _PairsAnswer(PooledAnswer):
    """Scores of pairs of texts.

    Args:
        pairs: for each score the number of its one call, or of the calls of two texts, whose embeddings are compared.
    """

    def __init__(
        self,
        request_id: str,
        request: ScoreRequest | RerankRequest,
        calls: Sequence[GenerateRequest],
        pairs: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(request_id, request, calls)
        self._pairs = pairs

    def _scores(self, outputs: Sequence[Sequence[Piece]]) -> list[float]:
        vectors = [np.frombuffer(_bytes_of(piece), "<f4").astype(np.float64) for [piece] in outputs]
        return [float(vectors[pair[0]][0]) if len(pair) == 1 else _cosine(vectors, *pair) for pair in self._pairs]


class ScoreAnswer(_PairsAnswer):
    """The answer to pairs of texts."""

    def full_answer(self, outputs: list[list[Piece]]) -> ScoreList:
        return ScoreList(
            id=self._id,
            created=self._created,
            model=self._model,
            data=[Score(index=index, score=score) for index, score in enumerate(self._scores(outputs))],
            usage=self._usage(outputs),
        )


class RankingAnswer(_PairsAnswer):
    """The answer to a query with documents, whose scores are those of its pairs."""

    def __init__(
        self,
        request_id: str,
        request: RerankRequest,
        calls: Sequence[GenerateRequest],
        pairs: Sequence[tuple[int, ...]],
        documents: Sequence[str],
    ) -> None:
        super().__init__(request_id, request, calls, pairs)
        self._documents = documents
        self._num_results = request.top_n or len(documents)
        self._returns_documents = request.return_documents is not False

    def full_answer(self, outputs: list[list[Piece]]) -> Ranking:
        ranked = sorted(enumerate(self._scores(outputs)), key=lambda item: -item[1])  # equal scores keep their order
        results = [
            RankedDocument(
                index=index,
                document=RankedText(text=self._documents[index]) if self._returns_documents else None,
                relevance_score=score,
            )
            for index, score in ranked[: self._num_results]
        ]
        return Ranking(id=self._id, model=self._model, usage=self._usage(outputs), results=results)


def _bytes_of(piece: Piece) -> bytes:
    assert piece.pooled is not None
    return piece.pooled


def _cosine(vectors: Sequence[Array], first: int, second: int) -> float:
    a, b = vectors[first], vectors[second]
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0
