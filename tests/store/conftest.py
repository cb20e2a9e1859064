"""Fixtures of the store's tests: a state root, sources made of plain bytes, and real child processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coldsnap.core.extents import semantic_id
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.sources import PackSource
from coldsnap.store.stateroot import StateRoot

MakeSource = Callable[[int, bytes, str], PackSource]


@pytest.fixture
def root(tmp_path: Path) -> StateRoot:
    return StateRoot.open(tmp_path / "state")


@pytest.fixture
def store(root: StateRoot) -> PayloadStore:
    return PayloadStore(root)


@pytest.fixture
def make_source() -> MakeSource:
    """``make_source(ptr, data, tensor name)``: a source that gives ``data`` in pieces of 1000 bytes."""

    def make(ptr: int, data: bytes, name: str) -> PackSource:
        def read() -> Iterator[bytes]:
            for start in range(0, len(data), 1000):
                yield data[start : start + 1000]

        return PackSource(ptr=ptr, size=len(data), semantic_id=semantic_id([(name, 0, len(data))]), read=read)

    return make


class Child:
    """A forked child that runs a function and leaves without cleaning up after pytest."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:  # pragma: no cover # the child's lines are not counted
            code = 1
            try:
                answer = repr(function()).encode()
                os.write(writer, answer)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)

    def wait(self) -> int:
        """Its exit code; minus the signal number when it was killed."""
        with open(self._reader, "rb") as pipe:
            self.answer = pipe.read().decode()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def fork() -> Callable[[Callable[[], object]], Child]:
    return Child
