"""KV memory: blocks, block tables, pages, regions, backends. Knows nothing of models, requests or Ray.

Importing the package does not import torch: routers and clients need the reports and prefix keys only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vmem.backends.base import AddressRange, Backend, MemoryInfo
from vmem.budget import BudgetAnswer
from vmem.device_pages import DevicePages
from vmem.errors import BudgetError, IntegrityError, LayoutError, MapError, OutOfPages, OutOfSwap, PinError, VmemError
from vmem.eviction import EvictionOrder, EvictionQueue, ReturnOrder
from vmem.group import LayerGroup, longest_sequence
from vmem.layout import KVLayout, LayerSpec, LayoutKind, StateLayout, plan_groups, plan_layout
from vmem.mapper_policy import MappingOptions
from vmem.pins import PinReport
from vmem.prefix_summary import CHANGE_BYTES, KEY_BYTES, NO_KEYS, CachedKeys, CachedPrefix, key_of, split_keys
from vmem.prefix_tree import PrefixMatch, PrefixNode, TokenChain
from vmem.report import GroupReport, MemoryReport
from vmem.segments import PrefixUse
from vmem.sequence import GroupTable, SequenceMemory, StepDemand, View, ViewPolicy
from vmem.snapshot import BlockState, MemorySnapshot, SequenceSnapshot, TableSnapshot, take_snapshot
from vmem.swapping import SwappedGroup
from vmem.tensor_parallel.orders import PeerRanks

if TYPE_CHECKING:
    from vmem.backends.cuda import CudaBackend
    from vmem.backends.host import HostBackend
    from vmem.backends.select import select_backend
    from vmem.memory import KVMemory
    from vmem.tensor_parallel.mirror import MirroredBackend, mirror
    from vmem.tensor_parallel.peer import PeerMemory
    from vmem.tensors import BlockContents, CacheTensors, CopyBlocks, LocalContents

# fmt: off
__all__ = [
    "CHANGE_BYTES", "KEY_BYTES", "NO_KEYS", "AddressRange", "Backend", "BlockContents", "BlockState", "BudgetAnswer",
    "BudgetError", "CacheTensors", "CachedKeys", "CachedPrefix", "CopyBlocks", "CudaBackend", "DevicePages",
    "EvictionOrder", "EvictionQueue", "GroupReport", "GroupTable", "HostBackend", "IntegrityError", "KVLayout",
    "KVMemory", "LayerGroup", "LayerSpec", "LayoutError", "LayoutKind", "LocalContents", "MapError", "MappingOptions",
    "MemoryInfo", "MemoryReport", "MemorySnapshot", "MirroredBackend", "OutOfPages", "OutOfSwap", "PeerMemory",
    "PeerRanks", "PinError", "PinReport", "PrefixMatch", "PrefixNode", "PrefixUse", "ReturnOrder", "SequenceMemory",
    "SequenceSnapshot", "StateLayout", "StepDemand", "SwappedGroup", "TableSnapshot", "TokenChain", "View",
    "ViewPolicy", "VmemError", "key_of", "longest_sequence", "mirror", "plan_groups", "plan_layout", "select_backend",
    "split_keys", "take_snapshot",
]
# fmt: on

# Names that are imported at their first use, and their modules.
_NEED_TORCH = {
    "select_backend": "vmem.backends.select",
    "CudaBackend": "vmem.backends.cuda",
    "HostBackend": "vmem.backends.host",
    "KVMemory": "vmem.memory",
    "MirroredBackend": "vmem.tensor_parallel.mirror",
    "mirror": "vmem.tensor_parallel.mirror",
    "PeerMemory": "vmem.tensor_parallel.peer",
    "BlockContents": "vmem.tensors",
    "CacheTensors": "vmem.tensors",
    "CopyBlocks": "vmem.tensors",
    "LocalContents": "vmem.tensors",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_NEED_TORCH[name]), name)
        return value
