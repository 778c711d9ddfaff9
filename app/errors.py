"""Errors of the application.

FolioError
├── ConfigError            settings that cannot work, found before anything starts
├── ModelError             a model that cannot be loaded, or would be served wrongly
├── RequestError           the request is invalid (HTTP 400); names the parameter
│   ├── ContextLengthError   prompt and output do not fit into the context
│   ├── PreviousResponseError  the response to continue is not stored
│   ├── UnknownModelError    no such model is served (HTTP 404)
│   ├── UnknownRequestError  no replica has the request to fork (HTTP 404)
│   ├── UnknownPinError      no prefix is pinned under that name (HTTP 404)
│   ├── UnknownReplicaError  there is no such engine replica (HTTP 404)
│   ├── UnknownFileError     the caller has no such file (HTTP 404)
│   ├── UnknownBatchError    the caller has no such batch (HTTP 404)
│   ├── UnknownResponseError the caller has no such stored response (HTTP 404)
│   └── UnknownThreadError   conversations of Anthropic's API are not stored (HTTP 404)
├── ForbiddenError         the API key does not allow the request (HTTP 403)
├── OverloadedError        the queue is full (HTTP 429); send the request again later
│   └── RateLimitError       a limit of the caller is used up (HTTP 429)
├── DeadlineError          the request's `timeout_s` has passed (HTTP 408)
└── EngineError            the engine failed (HTTP 500); the request may be sent again
    └── UnavailableError     no engine now, another one is expected (HTTP 503); send the request again
        ├── NoReplicaError   no replica started in time
        └── ModelUnavailableError  this model cannot be loaded or woken now; others of the replica are served
"""

from __future__ import annotations


class FolioError(Exception):
    """Base of every error raised by `app`."""


class ConfigError(FolioError):
    """A setting is out of its bounds, or two settings contradict each other."""


class ModelError(FolioError):
    """The model cannot be loaded, or its self-test shows that it would give wrong answers."""


class _FieldError(FolioError):
    """An error in one field of a request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)  # all arguments, for pickle
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class RequestError(_FieldError):
    """The request is invalid. `param` is the offending field, `code` a short name for programs."""

    code = "invalid_value"


class ContextLengthError(RequestError):
    """Prompt and requested output exceed the context. The messages have OpenAI's wording, which agents recognise."""

    code = "context_length_exceeded"

    @staticmethod
    def of_prompt(
        num_tokens: int, context_tokens: int, param: str, *, num_bytes: int | None = None, advice: str = ""
    ) -> ContextLengthError:
        """The prompt alone is too long.

        Args:
            num_bytes: size of a text that was not tokenised; `num_tokens` is then a lower bound.
            advice: a further sentence.
        """
        number = f"{num_tokens} tokens" if num_bytes is None else f"at least {num_tokens} tokens ({num_bytes} bytes)"
        return ContextLengthError(
            f"This model's maximum context length is {context_tokens} tokens. However, your {param} resulted in "
            f"{number}. Please reduce the length of the {param}.{advice}",
            param,
        )

    @staticmethod
    def of_output(
        num_tokens: int, max_tokens: int, context_tokens: int, prompt: str, param: str, advice: str = ""
    ) -> ContextLengthError:
        """The prompt leaves too little room for the output. `prompt` and `param` name the fields of the two."""
        return ContextLengthError(
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{num_tokens + max_tokens} tokens ({num_tokens} in the {prompt}, {max_tokens} in the completion). Please "
            f"reduce the length of the {prompt}, or {param}.{advice}",
            param,
        )


class UnknownModelError(RequestError):
    """The named model is not served here."""

    code = "model_not_found"


class UnknownRequestError(RequestError):
    """No replica has the named request: it ended too long ago, or never existed."""

    code = "request_not_found"


class UnknownPinError(RequestError):
    """No prefix is pinned under the name."""

    code = "pin_not_found"


class UnknownReplicaError(RequestError):
    """There is no such engine replica."""

    code = "replica_not_found"


class UnknownFileError(RequestError):
    """The caller has no such file, or it has expired."""

    code = "file_not_found"


class UnknownBatchError(RequestError):
    """The caller has no such batch, or it has expired."""

    code = "batch_not_found"


class UnknownResponseError(RequestError):
    """The caller has no such stored response, or it has expired."""

    code = "response_not_found"


class PreviousResponseError(RequestError):
    """The response to continue is not stored, or not the caller's."""

    code = "previous_response_not_found"


class UnknownThreadError(RequestError):
    """A conversation of Anthropic's API is to be continued, but none are stored here."""

    code = "thread_not_found"


class ForbiddenError(_FieldError):
    """The caller's API key does not allow the request. `param` is the field that it does not allow."""


class _RetryError(FolioError):
    """An error after which the request may be sent again."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s
        self.replica = ""

    def __str__(self) -> str:
        return self.message


class OverloadedError(_RetryError):
    """The queue is full.

    Attributes:
        retry_after_s: seconds until there may be room again; `None` if that is not known.
        num_queued: length of the queue; about half of it will have begun after `retry_after_s`.
        replica: the replica with that queue; empty when the ingress refused the request.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.num_queued = 0


class RateLimitError(OverloadedError):
    """A limit of the caller is used up; other callers are served. `retry_after_s`: until the limit allows a request."""


class DeadlineError(FolioError):
    """The request has not finished within its `timeout_s`."""


class EngineError(FolioError):
    """A step failed, or the engine is not running."""


class UnavailableError(_RetryError, EngineError):
    """The engine has stopped, after the loss of a rank or a fatal failure; or there is none; or the server drains.

    Attributes:
        retry_after_s: seconds until there may be another engine; `None` if that is not known.
        replica: the replica whose engine has stopped for good; empty when that is not known.
    """


class ModelUnavailableError(UnavailableError):
    """A model cannot be loaded or woken at a replica that serves others, or its engine has stopped."""


class NoReplicaError(UnavailableError):
    """There is no replica, and the request has waited for as long as it may, or too many others wait already.

    Attributes:
        replaced_within_s: time in which replicas that have gone are replaced, by measured starts; 0 if there were none.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.replaced_within_s = 0.0
