"""What can go wrong in KV memory.

VmemError
├── OutOfPages       not enough free pages now; transient, nothing was changed
├── OutOfSwap        not enough host memory for swapped blocks now; transient, nothing was changed
├── PinError         a prefix that cannot be pinned, or is not
├── MapError         the operating system or the driver refused a call
├── LayoutError      a layout that cannot be built from the given numbers
├── BudgetError      a budget outside the bounds it may be set to
└── IntegrityError   the books do not add up: a bug in Folio, never a user's mistake
"""

from __future__ import annotations


class VmemError(Exception):
    """Base of every error raised by `vmem`."""


class OutOfPages(VmemError):
    """The page budget has fewer free pages than were asked for; the caller may free some and try again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} free")
        self.needed = needed
        self.free = free


class OutOfSwap(VmemError):
    """The swap budget has less room than was asked for."""


class PinError(VmemError):
    """A prefix cannot be pinned: the quota is used up, or the name is taken or unknown."""


class MapError(VmemError):
    """A call of the operating system or the driver failed; says which, with what, and why."""


class LayoutError(VmemError):
    """The numbers given do not make a layout; says the value and the bound."""


class BudgetError(VmemError):
    """The budget cannot be set to this value; says the value and the bounds."""


class IntegrityError(VmemError):
    """An invariant of the accounting is broken."""
