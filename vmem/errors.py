"""Errors of KV memory.

VmemError
├── OutOfPages       too few free pages now; transient, nothing has changed
├── OutOfSwap        too little swap space now; transient, nothing has changed
├── PinError         a prefix cannot be pinned, or is not pinned
├── MapError         the operating system or the driver refused a call
├── LayoutError      the given numbers make no layout
├── BudgetError      a budget out of bounds
├── SegmentError     a file of the prefix store is not used
└── IntegrityError   the accounting is broken: a bug in Folio, never a user's mistake
"""

from __future__ import annotations


class VmemError(Exception):
    """Base of every error raised by `vmem`."""


class OutOfPages(VmemError):
    """Too few free pages, or bytes of a device; the caller may free some and retry."""

    def __init__(self, needed: int, free: int, unit: str = "pages") -> None:
        super().__init__(f"{needed} {unit} needed, {free} free")
        self.needed = needed
        self.free = free


class OutOfSwap(VmemError):
    """Too little swap space."""


class PinError(VmemError):
    """A prefix cannot be pinned: the quota is used up, or the name is taken or unknown."""


class MapError(VmemError):
    """A call of the operating system or the driver failed; names the call, its arguments and the reason."""


class LayoutError(VmemError):
    """The given numbers make no layout; names value and bound."""


class BudgetError(VmemError):
    """The budget is out of bounds; names value and bounds."""


class SegmentError(VmemError):
    """A segment file is foreign or damaged; says why."""


class IntegrityError(VmemError):
    """An invariant of the accounting is broken."""
