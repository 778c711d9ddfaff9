"""Client package for other programs: `Folio`, its request bodies, answers and errors.

folio = Folio("folio")  # within the Ray cluster; or Folio("http://127.0.0.1:8000"), Folio("grpc://127.0.0.1:9000")
question = Message(role="user", content="What is Folio?")
answer = await folio.chat(ChatCompletionRequest(model="builtin", messages=[question]))
"""

from folio.app.api.anthropic.body import CountTokensRequest, MessagesRequest
from folio.app.api.anthropic.replies import MessageEvent, MessageObject, TokenCount
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest, Message
from folio.app.api.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, Usage
from folio.app.api.operators.bodies import AddModelRequest, LoadAdapterRequest, PinRequest, UnloadAdapterRequest
from folio.app.api.operators.replies import LoadReport, PinCard, PinList
from folio.app.api.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.api.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ResponseObject, StreamEvent
from folio.app.client.folio import Folio
from folio.app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    FolioError,
    ForbiddenError,
    OverloadedError,
    RateLimitError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownPinError,
    UnknownRequestError,
)
from folio.vmem import BudgetAnswer, MemoryReport

__all__ = [
    "AddModelRequest",
    "BudgetAnswer",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "Completion",
    "CompletionRequest",
    "ContextLengthError",
    "CountTokensRequest",
    "DeadlineError",
    "EmbeddingList",
    "EmbeddingRequest",
    "EngineError",
    "Folio",
    "FolioError",
    "ForbiddenError",
    "ForkRequest",
    "LoadAdapterRequest",
    "LoadReport",
    "MemoryReport",
    "Message",
    "MessageEvent",
    "MessageObject",
    "MessagesRequest",
    "OverloadedError",
    "PinCard",
    "PinList",
    "PinRequest",
    "Ranking",
    "RateLimitError",
    "RequestError",
    "RerankRequest",
    "ResponseObject",
    "ResponsesRequest",
    "ScoreList",
    "ScoreRequest",
    "StreamEvent",
    "TokenCount",
    "UnavailableError",
    "UnknownModelError",
    "UnknownPinError",
    "UnknownRequestError",
    "UnloadAdapterRequest",
    "Usage",
]
