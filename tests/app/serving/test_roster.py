"""The roster file of a ledger, which only this user can write."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from folio.app.errors import ConfigError
from folio.app.serving.ledger import Roster


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_ledger_reads_its_predecessors_roster(temporary: Path) -> None:
    assert Roster("folio-ledger:app:cpu").read() == {}
    Roster("folio-ledger:app:cpu").write({"a": 5})
    assert Roster("folio-ledger:app:cpu").read() == {"a": 5}
    assert Roster("folio-ledger:app:cuda").read() == {}
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    Roster("folio-ledger:app:cpu").write({})
    assert not list(folder.iterdir())


@pytest.mark.parametrize("made", ["link", "file", "open to others"])
def test_the_folder_must_be_private(temporary: Path, made: str) -> None:
    """Regression: the file's name in /tmp can be guessed; another user's link was followed, and its target replaced."""
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
