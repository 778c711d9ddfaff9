"""Who has refused requests lately, so that nobody is asked in vain: one ingress's view."""

from __future__ import annotations

import math

# A replica that was full is asked again after this long at the latest. A full queue has work for longer.
MOST_PAUSE_S = 0.25


class Refusals:
    """Replicas whose queues were full a moment ago, and whether all were.

    A replica that refuses a request says when about half of its queue will have begun. Until half of that time has
    passed, or `most_pause_s`, others are asked before it. Once all have refused the door is closed until the first
    of them is worth asking again. By then at most a quarter of its queue has begun, so nothing runs dry, and meanwhile
    a refusal costs neither a call nor tokenising.

    Times are seconds of one clock. One thread at a time.
    """

    def __init__(self, most_pause_s: float = MOST_PAUSE_S) -> None:
        self._most_pause_s = most_pause_s
        self._asked_again_at: dict[str, float] = {}
        self._room_at: dict[str, float] = {}
        self._opens_at = self._first_room_at = -math.inf

    def note(self, replica: str, retry_after_s: float, now: float) -> None:
        """A replica has refused a request."""
        self._asked_again_at[replica] = now + min(self._most_pause_s, retry_after_s / 2)
        self._room_at[replica] = now + retry_after_s

    def lately(self, now: float) -> tuple[str, ...]:
        """Replicas to be asked last."""
        for replica in [r for r, at in self._asked_again_at.items() if at <= now]:
            del self._asked_again_at[replica], self._room_at[replica]
        return tuple(self._asked_again_at)

    def close(self, now: float) -> float:
        """All replicas have refused, each as `note` has it; returns after how many seconds the first may have room."""
        if self.lately(now):
            self._opens_at = min(self._asked_again_at.values())
            self._first_room_at = min(self._room_at.values())
        return max(self._first_room_at - now, 0.0)

    def retry_after_s(self, now: float) -> float | None:
        """While the door is closed: when to come again; else `None`."""
        return max(self._first_room_at - now, 0.0) if now < self._opens_at else None
