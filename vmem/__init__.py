"""KV memory: blocks, block tables, pages, regions, backends. Knows nothing of models, requests or Ray."""

from vmem.backend import AddressRange, Backend, MemoryInfo
from vmem.block_pool import BlockPool
from vmem.cuda import CudaBackend
from vmem.errors import IntegrityError, LayoutError, MapError, OutOfPages, VmemError
from vmem.host import HostBackend
from vmem.layout import KVLayout, LayerSpec, plan_layout
from vmem.memory import KVMemory, MemoryReport, SequenceMemory, View

__all__ = [
    "AddressRange",
    "Backend",
    "BlockPool",
    "CudaBackend",
    "HostBackend",
    "IntegrityError",
    "KVLayout",
    "KVMemory",
    "LayerSpec",
    "LayoutError",
    "MapError",
    "MemoryInfo",
    "MemoryReport",
    "OutOfPages",
    "SequenceMemory",
    "View",
    "VmemError",
    "plan_layout",
]
