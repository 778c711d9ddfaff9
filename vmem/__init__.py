"""KV memory: blocks, block tables, pages, regions, backends. Knows nothing of models, requests or Ray.

Importing the package does not import torch: routers and clients need the reports and prefix keys only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from folio.vmem.backends.base import AddressRange, Backend, MemoryInfo
from folio.vmem.blocks.eviction import EvictionOrder, EvictionQueue, ReturnOrder
from folio.vmem.blocks.segments import PrefixUse
from folio.vmem.blocks.snapshot import BlockState, MemorySnapshot, SequenceSnapshot, TableSnapshot, take_snapshot
from folio.vmem.budget import BudgetAnswer
from folio.vmem.device_pages import DevicePages
from folio.vmem.errors import (
    BudgetError,
    IntegrityError,
    LayoutError,
    MapError,
    OutOfPages,
    OutOfSwap,
    PinError,
    VmemError,
)
from folio.vmem.group import LayerGroup, longest_sequence
from folio.vmem.layout import KVLayout, LayerSpec, LayoutKind, StateLayout, plan_groups, plan_layout
from folio.vmem.mapping.options import MappingOptions
from folio.vmem.prefix.pins import PinReport
from folio.vmem.prefix.prefix_summary import (
    CHANGE_BYTES,
    KEY_BYTES,
    NO_KEYS,
    CachedKeys,
    CachedPrefix,
    key_of,
    split_keys,
)
from folio.vmem.prefix.prefix_tree import PrefixMatch, PrefixNode
from folio.vmem.prefix.token_chain import TokenChain
from folio.vmem.report import GroupReport, MemoryReport
from folio.vmem.sequence import GroupTable, SequenceMemory, StepDemand, View, ViewPolicy
from folio.vmem.swap.swapping import SwappedGroup
from folio.vmem.tensor_parallel.orders import PeerRanks

if TYPE_CHECKING:
    from folio.vmem.backends.cuda import CudaBackend
    from folio.vmem.backends.host import HostBackend
    from folio.vmem.backends.select import select_backend
    from folio.vmem.memory import KVMemory
    from folio.vmem.tensor_parallel.mirror import MirroredBackend, mirror
    from folio.vmem.tensor_parallel.peer import PeerMemory
    from folio.vmem.tensors import BlockContents, CacheTensors, CopyBlocks, LocalContents

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
    "select_backend": "folio.vmem.backends.select",
    "CudaBackend": "folio.vmem.backends.cuda",
    "HostBackend": "folio.vmem.backends.host",
    "KVMemory": "folio.vmem.memory",
    "MirroredBackend": "folio.vmem.tensor_parallel.mirror",
    "mirror": "folio.vmem.tensor_parallel.mirror",
    "PeerMemory": "folio.vmem.tensor_parallel.peer",
    "BlockContents": "folio.vmem.tensors",
    "CacheTensors": "folio.vmem.tensors",
    "CopyBlocks": "folio.vmem.tensors",
    "LocalContents": "folio.vmem.tensors",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_NEED_TORCH[name]), name)
        return value
