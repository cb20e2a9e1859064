"""Who decides in this process what vLLM's sleep and wake mean; asked by our sleep-mode backend.

vLLM makes the backend itself, late and by name, and passes it nothing of ours. So whoever holds the weights says here
that it is in charge. Imports neither torch nor vllm.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from coldsnap.errors import EngineError

__all__ = ["BACKEND", "Sleeper", "in_charge", "put_in_charge"]

BACKEND = "coldsnap"
"""The name of our backend in `ModelConfig.sleep_mode_backend`."""


class Sleeper(Protocol):
    """What happens to this process's device memory. Calls come from vLLM's main thread, with no work on the device.

    An exception reaches whoever put the engine to sleep as text alone.
    """

    def suspend(self, level: int) -> None:
        """Give back what vLLM's sleep of this level gives back. Idempotent."""
        ...

    def resume(self, tags: Sequence[str] | None) -> None:
        """Bring allocations with these tags back, all of them for None. Idempotent."""
        ...

    def discard(self, tags: Sequence[str]) -> None:
        """Give back allocations with these tags, without keeping what is in them. Idempotent."""
        ...


_lock = threading.Lock()
_sleeper: Sleeper | None = None


def put_in_charge(sleeper: Sleeper | None) -> None:
    """From now on `sleeper` is asked. None: nobody."""
    global _sleeper
    with _lock:
        _sleeper = sleeper


def in_charge() -> Sleeper:
    """Who is asked. Raises EngineError when there is nobody: the weights were not loaded by our loader."""
    with _lock:
        if _sleeper is not None:
            return _sleeper
    raise EngineError(
        f"sleep-mode backend {BACKEND!r} has no weights to take care of",
        cure="load them with --load-format coldsnap",
    )
