"""This machine as a host: steps run on threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from coldsnap.hosts.base import Step

__all__ = ["LocalHost"]

T = TypeVar("T")


class LocalHost:
    """A host whose steps run here, at most ``max_steps`` at a time."""

    def __init__(self, host_id: str = "local", *, max_steps: int = 16) -> None:
        self._id = host_id
        self._pool = ThreadPoolExecutor(max_workers=max_steps, thread_name_prefix=f"host-{host_id}")

    @property
    def id(self) -> str:
        return self._id

    def submit(self, step: Step[T], cancel: threading.Event) -> Future[T]:
        return self._pool.submit(step, cancel)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
