"""Who wants to hear what the edge does."""

from __future__ import annotations


class Watcher:
    """Hears it, and does nothing with it. Those that count derive from this."""

    def refused(self, code: str) -> None:
        """A request was not let in; `code` is the one of their answers."""

    def keys_read(self, problem: str | None) -> None:
        """The API keys are those of the file now; or the file has this problem, and they are those from before."""
