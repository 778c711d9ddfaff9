"""The rule that keeps `make test-fast` fast."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_a_process_that_the_test_does_not_announce_is_refused() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"@pytest\.mark\.processes"):
        subprocess.run([sys.executable, "-c", ""])


@pytest.mark.processes
def test_a_process_that_the_test_announces_is_started() -> None:
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3
