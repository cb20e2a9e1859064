"""The contract of a host: a place where steps of an operation run.

``submit`` hands a step over and returns at once; the step runs exactly once, on that host. Steps of
one host may run at the same time. A step gets a cancellation event and looks at it between bounded
pieces of work; nobody kills a thread. Exceptions travel back unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Host", "Placement", "Step"]

T = TypeVar("T")
Step = Callable[[threading.Event], T]


class Host(Protocol):
    """See the module's head for the promises."""

    @property
    def id(self) -> str:
        """The host's id, as ``launch.units[].host`` spells it."""

    def submit(self, step: Step[T], cancel: threading.Event) -> Future[T]:
        """Run ``step(cancel)`` on this host; the future carries its result or its exception."""

    def close(self) -> None:
        """Let go of whatever ran the steps. Idempotent; running steps are waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which host runs each unit: unit id -> host. Every unit of a launch is in it."""

    hosts: Mapping[str, Host]
