"""Speculative decoding: proposing draft tokens, which the engine verifies in one step. `Speculation` is the
interface."""

from app.engine.speculation.proposer import Proposer, SpeculationCounts
from app.engine.speculation.speculation import Speculation

__all__ = ["Proposer", "Speculation", "SpeculationCounts"]
