"""A command that stands still at the begin of each of its phases, so that a test can hit it there.

The moments are those that ``--timing-events`` tells. However late a test reads that a phase began, the command is
there.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from coldsnap.testing.stand import PATIENCE_S, Stand

__all__ = ["Watched"]

_STEP_BY_STEP = """
import sys
from contextlib import contextmanager
from dataclasses import replace
from coldsnap.cli import recording

go_on = open(sys.argv.pop(1), "rb", buffering=0)
real = recording.outlet

@contextmanager
def outlet(receipt, events):
    with real(receipt, events) as usual:
        def on_event(event):
            usual.on_event(event)
            if event["event"] == "span-started":
                go_on.read(1)
        yield replace(usual, on_event=on_event)

recording.outlet = outlet
from coldsnap.cli.__main__ import main
main()
"""


class Watched:
    """A ``coldsnap`` command that stands still at the begin of each phase; it ends with the block."""

    def __init__(self, stand: Stand, folder: Path, *words: str | Path) -> None:
        fifo, go_on = folder / "events", folder / "go-on"
        os.mkfifo(fifo)
        os.mkfifo(go_on)
        self._fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self._go_on = open(go_on, "r+b", buffering=0)  # noqa: SIM115 - for reading too, or opening would wait
        self._buffer = b""
        program = ("-c", _STEP_BY_STEP, str(go_on))
        self.process = stand.cli(*words, "--timing-events", fifo, "--json", program=program, start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._go_on.close()
        os.close(self._fd)

    def until(self, phase: str) -> None:
        """Let the command go on until ``phase`` begins, where it stands still."""
        for event in self._events():
            if event["event"] == "span-started":
                if event["name"] == phase:
                    return
                self._go_on.write(b"+")
        out, err = self.process.communicate(timeout=PATIENCE_S)
        raise AssertionError(f"the command ended before its phase {phase}: {self.process.returncode}\n{out}\n{err}")

    def end(self, number: int, *, group: bool = False) -> tuple[int, str, str]:
        """Send a signal, to the group as a terminal does or to the one process, and let it go on; how it ended."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        self._go_on.close()
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def _events(self) -> Iterator[dict[str, Any]]:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while True:
            if not poll.poll(PATIENCE_S * 1000):
                raise AssertionError(f"no event came for {PATIENCE_S} s")
            data = os.read(self._fd, 65536)
            if not data:
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                yield json.loads(line)
