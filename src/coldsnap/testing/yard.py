"""Real process trees for tests: start them, talk to them, and see that none is left behind."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.capsule.driver import RunningUnit, UnitSpec
from coldsnap.capsule.makers import UnitMaker
from coldsnap.capsule.running import NATIVE, launch

__all__ = ["PATIENCE_S", "Yard", "wait_for_writer", "wait_until_gone"]

_PROGRAM = Path(__file__).with_name("process_tree.py")
_MEMORY_PROGRAM = Path(__file__).with_name("memory_tree.py")
_PYTHON = Path(sys.executable)
_MAPPED_BYTES = 8 << 20
_RUN = Path("/run/coldsnap")
PATIENCE_S = 60.0
"""How long a test waits for something that takes milliseconds."""


@dataclass
class Yard:
    """Where one test keeps its trees: names that nobody else uses, a folder, and help to talk to a tree."""

    folder: Path
    token: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    units: list[RunningUnit] = field(default_factory=list)
    found: frozenset[str] = field(default_factory=lambda: frozenset(_run_mounts_and_files()))
    """What somebody else had left on the machine before this test began, which is none of its doing."""

    def spec(self, name: str = "u0", **changes: Any) -> UnitSpec:
        """A spec whose unit id is this test's own."""
        log = self.folder / f"{name}.log"
        return UnitSpec(**{"unit": f"{self.token}-{name}", "log_path": log, **changes})

    def launch(
        self,
        name: str = "u0",
        *,
        megabytes: int = 1,
        tied: bool = False,
        maker: UnitMaker = NATIVE,
        python: Path = _PYTHON,
        **changes: Any,
    ) -> RunningUnit:
        """A running process tree (``process_tree.py``) that is ready to be asked."""
        fifo = self.folder / f"{name}.fifo"
        os.mkfifo(fifo)
        defaults: dict[str, Any] = {
            "command": (str(python), "-I", "-S", str(_PROGRAM), str(fifo), str(megabytes)),
            "environment": {"GREETING": "hello"},
            "files": {"settings.json": b"{}"},
        }
        spec = self.spec(name, **defaults | changes)
        unit = self.keep(launch(spec, deadline_s=PATIENCE_S, tied=tied, maker=maker))
        wait_for_writer(fifo)
        fifo.unlink()
        return unit

    def launch_memory(self, name: str = "u0", *, python: Path = _PYTHON, **changes: Any) -> RunningUnit:
        """A running tree (``memory_tree.py``) with every kind of memory, which answers with digests of it."""
        mapped = self.folder / f"{name}.mapped"
        mapped.write_bytes(b"".join(number.to_bytes(4, "big") * 1024 for number in range(1, _MAPPED_BYTES // 4096 + 1)))
        command = (str(python), "-I", "-S", str(_MEMORY_PROGRAM), str(self.folder / f"{name}.fifo"), str(mapped))
        return self.launch(name, command=command, **changes)

    def keep(self, unit: RunningUnit) -> RunningUnit:
        """End the unit with the test."""
        self.units.append(unit)
        return unit

    def ask(self, unit: RunningUnit, question: str = "state") -> Any:
        """One question to a tree; None when it ended instead of answering."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(PATIENCE_S)
            client.connect(str(unit.socket_path("control.sock")))
            client.sendall(question.encode() + b"\n")
            with client.makefile() as lines:
                line = lines.readline()
                return json.loads(line) if line else None

    def sweep(self) -> None:
        """End this test's units and make sure that no process, mount or file of them is left on the machine."""
        for unit in self.units:
            unit.kill()
        self.wait_until_empty()
        left = [one for one in _run_mounts_and_files(str(self.folder)) if one not in self.found]
        if left:
            raise AssertionError(f"left behind: {left}")

    def wait_until_empty(self) -> None:
        """Return once no process of this test is left; one that ends may have started another just before."""
        patience = time.monotonic() + PATIENCE_S
        while processes := self.processes():
            if time.monotonic() > patience:
                raise AssertionError(f"left behind: processes {processes}")
            for pid in processes:
                wait_until_gone(pid)

    def processes(self) -> list[int]:
        """Every process on this machine that carries this test's token in its command line."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    line = (folder / "cmdline").read_bytes()
                except OSError:
                    continue
                if self.token.encode() in line:
                    found.append(int(folder.name))
        return found


def _run_mounts_and_files(*also: str) -> list[str]:
    """Mounts with ``/run/coldsnap`` or one of ``also`` in their line, and what lies in that folder on the host."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = [f"mount {line}" for line in lines if any(word in line for word in (str(_RUN), *also))]
    return mounts + [f"file {path}" for path in (_RUN.iterdir() if _RUN.is_dir() else ())]


def wait_for_writer(fifo: Path) -> None:
    """Return once somebody opened the FIFO for writing."""
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(PATIENCE_S * 1000):
            raise AssertionError(f"nobody wrote to {fifo}")
    finally:
        os.close(descriptor)


def wait_until_gone(pid: int) -> None:
    """Return once the process is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(PATIENCE_S * 1000):
            raise AssertionError(f"process {pid} does not end")
    finally:
        os.close(pidfd)
