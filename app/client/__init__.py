"""Client package for other programs: `Folio`, its request bodies, answers and errors.

folio = Folio("folio")  # within the Ray cluster; or Folio("http://127.0.0.1:8000"), Folio("grpc://127.0.0.1:9000")
question = Message(role="user", content="What is Folio?")
answer = await folio.chat(ChatCompletionRequest(model="builtin", messages=[question]))
"""

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
from folio.app.openai.bodies import CompletionRequest, ForkRequest
from folio.app.openai.chat_body import ChatCompletionRequest, Message
from folio.app.openai.messages.body import CountTokensRequest, MessagesRequest
from folio.app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from folio.app.openai.operation.bodies import AddModelRequest, LoadAdapterRequest, PinRequest, UnloadAdapterRequest
from folio.app.openai.operation.replies import LoadReport, PinCard, PinList
from folio.app.openai.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, Usage
from folio.app.openai.responses.body import ResponsesRequest
from folio.app.openai.responses.replies import ResponseObject, StreamEvent
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
