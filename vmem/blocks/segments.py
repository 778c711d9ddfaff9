"""Segments: runs of cached units that return together, and what is known of their use.

    a system prompt ─┬─ the first turn's prompt ─┬─ (its output)
        shared       │        prompt             └─ the second turn's prompt ── (its output)
                     └─ another conversation                 prompt                output

A turn adds a segment for the new part of its prompt and one for its output. A prompt that leaves a segment midway cuts
it: the first part is shared from then on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

# Most known segments. Those evicted from memory are remembered as well: the return of an evicted prefix teaches its
# class, and a conversation has made as many turns as before.
_MOST_SEGMENTS = 1 << 15
# A prompt that has this share of a segment continues it: chat templates rewrite the end of a prompt in later turns.
_NEARLY_ALL = 7 / 8

Part = Literal["shared", "prompt", "output"]


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """A sequence's use of the prefix cache, as far as it is known.

    Attributes:
        kind: of request; return times are learned for each kind. A few short names.
        num_prompt_tokens: later tokens are output; `None`: all are prompt.
        resumes: the sequence was preempted: this use is part of the last one.
        retain_s: keep its whole units this long after the use ends, if the quota allows.
        retains_output: not only those of the prompt.
        owner: the tenant whose retained prefixes these are.
    """

    kind: str = ""
    num_prompt_tokens: int | None = None
    resumes: bool = False
    retain_s: float = 0.0
    retains_output: bool = False
    owner: str = ""


@dataclass(slots=True, eq=False)
class Segment:
    """The units `start + 1 … end` of a prefix.

    Attributes:
        digest: of the prefix that ends with it; empty for an output.
        returns: how often its conversation has come back; of a shared one, how often it was used again.
        used_at: when a use last began or ended.
        place: class and band of age, see `ReturnOrder`.
        is_idle: its last use has ended.
        retained_until: 0 if it is not retained.
    """

    start: int
    end: float
    digest: bytes = b""
    part: Part = "prompt"
    kind: str = ""
    returns: int = 0
    used_at: float = 0.0
    place: tuple[PrefixClass, int] = field(init=False)
    is_idle: bool = False
    retained_until: float = 0.0
    retained_pages: int = 0
    owner: str = ""

    def __post_init__(self) -> None:
        self.place = self.prefix_class, 0

    @property
    def prefix_class(self) -> PrefixClass:
        return self.part, self.kind if self.part != "shared" else "", min(self.returns.bit_length(), 3)


# Part, kind of request, and returns: none, 1, 2 to 3, more.
PrefixClass = tuple[Part, str, int]


class CachedUnit(Protocol):
    """The part of a prefix tree's node that eviction reads: see `PrefixNode`."""

    digest: bytes
    depth: int
    segment: Segment


class SegmentIndex:
    """The segments in use, and the latest others. Only called with the memory's lock held.

    Args:
        forget: called with an idle segment that is dropped because there are too many.
    """

    def __init__(self, forget: Callable[[Segment], None]) -> None:
        self._by_end: dict[bytes, Segment] = {}
        self._idle: OrderedDict[Segment, None] = OrderedDict()
        self._forget = forget

    def trace(
        self, digests: Sequence[bytes], nodes: Sequence[CachedUnit], use: PrefixUse
    ) -> tuple[list[Segment], list[Segment]]:
        """The segments of a new sequence, in order, and the known ones that return with it.

        Args:
            digests: of the prompt's units.
            nodes: those that are cached, from the first one on.
        """
        path = [segment for digest in digests if (segment := self._by_end.get(digest)) is not None]
        returning = [] if use.resumes else path.copy()
        if not use.resumes:
            self._cut(nodes, path, returning, use.kind)
            for segment in path:
                segment.returns += 1
        start = int(path[-1].end) if path else 0
        if len(digests) > start:
            returns = path[-1].returns if path and path[-1].part != "shared" else 0
            path.append(Segment(start, len(digests), digests[-1], "prompt", use.kind, returns))
            self._by_end[digests[-1]] = path[-1]
            start = len(digests)
        if use.resumes and nodes and nodes[-1].segment.part == "output":
            path.append(nodes[-1].segment)
        else:
            path.append(output_after(path[-1] if path else None, use.kind))
        return path, returning

    def _cut(self, nodes: Sequence[CachedUnit], known: list[Segment], returning: list[Segment], kind: str) -> None:
        """Let a segment end where the prompt leaves it, if the prompt leaves one midway."""
        if not nodes:
            return
        last, segment = nodes[-1], nodes[-1].segment
        if segment in known or last.depth >= segment.end or (known and known[-1].end >= last.depth):
            return
        returning.append(segment)
        length = last.depth - segment.start
        if segment.part == "prompt" and (
            length >= _NEARLY_ALL * (segment.end - segment.start) or segment.end - last.depth <= 1
        ):
            self._drop_end(segment)
            segment.end, segment.digest = last.depth, last.digest
            first = segment
        else:
            part: Part = "prompt" if segment.part == "output" else "shared"
            first = Segment(segment.start, last.depth, last.digest, part, kind, segment.returns)
            segment.start = last.depth
            for node in nodes[first.start :]:
                if node.segment is segment:
                    node.segment = first
            if part == "shared":
                first.returns = 0
                returning.pop()  # the whole has not returned
        self._by_end[first.digest] = first
        known.append(first)

    def note_idle(self, segment: Segment) -> None:
        """Note that a segment is idle now, or was used again."""
        self._idle[segment] = None
        self._idle.move_to_end(segment)
        if len(self._idle) > _MOST_SEGMENTS:
            oldest, _ = self._idle.popitem(last=False)
            self._drop_end(oldest)
            self._forget(oldest)

    def _drop_end(self, segment: Segment) -> None:
        if self._by_end.get(segment.digest) is segment:
            del self._by_end[segment.digest]

    def note_used(self, segment: Segment) -> None:
        """Note that an idle segment is in use again."""
        self._idle.pop(segment, None)


def output_after(segment: Segment | None, kind: str) -> Segment:
    """A segment for what a sequence generates."""
    if segment is None:
        return Segment(0, math.inf, part="output", kind=kind)
    returns = 0 if segment.part == "shared" else segment.returns
    return Segment(int(segment.end), math.inf, part="output", kind=kind, returns=returns)
