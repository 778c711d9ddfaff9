"""Device of a shelf: its memory, and the parts of it that belong to no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from folio.app.config.machine import Machine
from folio.app.config.shelf import ModelConfig
from folio.app.engine.device.shared_device import SharedDevice
from folio.app.engine.memory.memory_profile import HEADROOM_BYTES, TorchMemory
from folio.app.engine.model.device import resolve
from folio.app.errors import ConfigError
from folio.app.models.named import cache_folder
from folio.app.models.weights.pinned_share import PinnedShare, default_folder
from folio.app.models.weights.store import WeightStore
from folio.app.shelf.allocation import ModelNeed
from folio.app.shelf.read_ahead import STEPS_ON_CPU_BYTES_PER_S
from folio.app.shelf.status import DeviceStatus
from folio.vmem import CudaBackend, DevicePages, OutOfPages, select_backend
from folio.vmem.uploads import Uploads

# Share of a machine's memory that all models may take together if the settings do not say.
_CPU_SHARE = 0.5
# The same for those weights of sleeping models that are in no file; on CUDA for their pinned copies in all processes of
# the machine together, since no other program can have pinned memory.
_HOST_SHARE = 0.25
# Share of a machine's memory that files read ahead leave free.
_RESERVE_SHARE = 0.1


class ShelfDevice:
    """The memory that the models of a shelf share.

    Attributes:
        shared: for the engines.
        device: of the memory.
        uploads: of weights on CUDA; `None` on a CPU.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        device_memory_bytes: int | None,
        host_memory_bytes: int | None,
        weights_dir: Path | None,
        weights_dir_bytes: int | None,
    ) -> None:
        on_cuda = bool(models) and resolve(models[0].engine).device == "cuda"
        self.device = torch.device("cuda" if on_cuda else "cpu")
        pages = DevicePages(device_memory_bytes or _default_bytes(models[0] if on_cuda else None), swap_bytes=0)
        shares_pinned = on_cuda and host_memory_bytes is None
        if host_memory_bytes is None:
            host_memory_bytes = int(_HOST_SHARE * Machine.detect().memory_bytes)
        self.uploads = Uploads(open_cuda(pages)) if on_cuda else None
        self._pinned: PinnedShare | None = None
        try:
            if shares_pinned:
                self._pinned = PinnedShare(host_memory_bytes, default_folder())
            store = WeightStore(
                weights_dir or cache_folder() / "weights",
                charges=pages,
                uploads=self.uploads,
                most_bytes=weights_dir_bytes,
                host_memory_bytes=host_memory_bytes,
                pinned=self._pinned,
            )
        except ConfigError:
            self._close_uploads()
            raise
        self.shared = SharedDevice(pages, store)
        for model in models:
            self.add(model)
        self._workspace_bytes = self._wanted_bytes = 0  # reserved workspace, and wanted
        self._usable_bytes = self.capacity_bytes
        self._needed_bytes, self._needed_weights = 0, dict[str, int]()

    @property
    def capacity_bytes(self) -> int:
        """Memory for weights and KV caches."""
        return self.shared.pages.capacity_bytes - self._wanted_bytes

    @property
    def has_workspace(self) -> bool:
        """Whether all of the wanted workspace is reserved."""
        return self._workspace_bytes == self._wanted_bytes

    @property
    def read_ahead_bytes_per_s(self) -> float:
        """The highest rate of reading weights ahead while steps run."""
        return STEPS_ON_CPU_BYTES_PER_S * Machine.detect().num_cores if self.uploads is None else math.inf

    @property
    def status(self) -> DeviceStatus:
        """From any thread; figures may change meanwhile."""
        pages = self.shared.pages
        return DeviceStatus(
            capacity_bytes=pages.capacity_bytes,
            used_bytes=pages.used_bytes,
            idle_bytes=pages.idle_bytes,
            charged_bytes=pages.charged_bytes - self._workspace_bytes,
            workspace_bytes=self._workspace_bytes,
            usable_bytes=self._usable_bytes,
            needed_bytes=self._needed_bytes,
            needed_weights=self._needed_weights,
        )

    def add(self, model: ModelConfig) -> None:
        """Note a model of the shelf. From any thread."""
        # Few models have preempted requests at a time: the bound is that of a server with one model.
        space = self.shared.pages.swap_space
        space.most_bytes = max(space.most_bytes, model.engine.swap_bytes)

    def note_needs(self, needs: Iterable[ModelNeed], usable_bytes: int) -> None:
        """Note what the models with requests need, and the memory for that, for `status`."""
        busy = [need for need in needs if need.has_work]
        beside_bytes = self.shared.pages.capacity_bytes - usable_bytes
        self._usable_bytes = usable_bytes
        self._needed_bytes = sum(need.needed_bytes for need in busy) + beside_bytes if busy else 0
        self._needed_weights = {need.name: need.weight_bytes for need in busy}

    def take_workspace(self, num_bytes: int) -> None:
        """Reserve memory for the tensors of the largest step, now or when other uses have left it. Only one step is
        computed at a time."""
        self._wanted_bytes = num_bytes
        missing = num_bytes - self._workspace_bytes
        try:
            if missing > 0:
                self.shared.pages.charge(missing)
            else:
                self.shared.pages.discharge(-missing)
        except OutOfPages:
            return
        self._workspace_bytes = self._wanted_bytes

    def give_back_cached(self, graph_bytes: int) -> None:
        """Give back what torch keeps if it has more than a step's workspace and the graphs of all models. Waits for the
        device."""
        memory = TorchMemory()
        if self.uploads is not None and memory.reserved() > graph_bytes + self._workspace_bytes:
            memory.give_back()

    def has_page_cache(self, num_bytes: int) -> bool:
        """Whether the machine has so many bytes to spare for files, beside the weights that are mapped now. From any
        thread."""
        machine = Machine.detect()
        # Mapped files are in the page cache, which the system counts as available. On CUDA they are the device's.
        mapped_bytes = self.shared.pages.charged_bytes if self.uploads is None else 0
        return num_bytes + int(_RESERVE_SHARE * machine.memory_bytes) <= machine.available_bytes - mapped_bytes

    def close(self) -> None:
        """Give the memory back. Raises `IntegrityError` if a model has some left."""
        self.shared.pages.discharge(self._workspace_bytes)
        self._workspace_bytes = self._wanted_bytes = 0
        self._close_uploads()
        self.shared.pages.close()

    def _close_uploads(self) -> None:
        if self.uploads is not None:
            self.uploads.close()
        if self._pinned is not None:
            self._pinned.close()


def _default_bytes(on_cuda: ModelConfig | None) -> int:
    if on_cuda is not None:
        free, total = torch.cuda.mem_get_info()
        return min(free, int(on_cuda.engine.gpu_memory_utilization * total)) - HEADROOM_BYTES
    return int(_CPU_SHARE * Machine.detect().memory_bytes)


def open_cuda(pages: DevicePages) -> CudaBackend:
    """The backend for weights on the current CUDA device.

    Raises:
        ConfigError: the device has less memory than the pages may take.
    """
    most = pages.capacity_bytes
    backend = select_backend(torch.device("cuda"), capacity_bytes=most, headroom_bytes=HEADROOM_BYTES, pages=pages)
    assert isinstance(backend, CudaBackend)
    available = backend.memory_info().available_bytes
    if available < most:
        backend.close()
        raise ConfigError(
            f"device_memory_bytes is {most}; the CUDA device has {available} bytes free beside "
            f"{HEADROOM_BYTES} for kernels and graphs: set at most {available}"
        )
    return backend
