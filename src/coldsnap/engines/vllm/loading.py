"""What our loader is given by the process that it runs in: where weights lie, and who wants to know of each copy.

vLLM makes the loader, deep in its own start, and passes it nothing of ours. So whoever began the process says here how
to get it (`supply`), and the loader asks when a model is to be loaded (`taken`). Without a supplier vLLM's own loader
does the work, unwatched. Neither torch nor vllm is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from coldsnap.engines.observer import Observer
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.errors import Problem
from coldsnap.hydrate.memory import StableMemory

__all__ = ["Load", "WeightMemory", "supply", "taken"]


class WeightMemory(StableMemory, Protocol):
    """Stable memory for the weights of a vLLM model, and what is done to its keys and values around a sleep.

    `tracer` is a context manager: copies made while it is open are seen. It may be open already.
    """

    def prepare(self, model: Any, tracer: AbstractContextManager[object]) -> None:
        """The torch module is built and nothing is read yet: make its tensors lie here, if they can be moved."""
        ...

    def settle(self, model: Any, tracer: AbstractContextManager[object]) -> None:
        """Finalizers are done: every tensor that must survive a sleep lies in an allocation when this returns."""
        ...

    def discard_kv(self) -> int:
        """Give the pages of keys and values back; how many bytes that were."""
        ...

    def restore_kv(self) -> None:
        """Keys and values have memory again, at the same addresses, all zero."""
        ...

    def leftovers(self) -> Sequence[Problem]:
        """What would land in an image and must not: copies of weights that somebody else made."""
        ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """One model to be loaded: into which memory, told to whom, from which checkpoint (`files` are its headers)."""

    observer: Observer
    memory: WeightMemory
    files: tuple[SafetensorsFile, ...]


_lock = threading.Lock()
_supplier: Callable[[], Load | None] | None = None


def supply(supplier: Callable[[], Load | None] | None) -> None:
    """From now on the loader of this process asks `supplier`, on its own thread, for each model. None: nobody."""
    global _supplier
    with _lock:
        _supplier = supplier


def taken() -> Load | None:
    """What is to be loaded now. None: a model that nobody watches."""
    with _lock:
        supplier = _supplier
    return supplier() if supplier is not None else None
