"""Probe of a memory backend: whether the device maps a page at two addresses."""

from __future__ import annotations

from functools import partial

from folio.vmem.backends.base import Backend, retry_undo
from folio.vmem.errors import MapError, OutOfPages

_BYTE = 0x5A


def check_mapping(backend: Backend) -> None:
    """Map one page at two addresses, write it at one and read it at the other. Nothing is left behind.

    Raises:
        MapError: the device refuses a call, has no memory for a page, or shows other bytes at the second address.
        IntegrityError: the device refuses to undo a call.
    """
    size = backend.granularity_bytes
    reserved = backend.reserve(2 * size)
    try:
        page = backend.create(size)
        try:
            backend.map(reserved.address, [page, page])
            try:
                memory = backend.tensor(reserved)
                memory[:size].fill_(_BYTE)
                if not bool((memory[size:] == _BYTE).all()):
                    raise MapError("a page that is mapped at two addresses does not show the same bytes at both")
            finally:
                retry_undo(partial(backend.unmap, reserved))
        finally:
            retry_undo(partial(backend.destroy, page))
    except OutOfPages as error:
        raise MapError(f"the device has no memory for a page of {size} bytes") from error
    finally:
        retry_undo(partial(backend.release, reserved))
