"""How to choose the next token, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import RequestError

MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Attributes:
        max_tokens: tokens to generate at most; `None`: as many as the context has room for.
        temperature: 0 is greedy; above, logits are divided by it.
        top_k: sample among the k likeliest tokens; 0: all.
        top_p: sample among the fewest tokens whose probability reaches p; 1: all.
        seed: same seed and same request, same tokens; `None`: a fresh one.
        stop: strings that end the output; they are not part of it.
        ignore_eos: go on after the end-of-sequence token.

    Raises:
        RequestError: a value is out of bounds.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1", "max_tokens")
        if not 0 <= self.temperature <= 100:
            raise RequestError(f"temperature is {self.temperature}; it must be between 0 and 100", "temperature")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more", "top_k")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1", "top_p")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; it must be a 64-bit integer", "seed")
        if len(self.stop) > MAX_STOP_STRINGS or not all(self.stop):
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty", "stop")

    @property
    def truncates(self) -> bool:
        """Whether only some of the tokens can be sampled."""
        return self.top_k > 0 or self.top_p < 1
