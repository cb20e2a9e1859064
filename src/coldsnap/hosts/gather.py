"""A barrier: run one step for every unit (or worker) and go on only when all are done.

The rule it obeys: no step is left behind. When one fails, or the deadline passes, or the caller is
interrupted, the others are told to stop through the cancellation event and waited for, so that the
caller's clean-up never races a step that still runs. The first failure is raised; later ones are
attached to it as notes, never lost.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Mapping
from typing import TypeVar

from coldsnap.errors import DeadlineExceeded, OperationInterrupted
from coldsnap.hosts.base import Host, Step
from coldsnap.hosts.holding import signals_held_back

__all__ = ["together"]

K = TypeVar("K")
T = TypeVar("T")


def together(phase: str, steps: Mapping[str, tuple[Host, Step[T]]], *, deadline_s: float) -> dict[str, T]:
    """Run every step on its host at the same time and return their results by key, in the given order.

    Raises the first failure, with the others as notes, after every step has ended. A deadline that
    passes first raises DeadlineExceeded naming the phase and who was late.
    """
    cancel = threading.Event()
    futures: dict[str, concurrent.futures.Future[T]] = {}
    ends = time.monotonic() + deadline_s
    try:
        with signals_held_back():
            for key, (host, step) in steps.items():
                futures[key] = host.submit(step, cancel)
        done, late = concurrent.futures.wait(
            futures.values(),
            timeout=max(0.0, ends - time.monotonic()),
            return_when=concurrent.futures.FIRST_EXCEPTION,
        )
        failed = any(future.exception() is not None for future in done)
        overdue = [key for key, future in futures.items() if future in late] if not failed else []
    except BaseException:
        cancel.set()
        concurrent.futures.wait(futures.values())
        raise
    if late:
        cancel.set()
        concurrent.futures.wait(futures.values())
    first = _first_failure(futures, overdue)
    if first is not None:
        raise first
    if overdue:
        raise DeadlineExceeded(
            f"{phase} did not end within {deadline_s:g} s for {', '.join(overdue)}",
            cure="raise the deadline, or look at the unit's log for what it waits on",
            facts={"phase": phase, "deadline_s": deadline_s, "late": overdue},
        )
    return {key: future.result() for key, future in futures.items()}


def _first_failure(futures: Mapping[str, concurrent.futures.Future[T]], overdue: list[str]) -> BaseException | None:
    failures = [(key, error) for key, future in futures.items() if (error := future.exception()) is not None]
    causes = [item for item in failures if item[0] not in overdue or not isinstance(item[1], OperationInterrupted)]
    if not causes:
        return None
    # A step that only stopped because it was told to is not the cause.
    causes.sort(key=lambda item: isinstance(item[1], OperationInterrupted))
    first = causes[0][1]
    for key, error in failures:
        if error is not first:
            first.add_note(f"also, {key}: {error}")
    return first
