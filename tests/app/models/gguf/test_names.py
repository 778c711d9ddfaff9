"""Names of GGUF models, and the folders of their metadata."""

import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from folio.app.cli.main import main
from folio.app.config.args import AppArgs
from folio.app.config.checkpoint import checkpoint_faults, weight_bytes
from folio.app.config.engine import EngineConfig
from folio.app.errors import ModelError
from folio.app.models.builtin import BUILTIN_FOLDER, local_folder, resolve_model
from folio.app.models.gguf.files import read_gguf
from folio.app.models.gguf.folder import gguf_files, metadata_folder, packed_bytes
from folio.app.models.gguf.hub import chosen, is_hub_file
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.app.models.weights.key import weight_files
from tests.app.models.gguf.files import gguf_bytes, split, tiny_llama, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "folio" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_gguf(tmp_path / "models" / "tiny.Q4_K_M.gguf", *tiny_llama())


def test_a_file_is_a_folder_of_the_usual_files(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(resolve_model(str(file)))
    assert folder.parent == cache
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "gguf.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert (gguf_files(folder), weight_files(str(folder))) == ((file,), [file])
    assert weight_bytes(folder) == file.stat().st_size
    assert list(checkpoint_faults(folder)) == list(checkpoint_faults(file.parent)) == []
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    assert "model.layers.1.mlp.down_proj.weight" in checkpoint.names()
    assert resolve_model(str(file.parent)) == str(folder)  # the folder with one file
    monkeypatch.chdir(file.parent)
    assert resolve_model("tiny.Q4_K_M.gguf") == resolve_model(".") == str(folder)
    assert gguf_files(BUILTIN_FOLDER) == ()


def test_a_file_without_the_ending_is_found_by_its_magic(file: Path) -> None:
    renamed = file.rename(file.with_name("model"))
    assert gguf_files(Path(resolve_model(str(renamed)))) == (renamed,)
    (file.parent / "other").write_bytes(b"GG")
    assert resolve_model(str(file.parent / "other")) == str(file.parent / "other")


def test_a_folder_with_several(file: Path, tmp_path: Path) -> None:
    write_gguf(file.parent / "mmproj-F16.gguf", *tiny_llama())
    resolve_model(str(file.parent))  # eyes are no model
    write_gguf(file.parent / "other.gguf", *tiny_llama())
    with pytest.raises(ModelError, match=r"has 2 GGUF models; name one: other.gguf, tiny.Q4_K_M.gguf"):
        resolve_model(str(file.parent))
    split(tmp_path, 3, *tiny_llama())
    assert [path.name for path in gguf_files(Path(resolve_model(str(tmp_path))))] == [
        f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)
    ]


def test_a_changed_file_has_another_folder(file: Path, cache: Path) -> None:
    first = resolve_model(str(file))
    write_gguf(file, *tiny_llama(seed=1))
    assert resolve_model(str(file)) == first  # other weights under the same header: digests of files tell them apart
    write_gguf(file, *tiny_llama(**{"llama.context_length": 512}))
    second = Path(resolve_model(str(file)))
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 512
    assert list(cache.iterdir()) == [second]  # the outdated one is removed


def test_two_at_once(file: Path, cache: Path) -> None:
    header, found = read_gguf(file), []
    barrier = threading.Barrier(4)

    def make() -> None:
        barrier.wait()
        found.append(metadata_folder(header, [cache]))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert [*cache.iterdir()] == [*set(found)]


def test_places_that_cannot_be_used(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header, open_to_all, blocked = read_gguf(file), tmp_path / "open", tmp_path / "blocked"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    blocked.write_text("")
    caplog.set_level(logging.INFO)
    assert metadata_folder(header, [open_to_all, blocked, tmp_path / "mine"]).parent == tmp_path / "mine"
    assert "wrote config and tokenizer of" in caplog.text
    reason = r"no place for its tokenizer: .*open: others could change it; .*blocked: File exists; set XDG_CACHE_HOME"
    with pytest.raises(ValueError, match=reason):
        metadata_folder(header, [open_to_all, blocked])


def test_a_truncated_file_is_an_error_and_no_crash(file: Path) -> None:
    checkpoint = open_checkpoint(Path(resolve_model(str(file))))
    assert checkpoint is not None
    os.truncate(file, file.stat().st_size - 100)
    last = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ModelError, match="was truncated: it ends at byte"):
        checkpoint.read(last)
    checkpoint.read("model.embed_tokens.weight")
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("command", ["check", "serve", "plan"])
def test_a_damaged_file_in_a_command_line(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, config = tmp_path / "m.gguf", tmp_path / "config.yaml"
    path.write_bytes(gguf_bytes(*tiny_llama())[:-1000])
    config.write_text(f"applications: [{{import_path: 'folio.app.main:build', args: {{engine: {{model: {path}}}}}}}]")
    assert main([command, str(config if command == "check" else path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("it is truncated or damaged")
    assert str(path) in line


NAMES = ("README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "M-UD-Q8_0.gguf", "m.Q8_0.gguf", "mmproj-Q8_0.gguf")
NAMES += ("m-IQ4_XS.gguf", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf")


def test_the_file_of_a_quantisation() -> None:
    expected = {None: "m-Q4_K_M.gguf", "q8_0": "m.Q8_0.gguf", "UD-Q8_0": "M-UD-Q8_0.gguf", "IQ4_XS": "m-IQ4_XS.gguf"}
    expected |= {"BF16": "BF16/m-BF16-00001-of-00002.gguf"}
    assert {kind: chosen("a/b", NAMES, kind) for kind in expected} == expected
    assert chosen("a/b", ["x.gguf", "mmproj.gguf"], None) == "x.gguf"
    with pytest.raises(ValueError, match=r"a/b has no GGUF file in Q4_0; it has m-Q4_K_M.gguf, m-Q4_K_S.gguf, M-"):
        chosen("a/b", NAMES, "Q4_0")
    with pytest.raises(ValueError, match=r"the repository a/b has no GGUF file in Q4_K_M$"):
        chosen("a/b", ["README.md"], None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(name, True) for name in ("a/b:Q4_K_M", "hf.co/a/b", "https://huggingface.co/a/b:Q8_0", "a/b-GGUF")],
        *[(name, False) for name in ("a/b", "builtin", "b:Q4_K_M", "./a/b:Q4", "/a/b:Q4")],
    ],
)
def test_names_of_the_hub(name: str, expected: bool) -> None:
    assert is_hub_file(name) is expected
    if expected:
        assert str(local_folder(name)) == str(Path(name))  # nothing is downloaded


class _Hub(BaseHTTPRequestHandler):
    """The parts of the Hub's API that its client uses to list and fetch files."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []
    sent: ClassVar[list[int]] = [0]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        """Facts of paths."""
        paths = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        found = [
            {"type": "file", "path": path, "size": len(self.files[path]), "oid": "0" * 40, "lastCommit": None}
            for path in paths
            if path in self.files
        ]
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, *, body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path, commit = self.path.partition("?")[0], "0" * 40
        kind, content = "application/json", b""
        if path.startswith("/api/models/owner/tiny-GGUF/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{number:040}"}
                for number, (name, data) in enumerate(self.files.items())
            ]
            content = json.dumps(tree).encode()
        elif path.startswith("/api/models/owner/tiny-GGUF"):
            siblings = [{"rfilename": name} for name in self.files]
            content = json.dumps({"id": "owner/tiny-GGUF", "sha": commit, "siblings": siblings}).encode()
        elif (name := path.removeprefix("/owner/tiny-GGUF/resolve/").partition("/")[2]) in self.files:
            kind, content = "application/octet-stream", self.files[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status, whole = 200, content
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            status, content = 206, whole[int(found[1]) : int(found[2]) + 1]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{len(whole)}")
        self.sent[0] += len(content) * body
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{abs(hash(content)):040}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    _Hub.files.clear()
    _Hub.files |= {"README.md": b"x", "tiny-Q8_0.gguf": gguf_bytes(*tiny_llama(seed=1))}
    (tmp_path / "parts").mkdir()
    for path in split(tmp_path / "parts", 2, *tiny_llama(), name="tiny-Q4_K_M"):
        _Hub.files[f"Q4_K_M/{path.name}"] = path.read_bytes()
    _Hub.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolved(
    tmp_path: Path, name: str, call: str = "models.builtin import resolve_model", **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the Hub's client reads its environment once."""
    program = f"import sys; from folio.app.{call} as find; print(find(sys.argv[1]))"
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"} | environment
    command = [sys.executable, "-c", program, name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.processes
def test_a_file_of_the_hub(tmp_path: Path, hub: str) -> None:
    first = resolved(tmp_path, "hf.co/owner/tiny-GGUF:q8_0", HF_ENDPOINT=hub)
    assert first.returncode == 0, first.stderr
    [file] = gguf_files(Path(first.stdout.strip()))
    assert file.name == "tiny-Q8_0.gguf"
    assert file.read_bytes() == _Hub.files["tiny-Q8_0.gguf"]
    fetched = [request for request in _Hub.requests if request.startswith("GET /owner")]
    assert fetched == [f"GET /owner/tiny-GGUF/resolve/{'0' * 40}/tiny-Q8_0.gguf"]
    # What is there is used without the Hub.
    assert resolved(tmp_path, "owner/tiny-GGUF", HF_HUB_OFFLINE="1").stdout == first.stdout
    parts = resolved(tmp_path, "owner/tiny-GGUF", HF_ENDPOINT=hub)
    assert len(gguf_files(Path(parts.stdout.strip()))) == 2
    _Hub.requests.clear()
    assert resolved(tmp_path, "owner/tiny-GGUF:Q4_K_M", HF_ENDPOINT=hub).stdout == parts.stdout
    assert _Hub.requests == []


@pytest.mark.processes
def test_files_that_the_hub_lacks(tmp_path: Path, hub: str) -> None:
    gone = resolved(tmp_path, "owner/tiny-GGUF:Q2_K", HF_ENDPOINT=hub)
    assert "ModelError: the repository owner/tiny-GGUF has no GGUF file in Q2_K; it has tiny-Q8_0.gguf" in gone.stderr
    assert "owner/none cannot be downloaded: " in resolved(tmp_path, "owner/none:Q2_K", HF_ENDPOINT=hub).stderr
    offline = resolved(tmp_path, "owner/tiny-GGUF", HF_HUB_OFFLINE="1")
    assert "owner/tiny-GGUF cannot be downloaded: " in offline.stderr


@pytest.mark.processes
def test_a_plan_reads_headers_only(tmp_path: Path, hub: str) -> None:
    """Regression: to plan a model of the Hub was to download its GGUF file."""
    settings, tensors = tiny_llama(1, width=1 << 15, **{"llama.context_length": 128})  # 12 MiB
    _Hub.files["tiny-F32.gguf"] = gguf_bytes(settings, tensors)
    plan = "models.gguf.names import planned_gguf"
    found = resolved(tmp_path, "owner/tiny-GGUF:F32", plan, HF_ENDPOINT=hub)
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.strip())
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 128
    assert packed_bytes(folder) == sum(len(tensor.data) for tensor in tensors.values())
    assert _Hub.sent[0] < 4 << 20
    parts = resolved(tmp_path, "owner/tiny-GGUF", plan, HF_ENDPOINT=hub)
    assert parts.returncode == 0, parts.stderr
    assert "has no GGUF file in Q2_K" in resolved(tmp_path, "owner/tiny-GGUF:Q2_K", plan, HF_ENDPOINT=hub).stderr


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/a/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("m.GGUF", "m"),
        ("a/m-00001-of-00003.gguf", "m"),
        ("owner/name-GGUF:Q8_0", "name-GGUF:Q8_0"),
        ("/a/folder.1", "folder.1"),
        ("smollm2", "smollm2"),
    ],
)
def test_the_served_name(model: str, name: str) -> None:
    [config] = AppArgs(engine=EngineConfig(model=model)).shelf.models
    assert config.name == name
