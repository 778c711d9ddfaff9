"""Block copies against plain indexing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from folio.kernels import KernelError, blocks, select_block_copy
from folio.kernels.cpu import build
from tests.kernels.conftest import UseCompiler

CPU = torch.device("cpu")


@pytest.mark.parametrize("words", [1, 7, 512, 3 * 8192 + 5])
def test_copies_rows_and_nothing_else(words: int) -> None:
    """Between tensors of different strides, and within one."""
    copy = select_block_copy(CPU)
    assert isinstance(copy, blocks.CpuBlockCopy)
    source = torch.randint(2**62, (9, words + 3))[:, :words]
    target = torch.zeros(12, words, dtype=torch.int64)
    rows, to = torch.tensor([3, 3, 8, 0]), torch.tensor([11, 0, 5, 7])
    expected = target.clone()
    expected[to] = source[rows]
    copy(source, target, rows, to)
    assert torch.equal(target, expected)
    expected[torch.tensor([1, 2])] = expected[torch.tensor([5, 7])]
    copy(target, target, torch.tensor([5, 7]), torch.tensor([1, 2]))
    assert torch.equal(target, expected)
    copy(source, target, rows[:0], to[:0])
    assert torch.equal(target, expected)


def test_wrong_tensors_are_named() -> None:
    source, target, rows = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64), torch.arange(2)
    for arguments, message in (
        ((source.float(), target, rows, rows), "source must be an int64"),
        ((source, target.T, rows, rows), "target must be an int64"),
        ((source, target[:, :4], rows, rows), "cannot copy 2 blocks of 8 words to 2 of 4 words"),
        ((source, target, rows, rows[:1]), "to 1 of 8 words"),
        ((source, target, rows, rows.int()), "target_rows must be"),
    ):
        with pytest.raises(ValueError, match=message):
            blocks.CpuBlockCopy()(*arguments)


@pytest.mark.processes
@pytest.mark.parametrize("fails", ["folder", "compiler", "loading"])
def test_failed_builds_raise_kernel_error(
    fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use_compiler: UseCompiler
) -> None:
    """Regression: routers failed to start where the cache folder was read-only or not executable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if fails == "folder":
        (tmp_path / "folio").write_text("no folder")
    elif fails == "compiler":
        use_compiler("exit 1")
    else:
        use_compiler('echo "no library" > "$last"')
    with pytest.raises(KernelError, match=r"copy\.cpp"):
        build.load_library("copy")


def test_without_a_compiler_there_is_no_block_copy(use_compiler: UseCompiler, caplog: pytest.LogCaptureFixture) -> None:
    use_compiler(None)
    with caplog.at_level(logging.WARNING):
        assert select_block_copy(CPU) is None
    assert "by indexing" in caplog.text
