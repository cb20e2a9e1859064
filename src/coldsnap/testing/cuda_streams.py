"""The half of the fake driver that knows about time: calls that fail, streams, and events.

What was sent to a stream happens when somebody waits for it, and not before. ``FakeDriver`` adds memory.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coldsnap.hydrate.cuda.driver import DriverFailure

__all__ = ["FakeStreams"]


@dataclass(slots=True)
class _Stream:
    work: deque[Callable[[], None]] = field(default_factory=deque)
    sent: int = 0
    done: int = 0


class FakeStreams:
    """Streams and events of one context; see the module."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.violations: list[str] = []
        self._lock = threading.RLock()
        self._here = threading.local()
        self._contexts = 0
        self._broken = False
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, tuple[int, int] | None] = {}
        self._next = 1
        self._failing: dict[str, tuple[int, str]] = {}

    def fail(self, call: str, code: str = "CUDA_ERROR_UNKNOWN", *, after: int = 0) -> None:
        """From now on let ``after`` calls of this name pass and fail the next one, once."""
        self._failing[call] = (after, code)

    def heal(self) -> None:
        """Let no call fail any more."""
        self._failing = {}

    def count(self, call: str) -> int:
        """How often a call was made."""
        return Counter(one.split("(")[0] for one in self.calls)[call]

    def create_stream(self) -> int:
        """See ``Driver.create_stream``."""
        with self._lock:
            self._enter("cuStreamCreate", "create_stream()")
            stream = self._new()
            self._streams[stream] = _Stream()
            return stream

    def destroy_stream(self, stream: int) -> None:
        """See ``Driver.destroy_stream``: CUDA lets the work end by itself."""
        with self._lock:
            self._enter("cuStreamDestroy", "destroy_stream()")
            state = self._stream(stream, "cuStreamDestroy")
            self._run(state, state.sent)
            del self._streams[stream]

    def synchronize(self, stream: int) -> None:
        """See ``Driver.synchronize``."""
        with self._lock:
            self._enter("cuStreamSynchronize", "synchronize()")
            state = self._stream(stream, "cuStreamSynchronize")
            self._run(state, state.sent)
            self._enter_broken("cuStreamSynchronize")

    def create_event(self) -> int:
        """See ``Driver.create_event``."""
        with self._lock:
            self._enter("cuEventCreate", None)
            event = self._new()
            self._events[event] = None
            return event

    def destroy_event(self, event: int) -> None:
        """See ``Driver.destroy_event``."""
        with self._lock:
            self._enter("cuEventDestroy", None)
            self._require(event in self._events, "cuEventDestroy", "CUDA_ERROR_INVALID_HANDLE")
            del self._events[event]

    def record(self, event: int, stream: int) -> None:
        """See ``Driver.record``."""
        with self._lock:
            self._enter("cuEventRecord", None)
            self._require(event in self._events, "cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")
            self._events[event] = (stream, self._stream(stream, "cuEventRecord").sent)

    def wait(self, event: int) -> None:
        """See ``Driver.wait``."""
        with self._lock:
            self._enter("cuEventSynchronize", None)
            self._require(event in self._events, "cuEventSynchronize", "CUDA_ERROR_INVALID_HANDLE")
            recorded = self._events[event]
            if recorded is not None and recorded[0] in self._streams:
                self._run(self._streams[recorded[0]], recorded[1])
            self._enter_broken("cuEventSynchronize")

    def done(self, event: int) -> bool:
        """See ``Driver.done``: as late as may be, so never before somebody waits."""
        with self._lock:
            self._enter("cuEventQuery", None)
            self._require(event in self._events, "cuEventQuery", "CUDA_ERROR_INVALID_HANDLE")
            recorded = self._events[event]
            return (
                recorded is None or recorded[0] not in self._streams or self._streams[recorded[0]].done >= recorded[1]
            )

    def _send(self, call: str, stream: int, act: Callable[[], None]) -> None:
        state = self._stream(stream, call)
        state.work.append(act)
        state.sent += 1

    def _run(self, stream: _Stream, until: int) -> None:
        while stream.done < until and stream.work:
            act = stream.work.popleft()
            stream.done += 1
            if self._broken:
                continue
            try:
                act()
            except (LookupError, DriverFailure) as error:
                self.violations.append(str(error))
                self._broken = True

    def _stream(self, stream: int, call: str) -> _Stream:
        self._require(stream in self._streams, call, "CUDA_ERROR_INVALID_HANDLE")
        return self._streams[stream]

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _enter(self, call: str, told: str | None, *, context: bool = True) -> None:
        if told is not None:
            self.calls.append(told)
        if call in self._failing:
            left, code = self._failing[call]
            if left == 0:
                del self._failing[call]
                raise DriverFailure(call, code)
            self._failing[call] = (left - 1, code)
        if context:
            here = getattr(self._here, "context", None)
            self._require(here is not None and self._contexts > 0, call, "CUDA_ERROR_INVALID_CONTEXT")

    def _enter_broken(self, call: str) -> None:
        self._require(not self._broken, call, "CUDA_ERROR_ILLEGAL_ADDRESS")

    @staticmethod
    def _require(condition: bool, call: str, code: str) -> None:
        if not condition:
            raise DriverFailure(call, code)
