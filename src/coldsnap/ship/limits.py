"""How patient a transfer is, in one record, and the one loop that tries again."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from coldsnap.errors import OperationInterrupted, RemoteError
from coldsnap.ship.faults import TRANSIENT

__all__ = ["Limits", "asked_to_wait_s", "pause", "retried", "stop_if_cancelled"]

T = TypeVar("T")

_FOR_EVER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of everything that waits for somebody else. Times are in seconds.

    ``idle_s``: no byte for so long ends an attempt. ``answer_s``: so long may an answer's head take as a whole. Less
    than ``slow_bytes`` within ``slow_s`` is a drip, which ends it too. ``attempts`` in a row may fail; the pauses
    between them grow from ``first_pause_s`` to ``longest_pause_s``. A server that asks to wait longer than
    ``retry_after_s`` is not waited for.

    A download is kept in ranges of ``range_bytes``, which is what an interruption may cost a stream; one request asks
    for ``request_bytes`` of them, and there are up to ``num_streams`` at a time. An upload goes in ``chunk_bytes``.
    """

    connect_s: float = 20.0
    idle_s: float = 60.0
    answer_s: float = 120.0
    slow_s: float = 30.0
    slow_bytes: int = 256 << 10
    attempts: int = 6
    first_pause_s: float = 0.5
    longest_pause_s: float = 20.0
    retry_after_s: float = 120.0
    redirects: int = 5
    document_bytes: int = 16 << 20
    range_bytes: int = 16 << 20
    request_bytes: int = 128 << 20
    chunk_bytes: int = 64 << 20
    num_streams: int = 4


def asked_to_wait_s(text: str) -> float | None:
    """The seconds that a Retry-After header asks for, in either of its forms; None when it says nothing that we know.

    Whatever a server writes, it is a number of seconds from 0 to 1e9.
    """
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return float(text) if len(text) < 10 else _FOR_EVER_S
    try:
        seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, seconds), _FOR_EVER_S)


def pause(limits: Limits, failures: int, *, asked_s: float | None, cancel: threading.Event | None) -> None:
    """Wait before the next attempt: as long as the server ``asked``, else longer each time. Ends early when cancelled.

    The exponential pause is drawn between half and all of it, so that many clients do not come back together.
    """
    longest = min(limits.longest_pause_s, limits.first_pause_s * 2.0 ** (failures - 1))
    seconds = asked_s if asked_s is not None else longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
    if cancel is None:
        time.sleep(seconds)
    else:
        cancel.wait(seconds)
    stop_if_cancelled(cancel)


def stop_if_cancelled(cancel: threading.Event | None) -> None:
    """Raise OperationInterrupted once ``cancel`` is set."""
    if cancel is not None and cancel.is_set():
        raise OperationInterrupted("the transfer was stopped; whole objects and finished parts are kept")


def retried(limits: Limits, work: Callable[[], T], *, cancel: threading.Event | None = None) -> T:
    """``work()``, again after a pause while it fails for a transient reason. The last failure comes out.

    ``facts["retry_after_s"]`` of an error is what its server asked for.
    """
    failures = 0
    while True:
        stop_if_cancelled(cancel)
        try:
            return work()
        except RemoteError as error:
            failures += 1
            asked = error.facts.get("retry_after_s")
            asked_s = float(asked) if isinstance(asked, int | float) else None
            if (
                error.reason not in TRANSIENT
                or failures >= limits.attempts
                or (asked_s is not None and asked_s > limits.retry_after_s)
            ):
                error.facts.setdefault("attempts", failures)
                raise
            pause(limits, failures, asked_s=asked_s, cancel=cancel)
