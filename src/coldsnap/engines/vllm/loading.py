"""What our loader is given by the process that it runs in: where weights lie, and who wants to know of each copy.

vLLM makes the loader, deep in its own start, and passes it nothing of ours. So whoever began the process says here how
to get it (`supply`), and the loader asks when a model is to be loaded (`taken`). Without a supplier vLLM's own loader
does the work, unwatched. Neither torch nor vllm is imported.

The front reads the checkpoint's headers before it forks; `remember_files` keeps them for the processes that it forks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from coldsnap.core.extents import Allocation
from coldsnap.engines.observer import Observer
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.errors import Problem
from coldsnap.hydrate.memory import StableMemory

__all__ = [
    "WATCHED_FORMATS",
    "Load",
    "Supplier",
    "Way",
    "WeightMemory",
    "is_supplied",
    "reloaded",
    "remember_files",
    "remembered_files",
    "supply",
    "taken",
    "watch_reloads",
]

WATCHED_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""vLLM's load formats that give each tensor to the model by its name in the checkpoint."""


class Way(StrEnum):
    """How a model comes up: from the checkpoint's bytes, or from its metadata alone, to be filled by somebody else."""

    LOAD = "load"
    BUILD = "build"


@runtime_checkable
class WeightMemory(StableMemory, Protocol):
    """Stable memory for the weights of a vLLM model, and what is done to its keys and values around a sleep.

    `tracer` is a context manager: copies made while it is open are seen. It may be open already.
    """

    def prepare(self, model: Any, tracer: AbstractContextManager[object]) -> None:
        """The torch module is built and nothing is read yet: make its tensors lie here, if they can be moved."""
        ...

    def keep_graphs(self) -> None:
        """What device graphs use from now on is preserved with the weights. Nothing, where there are none."""
        ...

    def settle(self, model: Any, tracer: AbstractContextManager[object]) -> None:
        """Finalizers are done: every tensor that must survive a sleep lies in an allocation when this returns."""
        ...

    def seal(self) -> None:
        """After `settle`, on its thread: what comes to the weights later is made anew by whoever builds the model.

        It lies beside what is there, is not preserved, and `complete` does not take it on.
        """
        ...

    def clear(self) -> None:
        """Every byte of every allocation is zero afterwards. Nobody computes meanwhile."""
        ...

    def complete(self) -> tuple[Allocation, ...]:
        """The engine is up: take on what came to the weights since `settle`, and zero what belongs to no tensor.

        What was taken on: nothing where the weights are sealed. Raises EngineError for a seal that was broken.
        """
        ...

    def discard_kv(self) -> int:
        """Give the pages of keys and values back; how many bytes that were. Idempotent."""
        ...

    def restore_kv(self) -> None:
        """Keys and values have memory again, at the same addresses, all zero. Idempotent."""
        ...

    def held_bytes(self) -> int:
        """What is held on the device now beside the weights, once keys and values are given back."""
        ...

    def leftovers(self) -> Sequence[Problem]:
        """What would land in an image and must not: copies of weights that somebody else made."""
        ...


def _nothing(*_: object) -> None:
    """What a load does that nobody waits for."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One model to be loaded: into which memory, told to whom, from which checkpoint (`files` are its headers).

    The loader calls one of the last two, on its own thread. `laid_out`: every tensor is where it stays; it returns when
    their bytes are there, for `Way.BUILD` after somebody else has filled them. `failed`: it raises this next.

    `is_template`: copies of this process will build the model, so one that cannot be built is refused.
    """

    observer: Observer
    memory: WeightMemory
    files: tuple[SafetensorsFile, ...]
    way: Way = Way.LOAD
    is_template: bool = False
    laid_out: Callable[[], None] = _nothing
    failed: Callable[[Exception], None] = _nothing


Supplier: TypeAlias = Callable[[Any], Load | None]
"""What is to be loaded into a model of this `VllmConfig`; None: nobody watches it."""

_lock = threading.Lock()
_supplier: Supplier | None = None
_files: tuple[SafetensorsFile, ...] = ()
_on_reload: Callable[[], None] = _nothing


def supply(supplier: Supplier | None) -> None:
    """From now on the loader of this process asks `supplier`, on its own thread, for each model. None: nobody."""
    global _supplier
    with _lock:
        _supplier = supplier


def is_supplied() -> bool:
    """Whether there is somebody to ask."""
    with _lock:
        return _supplier is not None


def taken(vllm_config: Any) -> Load | None:
    """What is to be loaded now. None: a model that nobody watches."""
    with _lock:
        supplier = _supplier
    return supplier(vllm_config) if supplier is not None else None


def watch_reloads(act: Callable[[], None] | None) -> None:
    """From now on call `act` when weights are read for a model that was loaded before. None: nothing."""
    global _on_reload
    with _lock:
        _on_reload = act if act is not None else _nothing


def reloaded() -> None:
    """Weights are being read for a model that was loaded before."""
    with _lock:
        act = _on_reload
    act()


def remember_files(files: Sequence[SafetensorsFile]) -> None:
    """These are the headers of the pinned checkpoint, for this process and those that it forks."""
    global _files
    with _lock:
        _files = tuple(files)


def remembered_files() -> tuple[SafetensorsFile, ...]:
    """What was remembered; () when nothing was."""
    with _lock:
        return _files
