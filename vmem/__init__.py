"""KV memory: blocks, block tables, pages, regions, backends. Knows nothing of models, requests or Ray."""

from vmem.backends import select_backend
from vmem.backends.base import AddressRange, Backend, MemoryInfo
from vmem.backends.cuda import CudaBackend
from vmem.backends.host import HostBackend
from vmem.budget import BudgetAnswer
from vmem.errors import BudgetError, IntegrityError, LayoutError, MapError, OutOfPages, OutOfSwap, PinError, VmemError
from vmem.group import LayerGroup, longest_sequence
from vmem.layout import KVLayout, LayerSpec, LayoutKind, StateLayout, plan_groups, plan_layout
from vmem.mapper_policy import MappingOptions
from vmem.memory import KVMemory
from vmem.pins import PinReport
from vmem.prefix_summary import CHANGE_BYTES, KEY_BYTES, NO_KEYS, CachedKeys, CachedPrefix, key_of, split_keys
from vmem.prefix_tree import PrefixMatch, TokenChain
from vmem.report import GroupReport, MemoryReport
from vmem.sequence import SequenceMemory, StepDemand, View, ViewPolicy
from vmem.swapping import SwappedGroup
from vmem.tensor_parallel.mirror import MirroredBackend, mirror
from vmem.tensor_parallel.orders import PeerRanks
from vmem.tensor_parallel.peer import PeerMemory
from vmem.tensors import BlockContents, CacheTensors, CopyBlocks, LocalContents

# fmt: off
__all__ = [
    "CHANGE_BYTES", "KEY_BYTES", "NO_KEYS", "AddressRange", "Backend", "BlockContents", "BudgetAnswer", "BudgetError",
    "CacheTensors", "CachedKeys", "CachedPrefix", "CopyBlocks", "CudaBackend", "GroupReport", "HostBackend",
    "IntegrityError", "KVLayout", "KVMemory", "LayerGroup", "LayerSpec", "LayoutError", "LayoutKind", "LocalContents",
    "MapError", "MappingOptions", "MemoryInfo", "MemoryReport", "MirroredBackend", "OutOfPages", "OutOfSwap",
    "PeerMemory", "PeerRanks", "PinError", "PinReport", "PrefixMatch", "SequenceMemory", "StateLayout", "StepDemand",
    "SwappedGroup", "TokenChain", "View", "ViewPolicy", "VmemError", "key_of", "longest_sequence", "mirror",
    "plan_groups", "plan_layout", "select_backend", "split_keys",
]
