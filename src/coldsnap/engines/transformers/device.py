"""What computes, behind one narrow seam: everything of this engine that a GPU does differently.

Three rules hold for CUDA, because the process will be frozen and brought back:

- Nothing asks NVML. torch counts devices through it when it can, and never closes it again; its descriptors of
  ``/dev/nvidiactl`` are no part of the context that the driver's checkpoint takes along.
- Work is captured with errors of this thread alone in mind (``thread_local``): another thread may read memory then.
- Before a freeze, what torch keeps for later goes back: device blocks, and pinned host blocks, which would lie in the
  process image. What belongs to a captured graph stays, and is counted (``held_bytes``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch

from coldsnap.errors import EngineError, UserError
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import StableMemory

__all__ = ["Accelerator", "CpuAccelerator", "CudaAccelerator", "EagerSteps", "Steps", "accelerator_for"]

_CACHE_DEVICE_BASE = 0x4800_0000_0000
"""The cache's own region, far from ``hydrate.cuda.DEFAULT_DEVICE_BASE``, where the weights are."""
_CACHE_HOST_BASE = 0x5800_0000_0000
_WARM_UPS = 3


class Steps(Protocol):
    """One piece of work over fixed tensors, done again and again."""

    @property
    def ready(self) -> bool:
        """Whether `replay` may be called."""
        ...

    def prepare(self, work: Callable[[], None]) -> None:
        """Take the work on. It may run now, several times. Raises UserError when it cannot be taken on."""
        ...

    def replay(self) -> None:
        """Do the work with what the fixed tensors hold now."""
        ...


class EagerSteps:
    """Calls the work each time; works anywhere."""

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None

    @property
    def ready(self) -> bool:
        """See `Steps.ready`."""
        return self._work is not None

    def prepare(self, work: Callable[[], None]) -> None:
        """See `Steps.prepare`."""
        self._work = work

    def replay(self) -> None:
        """See `Steps.replay`."""
        if self._work is None:
            raise EngineError("a step was asked for before there was any")
        self._work()


class GraphSteps:
    """The work as a captured CUDA graph, which is alive as long as this object."""

    def __init__(self) -> None:
        self._graph: Any = None

    @property
    def ready(self) -> bool:
        """See `Steps.ready`."""
        return self._graph is not None

    def prepare(self, work: Callable[[], None]) -> None:
        """Run it on a side stream until every kernel is loaded and every workspace is there, then capture it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            raise UserError(
                f"a step of this model cannot be captured as a CUDA graph: {error}",
                cure="write 'cuda_graph: false' below 'serve'",
            ) from error
        self._graph = graph

    def replay(self) -> None:
        """See `Steps.replay`."""
        if self._graph is None:
            raise EngineError("a step was asked for before its graph was captured")
        self._graph.replay()


class Accelerator(Protocol):
    """What computes. Calls come from the compute thread."""

    @property
    def device(self) -> torch.device:
        """As torch names it."""
        ...

    def cache_memory(self) -> StableMemory:
        """A new memory for keys and values, at addresses of its own."""
        ...

    def steps(self, *, graph: bool) -> Steps:
        """New steps; `graph`: captured, where that exists."""
        ...

    def settle(self) -> None:
        """Wait for everything that was sent, and give back what is kept for later."""
        ...

    def held_bytes(self) -> int:
        """Device memory that is held after `settle`, beside stable memory."""
        ...


class CpuAccelerator:
    """The processor: nothing is sent anywhere, and nothing is kept but the heap."""

    device = torch.device("cpu")

    def cache_memory(self) -> StableMemory:
        """See `Accelerator.cache_memory`."""
        return HostMemory(base=_CACHE_HOST_BASE)

    def steps(self, *, graph: bool) -> Steps:
        """See `Accelerator.steps`."""
        return EagerSteps()

    def settle(self) -> None:
        """See `Accelerator.settle`."""

    def held_bytes(self) -> int:
        """See `Accelerator.held_bytes`."""
        return 0


class CudaAccelerator:
    """One GPU: the one whose memory the weights are in."""

    def __init__(self, memory: CudaMemory) -> None:
        _never_ask_nvml()
        self._memory = memory
        self.device = torch.device("cuda", memory.ordinal)
        torch.cuda.set_device(self.device)

    def cache_memory(self) -> StableMemory:
        """See `Accelerator.cache_memory`."""
        return CudaMemory(self._memory.driver, ordinal=self._memory.ordinal, base=_CACHE_DEVICE_BASE)

    def steps(self, *, graph: bool) -> Steps:
        """See `Accelerator.steps`."""
        return GraphSteps() if graph else EagerSteps()

    def settle(self) -> None:
        """See `Accelerator.settle`."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        # A captured graph's own workspace stays in the graph's pool, where nothing else is ever put.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def held_bytes(self) -> int:
        """See `Accelerator.held_bytes`."""
        return int(torch.cuda.memory_reserved(self.device))


def accelerator_for(memory: StableMemory) -> Accelerator:
    """The one that computes over this memory."""
    return CudaAccelerator(memory) if isinstance(memory, CudaMemory) else CpuAccelerator()


def _never_ask_nvml() -> None:
    """Let torch count devices by the CUDA runtime."""
    cuda: Any = torch.cuda
    if hasattr(cuda, "_device_count_nvml"):
        cuda._device_count_nvml = lambda: -1  # torch's own word for "NVML cannot tell"
