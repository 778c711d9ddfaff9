"""The engine, without Ray: `LLM` for scripts, `AsyncEngine` for servers."""

from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.llm import LLM, Completion, Output
from app.engine.request import Delta, FinishReason, RequestOptions, TokenLogprobs
from app.engine.sampling.params import SamplingParams, Structure

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "Delta",
    "EngineConfig",
    "FinishReason",
    "Output",
    "RequestOptions",
    "SamplingParams",
    "Structure",
    "TokenLogprobs",
]
