"""Folders of adapters: only those below `adapter_dir`, with links followed; versions of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from folio.app.engine.lora.source import AdapterSource, files_version, folder_below
from folio.app.errors import RequestError, UnknownModelError


def write(folder: Path, config: str = "{}", weights: str = "w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path / "adapters" / "legal" / "v2")
    write(tmp_path / "outside")
    return tmp_path / "adapters"


def test_folders_below_are_found(directory: Path) -> None:
    (directory / "current").symlink_to(directory / "legal" / "v2")
    for path in ("legal/v2", "legal/../legal/v2", str(directory / "legal/v2"), "current", "./current/"):
        assert folder_below(str(directory), path) == directory / "legal" / "v2"
    (directory.parent / "link").symlink_to(directory)
    assert folder_below(str(directory.parent / "link"), "legal/v2") == directory / "legal" / "v2"


def test_nothing_outside_is_read(directory: Path) -> None:
    """Nor does the answer say whether it exists."""
    (directory / "link").symlink_to(directory.parent / "outside")
    write(directory / "files")
    (directory / "files" / "adapter_config.json").unlink()
    (directory / "files" / "adapter_config.json").symlink_to(directory.parent / "outside" / "adapter_config.json")
    write(directory.parent / "adapters-of-others")
    outside = ("../outside", "../nowhere", str(directory.parent / "outside"), "/etc", "link", "files", "legal/../..")
    for path in (*outside, "../adapters-of-others", str(directory) + "-of-others"):
        with pytest.raises(RequestError, match="not below adapter_dir") as refused:
            folder_below(str(directory), path)
        assert (refused.value.code, refused.value.param) == ("invalid_value", "lora_path")


def test_paths_that_lead_nowhere(directory: Path) -> None:
    (directory / "round").symlink_to(directory / "round")
    (directory / "half").mkdir()
    (directory / "half" / "adapter_config.json").write_text("{}")
    (directory / "file").write_text("")
    write(directory / "folders")
    (directory / "folders" / "adapter_config.json").unlink()
    (directory / "folders" / "adapter_config.json").mkdir()
    for path, missing in (
        ("typo", "no adapter_config.json and no adapter_model"),
        ("legal", "no adapter_config.json and"),
        ("half", "has no adapter_model.safetensors"),
        ("file", "no adapter_config.json and"),
        ("folders", "has no adapter_config.json"),
        (".", "no adapter_config.json and"),
    ):
        with pytest.raises(UnknownModelError, match=missing):
            folder_below(str(directory), path)
    for path in ("a\0b", "x" * 5000, "round"):
        with pytest.raises(RequestError):
            folder_below(str(directory), path)


def test_the_version_is_the_contents(tmp_path: Path) -> None:
    versions = {
        files_version(write(tmp_path / name, *contents))
        for name, contents in (("a", ("{}", "w")), ("b", ("{}", "v")), ("c", ("{}w", "")), ("d", ("", "{}w")))
    }
    assert len(versions) == 4
    assert files_version(write(tmp_path / "elsewhere")) == files_version(tmp_path / "a")


def test_ids_differ_by_version() -> None:
    assert AdapterSource("a", "p").id == "a"
    assert AdapterSource("a", "p", "1").id == "a@1" != AdapterSource("a", "p", "2").id
