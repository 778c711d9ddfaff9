"""Contiguous memory reserved for each request: the baselines of PagedAttention's evaluation (Kwon et al., §6.1).

The scheduler, the KV memory and the steps are Folio's. A request is admitted only when each of its sequences gets a
range of addresses for all the tokens that the baseline expects; it has it until it ends. Nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from folio.app.engine.request.request import Request
from folio.app.engine.schedule.admission import Admission
from folio.app.engine.schedule.scheduler import Scheduler
from folio.vmem import KVMemory

LEAST_TOKENS = 16


class BuddyAllocator:
    """Ranges of a power of two of tokens, each at a multiple of its size; the paper assumes that Orca has one.

    Args:
        capacity: in tokens; of what is no power of two, the largest ranges that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: dict[int, set[int]] = {}  # size → starts
        self._largest, start = 0, 0
        for size in (1 << i for i in reversed(range(capacity.bit_length()))):
            if size >= LEAST_TOKENS and start + size <= capacity:
                self._largest = self._largest or size
                self._free[size] = {start}
                start += size

    def take(self, num_tokens: int) -> tuple[int, int] | None:
        """The (start, size) of a range for these tokens; `None` if none is free."""
        wanted = max(1 << (num_tokens - 1).bit_length(), LEAST_TOKENS)
        size = wanted
        while size <= self._largest and not self._free.get(size):
            size *= 2
        if size > self._largest:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:  # the upper half stays free
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        return start, size

    def give_back(self, start: int, size: int) -> None:
        """Free a range, and join it with its buddy if that is free as well."""
        while (start ^ size) in self._free.get(size, ()) and size < self._largest:
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free.setdefault(size, set()).add(start)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A baseline.

    Attributes:
        num_tokens: (prompt, output, longest) → tokens that a sequence reserves.
        is_static: a batch begins when the previous one has ended as a whole, as in FasterTransformer.
    """

    num_tokens: Callable[[int, int, int], int]
    is_static: bool = False


def _most(prompt: int, output: int, longest: int) -> int:
    return longest


def _power(prompt: int, output: int, longest: int) -> int:
    return min(prompt + (1 << (output - 1).bit_length()), longest)


def _oracle(prompt: int, output: int, longest: int) -> int:
    return prompt + output


BASELINES: Mapping[str, Reservation] = {
    "static": Reservation(_most, is_static=True),
    "max": Reservation(_most),
    "pow2": Reservation(_power),
    "oracle": Reservation(_oracle),
}


class ReservedAdmission(Admission):
    """Admits a request when there is a range for each of its sequences. Ranges of sequences that have ended are freed
    before the next decision; of a static batch, when all have.

    Attributes:
        ranges: (start, size) of each running request's ranges.
    """

    def __init__(
        self, memory: KVMemory, scheduler: Scheduler, reservation: Reservation, capacity: int, longest: int
    ) -> None:
        super().__init__(memory, scheduler.begun, scheduler.waiting, scheduler.max_num_seqs)
        self._buddies = BuddyAllocator(capacity)
        self._reservation, self._longest = reservation, longest
        self.ranges: dict[Request, list[tuple[int, int]]] = {}

    def can_admit(self, request: Request, reserve: int) -> bool:
        self._free_ended()
        if self._reservation.is_static and any(sequence.max_computed for sequence in self._begun.sequences()):
            return False
        first = request.sequences[0]
        wanted = self._reservation.num_tokens(len(first.prompt_token_ids), first.max_tokens, self._longest)
        taken: list[tuple[int, int]] = []
        for _ in range(request.max_sequences):
            if (found := self._buddies.take(wanted)) is None:
                break
            taken.append(found)
        if len(taken) < request.max_sequences or not super().can_admit(request, reserve):
            for found in taken:
                self._buddies.give_back(*found)
            return False
        self.ranges[request] = taken
        return True

    def _free_ended(self) -> None:
        if self._reservation.is_static and self._begun.running:
            return
        for request in [request for request in self.ranges if not request.sequences]:
            for found in self.ranges.pop(request):
                self._buddies.give_back(*found)
        for request, taken in self.ranges.items():
            while len(taken) > request.max_sequences:
                self._buddies.give_back(*taken.pop())


def reserve(scheduler: Scheduler, memory: KVMemory, baseline: str, capacity: int, longest: int) -> ReservedAdmission:
    """Let an idle scheduler admit requests by reservation. Its memory must hold more than `capacity` tokens, so that
    the reservations alone decide."""
    admission = ReservedAdmission(memory, scheduler, BASELINES[baseline], capacity, longest)
    scheduler._admission = admission
    return admission
