"""Routes of the operations: bodies, answers and their places on the OpenAPI page."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from folio.app.api.anthropic.body import CountTokensRequest, MessagesRequest
from folio.app.api.anthropic.replies import MessageObject, TokenCount
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest, GenerationBody
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.replies import ChatCompletion, Completion
from folio.app.api.openai.token_bodies import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from folio.app.api.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.api.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ResponseObject


@dataclass(frozen=True, slots=True)
class Route:
    body: type[BaseModel]
    answer: type[BaseModel]
    title: str
    tag: str
    description: str

    @property
    def streams(self) -> bool:
        return "stream" in self.body.model_fields

    @property
    def takes_session(self) -> bool:
        """Whether a session is a hint for the choice of the replica."""
        return issubclass(self.body, GenerationBody)


_TEXT, _TOKENS, _POOLED = "generation", "tokens", "embeddings and scores"
_OR_STREAMED = "whole or, with `stream`, as server-sent events."
_MORE = f"Continue an output of a running or recently finished request in `n` more ways, {_OR_STREAMED}"
# By the operation's name in `folio.app.http.operations`.
ROUTES = {
    "chat": Route(
        ChatCompletionRequest, ChatCompletion, "chat_completions", _TEXT, f"Answer a conversation, {_OR_STREAMED}"
    ),
    "generate": Route(
        CompletionRequest, Completion, "completions", _TEXT, f"Continue a prompt, or several, {_OR_STREAMED}"
    ),
    "responses": Route(ResponsesRequest, ResponseObject, "responses", _TEXT, f"Answer an input, {_OR_STREAMED}"),
    "fork": Route(ForkRequest, Completion, "forks", _TEXT, _MORE),
    "messages": Route(
        MessagesRequest, MessageObject, "messages", _TEXT, f"Answer a conversation in Anthropic's API, {_OR_STREAMED}"
    ),
    "count_tokens": Route(
        CountTokensRequest,
        TokenCount,
        "count_tokens",
        _TOKENS,
        "The number of tokens of a conversation in Anthropic's API.",
    ),
    "embed": Route(EmbeddingRequest, EmbeddingList, "embeddings", _POOLED, "The embeddings of texts or token ids."),
    "score": Route(ScoreRequest, ScoreList, "score", _POOLED, "The scores of pairs of texts."),
    "rerank": Route(RerankRequest, Ranking, "rerank", _POOLED, "Documents in the order of their relevance to a query."),
    "tokenize": Route(
        TokenizeRequest, Tokens, "tokenize", _TOKENS, "The tokens of a text or a conversation, and their number."
    ),
    "detokenize": Route(DetokenizeRequest, DetokenizedText, "detokenize", _TOKENS, "The text of tokens."),
}
