"""Who makes a unit's root and namespaces, starts our init as their first process, and takes all of it away.

Everything else of a unit (what the init does, how it is frozen, brought back, found and asked) is the same whoever
made it. ``capsule/native.py`` does it with system calls, ``capsule/containers/maker.py`` has docker or podman do it;
``coldsnap.testing.makers_suite`` holds both to this page.

- ``begin`` returns an init that waits for its config, the first process of PID, mount and IPC namespaces of its own;
  or it raises and leaves nothing.
- Until it is told ``confirm``, that init ends when the channel closes, also by this process ending.
- ``clear`` may be called any number of times, by anybody, and touches nothing that is not ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coldsnap.capsule.channel import Channel
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import ContainerMark, UnitSpec

__all__ = ["Begun", "InitFiles", "UnitMaker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InitFiles:
    """The descriptors that an init works with; for a restore there are images and a log of CRIU. -1: none."""

    log: int
    images: int = -1
    criu_log: int = -1

    @property
    def numbers(self) -> tuple[int, int, int]:
        """In the order in which the init takes them."""
        return (self.log, self.images, self.criu_log)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """An init that waits for its config. ``pid`` and ``ticks`` are the host's.

    ``world`` is the part of its config that says what of root and mounts it has still to make.
    """

    channel: Channel
    pid: int
    ticks: int
    world: Mapping[str, Any]
    container: ContainerMark | None = None


class UnitMaker(Protocol):
    """One way to make root and namespaces. See the module's promises."""

    def begin(self, spec: UnitSpec, files: InitFiles, deadline: Deadline) -> Begun:
        """Raises UserError for what the spec asks and cannot be had, HostError, PeerError, DeadlineExceeded."""

    def clear(self, mark: ContainerMark | None) -> None:
        """Take away what outlives an init that ended. Raises HostError."""
