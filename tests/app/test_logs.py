"""What is written down of exceptions."""

from __future__ import annotations

import logging
from io import StringIO

import pytest

from app.errors import ConfigError, RequestError
from app.logs import WithheldMessages, configure_logs, describe

SECRET = "xyzzy"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 - it is the value
        return caught


def test_type_and_place_without_the_message() -> None:
    text = describe(raised(ValueError(SECRET)))
    assert SECRET not in text
    assert "builtins.ValueError: (message withheld)" in text
    assert "raise error from cause" in text
    assert "test_logs.py" in text


def test_messages_that_cannot_quote_a_request_stay() -> None:
    text = describe(raised(ConfigError("max_num_seqs is 0"), OSError(28, "No space left on device")))
    assert "max_num_seqs is 0" in text
    assert "No space left on device" in text
    assert text.index("No space") < text.index("which led to") < text.index("max_num_seqs")


def test_whatever_led_to_it_and_its_parts() -> None:
    group = raised(ExceptionGroup(SECRET, [KeyError(SECRET), RequestError(SECRET)]))
    error = RuntimeError(SECRET)
    error.__context__ = group
    text = describe(raised(error))
    assert "KeyError" not in text  # as `from None` asks
    error.__suppress_context__ = False
    text = describe(error)
    assert SECRET not in text
    for name in ("builtins.KeyError", "app.errors.RequestError", "builtins.ExceptionGroup", "builtins.RuntimeError"):
        assert name in text


def test_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert describe(first).count("ValueError") == 2


def test_handlers_of_the_process_withhold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's logger has handlers of its own; being asked twice does no harm."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    serves = logging.getLogger("ray.serve")
    ours = logging.getLogger("app")
    before = ours.level, logging.getLogger().handlers[:]
    serves.addHandler(handler)
    try:
        configure_logs()
        configure_logs()
        assert [type(present) for present in handler.filters] == [WithheldMessages]
        try:
            raise ValueError(SECRET)
        except ValueError:
            serves.exception("Request failed.")
    finally:
        serves.removeHandler(handler)
        ours.setLevel(before[0])
        for present in logging.getLogger().handlers[:]:
            for added in [f for f in present.filters if isinstance(f, WithheldMessages)]:
                present.removeFilter(added)
            if present not in before[1]:
                logging.getLogger().removeHandler(present)
    assert "Request failed." in written.getvalue()
    assert "(message withheld)" in written.getvalue()
    assert SECRET not in written.getvalue()
