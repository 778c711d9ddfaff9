"""Output on its way from an engine to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.request import Delta, FinishReason, TokenLogprobs

# Neither hexadecimal digits nor the names of replicas have it.
_SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class Piece:
    """What one or more steps added to one output: the `Delta`s of these steps in one.

    Attributes:
        replica: the one that has the request.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_unfinished: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None
    replica: str = ""

    @staticmethod
    def of(deltas: Sequence[Delta], prompt_logprobs: tuple[TokenLogprobs, ...], replica: str) -> Piece:
        """At least one, all of one output, none with an error."""
        last = deltas[-1]
        return Piece(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            index=last.index,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_unfinished=last.num_unfinished,
            num_cached_tokens=last.num_cached_tokens,
            logprobs=tuple(token for delta in deltas for token in delta.logprobs),
            prompt_logprobs=prompt_logprobs,
            score=last.score,
            replica=replica,
        )

    @property
    def ends_request(self) -> bool:
        """Whether nothing of the request follows."""
        return self.finish_reason is not None and not self.num_unfinished


class PieceCollector:
    """Deltas of a request's outputs until there is something to send: those that end inside a character, or inside what
    may be a stop string, add to the next piece. The first piece, of whichever output, has the prompt's log
    probabilities."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._held: dict[int, list[Delta]] = {}
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def push(self, deltas: Sequence[Delta]) -> list[Piece]:
        """A piece of each output that has got text, or its end; last of all the one that ends the request."""
        self.hold(deltas)
        latest_first = dict.fromkeys(d.index for d in reversed(deltas) if d.text or d.finished)
        return [self._take(index) for index in reversed(latest_first)]

    def hold(self, deltas: Sequence[Delta]) -> None:
        """Keep them for `all`."""
        for delta in deltas:
            self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
            self._held.setdefault(delta.index, []).append(delta)

    def all(self) -> list[Piece]:
        """What is held, each output in one piece, in order."""
        return [self._take(index) for index in sorted(self._held)]

    def _take(self, index: int) -> Piece:
        entries, self._prompt_logprobs = self._prompt_logprobs, ()
        return Piece.of(self._held.pop(index), entries, self._replica)


def public_id(request_id: str, replica: str) -> str:
    """What clients know a request by: a fork finds the replica in it, whichever ingress it comes to."""
    return f"{request_id}{_SEPARATOR}{replica}"


def split_public_id(public: str) -> tuple[str, str]:
    """(request id, replica). The latter is empty when there is none in it."""
    request_id, _, replica = public.partition(_SEPARATOR)
    return request_id, replica
