"""The driver's checkpoint calls, by host PID: a page and its promises.

    running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running

- ``lock``: CUDA calls of the process wait from now on, and what it sent to its devices has ended. While one of several
  ranks that talk to each other is locked, the others may wait for it, so all are locked before any goes further.
- ``checkpoint``: its device memory and contexts are in its own host memory, and it holds no device any more.
- ``restore``: they are back on its devices, or on those that ``devices`` names instead.
- ``unlock``: it computes again.

``remote.HelperApi`` is the real one, ``coldsnap.testing.cuda_checkpoint.FakeCheckpoints`` the fake, and
``coldsnap.testing.cuda_checkpoint_suite`` holds both to this page. Any thread may call; calls about different processes
run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

__all__ = ["CheckpointApi", "ProcessState"]


class ProcessState(StrEnum):
    """What the driver says of a process."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class CheckpointApi(Protocol):
    """See the module's head. A call in a state that does not allow it changes nothing and raises CudaError.

    Every call may raise HelperLost: nobody then knows whether it was carried out, and ``state`` tells. The next call
    is made by a new helper.
    """

    def start(self) -> None:
        """Begin to get ready, beside whatever the caller does next; what is wrong shows with the first call."""
        ...

    def state(self, pid: int) -> ProcessState | None:
        """What the driver knows about the process; None: it is no CUDA process, or is gone. Raises DeadlineExceeded."""
        ...

    def lock(self, pid: int, *, deadline_s: float) -> None:
        """Raises DeadlineExceeded when the process does not come to rest in time, and leaves it running then."""
        ...

    def checkpoint(self, pid: int, *, deadline_s: float) -> None:
        """Raises CudaError; the process stays locked then, or is ``failed``."""
        ...

    def restore(self, pid: int, *, devices: Mapping[str, str], deadline_s: float) -> None:
        """``devices``: UUID that it was on -> UUID to go to, every device of it; empty: the same ones.

        Raises CudaError; the process stays checkpointed then, or is ``failed``.
        """
        ...

    def unlock(self, pid: int, *, deadline_s: float) -> None:
        """Raises CudaError."""
        ...

    def close(self) -> None:
        """End the helper. May be repeated; a later call starts a new one."""
        ...
