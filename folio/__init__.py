"""Folio's public names: the client (`Folio`, its requests, answers and errors) and the engine (`LLM`, `AsyncEngine`).

A name is imported at its first use. A client loads no torch, and Ray only for calls by handle; the engine loads no Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folio.app.client import *  # noqa: F403
    from folio.app.engine import LLM as LLM
    from folio.app.engine import AsyncEngine as AsyncEngine
    from folio.app.engine import EngineConfig as EngineConfig
    from folio.app.engine import SamplingParams as SamplingParams
    from folio.app.engine import Structure as Structure

_OF_ENGINE = ("LLM", "AsyncEngine", "EngineConfig", "SamplingParams", "Structure")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in ("app", "kernels", "vmem"):  # `from folio import vmem` needs no client
            return import_module(f"folio.{name}")
        module = import_module("folio.app.engine" if name in _OF_ENGINE else "folio.app.client")
        if name not in module.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_OF_ENGINE, *import_module("folio.app.client").__all__})
