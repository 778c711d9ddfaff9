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
    UnknownRequestError,
)
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, ForkRequest, Message, PinRequest
from app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, Usage
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
    "MemoryReport",
    "Message",
    "OverloadedError",
    "PinRequest",
    "RequestError",
    "UnavailableError",
    "UnknownModelError",
    "UnknownRequestError",
    "Usage",
]
