"""vLLM's sleep-mode backend `coldsnap`: passes on what is asked of it. Needs torch and vllm.

vLLM's own backend copies the weights to pinned host memory, of which torch keeps the blocks: they would all land in a
process image. Here whoever holds the weights decides (`sleeping.put_in_charge`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from coldsnap.engines.vllm.sleeping import BACKEND, in_charge

__all__ = ["ColdsnapBackend", "register"]


class ColdsnapBackend(SleepModeBackend):  # type: ignore[misc] # vllm is not type-checked here
    """See the module. Communicators, compiled code and graphs stay as they are."""

    def suspend(self, level: int = 1) -> None:
        """See `Sleeper.suspend`."""
        in_charge().suspend(level)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """See `Sleeper.resume`."""
        self._state = "RESUMING"
        in_charge().resume(tags)
        self._state = "RUNNING"

    def discard(self, tags: Sequence[str]) -> None:
        """See `Sleeper.discard`. Asked from 0.32 on."""
        in_charge().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Nothing of them is touched."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Nothing of them is touched."""
        return True


def register() -> None:
    """Make the backend known to this process. Idempotent."""
    try:
        SleepModeBackendFactory.get_backend_class(BACKEND)
    except ValueError:
        SleepModeBackendFactory.register_backend(BACKEND, __name__, ColdsnapBackend.__name__)
