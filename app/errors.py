"""What can go wrong in the application.

FolioError
├── ConfigError            settings that cannot work, found before anything starts
├── ModelError             a model that cannot be loaded, or would be served wrongly
├── RequestError           the request is at fault (HTTP 400); names the parameter
│   ├── ContextLengthError   prompt and output do not fit into the context
│   ├── UnknownModelError    no such model here (HTTP 404)
│   ├── UnknownRequestError  nothing is known of the request to fork (HTTP 404)
│   └── UnknownPinError      no prefix is pinned under that name (HTTP 404)
├── ForbiddenError         the caller may not ask for that (HTTP 403)
├── OverloadedError        the queue is full (HTTP 429); send the request again later
│   └── RateLimitError       the caller has asked for as much as it may (HTTP 429)
├── DeadlineError          the request's `timeout_s` has passed (HTTP 408)
└── EngineError            the engine is at fault (HTTP 500); the request may be sent again
    └── UnavailableError     the engine is gone, and another one is coming (HTTP 503); send the request again
        └── NoReplicaError   the request has waited for one in vain
"""

from __future__ import annotations


class FolioError(Exception):
    """Base of every error raised by `app`."""


class ConfigError(FolioError):
    """A setting is out of its bounds, or two settings contradict each other."""


class ModelError(FolioError):
    """The model cannot be loaded, or its self-test shows that it would give wrong answers."""


class RequestError(FolioError):
    """The request is invalid. `param` is the offending field, `code` a short name for programs."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class ContextLengthError(RequestError):
    """Prompt and requested output are longer than the context."""

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """The named model is not served here."""

    code = "model_not_found"


class UnknownRequestError(RequestError):
    """No replica has the request that was named: it ended too long ago, or never was."""

    code = "request_not_found"


class UnknownPinError(RequestError):
    """No prefix is pinned under the name."""

    code = "pin_not_found"


class ForbiddenError(FolioError):
    """The caller's API key does not allow what the request asks for. `param` is the field that does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class OverloadedError(FolioError):
    """As many requests wait as may.

    Attributes:
        retry_after_s: when there may be room again; `None` if that is not known.
        num_queued: requests that wait where it was refused, of which about half will have begun by then.
        replica: the one that refused; empty when it was not one of them.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)  # all, or it could not be pickled
        self.message = message
        self.retry_after_s = retry_after_s
        self.num_queued = 0
        self.replica = ""

    def __str__(self) -> str:
        return self.message


class RateLimitError(OverloadedError):
    """One caller has asked for as much as it may; others are served. `retry_after_s`: when it may ask again."""


class DeadlineError(FolioError):
    """The request has not finished within its `timeout_s`."""


class EngineError(FolioError):
    """A step failed, or the engine is not running."""


class UnavailableError(EngineError):
    """The engine has stopped: it lost a rank, or it failed in a way that it cannot go on from. Or there is none, or the
    server is about to stop.

    Attributes:
        retry_after_s: when there may be another; `None` if that is not known.
        replica: the one whose engine has stopped, for good; empty when that is not known.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s
        self.replica = ""

    def __str__(self) -> str:
        return self.message


class NoReplicaError(UnavailableError):
    """There is no replica for the request, and it has waited for one as long as may be, or too many others do."""
