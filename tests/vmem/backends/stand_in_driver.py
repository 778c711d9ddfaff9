"""The real `cuda.bindings.driver` over a stand-in for `libcuda.so.1` (libcuda.c), for tests on machines without a GPU.

Breaking a rule gives the status the real driver gives: a page maps at offset 0 and whole, no address twice, unmap takes
whole mappings, access must be granted before use, released handles are gone, events need a context in the calling
thread. Work takes as long as the test likes: `launch` says what a step reads and on which stream, events pass when
`finish_work` has finished what was before them on their stream. A copy from host memory reads its source only when it
is finished, so a buffer that is used again too early shows. Violations are unmapping what an unfinished step reads or
an unfinished copy writes, launching a step that reads what is not mapped, copying from memory that is not pinned or
freeing it before the copy is finished, releasing a mapped handle, and giving up the last reference on the primary
context, of which torch holds one from the start. Calls may come from several threads.

The stand-in is one device per process, so there is one driver at a time. A process that has no use for these controls
needs only `build()` on its `LD_LIBRARY_PATH`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

GRANULARITY_BYTES = 65536
_SOURCE = Path(__file__).with_name("libcuda.c")
_FLAGS = ["-std=gnu11", "-O2", "-fvisibility=hidden", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
_MOST_VIOLATIONS_KEPT = 64


def build() -> Path:
    """The folder of the stand-in `libcuda.so.1`, compiled if the source has changed."""
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "folio"
    library = cache_folder / f"stand-in-{key}" / "libcuda.so.1"
    if not library.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("no C compiler (gcc) found; install one, for example `apt-get install g++`")
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder) as folder:
            built = Path(folder) / library.name
            subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(built)], check=True)
            built.replace(library)  # atomic: another process may be building the same one
    return library.parent


def skip_without_stand_in() -> None:
    """Skip the test where the stand-in cannot be the process's driver, or the real bindings are missing."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, and its driver is this process's libcuda.so.1")
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")


class _Controls(ctypes.Structure):
    """`standin` in libcuda.c: settings, then counters."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("capacity_bytes", "granularity_bytes", "granularity_status")),
        *((name, ctypes.c_int64) for name in ("refuse_run_unmap", "fail_at", "fail_status")),
        *((name, ctypes.c_double) for name in ("fail_rate", "slow_rate")),
        *((f"num_{name}", ctypes.c_int64) for name in ("handles", "reservations", "mappings", "events", "contexts")),
        *((f"num_{name}", ctypes.c_int64) for name in ("running", "calls", "violations", "set_current")),
        *((f"num_{name}", ctypes.c_int64) for name in ("pinned", "streams", "copies")),
        ("used_bytes", ctypes.c_uint64),
    )


@cache
def _load() -> ctypes.CDLL:
    """Make the stand-in this process's `libcuda.so.1`, by its SONAME."""
    library = ctypes.CDLL(str(build() / "libcuda.so.1"), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    found = ctypes.CDLL("libcuda.so.1")
    if not hasattr(found, "standin_reset"):
        raise RuntimeError("another libcuda.so.1 is loaded in this process already")
    library.standin_reset.argtypes = [ctypes.c_uint64]
    library.standin_launch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64]
    library.standin_finish_work.argtypes = library.standin_is_reserved.argtypes = [ctypes.c_uint64]
    for get_text in (library.standin_call, library.standin_violation):
        get_text.argtypes, get_text.restype = [ctypes.c_size_t], ctypes.c_char_p
    return library


class StandInDriver:
    """`cuda.bindings.driver` over the stand-in with `capacity_bytes` of memory, and a test's controls over that.

    Settings: call number `fail_at` fails with `fail_status`, and so does each with probability `fail_rate`; with
    probability `slow_rate` a call takes a millisecond. With `refuse_run_unmap` an unmap takes one mapping only. A test
    may put a function of its own in the place of a call.

    Args:
        may_follow_leftovers: do not insist that the driver before has left the device empty. Hypothesis, which repeats
            a failed example, would see another failure.
    """

    def __init__(self, capacity_bytes: int, *, may_follow_leftovers: bool = False) -> None:
        skip_without_stand_in()
        library = _load()
        vars(self).update(
            _library=library,
            _controls=_Controls.in_dll(library, "standin"),
            _bindings=importlib.import_module("cuda.bindings.driver"),
            _violations=[],
            _num_taken=0,
        )
        left = self.leftovers
        library.standin_reset(capacity_bytes)
        self.granularity_bytes = GRANULARITY_BYTES
        assert may_follow_leftovers or not any(left), (
            f"the test before left {left} handles, reservations, mappings, events and contexts"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controls if hasattr(_Controls, name) else self._bindings, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(_Controls, name):
            setattr(self._controls, name, value if isinstance(value, float) else int(value))
        elif hasattr(self._bindings, name):
            vars(self)[name] = value
        else:
            raise AttributeError(f"{name} is neither a setting of the stand-in nor a call of the driver")

    def launch(self, addresses: set[int], stream: Any = 0) -> None:
        """Run a step that reads these pages on the stream until `finish_work`."""
        self._library.standin_launch((ctypes.c_uint64 * len(addresses))(*addresses), len(addresses), int(stream))

    def finish_work(self, num_steps: int | None = None) -> None:
        """Finish the oldest `num_steps` steps of all streams; by default everything submitted."""
        self._library.standin_finish_work(2**64 - 1 if num_steps is None else num_steps)

    @property
    def leftovers(self) -> tuple[int, int, int, int, int]:
        """Numbers of handles, reservations, mappings, events and contexts left, without torch's."""
        now = self._controls
        return now.num_handles, now.num_reservations, now.num_mappings, now.num_events, now.num_contexts - 1

    @property
    def host_leftovers(self) -> tuple[int, int, int]:
        """Numbers of pinned host allocations, streams and unfinished copies left."""
        now = self._controls
        return now.num_pinned, now.num_streams, now.num_copies

    def is_reserved(self, address: int) -> bool:
        """Whether the address is in a range reserved here."""
        return bool(self._library.standin_is_reserved(address))

    @property
    def calls(self) -> _Calls:
        return _Calls(self._library, self._controls)

    @property
    def violations(self) -> list[str]:
        """Violations of the rules: the first 64 of the device, and those that a test adds."""
        taken = self._num_taken
        vars(self)["_num_taken"] = now = min(self._controls.num_violations, _MOST_VIOLATIONS_KEPT)
        self._violations.extend(self._library.standin_violation(i).decode() for i in range(taken, now))
        return self._violations


class _Calls(Sequence[str]):
    """Names of the calls that may be made to fail, in order."""

    def __init__(self, library: ctypes.CDLL, controls: Any) -> None:
        self._library, self._controls = library, controls

    def __len__(self) -> int:
        return int(self._controls.num_calls)

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[i] for i in found]
        return self._library.standin_call(found).decode()

    def __eq__(self, other: object) -> bool:
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def clear(self) -> None:
        self._library.standin_clear_calls()
