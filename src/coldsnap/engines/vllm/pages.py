"""vLLM's allocator behind the two calls that adopted memory asks for.

Every mapping is made and undone by vLLM's `create_and_map` and `unmap_and_release`, with the row's own handle, and the
row's `is_asleep` is set by what happened and never before. So vLLM finds its books true whatever failed, and frees a
tensor later as ever.

Mapping goes by the C function below `create_and_map` where vLLM's file has it, so that others run meanwhile (`native`).

What is still ugly: vLLM's C code forgets the memory it created when it then cannot map it (somebody else is at the
address), so each such failed wake costs that much of the device until the process ends.

torch and vllm are imported by `installed_cumem` and what it hands out, not before.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.engines.vllm.compat import pool_for_graphs
from coldsnap.engines.vllm.native import loaded, mapping
from coldsnap.engines.vllm.pools import GRAPHS_TAG, Allocator, Entry, Handle, pools_of
from coldsnap.errors import ColdsnapError, EngineError, HostError, MissingCapability, OutOfSpace, ResourceBusy

__all__ = ["CuMem", "CuMemPages", "installed_cumem", "pinned_cached_bytes", "segment_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CuMem:
    """vLLM's allocator and its two calls. `pinned_bytes`: what torch keeps pinned for later, as little as it can.
    `reserved_bytes`: what torch has of the device in pools that are not vLLM's. `lend_to_graphs`: CUDA graphs captured
    from now on get their memory here. `take`: a tensor of so many bytes, from the pool that the calling thread uses."""

    allocator: Allocator
    create_and_map: Callable[[Handle], None]
    unmap_and_release: Callable[[Handle], None]
    pinned_bytes: Callable[[], int]
    reserved_bytes: Callable[[], int] = lambda: 0
    lend_to_graphs: Callable[[], None] = lambda: None
    take: Callable[[int], object] = bytes


def installed_cumem() -> CuMem:
    """The one of this process. Raises MissingCapability where vLLM has none."""
    found: Any = importlib.import_module("vllm.device_allocator.cumem")
    if not found.cumem_available:
        raise MissingCapability(
            "vLLM has no CuMem allocator on this platform", cure="use an NVIDIA GPU and a CUDA build of vLLM"
        )
    allocator: Any = found.CuMemAllocator.get_instance()
    path = getattr(found, "lib_name", None)
    native = loaded(Path(path)) if path else None
    return CuMem(
        allocator=allocator,
        create_and_map=found.create_and_map if native is None else mapping(native),
        unmap_and_release=found.unmap_and_release,
        pinned_bytes=_pinned_bytes,
        reserved_bytes=lambda: _reserved_bytes(allocator),
        lend_to_graphs=lambda: pool_for_graphs(found, GRAPHS_TAG),
        take=_take,
    )


class CuMemPages:
    """`Pages` over vLLM's allocator."""

    def __init__(self, cumem: CuMem) -> None:
        self._cumem = cumem

    def map(self, ptr: int) -> None:
        """See `Pages.map`."""
        entry = self._entry(ptr)
        if not entry.is_asleep:
            return
        try:
            self._cumem.create_and_map(entry.handle)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # it may have mapped it, and failed at the last step
                self._cumem.unmap_and_release(entry.handle)
            raise _translated(error, "mapping", entry) from error
        entry.is_asleep = False

    def unmap(self, ptr: int) -> None:
        """See `Pages.unmap`."""
        entry = self._entry(ptr)
        if entry.is_asleep:
            return
        try:
            self._cumem.unmap_and_release(entry.handle)
        except RuntimeError as error:
            raise _translated(error, "unmapping", entry) from error
        entry.is_asleep = True

    def _entry(self, ptr: int) -> Entry:
        entry = self._cumem.allocator.pointer_to_data.get(ptr)
        if entry is None:
            raise EngineError(
                f"vLLM has freed its allocation at 0x{ptr:x}, which was adopted",
                cure="restart the engine; nothing may replace weights after they were loaded",
                facts={"ptr": ptr},
            )
        return entry


def pinned_cached_bytes(stats: Mapping[str, int]) -> int:
    """From torch's statistics of its pinned memory, what is kept and not in use. {}: nothing was ever pinned.

    torch 2.13 counts what it has and what is given out; earlier ones count it under other names. Raises EngineError
    for statistics of neither form.
    """
    for had, used in (("allocated_bytes", "active_bytes"), ("reserved_bytes", "allocated_bytes")):
        if f"{had}.current" in stats and f"{used}.current" in stats:
            return stats[f"{had}.current"] - stats[f"{used}.current"]
    if not stats:
        return 0
    raise EngineError(
        "torch counts its pinned memory in a way that is not known here",
        cure="use a version of torch that docs/vllm.md names",
        facts={"stats": sorted(stats)},
    )


def _pinned_bytes() -> int:
    import torch

    torch._C._host_emptyCache()
    return pinned_cached_bytes(torch.cuda.host_memory_stats())


def segment_bytes(segments: Iterable[Mapping[str, Any]], without: Collection[tuple[int, int]]) -> int:
    """Bytes of torch's segments (`memory_snapshot`) that are in none of these pools."""
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) not in without)


def _take(size: int) -> object:
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _reserved_bytes(allocator: Allocator) -> int:
    """torch lists segments of vLLM's pools that vLLM has given back, so those are counted from vLLM's own books."""
    import torch

    return segment_bytes(torch.cuda.memory_snapshot(), {tuple(pool.id) for pool in pools_of(allocator)})


def _translated(error: RuntimeError, what: str, entry: Entry) -> ColdsnapError:
    """vLLM's C code tells CUDA's own words, and only as text."""
    _, size, ptr, _ = entry.handle
    message = f"{what} vLLM's {size} bytes at 0x{ptr:x} (tag {entry.tag!r}) failed: {error}"
    facts: dict[str, object] = {"ptr": ptr, "size": size, "tag": entry.tag}
    if "out of memory" in str(error):
        return OutOfSpace(message, cure="stop what else uses the device, or take a larger one", facts=facts)
    if what == "mapping" and "invalid argument" in str(error):  # the arguments are vLLM's own, so the place is taken
        return ResourceBusy(message, cure="find what else in this process maps these addresses", facts=facts)
    return HostError(message, cure="look for Xid lines in the kernel log; a new process may be needed", facts=facts)
