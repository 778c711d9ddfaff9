"""Speculative decoding: several tokens are guessed and checked in one step. The engine needs `Speculation` only."""

from app.engine.speculation.proposer import Proposer, SpeculationCounts
from app.engine.speculation.speculation import Speculation

__all__ = ["Proposer", "Speculation", "SpeculationCounts"]
