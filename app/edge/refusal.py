"""Answers that the guard gives itself."""

from __future__ import annotations

import math

from app.errors import FolioError, ForbiddenError
from app.openai import errors
from app.openai.replies import ErrorBody

Headers = list[tuple[bytes, bytes]]

# What follows on this connection is the rest of a body that nobody wants.
_CLOSE: Headers = [(b"connection", b"close")]
_TOO_LARGE = {413: "body_too_large", 414: "url_too_long", 431: "headers_too_large"}


class Refusal(FolioError):
    """The request is not let in. `status`, `answer` and `headers` are those of the HTTP answer."""

    def __init__(self, status: int, answer: ErrorBody, headers: Headers | None = None) -> None:
        super().__init__(answer.error.message)
        self.status = status
        self.answer = answer
        self.headers = headers or []

    @staticmethod
    def of(error: FolioError) -> Refusal:
        """As the API would answer that error."""
        status, answer = errors.error_response(error)
        headers = [(name.lower().encode(), value.encode()) for name, value in errors.error_headers(error).items()]
        return Refusal(status, answer, headers)

    @staticmethod
    def no_key(presented: bool) -> Refusal:
        if presented:
            message, challenge = "the API key is not valid here", b'Bearer error="invalid_token"'
        else:
            message, challenge = "there is no API key; send it as Authorization: Bearer KEY", b"Bearer"
        answer = errors.body(message, "invalid_request_error", None, "invalid_api_key")
        return Refusal(401, answer, [(b"www-authenticate", challenge)])

    @staticmethod
    def not_operator() -> Refusal:
        return Refusal.of(ForbiddenError("this is for operators; your API key is not one of theirs"))

    @staticmethod
    def too_large(status: int, what: str, most: int, unit: str) -> Refusal:
        """413, 414 or 431."""
        message = f"{what} may have at most {most} {unit}"
        return Refusal(status, errors.body(message, "invalid_request_error", None, _TOO_LARGE[status]), _CLOSE)

    @staticmethod
    def bad_length() -> Refusal:
        message = "Content-Length is not a number of bytes"
        return Refusal(400, errors.body(message, "invalid_request_error", None, "invalid_value"), _CLOSE)

    @staticmethod
    def too_slow(timeout_s: float) -> Refusal:
        message = f"the body has not arrived within {timeout_s:g} s; send it again"
        return Refusal(408, errors.body(message, "timeout_error", None, "timeout"), _CLOSE)

    @staticmethod
    def too_busy(most: int, retry_after_s: float) -> Refusal:
        message = f"{most} requests are being answered, as many as may be; send it again later"
        headers = [(b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))]
        return Refusal(503, errors.body(message, "server_error", None, "overloaded"), headers)
