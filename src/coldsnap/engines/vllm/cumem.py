"""vLLM's weights on a GPU as stable memory, and its keys and values gone and back, through vLLM's own allocator.

    adopt_weights   the rows tagged `weights` that hold something become allocations, where they are
    discard_kv      keys and values, scratch and dead weights: unmapped, no copy made
    keep_graphs     what CUDA graphs use becomes allocations too, and so leaves the device's image
    seal            what vLLM makes later lies in allocations of its own, which are left alone
    unmap, remap    the weights; `remap` then begins to bring back the rest, beside whoever fills the weights
    restore_kv      waits for that: all mapped at their addresses, zero

vLLM's runner makes more in the pool of weights when the loader has ended (0.26.0: 685 MB of what it samples with). An
engine that sleeps with its process keeps that as it keeps weights. A copy of a template makes it anew, once it goes on:
there nothing of it may be among what a wake fills, so every block that torch could still cut there is taken (`seal`).

How a mapping is made is `pages`'s business. No allocation is given back early: torch may still cut a block from one
while its pool is in use. Neither torch nor vllm is imported here.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from coldsnap.core.extents import Allocation
from coldsnap.engines.vllm.pages import CuMem, CuMemPages
from coldsnap.engines.vllm.pools import (
    SMALL_BYTES,
    Place,
    Row,
    backup_problems,
    discarded,
    graphs,
    layout_tag,
    rows_of,
    weights,
)
from coldsnap.errors import EngineError, Problem, Refused
from coldsnap.hydrate.cuda import AdoptedMemory, Driver, DriverFailure
from coldsnap.hydrate.cuda.driver import translated_failure

__all__ = ["PINNED_SLACK_BYTES", "CuMemMemory"]

PINNED_SLACK_BYTES = 32 << 20
"""What torch may keep pinned and unused: blocks of the engine's own small copies, which come and go with each step. A
sleep of level 1 leaves as much as the weights."""


class CuMemMemory(AdoptedMemory):
    """The `WeightMemory` of a process that computes on a GPU."""

    def __init__(self, driver: Driver, *, ordinal: int, cumem: CuMem) -> None:
        super().__init__(driver, ordinal=ordinal, pages=CuMemPages(cumem))
        self._cumem = cumem
        self._bringing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._keeps_graphs = False
        self._taken: list[object] = []
        self._sealed: frozenset[tuple[int, int]] | None = None  # what could not be taken, and must stay free

    def keep_graphs(self) -> None:
        """Graphs captured from now on get their memory from vLLM's allocator; `complete` adopts it.

        In the image of the device it would come back at 2.6 GB/s (measured on an H200), and through the process image.
        """
        self._cumem.lend_to_graphs()
        self._keeps_graphs = True

    def prepare(self, model: object, tracer: object) -> None:
        """Nothing: vLLM allocates weights where they can be adopted."""

    def settle(self, model: Any, tracer: object) -> None:
        """Adopt what the loader made for `model`, a torch module. Its tags say how it is laid out.

        What only a circle of objects keeps would be adopted too, and be gone some time later.
        """
        gc.collect()
        self.adopt_weights(_places(model))

    def seal(self) -> None:
        """Zero every free block of the adopted allocations, and take those that torch could give out, for good.

        The pool of weights is the one that this thread uses. `complete` looks after what could not be taken.
        Raises HostError.
        """
        self.clear_free()
        with self._lock:
            spare = self._spare()
            while spare:
                # The exact size of a block is cut from no larger one. Of a small segment a request is small.
                for size, small in spare.values():
                    self._taken += [self._cumem.take(part) for part in _parts(size, SMALL_BYTES if small else size)]
                before, spare = spare, self._spare()
                if sum(size for size, _ in spare.values()) >= sum(size for size, _ in before.values()):
                    break
            self._sealed = frozenset((ptr, size) for ptr, (size, _) in spare.items())

    def complete(self) -> tuple[Allocation, ...]:
        """Adopt what came later, and `clear_free`; nothing of it when sealed. Raises as the two of them, EngineError
        for a sealed allocation in which something was made since."""
        if self._sealed is not None:
            self._check_seal(self._sealed)
            return ()
        late = self.adopt_weights()
        self.clear_free()
        return late

    def adopt_weights(self, places: Iterable[Place] = ()) -> tuple[Allocation, ...]:
        """Adopt the weights that are not adopted yet; those. An empty answer: nothing came since the last call.

        Raises Refused naming each that cannot be: adopted and gone since, or asleep already.
        """
        known = tuple(places)
        with self._lock:
            adopted = {one.ptr for one in self.allocations}
            rows = {row.ptr: row for row in self._preserved()}
            problems = [
                Problem(field=f"cumem[0x{ptr:x}]", message="held weights, and does no more", cure="restart the engine")
                for ptr in sorted(adopted - rows.keys())
            ]
            new = [row for ptr, row in sorted(rows.items()) if ptr not in adopted]
            problems += [
                Problem(field=f"cumem[0x{row.ptr:x}]", message="is asleep already", cure="wake the engine first")
                for row in new
                if row.asleep
            ]
            if problems:
                raise Refused("vLLM's weights", problems)
            allocations = tuple(Allocation(ptr=row.ptr, size=row.size, tag=layout_tag(row, known)) for row in new)
            self.adopt(allocations)
            return allocations

    def clear(self) -> None:
        """Zero every adopted byte. Memory that vLLM has just made holds anything. Raises HostError."""
        with self._lock:
            self._zero([(one.ptr, one.size) for one in self.allocations])

    def clear_free(self) -> int:
        """Zero the adopted blocks that belong to no tensor, so that two captures agree about them; their bytes."""
        with self._lock:
            adopted = {one.ptr for one in self.allocations}
            free = [part for row in self._rows() if row.ptr in adopted and not row.asleep for part in row.free]
            self._zero(free)
            return sum(size for _, size in free)

    def discard_kv(self) -> int:
        """Give back what needs no preserving; its bytes. May be called again after a failure.

        Raises Refused for `leftovers`, before anything is given back; HostError.
        """
        with self._lock:
            self._settled()
            if problems := self.leftovers():
                raise Refused("putting vLLM to sleep", problems)
            return self._drop()

    def restore_kv(self) -> None:
        """All that was discarded is mapped at its addresses and zero, or none of it and this raises OutOfSpace,
        ResourceBusy or HostError, and may be called again."""
        with self._lock:
            failure = self._settled()
            if failure is not None:
                raise failure
            self._bring_back()

    def leftovers(self) -> tuple[Problem, ...]:
        """What somebody else's sleep has left in host memory, where it would be dumped with the process.

        Waits for the device: torch keeps a pinned block until the copies that use it are done.
        """
        problems = backup_problems(self._rows())
        self._wait_for_device()
        pinned = self._cumem.pinned_bytes()
        if pinned > PINNED_SLACK_BYTES:
            cached = Problem(
                field="torch.cuda.host_memory_stats",
                message="pinned blocks that nobody uses are kept for later",
                value=f"{pinned} bytes",
                cure="restart the engine, and do not put it to sleep by hand before a capture",
            )
            return (*problems, cached)
        return problems

    def held_bytes(self) -> int:
        """Device memory beside the weights: what vLLM's allocator has mapped, and what torch has from its own.

        Asleep, that is what stays in the device's image: graphs and workspaces.
        """
        with self._lock:
            adopted = {one.ptr for one in self.allocations}
            rows = self._rows()
            mapped = sum(row.size for row in rows if not row.asleep and row.ptr not in adopted)
            return mapped + self._cumem.reserved_bytes()

    def unmap(self) -> None:
        """See ``StableMemory.unmap``. What `remap` brought back beside the weights goes with them."""
        with self._lock:
            self._settled()
            if self.mapped and self.allocations:
                self._drop()
            super().unmap()

    def remap(self) -> None:
        """See ``StableMemory.remap``. Begins to bring back what was discarded; `restore_kv` waits for it."""
        with self._lock:
            if self.mapped:
                return
            super().remap()
            if any(row.asleep for row in discarded(self._rows())):
                self._bringing = threading.Thread(target=self._try_to_bring_back, name="restore-kv", daemon=True)
                self._bringing.start()

    def release(self) -> None:
        """See ``AdoptedMemory.release``."""
        with self._lock:
            self._settled()
            super().release()

    def _check_seal(self, sealed: frozenset[tuple[int, int]]) -> None:
        with self._lock:
            now = frozenset((ptr, size) for ptr, (size, _) in self._spare().items())
        if sealed - now:
            ptr, size = min(sealed - now)
            raise EngineError(
                f"vLLM made something at 0x{ptr:x}, in {size} bytes that were free among the weights when they were "
                f"loaded; a copy of this template would be filled over it",
                cure="capture this model with another snapshot driver",
                facts={"ptr": ptr, "size": size},
            )

    def _spare(self) -> dict[int, tuple[int, bool]]:
        """Address -> (bytes, of a small segment) of each block in adopted memory that torch may still give out."""
        adopted = {one.ptr for one in self.allocations}
        return {ptr: (size, row.small) for row in self._rows() if row.ptr in adopted for ptr, size in row.spare}

    def _rows(self) -> tuple[Row, ...]:
        return rows_of(self._cumem.allocator)

    def _preserved(self) -> tuple[Row, ...]:
        rows = self._rows()
        return (*weights(rows), *graphs(rows)) if self._keeps_graphs else weights(rows)

    def _zero(self, parts: Sequence[tuple[int, int]]) -> None:
        self._wait_for_device()  # a kernel that was sent before its tensor was freed may still write
        try:
            self._clear(parts)
        except DriverFailure as failure:
            raise translated_failure(failure, "clearing device memory", device=self.ordinal) from failure

    def _wait_for_device(self) -> None:
        self.attach()
        try:
            self.driver.settle()
        except DriverFailure as failure:
            raise translated_failure(failure, "waiting for the device", device=self.ordinal) from failure

    def _drop(self) -> int:
        self._wait_for_device()
        mapped = [row for row in discarded(self._rows()) if not row.asleep]
        for row in mapped:
            self._pages.unmap(row.ptr)
        return sum(row.size for row in mapped)

    def _bring_back(self) -> None:
        self.attach()
        self._map([(row.ptr, row.size) for row in discarded(self._rows()) if row.asleep])

    def _try_to_bring_back(self) -> None:
        try:
            self._bring_back()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._failure = error

    def _settled(self) -> BaseException | None:
        """Wait for what `remap` began; how it failed, told once."""
        thread, self._bringing = self._bringing, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        return failure


def _parts(size: int, most: int) -> list[int]:
    """`size` in parts of at most `most`, the last of which may be less."""
    return [min(most, size - at) for at in range(0, size, most)]


def _places(model: Any) -> tuple[Place, ...]:
    """Every parameter and buffer of a torch module, under each of its names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return tuple(
        Place(ptr=tensor.data_ptr(), size=tensor.numel() * tensor.element_size(), name=name)
        for name, tensor in named
        if tensor.numel()
    )
