"""The engine, without Ray: `LLM` for scripts, `AsyncEngine` for servers.

Importing the package imports neither torch nor transformers: routers, ingresses and clients need its values only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from folio.app.config.engine import EngineConfig
from folio.app.engine.request.delta import Delta, FinishReason
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.sampling.params import SamplingParams, Structure
from folio.app.engine.sampling.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from folio.app.engine.async_engine import AsyncEngine
    from folio.app.engine.llm import LLM, Completion, Output

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "Delta",
    "EngineConfig",
    "EngineRequest",
    "FinishReason",
    "Output",
    "SamplingParams",
    "Structure",
    "TokenLogprobs",
]

# Names that are imported at their first use, and their modules.
_NEED_TORCH = {
    "AsyncEngine": "folio.app.engine.async_engine",
    "LLM": "folio.app.engine.llm",
    "Completion": "folio.app.engine.llm",
    "Output": "folio.app.engine.llm",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_NEED_TORCH[name]), name)
        return value
