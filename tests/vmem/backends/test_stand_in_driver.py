"""The stand-in libcuda.so.1 under the real cuda.bindings: rules and faults."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vmem.backends.stand_in_driver import GRANULARITY_BYTES as PAGE
from tests.vmem.backends.stand_in_driver import StandInDriver, build, skip_without_stand_in

NUM_PAGES = 12
OK, INVALID, OUT_OF_MEMORY, NOT_INITIALIZED, NO_CONTEXT, ALREADY_MAPPED = 0, 1, 2, 3, 201, 208
INVALID_HANDLE, NOT_READY, CONTEXT_IS_DESTROYED = 400, 600, 709


@pytest.fixture
def driver() -> Iterator[StandInDriver]:
    """An initialised device whose primary context is current in this thread."""
    driver = StandInDriver(NUM_PAGES * PAGE)
    value(driver.cuInit(0))
    value(driver.cuCtxSetCurrent(value(driver.cuDevicePrimaryCtxRetain(0))))
    yield driver
    driver.fail_at, driver.refuse_run_unmap = -1, False
    driver.cuDevicePrimaryCtxRelease(0)


def value(result: tuple[Any, ...]) -> Any:
    """The result of a call, which must succeed."""
    status, *values = result
    assert status == OK
    return values[0] if values else None


def properties(driver: Any, *, kind: int = 1, location: int = 1, ordinal: int = 0) -> Any:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType(kind)
    made.location.type = driver.CUmemLocationType(location)
    made.location.id = ordinal
    return made


def access(driver: Any, *, flags: int = 3, ordinal: int = 0) -> Any:
    made = driver.CUmemAccessDesc()
    made.location.type = driver.CUmemLocationType(1)
    made.location.id = ordinal
    made.flags = driver.CUmemAccess_flags(flags)
    return made


def reserve(driver: Any, num_pages: int) -> int:
    return int(value(driver.cuMemAddressReserve(num_pages * PAGE, PAGE, 0, 0)))


def create(driver: Any) -> int:
    return int(value(driver.cuMemCreate(PAGE, properties(driver), 0)))


def map_page(driver: Any, address: int, handle: int) -> None:
    value(driver.cuMemMap(address, PAGE, 0, handle, 0))
    value(driver.cuMemSetAccess(address, PAGE, [access(driver)], 1))


def pointer_status(driver: Any, address: int) -> int:
    status, pointer = driver.cuPointerGetAttribute(
        driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address
    )
    assert (pointer is None or int(pointer) == 0) if status != OK else int(pointer) == address
    return int(status)


def put_back(driver: Any, base: int, num_pages: int, *handles: int) -> None:
    for handle in handles:
        value(driver.cuMemRelease(handle))
    value(driver.cuMemAddressFree(base, num_pages * PAGE))
    assert driver.leftovers[:4] == (0, 0, 0, 0)


def test_nothing_works_before_the_driver_is_initialised() -> None:
    driver = StandInDriver(PAGE)
    for result in (
        driver.cuDeviceGet(0),
        driver.cuDevicePrimaryCtxRetain(0),
        driver.cuMemAddressReserve(PAGE, 0, 0, 0),
        driver.cuMemCreate(PAGE, properties(driver), 0),
        driver.cuMemGetInfo(),
        driver.cuEventCreate(0),
    ):
        assert result[0] == NOT_INITIALIZED
    assert value(driver.cuDriverGetVersion()) == 13000
    assert driver.cuGetErrorName(driver.CUresult(3)) == (OK, b"CUDA_ERROR_NOT_INITIALIZED")


def test_a_thread_without_a_context(driver: StandInDriver) -> None:
    """Pages need no context; events, streams and free memory do."""
    event = value(driver.cuEventCreate(0))
    base = reserve(driver, 1)
    statuses: list[int] = []

    def without() -> None:
        handle = create(driver)
        map_page(driver, base, handle)
        statuses.append(pointer_status(driver, base))
        value(driver.cuMemUnmap(base, PAGE))
        value(driver.cuMemRelease(handle))
        for result in (
            driver.cuMemGetInfo(),
            driver.cuEventCreate(0),
            driver.cuEventRecord(event, 0),
            driver.cuEventSynchronize(event),
            driver.cuEventDestroy(event),
            driver.cuStreamCreate(1),
            driver.cuStreamSynchronize(0),
        ):
            statuses.append(int(result[0]))
        assert int(value(driver.cuCtxGetCurrent())) == 0

    thread = threading.Thread(target=without)
    thread.start()
    thread.join()
    assert statuses == [OK] + [NO_CONTEXT] * 7
    value(driver.cuEventDestroy(event))
    put_back(driver, base, 1)


def test_the_last_release_destroys_the_primary_context(driver: StandInDriver) -> None:
    assert driver.leftovers[4] == 1
    value(driver.cuDevicePrimaryCtxRelease(0))
    assert not driver.violations
    assert driver.cuDevicePrimaryCtxGetState(0) == (OK, 0, 1)
    value(driver.cuDevicePrimaryCtxRelease(0))  # torch's
    assert driver.violations == ["the primary context was destroyed"]
    assert driver.cuMemGetInfo()[0] == CONTEXT_IS_DESTROYED
    assert driver.cuDevicePrimaryCtxRelease(0) == (NO_CONTEXT,)
    value(driver.cuDevicePrimaryCtxRetain(0))
    assert driver.cuMemGetInfo()[0] == CONTEXT_IS_DESTROYED  # the new one is another
    value(driver.cuDevicePrimaryCtxRetain(0))


def test_bounds_of_pages_and_ranges(driver: StandInDriver) -> None:
    assert value(driver.cuMemGetAllocationGranularity(properties(driver), granularity_kind(driver))) == PAGE
    for wrong in (
        properties(driver, kind=0),
        properties(driver, location=0),
        properties(driver, location=2),
        properties(driver, ordinal=1),
    ):
        assert driver.cuMemCreate(PAGE, wrong, 0)[0] == INVALID
        assert driver.cuMemGetAllocationGranularity(wrong, granularity_kind(driver))[0] == INVALID
    exported = properties(driver)
    exported.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_WIN32
    compressed = properties(driver)
    compressed.allocFlags.compressionType = 1
    for wrong in (exported, compressed):
        assert driver.cuMemCreate(PAGE, wrong, 0)[0] == INVALID
    assert driver.cuMemCreate(PAGE, properties(driver), 1)[0] == INVALID
    assert driver.cuMemCreate(PAGE + 4096, properties(driver), 0)[0] == INVALID
    assert driver.cuMemCreate(0, properties(driver), 0)[0] == INVALID
    for size, alignment, flags in ((0, PAGE, 0), (PAGE + 4096, PAGE, 0), (PAGE, 3 * PAGE, 0), (PAGE, PAGE, 1)):
        assert driver.cuMemAddressReserve(size, alignment, 0, flags)[0] == INVALID
    assert driver.cuMemAddressReserve(1 << 62, PAGE, 0, 0)[0] == OUT_OF_MEMORY
    base = int(value(driver.cuMemAddressReserve(8 << 40, 1 << 30, 0, 0)))
    assert base % (1 << 30) == 0
    assert [driver.is_reserved(a) for a in (base - 1, base, base + (8 << 40) - 1, base + (8 << 40))] == [0, 1, 1, 0]
    for address, size in ((base, PAGE), (base + PAGE, 8 << 40)):
        assert driver.cuMemAddressFree(address, size) == (INVALID,)
    value(driver.cuMemAddressFree(base, 8 << 40))
    assert driver.cuMemAddressFree(base, 8 << 40) == (INVALID,)
    assert driver.cuDeviceGet(1)[0] == 101


def granularity_kind(driver: StandInDriver) -> Any:
    return driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM


def test_mapping_rules(driver: StandInDriver) -> None:
    base, handle = reserve(driver, 4), create(driver)
    wide = int(value(driver.cuMemCreate(2 * PAGE, properties(driver), 0)))
    for arguments, status in (
        ((base, PAGE, PAGE, wide, 0), INVALID),  # offset
        ((base, PAGE, 0, wide, 0), INVALID),  # a part of a handle
        ((base, 2 * PAGE, 0, handle, 0), INVALID),
        ((base + 4096, PAGE, 0, handle, 0), INVALID),  # alignment
        ((base + 4 * PAGE, PAGE, 0, handle, 0), INVALID),  # outside
        ((base + 3 * PAGE, 2 * PAGE, 0, wide, 0), INVALID),  # half outside
        ((base, PAGE, 0, handle, 1), INVALID),
        ((base, PAGE, 0, 12345, 0), INVALID_HANDLE),
        ((base, PAGE, 0, handle + 2, 0), INVALID_HANDLE),
    ):
        assert driver.cuMemMap(*arguments) == (status,)
    value(driver.cuMemMap(base + PAGE, 2 * PAGE, 0, wide, 0))
    assert driver.cuMemMap(base + PAGE, PAGE, 0, handle, 0) == (ALREADY_MAPPED,)
    assert driver.cuMemMap(base + 2 * PAGE, PAGE, 0, handle, 0) == (ALREADY_MAPPED,)
    value(driver.cuMemMap(base, PAGE, 0, handle, 0))
    for start, size in ((base, 2 * PAGE), (base + 2 * PAGE, PAGE), (base, 4 * PAGE), (base + 3 * PAGE, PAGE)):
        assert driver.cuMemSetAccess(start, size, [access(driver)], 1) == (INVALID,)
        assert driver.cuMemUnmap(start, size) == (INVALID,)
    for wrong in (access(driver, flags=0x7FFFFFFF), access(driver, ordinal=1)):
        assert driver.cuMemSetAccess(base, PAGE, [wrong], 1) == (INVALID,)
    assert driver.cuMemSetAccess(base, 0, [access(driver)], 1) == driver.cuMemUnmap(base, 0) == (INVALID,)
    assert driver.cuMemAddressFree(base, 4 * PAGE) == (INVALID,)
    driver.refuse_run_unmap = True
    assert driver.cuMemUnmap(base, 3 * PAGE) == (INVALID,)
    driver.refuse_run_unmap = False
    value(driver.cuMemUnmap(base, 3 * PAGE))
    assert not driver.violations
    put_back(driver, base, 4, handle, wide)
    assert driver.cuMemRelease(handle) == (INVALID_HANDLE,)


def test_access_is_of_a_mapping_and_ends_with_it(driver: StandInDriver) -> None:
    base, handle = reserve(driver, 2), create(driver)
    assert pointer_status(driver, base) == INVALID
    value(driver.cuMemMap(base, PAGE, 0, handle, 0))
    assert pointer_status(driver, base) == INVALID
    value(driver.cuMemSetAccess(base, PAGE, [access(driver)], 1))
    assert [pointer_status(driver, base + i) for i in (0, PAGE - 1, PAGE)] == [OK, OK, INVALID]
    value(driver.cuMemUnmap(base, PAGE))
    value(driver.cuMemMap(base, PAGE, 0, handle, 0))
    assert pointer_status(driver, base) == INVALID
    value(driver.cuMemUnmap(base, PAGE))
    put_back(driver, base, 2, handle)


def test_aliases_show_one_page_and_new_pages_none_of_the_old(driver: StandInDriver) -> None:
    base, handle = reserve(driver, 3), create(driver)
    for place in (0, 2):
        map_page(driver, base + place * PAGE, handle)
    ctypes.memset(base, 7, PAGE)
    assert ctypes.string_at(base + 2 * PAGE, PAGE) == b"\7" * PAGE
    other = create(driver)
    map_page(driver, base + PAGE, other)
    ctypes.memset(base + PAGE, 1, PAGE)
    value(driver.cuMemUnmap(base, 3 * PAGE))
    map_page(driver, base + PAGE, handle)
    assert ctypes.string_at(base + PAGE, PAGE) == b"\7" * PAGE
    value(driver.cuMemUnmap(base + PAGE, PAGE))
    put_back(driver, base, 3, handle, other)


def test_memory_lives_until_handle_and_mappings_are_gone(driver: StandInDriver) -> None:
    """Releasing a mapped handle is legal, but a violation: a backend that does it has lost count."""
    base = reserve(driver, 1)
    handles = [create(driver) for _ in range(NUM_PAGES)]
    assert driver.cuMemCreate(PAGE, properties(driver), 0)[0] == OUT_OF_MEMORY
    assert driver.cuMemGetInfo() == (OK, 0, NUM_PAGES * PAGE)
    map_page(driver, base, handles[0])
    ctypes.memset(base, 5, PAGE)
    value(driver.cuMemRelease(handles[0]))
    assert ctypes.string_at(base, 1) == b"\5"
    assert driver.cuMemMap(base, PAGE, 0, handles[0], 0) == (INVALID_HANDLE,)
    assert driver.cuMemCreate(PAGE, properties(driver), 0)[0] == OUT_OF_MEMORY
    value(driver.cuMemUnmap(base, PAGE))
    assert driver.cuMemGetInfo() == (OK, PAGE, NUM_PAGES * PAGE)
    assert len(driver.violations) == 1
    assert "released while mapped 1 times" in driver.violations[0]
    put_back(driver, base, 1, *handles[1:])


def test_an_exported_page_lives_until_its_last_handle_and_mapping_are_gone(driver: StandInDriver) -> None:
    fd_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    exportable = properties(driver)
    exportable.requestedHandleTypes = fd_type
    base, plain, handle = reserve(driver, 2), create(driver), int(value(driver.cuMemCreate(PAGE, exportable, 0)))
    map_page(driver, base, handle)
    ctypes.memset(base, 5, PAGE)
    for wrong in ((plain, fd_type, 0), (12345, fd_type, 0), (handle, fd_type, 1)):
        assert driver.cuMemExportToShareableHandle(*wrong)[0] == INVALID
    fd = value(driver.cuMemExportToShareableHandle(handle, fd_type, 0))
    with open(os.devnull) as other:
        assert driver.cuMemImportFromShareableHandle(other.fileno(), fd_type)[0] == INVALID
    imported = int(value(driver.cuMemImportFromShareableHandle(fd, fd_type)))
    os.close(fd)
    assert imported != handle
    value(driver.cuMemUnmap(base, PAGE))
    value(driver.cuMemRelease(handle))
    assert driver.used_bytes == 2 * PAGE
    value(driver.cuMemMap(base + PAGE, PAGE, 0, imported, 0))
    value(driver.cuMemSetAccess(base + PAGE, PAGE, [access(driver, flags=1)], 1))
    value(driver.cuMemRelease(imported))
    assert ctypes.string_at(base + PAGE, PAGE) == b"\5" * PAGE
    pinned = int(value(driver.cuMemHostAlloc(PAGE, 0)))
    assert driver.cuMemcpyHtoDAsync(base + PAGE, pinned, PAGE, 0) == (INVALID,)  # it is read-only
    value(driver.cuMemFreeHost(pinned))
    value(driver.cuMemUnmap(base + PAGE, PAGE))
    assert driver.used_bytes == PAGE
    put_back(driver, base, 2, plain)
    assert driver.violations == []


def test_events_pass_with_the_work_of_their_stream(driver: StandInDriver) -> None:
    side = value(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    here, there = (value(driver.cuEventCreate(0)) for _ in range(2))
    assert driver.cuEventQuery(here) == (OK,)  # never recorded
    assert driver.cuEventElapsedTime(here, there)[0] == INVALID_HANDLE
    driver.launch(set(), side)
    value(driver.cuEventRecord(there, side))
    driver.launch(set())
    value(driver.cuEventRecord(here, 0))
    assert driver.cuEventElapsedTime(there, here)[0] == NOT_READY
    value(driver.cuStreamSynchronize(0))
    assert (driver.cuEventQuery(here), driver.cuEventQuery(there), driver.num_running) == ((OK,), (NOT_READY,), 1)
    driver.launch(set(), side)
    value(driver.cuEventSynchronize(there))
    assert (driver.cuEventQuery(there), driver.num_running) == ((OK,), 1)
    assert value(driver.cuEventElapsedTime(there, here)) >= 0
    driver.finish_work()
    assert driver.num_running == 0
    value(driver.cuStreamDestroy(side))
    for result in (driver.cuStreamSynchronize(side), driver.cuEventRecord(here, side), driver.cuStreamDestroy(0)):
        assert result == (INVALID_HANDLE,)
    for event in (here, there):
        value(driver.cuEventDestroy(event))
    for result in (driver.cuEventQuery(here), driver.cuEventRecord(here, 0), driver.cuEventDestroy(here)):
        assert result == (INVALID_HANDLE,)
    untimed = value(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    value(driver.cuEventRecord(untimed, 0))
    assert driver.cuEventElapsedTime(untimed, untimed)[0] == INVALID_HANDLE
    value(driver.cuEventDestroy(untimed))


def test_copies_read_pinned_memory_when_their_stream_gets_there(driver: StandInDriver) -> None:
    """A buffer that is filled again too early is seen in what arrives."""
    side = value(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    base, handle, source = reserve(driver, 1), create(driver), int(value(driver.cuMemHostAlloc(PAGE, 0)))
    assert driver.cuMemcpyHtoDAsync(base, source, PAGE, side) == (INVALID,)  # a hole
    map_page(driver, base, handle)
    ctypes.memset(source, 1, PAGE)
    value(driver.cuMemcpyHtoDAsync(base, source, PAGE, side))
    ctypes.memset(source, 2, PAGE)
    value(driver.cuStreamSynchronize(0))
    assert ctypes.string_at(base, 1) == b"\0"
    value(driver.cuStreamSynchronize(side))
    assert ctypes.string_at(base + PAGE - 1, 1) == b"\2"
    assert driver.violations == []
    pageable = ctypes.create_string_buffer(16)
    value(driver.cuMemcpyHtoDAsync(base, ctypes.addressof(pageable), 16, side))
    value(driver.cuMemcpyHtoDAsync(base, source, 16, side))
    value(driver.cuMemFreeHost(source))
    assert driver.cuMemFreeHost(source) == (INVALID,)
    value(driver.cuMemUnmap(base, PAGE))
    assert [text.partition(" ")[2].split(" 0x")[0] for text in driver.violations] == [
        "bytes are copied from",
        "was freed under a running copy",
        "was unmapped under a running copy",
    ]
    value(driver.cuStreamDestroy(side))
    put_back(driver, base, 1, handle)
    assert driver.host_leftovers == (0, 0, 0)


def test_steps_that_read_holes_are_violations(driver: StandInDriver) -> None:
    base, handle = reserve(driver, 2), create(driver)
    driver.launch({base, base + PAGE})
    assert driver.violations == [f"a step reads 2 pages that are not mapped, {base:#x} first"]
    driver.finish_work()
    map_page(driver, base, handle)
    driver.launch({base})
    value(driver.cuMemUnmap(base, PAGE))
    driver.violations.append("seen by the test")  # such were lost: each look at the list made a new one
    assert driver.violations[1:] == [f"{base:#x} was unmapped under a running step", "seen by the test"]
    driver.finish_work()
    map_page(driver, base, handle)
    value(driver.cuMemUnmap(base, PAGE))
    assert len(driver.violations) == 3
    put_back(driver, base, 2, handle)


@pytest.mark.parametrize("fail_at", range(1, 10))
def test_call_k_fails_and_changes_nothing(driver: StandInDriver, fail_at: int) -> None:
    """The failed call is repeated and succeeds, so that the log of names shows which call failed."""
    names = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"]
    names += ["cuMemAddressFree", "cuEventCreate", "cuEventRecord"]
    driver.fail_at, driver.fail_status = fail_at, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    failed: list[int] = []

    def insist(name: str, *arguments: Any) -> Any:
        before = driver.leftovers
        status, *values = getattr(driver, name)(*arguments)
        if status != OK:
            assert status == OUT_OF_MEMORY
            assert driver.leftovers == before
            failed.append(len(driver.calls))
            return insist(name, *arguments)
        return values[0] if values else None

    base = int(insist(names[0], PAGE, PAGE, 0, 0))
    handle = int(insist(names[1], PAGE, properties(driver), 0))
    insist(names[2], base, PAGE, 0, handle, 0)
    insist(names[3], base, PAGE, [access(driver)], 1)
    insist(names[4], base, PAGE)
    insist(names[5], handle)
    insist(names[6], base, PAGE)
    event = insist(names[7], 0)
    insist(names[8], event, 0)
    value(driver.cuEventDestroy(event))
    assert failed == [fail_at]
    assert driver.calls == [*names[:fail_at], *names[fail_at - 1 :]]
    driver.calls.clear()
    assert len(driver.calls) == 0


def test_leftovers_of_a_test_are_reported_once_to_the_next() -> None:
    driver = StandInDriver(PAGE)
    value(driver.cuInit(0))
    value(driver.cuCtxSetCurrent(value(driver.cuDevicePrimaryCtxRetain(0))))
    base, handle = reserve(driver, 1), create(driver)
    map_page(driver, base, handle)
    with pytest.raises(AssertionError, match=r"left \(1, 1, 1, 0, 1\)"):
        StandInDriver(PAGE)
    assert StandInDriver(PAGE).leftovers == (0, 0, 0, 0, 0)
    assert ctypes.string_at(base, 1) == b"\0"  # a thread of the first test may still touch it
    assert driver.cuMemGetInfo()[0] == NOT_INITIALIZED
    assert driver.cuInit(0) == (OK,)
    assert driver.cuMemGetInfo()[0] == NO_CONTEXT
    assert driver.cuMemRelease(handle) == (INVALID_HANDLE,)


def test_calls_from_several_threads(driver: StandInDriver) -> None:
    """The bindings release the GIL: lost updates would leave something behind or shorten the log."""
    num_threads, num_rounds = 4, 150

    def work() -> None:
        base, handle = reserve(driver, 2), create(driver)
        for _ in range(num_rounds):
            map_page(driver, base, handle)
            map_page(driver, base + PAGE, handle)
            value(driver.cuMemUnmap(base, 2 * PAGE))
        value(driver.cuMemRelease(handle))
        value(driver.cuMemAddressFree(base, 2 * PAGE))

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.leftovers == (0, 0, 0, 0, 1)
    assert len(driver.calls) == num_threads * (4 + 5 * num_rounds)


_TOUCH = """
import ctypes, sys
from cuda.bindings import driver

def value(result):
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None

value(driver.cuInit(0))
value(driver.cuCtxSetCurrent(value(driver.cuDevicePrimaryCtxRetain(0))))
made, size = driver.CUmemAllocationProp(), 2 << 20
made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
kind = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
assert value(driver.cuMemGetAllocationGranularity(made, kind)) == size
base = int(value(driver.cuMemAddressReserve(2 * size, size, 0, 0)))
handle = value(driver.cuMemCreate(size, made, 0))
assert driver.cuMemGetInfo()[2] - driver.cuMemGetInfo()[1] == size
if sys.argv[1] != "hole":
    value(driver.cuMemMap(base, size, 0, handle, 0))
if sys.argv[1] in ("mapped", "unmapped", "read_only"):
    access = driver.CUmemAccessDesc()
    access.location.type = made.location.type
    access.flags = driver.CUmemAccess_flags(1 if sys.argv[1] == "read_only" else 3)
    value(driver.cuMemSetAccess(base, size, [access], 1))
if sys.argv[1] == "unmapped":
    ctypes.memset(base, 1, size)
    value(driver.cuMemUnmap(base, size))
print("touching", flush=True)
ctypes.memset(base, 1, size)
print("touched", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("state", ["mapped", "hole", "no_access", "unmapped", "read_only"])
def test_the_mmu_catches_access_in_a_process_that_finds_the_stand_in_by_path(state: str) -> None:
    skip_without_stand_in()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(build())}
    command = [sys.executable, "-c", _TOUCH, state]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    told = done.stdout.split()
    expected = (0, ["touching", "touched"]) if state == "mapped" else (-signal.SIGSEGV, ["touching"])
    assert (done.returncode, told) == expected, done.stderr
