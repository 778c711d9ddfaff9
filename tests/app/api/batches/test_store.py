"""Files and batches on disk: isolation, bounds, expiry, leftovers of crashes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from folio.app.api.batches.store import BatchStore, Bounds, StoreFullError, owner_folder
from folio.app.config.http import BatchSettings
from folio.app.errors import ConfigError, RequestError, UnknownBatchError, UnknownFileError

from .fake import ALICE, BOB, CHAT, Clock, add_batch, add_file, jsonl, request_line, store_in

CONTENT = jsonl(request_line("a"))


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_one_owner_sees_nothing_of_another(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    file_id = add_file(store, ALICE, CONTENT)
    batch_id = add_batch(store, ALICE, CONTENT)
    assert store.files(BOB) == []
    assert store.batches(BOB) == []
    for call in (store.file, store.delete_file):
        with pytest.raises(UnknownFileError):
            call(BOB, file_id)
    for ask in (store.batch, store.cancel_batch):
        with pytest.raises(UnknownBatchError):
            ask(BOB, batch_id)
    with pytest.raises(UnknownFileError):
        add_batch(store, BOB, CONTENT, input_file_id=file_id)
    assert {file.id for file in store.files(ALICE)} >= {file_id}
    assert store.batch(ALICE, batch_id).status == "validating"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "file-", "/etc/passwd", "file-" + "0" * 31 + "/", "file-" + "0" * 32 + "\n", "\0"]
)
def test_ids_are_never_paths(tmp_path: Path, name: str) -> None:
    store = store_in(tmp_path / "store")
    for call in (store.file, store.delete_file):
        with pytest.raises(UnknownFileError):
            call(ALICE, name)
    for ask in (store.batch, store.cancel_batch):
        with pytest.raises(UnknownBatchError):
            ask(ALICE, name)


@pytest.mark.parametrize("owner", ["..", ".", "a/b", "x" * 64, ""])
def test_owners_names_are_never_paths(tmp_path: Path, owner: str) -> None:
    store = store_in(tmp_path / "store")
    file_id = add_file(store, owner, CONTENT, name="../../name")
    assert store.file(owner, file_id).filename == "../../name"
    assert {path.name for path in tmp_path.iterdir()} == {"store"}
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"changes", "open", owner_folder(owner)}


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    before = tree(tmp_path)
    with store.new_upload(ALICE) as upload:
        upload.write(b"x" * 100_000)
    assert tree(tmp_path) == before


def test_the_bytes_of_an_owner_and_of_the_store_are_bounded(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_bytes_per_key=8 << 20, max_bytes=12 << 20)

    def fill(owner: str) -> None:
        with store.new_upload(owner) as upload:
            for _ in range(100):
                upload.write(b"x" * (1 << 20))

    with pytest.raises(StoreFullError, match="max_bytes_per_key"):
        fill(ALICE)
    kept = add_file(store, ALICE, b"x" * (7 << 20))
    with pytest.raises(StoreFullError, match=r"\(max_bytes\)"):
        fill(BOB)
    assert store.used_bytes(BOB) == 0
    store.delete_file(ALICE, kept)
    add_file(store, BOB, b"x" * (7 << 20))


def bounded(folder: Path, most: Bounds) -> BatchStore:
    return BatchStore(folder, BatchSettings(store=folder), most=most)


def test_the_numbers_of_files_and_batches_are_bounded(tmp_path: Path) -> None:
    store = bounded(tmp_path, Bounds(files=6, batches=4, open_batches=2))
    add_batch(store, ALICE, CONTENT)
    batch_id = add_batch(store, ALICE, CONTENT)
    with pytest.raises(StoreFullError, match="have not ended"):
        add_batch(store, ALICE, CONTENT)
    for record in store.open_batches():
        store.close_batch(record)
    input_file_id = store.batch(ALICE, batch_id).input_file_id
    add_batch(store, ALICE, CONTENT, input_file_id=input_file_id)
    add_batch(store, ALICE, CONTENT, input_file_id=input_file_id)
    with pytest.raises(StoreFullError, match="4 batches"):
        add_batch(store, ALICE, CONTENT, input_file_id=input_file_id)
    with pytest.raises(StoreFullError, match="6 files"):
        add_file(store, ALICE, CONTENT)
    add_file(store, BOB, CONTENT)


def test_files_and_batches_expire(tmp_path: Path) -> None:
    clock = Clock()
    store = store_in(tmp_path, clock, keep_s=100)
    file_id = add_file(store, ALICE, CONTENT)
    batch_id = add_batch(store, ALICE, CONTENT)
    used = store.batch(ALICE, batch_id).input_file_id
    clock.now += 101
    with pytest.raises(UnknownFileError):
        store.file(ALICE, file_id)
    assert store.files(ALICE) == []
    clock.now += 3600
    store.delete_old()
    store.delete_old()  # contents of descriptions that the first time has deleted
    assert not store.content_path(ALICE, file_id).exists()
    assert store.content_path(ALICE, used).exists(), "an open batch reads it"
    [record] = store.open_batches()
    store.close_batch(record)
    store.delete_old()
    store.delete_old()
    assert tree(tmp_path) == {"changes"}


def test_leftovers_of_crashes_are_deleted_later(tmp_path: Path) -> None:
    clock = Clock()
    store = store_in(tmp_path, clock)
    file_id = add_file(store, ALICE, CONTENT)
    folder = tmp_path / owner_folder(ALICE)
    left = [
        folder / "uploads" / "half",
        folder / "files" / f"file-{'0' * 32}.jsonl",
        folder / "files" / f"{file_id}.0123",
        tmp_path / "open" / f"{owner_folder(ALICE)}.batch_{'0' * 32}",
        tmp_path / "open" / f"{owner_folder(ALICE)}.batch_{'0' * 32}.cancel",
    ]
    (folder / "uploads").mkdir(exist_ok=True)
    for path in left:
        path.write_bytes(b"x")
    store.delete_old()
    assert all(path.exists() for path in left), "they may be arriving just now"
    clock.now += 3601
    store.delete_old()
    assert not any(path.exists() for path in left)
    store.file(ALICE, file_id)


def test_a_broken_description_hides_one_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    broken, whole = add_file(store, ALICE, CONTENT), add_file(store, ALICE, CONTENT)
    (tmp_path / owner_folder(ALICE) / "files" / f"{broken}.json").write_bytes(b"\0" * 100)
    assert [file.id for file in store.files(ALICE)] == [whole]
    assert "which is invalid" in caplog.text


@pytest.mark.parametrize(
    ("fields", "param"), [({"endpoint": "/v1/audio"}, "endpoint"), ({"input_file_id": "file-x"}, None)]
)
def test_batches_that_cannot_be_created(tmp_path: Path, fields: dict[str, Any], param: str | None) -> None:
    store = store_in(tmp_path)
    with pytest.raises(RequestError) as caught:
        add_batch(store, ALICE, CONTENT, **fields)
    assert caught.value.param == param
    assert store.batches(ALICE) == []


def test_answers_are_no_requests(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with store.new_upload(ALICE) as upload:
        upload.write(CONTENT)
        answers = upload.keep("out", "batch_output", None)
    with pytest.raises(RequestError, match="purpose"):
        add_batch(store, ALICE, CONTENT, input_file_id=answers.id)


def test_threads_of_several_ingresses_keep_the_bound(tmp_path: Path) -> None:
    """Each has its own store object, as each process has."""

    def add(_: int) -> bool:
        try:
            return bool(add_file(bounded(tmp_path, Bounds(files=5)), ALICE, CONTENT))
        except StoreFullError:
            return False

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(add, range(12))) == 5 == len(store_in(tmp_path).files(ALICE))


def test_the_runners_lock_is_one(tmp_path: Path) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    lock = first.try_lock_runner()
    assert lock is not None
    assert second.try_lock_runner() is None
    lock.close()
    assert second.try_lock_runner() is not None


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"batches\.store"):
        BatchStore(tmp_path / "file" / "store", BatchSettings(store=tmp_path / "file" / "store"))


def test_the_store_is_private(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    add_batch(store, ALICE, CONTENT, endpoint=CHAT)
    assert {oct(os.stat(folder).st_mode & 0o777) for folder, _, _ in os.walk(tmp_path / "store")} == {"0o700"}
