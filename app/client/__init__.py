"""Client package for other programs: `Folio`, its request bodies, answers and errors.

folio = Folio("folio")  # within the Ray cluster; or Folio("http://127.0.0.1:8000"), Folio("grpc://127.0.0.1:9000")
question = Message(role="user", content="What is Folio?")
answer = await folio.chat(ChatCompletionRequest(model="builtin", messages=[question]))
"""

from app.client.folio import Folio
from app.errors import (
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
from app.openai.bodies import CompletionRequest, ForkRequest
from app.openai.chat_body import ChatCompletionRequest, Message
from app.openai.messages.body import CountTokensRequest, MessagesRequest
from app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from app.openai.operation.bodies import AddModelRequest, LoadAdapterRequest, PinRequest, UnloadAdapterRequest
from app.openai.operation.replies import LoadReport, PinCard, PinList
from app.openai.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, Usage
from app.openai.responses.body import ResponsesRequest
from app.openai.responses.replies import ResponseObject, StreamEvent
from vmem import BudgetAnswer, MemoryReport

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
