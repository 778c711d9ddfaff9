"""What other Ray applications import: the client, the bodies it takes, the answers and the errors it gives.

folio = Folio("folio")
question = Message(role="user", content="What is Folio?")
answer = await folio.chat(ChatCompletionRequest(model="builtin", messages=[question]))
"""

from app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    FolioError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownPinError,
    UnknownRequestError,
)
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, ForkRequest, Message, PinRequest
from app.openai.operator_replies import LoadReport
from app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, Usage
from app.openai.responses_body import ResponsesRequest
from app.openai.responses_replies import ResponseObject, StreamEvent
from app.serving.client import Folio
from vmem import BudgetAnswer, MemoryReport

__all__ = [
    "BudgetAnswer",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "Completion",
    "CompletionRequest",
    "ContextLengthError",
    "DeadlineError",
    "EngineError",
    "Folio",
    "FolioError",
    "ForkRequest",
    "LoadReport",
    "MemoryReport",
    "Message",
    "OverloadedError",
    "PinRequest",
    "RequestError",
    "ResponseObject",
    "ResponsesRequest",
    "StreamEvent",
    "UnavailableError",
    "UnknownModelError",
    "UnknownPinError",
    "UnknownRequestError",
    "Usage",
]
