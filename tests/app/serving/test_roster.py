"""The file of whom a ledger counts is this user's alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.serving.ledger import Roster


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_one_ledger_writes_the_next_one_reads(temporary: Path) -> None:
    assert Roster("folio-ledger:app:cpu").read() == {}
    Roster("folio-ledger:app:cpu").write({"a": 5})
    assert Roster("folio-ledger:app:cpu").read() == {"a": 5}
    assert Roster("folio-ledger:app:cuda").read() == {}
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    Roster("folio-ledger:app:cpu").write({})
    assert not list(folder.iterdir())


@pytest.mark.parametrize("made", ["link", "file", "open to others"])
def test_nothing_is_written_where_others_could_lead_it(temporary: Path, made: str) -> None:
    """The file's name in /tmp can be guessed: a link of somebody else's there was followed, and its target replaced."""
    Roster("x")
    [folder] = temporary.iterdir()
    folder.rmdir()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    if made == "link":
        folder.symlink_to(elsewhere)
    elif made == "file":
        folder.write_text("{}")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match="remove it"):
        Roster("x")
    assert not list(elsewhere.iterdir())
