"""Replies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from folio.app.api.base import Omitted
from folio.app.api.openai.replies import PromptTokensDetails


class PooledUsage(BaseModel):
    """Tokens of all prompts that were computed."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(BaseModel):
    """Numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The answer of `/v1/embeddings`, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    """The answer of `/v1/score`, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    """`index` is the document's place in the request."""

    index: int
    document: Omitted[RankedText] = None
    relevance_score: float


class Ranking(BaseModel):
    """The answer of `/v1/rerank`, the most relevant document first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RankedDocument]
