"""Speculative decoding: proposing draft tokens, which the engine verifies in one step. `Speculation` is the
interface."""

from folio.app.engine.speculation.speculation import Speculation, SpeculationCounts

__all__ = ["Speculation", "SpeculationCounts"]
