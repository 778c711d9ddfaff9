"""KV memory: blocks, block tables, pages, regions, backends. Knows nothing of models, requests or Ray."""

from vmem.backend import AddressRange, Backend, MemoryInfo
from vmem.background import MappingOptions
from vmem.contents import BlockContents, CopyBlocks, LocalContents
from vmem.cuda import CudaBackend
from vmem.errors import (
    BudgetError,
    IntegrityError,
    LayoutError,
    MapError,
    OutOfPages,
    OutOfSwap,
    PinError,
    VmemError,
)
from vmem.group import LayerGroup, longest_sequence
from vmem.host import HostBackend
from vmem.hot import CachedPrefix
from vmem.layout import KVLayout, LayerSpec, LayoutKind, StateLayout, plan_groups, plan_layout
from vmem.memory import KVMemory
from vmem.mirror import MirroredBackend, mirror
from vmem.orders import Peers
from vmem.pages import BudgetAnswer
from vmem.peer import PeerMemory
from vmem.prefix import PrefixMatch, TokenChain
from vmem.report import GroupReport, MemoryReport, PinReport
from vmem.select import select_backend
from vmem.sequence import Demand, SequenceMemory, View, ViewPolicy
from vmem.summary import CHANGE_BYTES, KEY_BYTES, NO_KEYS, CachedKeys, key_of, split_keys
from vmem.swap import SwappedGroup
from vmem.tensors import CacheTensors

__all__ = [
    "CHANGE_BYTES",
    "KEY_BYTES",
    "NO_KEYS",
    "AddressRange",
    "Backend",
    "BlockContents",
    "BudgetAnswer",
    "BudgetError",
    "CacheTensors",
    "CachedKeys",
    "CachedPrefix",
    "CopyBlocks",
    "CudaBackend",
    "Demand",
    "GroupReport",
    "HostBackend",
    "IntegrityError",
    "KVLayout",
    "KVMemory",
    "LayerGroup",
    "LayerSpec",
    "LayoutError",
    "LayoutKind",
    "LocalContents",
    "MapError",
    "MappingOptions",
    "MemoryInfo",
    "MemoryReport",
    "MirroredBackend",
    "OutOfPages",
    "OutOfSwap",
    "PeerMemory",
    "Peers",
    "PinError",
    "PinReport",
    "PrefixMatch",
    "SequenceMemory",
    "StateLayout",
    "SwappedGroup",
    "TokenChain",
    "View",
    "ViewPolicy",
    "VmemError",
    "key_of",
    "longest_sequence",
    "mirror",
    "plan_groups",
    "plan_layout",
    "select_backend",
    "split_keys",
]
