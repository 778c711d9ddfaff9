"""How messages go from rank 0 to its peers, and answers back."""

from __future__ import annotations

from typing import Protocol


class Link(Protocol):
    """Rank 0's end. `post` may be called from several threads; of `collect` one at a time.

    Both raise what the link's `check` raises: it is called now and then while they wait.
    """

    def post(self, message: bytes, *, answered: bool = False) -> None:
        """Send a message to every peer.

        Args:
            answered: every peer answers it, and `collect` follows before the next such message.
        """
        ...

    def collect(self) -> list[bytes]:
        """Every peer's answer to the last message that is answered, in the order of their ranks."""
        ...

    def close(self) -> None:
        """Nothing is sent any more."""
        ...


class PeerLink(Protocol):
    """A peer's end."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; `None` if there is none in time. Raises `EOFError` when rank 0 is gone, if that shows."""
        ...

    def reply(self, answer: bytes) -> None:
        """Answer the message received last."""
        ...
