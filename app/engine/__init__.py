"""The engine, without Ray: `LLM` for scripts, `AsyncEngine` for servers."""

from app.config import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.llm import LLM, Completion
from app.engine.params import SamplingParams
from app.engine.request import Delta, FinishReason

__all__ = ["LLM", "AsyncEngine", "Completion", "Delta", "EngineConfig", "FinishReason", "SamplingParams"]
