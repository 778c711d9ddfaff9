"""DLPack export: tensors over addresses that may be holes.

DLPack states the device. Other ways to wrap a pointer ask the driver for its device and fail on unmapped addresses.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch.utils.dlpack

from vmem.backends.base import AddressRange

CPU, CUDA = 1, 2  # DLDeviceType
_UINT = 1  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# By address, the DLManagedTensors that torch still uses; the deleter removes them.
_alive: dict[int, tuple[_ManagedTensor, Any]] = {}


@_Deleter
def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


def export_uint8(span: AddressRange, device_type: int, device_id: int) -> torch.Tensor:
    """A uint8 tensor `[num_bytes]` over the range. It owns nothing; only mapped parts may be touched."""
    shape = (ctypes.c_int64 * 1)(span.num_bytes)
    tensor = _Tensor(span.address, device_type, device_id, 1, _UINT, 8, 1, shape, None, 0)
    managed = _ManagedTensor(tensor, None, _delete)
    _alive[ctypes.addressof(managed)] = (managed, shape)
    return torch.utils.dlpack.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
