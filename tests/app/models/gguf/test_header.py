"""Headers of GGUF files: what they say, and that damaged ones are refused with one line."""

import random
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from folio.app.models.gguf.files import is_first_or_whole, read_gguf
from folio.app.models.gguf.header import _KINDS, READ_KINDS
from folio.app.models.quantised.gguf_blocks import _BLOCKS, _DENSE
from tests.app.models.gguf.files import Tensor, gguf_bytes, split, tiny_llama, write_gguf

SETTINGS = {"general.architecture": "llama", "a.list": [1, 2, 3], "a.texts": ["x", "é"], "a.flag": True, "a.f": 0.5}
TENSORS = {"x.weight": Tensor("Q8_0", (3, 64), bytes(range(204))), "y.weight": Tensor("F32", (5,), bytes(20))}


def fault(path: Path, content: bytes | None = None) -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        read_gguf(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("version", [2, 3])
def test_settings_and_tensors(tmp_path: Path, version: int) -> None:
    header = read_gguf(write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS, version=version))
    assert header.settings == {name: tuple(v) if isinstance(v, list) else v for name, v in SETTINGS.items()}
    x, y = header.tensors["x.weight"], header.tensors["y.weight"]
    assert (x.kind, x.shape, x.num_bytes, y.kind, y.shape) == ("Q8_0", (3, 64), 204, "F32", (5,))
    assert (tmp_path / "m.gguf").read_bytes()[x.offset :][:204] == bytes(range(204))
    assert (header.num_values, header.num_bytes) == (197, 224)


def test_another_alignment(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SETTINGS | {"general.alignment": 256}, TENSORS, align=256)
    assert read_gguf(path).tensors["y.weight"].offset % 256 == 0


def test_a_file_that_is_truncated_anywhere(tmp_path: Path) -> None:
    content = gguf_bytes(*tiny_llama(1))
    end = max(tensor.offset + tensor.num_bytes for tensor in _tensors(tmp_path, content))
    start = len(content) - sum(-(-tensor.num_bytes // 32) * 32 for tensor in _tensors(tmp_path, content))
    for length in {*range(400), *range(400, start, 37), *range(start, end, 997), end - 1}:
        assert "truncated or damaged" in (found := fault(tmp_path / "t.gguf", content[:length])) or "can hold" in found


def _tensors(folder: Path, content: bytes) -> Any:
    path = folder / "whole.gguf"
    path.write_bytes(content)
    return read_gguf(path).tensors.values()


def _start(version: int = 3, tensors: int = 0, settings: int = 0, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, settings)


def _setting(kind: int, data: bytes) -> bytes:
    return _start(settings=1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + data


def _tensor(*shape: int, kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    layout = f"<Q1sI{len(shape)}QIQ"
    return struct.pack(layout, 1, b"x", len(shape) if dimensions is None else dimensions, *shape, kind, offset)


HUGE = 2**64 - 1
DAMAGED = {
    "nothing": (b"", "its first 4 bytes ends at byte 4, beyond the file's 0 bytes"),
    "another format": (b"PK\3\4" + bytes(99), r"it is no GGUF file: it begins with b'PK\x03\x04'"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "version 1": (_start(version=1), "it has version 1 of GGUF; Folio reads versions 2 and 3"),
    "version 4": (_start(version=4), "it has version 4 of GGUF"),
    "big-endian": (_start(order=">"), "it is a big-endian GGUF file"),
    "settings": (_start(settings=HUGE), f"it has {HUGE} settings, more than its 24 bytes can hold"),
    "tensors": (_start(tensors=2**40), "it has 1099511627776 tensors, more than"),
    "a long name": (_start(settings=1) + struct.pack("<Q", 2**62) + bytes(40), "beyond the file's"),
    "a long text": (_setting(8, struct.pack("<Q", HUGE)), "beyond the file's"),
    "a long list": (_setting(9, struct.pack("<IQ", 4, 2**61)), "2305843009213693952 items in 'a', more than"),
    "many texts": (_setting(9, struct.pack("<IQ", 8, 2**61)), "2305843009213693952 items in 'a', more than"),
    "lists of lists": (_setting(9, struct.pack("<IQ", 9, 1) + bytes(99)), "'a' has the unknown type 9"),
    "a type": (_setting(99, bytes(99)), "'a' has the unknown type 99"),
    "no UTF-8": (_setting(8, struct.pack("<Q", 1) + b"\xff"), "'a' is no UTF-8"),
    "twice": (
        _start(settings=2) + 2 * (struct.pack("<Q1sIB", 1, b"a", 0, 0)) + bytes(9),
        "it has the setting 'a' twice",
    ),
    "dimensions": (_start(tensors=1) + _tensor(1, dimensions=5) + bytes(99), "has 5 dimensions"),
    "no dimensions": (_start(tensors=1) + _tensor(1, dimensions=0) + bytes(99), "has 0 dimensions"),
    "an empty tensor": (_start(tensors=1) + _tensor(0, 3) + bytes(99), "has the shape [3, 0]"),
    "a part of a block": (_start(tensors=1) + _tensor(33, kind=2) + bytes(99), "has the shape [33], with rows of 32s"),
    "a tensor's type": (_start(tensors=1) + _tensor(32, kind=4) + bytes(99), "has the unknown type 4"),
    "an offset": (_start(tensors=1) + _tensor(1, offset=3) + bytes(99), "begins at 3 of the data, no multiple of 32"),
    "beyond the file": (_start(tensors=1) + _tensor(1, offset=2**63) + bytes(99), "it is truncated or damaged"),
    "a huge tensor": (_start(tensors=1) + _tensor(2**40, 2**40) + bytes(99), "it is truncated or damaged"),
    "a longer name": (_start(settings=1) + struct.pack("<Q", 2000) + bytes(3000), "at most 1024 are possible"),
    "a line break": (_start(settings=1) + struct.pack("<Q3sIQ", 3, b"a\nb", 8, 99), r"'a\nb' ends at byte"),
    "an overlap": (
        _start(tensors=2) + _tensor(16) + _tensor(16, offset=32).replace(b"x", b"y") + bytes(199),
        "its tensors 'x' and 'y' overlap",
    ),
    "tensors twice": (_start(tensors=2) + 2 * _tensor(1) + bytes(99), "it has the tensor 'x' twice"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    content, named = DAMAGED[kind]
    assert named in fault(tmp_path / "m.gguf", content)


@pytest.mark.parametrize("alignment", [0, 3, -32, 2**30, 0.5, "32"])
def test_alignments_that_are_none(tmp_path: Path, alignment: object) -> None:
    content = gguf_bytes(SETTINGS | {"general.alignment": alignment}, TENSORS)
    assert "it must be a power of 2" in fault(tmp_path / "m.gguf", content)


def test_random_damage_costs_little_and_raises_one_kind_of_error(tmp_path: Path) -> None:
    """Bytes are changed at random: a file is read, or refused with a line, and memory stays in proportion to it."""
    dice, content = random.Random(0), gguf_bytes(*tiny_llama(1))
    path, lines = tmp_path / "m.gguf", list[str]()
    start = len(content) - 40_000
    tracemalloc.start()
    try:
        for _ in range(600):
            damaged = bytearray(content)
            for _ in range(dice.choice([1, 1, 2, 8])):
                at = dice.randrange(start) if dice.random() < 0.5 else dice.randrange(600)
                damaged[at] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])
            path.write_bytes(damaged)
            try:
                read_gguf(path)
            except ValueError as error:
                lines.append(str(error))
        assert tracemalloc.get_traced_memory()[1] < 20 * len(content)
    finally:
        tracemalloc.stop()
    assert 100 < len(lines) < 600
    assert not any("\n" in line for line in lines)


def test_what_is_no_file(tmp_path: Path) -> None:
    assert "is not there" in fault(tmp_path / "gone.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "is not there" in fault(tmp_path / "folder.gguf")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    settings, tensors = tiny_llama(1)
    paths = split(tmp_path, 3, settings, tensors)
    header = read_gguf(paths[1])
    assert header.files == tuple(paths)
    assert header.settings["general.architecture"] == "llama"
    assert header.tensors.keys() == tensors.keys()
    assert {tensor.file for tensor in header.tensors.values()} == set(paths)
    assert [is_first_or_whole(path) for path in (*paths, tmp_path / "m.gguf")] == [True, False, False, True]


def test_faults_of_several_files(tmp_path: Path) -> None:
    settings, tensors = tiny_llama(1)
    first, second, third = split(tmp_path, 3, settings, tensors)
    content = second.read_bytes()
    second.unlink()
    assert f"{second}, one of 3 files of the model is not there" in fault_of(first)
    second.write_bytes(third.read_bytes())
    assert f"{second} is part 2 by its name" in fault_of(first)
    write_gguf(second, {"split.count": 3}, dict([next(iter(tensors.items()))]))
    assert "has the tensor 'token_embd.weight', and so has a file before it" in fault_of(first)
    write_gguf(second, {"split.count": 4}, {})
    assert "is of a model of 4 files (split.count), and there are 3" in fault_of(first)
    write_gguf(second, {"split.count": 3}, {})
    assert "split.tensors.count says 11" in fault_of(first)
    second.write_bytes(content)
    read_gguf(first)
    wrong = first.rename(tmp_path / "m-00004-of-00003.gguf")
    assert "is part 4 of 3 by its name" in fault_of(wrong)


def fault_of(path: Path) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        read_gguf(path)
    return str(error.value)


def test_the_kinds_that_are_read_have_decoders() -> None:
    assert {*_BLOCKS, *_DENSE} == set(READ_KINDS)
    sizes = {name: (values, num_bytes) for name, values, num_bytes in _KINDS.values()}
    assert all(sizes[name] == (values, num_bytes) for name, (values, num_bytes, _) in _BLOCKS.items())
