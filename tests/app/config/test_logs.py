"""Logging of exceptions without messages that may quote requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from folio.app.config.logs import DropRefusals, WithheldMessages, configure_logs, describe
from folio.app.errors import ConfigError, DeadlineError, EngineError, ForbiddenError, OverloadedError, RequestError

SECRET = "xyzzy"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 - it is the value
        return caught


def test_type_and_place_without_the_message() -> None:
    text = describe(raised(ValueError(SECRET)))
    assert SECRET not in text
    assert "builtins.ValueError: (message withheld: it may quote a request; logging_config" in text
    assert "raise error from cause" in text
    assert "test_logs.py" in text


def test_messages_that_cannot_quote_a_request_stay() -> None:
    text = describe(raised(ConfigError("max_num_seqs is 0"), OSError(28, "No space left on device")))
    assert "max_num_seqs is 0" in text
    assert "No space left on device" in text
    assert text.index("No space") < text.index("which led to") < text.index("max_num_seqs")


def test_causes_and_parts() -> None:
    group = raised(ExceptionGroup(SECRET, [KeyError(SECRET), RequestError(SECRET)]))
    error = RuntimeError(SECRET)
    error.__context__ = group
    text = describe(raised(error))
    assert "KeyError" not in text  # as `from None` asks
    error.__suppress_context__ = False
    text = describe(error)
    assert SECRET not in text
    for name in (
        "builtins.KeyError",
        "folio.app.errors.RequestError",
        "builtins.ExceptionGroup",
        "builtins.RuntimeError",
    ):
        assert name in text


def test_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert describe(first).count("ValueError") == 2


@pytest.fixture
def written() -> Iterator[StringIO]:
    """What a handler of Serve's logger writes after `configure_logs`, which is asked twice."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    serves = logging.getLogger("ray.serve")
    ours = logging.getLogger("folio")
    before = ours.level, serves.level, logging.getLogger().handlers[:]
    serves.addHandler(handler)
    try:
        configure_logs()
        configure_logs()
        assert [type(present) for present in handler.filters] == [WithheldMessages, DropRefusals]
        yield written
    finally:
        serves.removeHandler(handler)
        ours.setLevel(before[0])
        serves.setLevel(before[1])
        for present in logging.getLogger().handlers[:]:
            for added in [f for f in present.filters if isinstance(f, WithheldMessages | DropRefusals)]:
                present.removeFilter(added)
            if present not in before[2]:
                logging.getLogger().removeHandler(present)


def serve_logs(error: Exception) -> None:
    """As Serve does with whatever a replica's method raises."""
    try:
        raise error
    except Exception:
        logging.getLogger("ray.serve").exception("Request failed.")


def test_handlers_of_the_process_withhold(written: StringIO) -> None:
    """Serve's logger has handlers of its own."""
    serve_logs(ValueError(SECRET))
    assert "Request failed." in written.getvalue()
    assert "(message withheld" in written.getvalue()
    assert SECRET not in written.getvalue()


def test_withheld_messages_are_shown_at_debug(written: StringIO) -> None:
    """Regression: "(message withheld)" did not say how; `log_level: DEBUG` of the deployment sets this logger's."""
    logging.getLogger("ray.serve").setLevel(logging.DEBUG)
    serve_logs(ValueError(SECRET))
    assert SECRET in written.getvalue()


@pytest.mark.parametrize(
    "error",
    [RequestError(SECRET, "prompt"), ForbiddenError(SECRET), OverloadedError(SECRET), DeadlineError(SECRET)],
)
def test_refusals_are_not_logged(written: StringIO, error: Exception) -> None:
    """Regression: each 400 left 36 lines of traceback in the log."""
    serve_logs(error)
    assert written.getvalue() == ""
    serve_logs(EngineError("a step failed"))
    assert "Request failed." in written.getvalue()
