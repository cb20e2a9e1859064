"""The device half of ``coldsnap.testing.gpu``: CUDA state of the process that makes it. Standard library only."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from coldsnap.capsule.identity import start_ticks
from coldsnap.errors import EngineError

__all__ = ["FAULTS_NAME", "FakeGpu", "agent_name", "open_device"]

FAULTS_NAME = "faults.json"
_ANSWER_LIMIT_BYTES = 65536


def agent_name(inside_pid: int) -> str:
    """The socket of the process with this PID in its own namespace."""
    return f"fake-gpu-{inside_pid}.sock"


def open_device(folder: Path) -> int:
    """A descriptor of new, empty device memory of the GPU whose folder this is; it is gone with its last user."""
    path = folder / f"nvidia0-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return descriptor


class FakeGpu:
    """The CUDA state of this process on the first GPU that ``visible`` names; calls come in below ``agent_folder``."""

    def __init__(self, rack: Path, agent_folder: Path, *, visible: str, num_bytes: int = 4096) -> None:
        self._rack = rack
        self._uuid = visible.split(",")[0]
        self._num_bytes = num_bytes
        self._compute = threading.Lock()
        self._change = threading.Lock()
        self._state = "running"
        self._saved = bytes(num_bytes)
        self._put_back()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(agent_folder / agent_name(os.getpid())))
        self._socket.listen()
        threading.Thread(target=self._serve, name="fake-gpu", daemon=True).start()

    @property
    def uuid(self) -> str:
        """The GPU it is on."""
        return self._uuid

    def write(self, data: bytes) -> None:
        """Fill the device memory from its beginning. Waits while the process is locked."""
        with self._compute:
            self._memory()[: len(data)] = data

    def read(self) -> bytes:
        """All of the device memory; zeros when it was lost. Waits while the process is locked."""
        with self._compute:
            return bytes(self._memory())

    def _memory(self) -> mmap.mmap:
        if self._mapping is None:
            raise EngineError("the fake GPU computes in a process that is checkpointed", cure="report this")
        if start_ticks(os.getpid()) != self._incarnation:
            self._mapping[:] = bytes(self._num_bytes)  # a copy of a process has no device memory of its own
        return self._mapping

    # -- what the driver does ---------------------------------------------------------------------

    def _put_back(self) -> None:
        self._descriptor = open_device(self._rack / self._uuid)
        os.ftruncate(self._descriptor, self._num_bytes)
        self._mapping: mmap.mmap | None = mmap.mmap(self._descriptor, self._num_bytes)
        self._mapping[:] = self._saved
        self._incarnation = start_ticks(os.getpid())

    def _take_off(self) -> None:
        mapping = self._memory()
        self._saved = bytes(mapping)
        mapping.close()
        self._mapping = None
        os.close(self._descriptor)

    def lock(self, timeout_ms: int) -> None:
        """See ``LibCuda``, here and below."""
        self._expect("running")
        if not self._compute.acquire(timeout=timeout_ms / 1000):
            raise _Refusal("CUDA_ERROR_NOT_READY")
        self._state = "locked"

    def checkpoint(self) -> None:
        """Device memory into the process."""
        self._expect("locked")
        self._take_off()
        self._state = "checkpointed"

    def restore(self, devices: dict[str, str]) -> None:
        """And back."""
        self._expect("checkpointed")
        if devices and self._uuid not in devices:
            raise _Refusal("CUDA_ERROR_INVALID_VALUE")
        self._uuid = devices.get(self._uuid, self._uuid)
        if not (self._rack / self._uuid).is_dir():
            raise _Refusal("CUDA_ERROR_INVALID_DEVICE")
        self._put_back()
        self._state = "locked"

    def unlock(self) -> None:
        """Go on."""
        self._expect("locked")
        self._state = "running"
        self._compute.release()

    def state(self) -> str:
        """As the driver says it."""
        return self._state

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise _Refusal("CUDA_ERROR_ILLEGAL_STATE")

    # -- how it is told ---------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            message = json.loads(connection.recv(_ANSWER_LIMIT_BYTES))
            how = self._fault(message["call"])
            if how == "hang":
                connection.recv(1)  # until the other side is gone
                return
            codes = {"fail": "CUDA_ERROR_UNKNOWN", "full": "CUDA_ERROR_OUT_OF_MEMORY"}
            reply: dict[str, Any] = {"code": codes[how]} if how in codes else {}
            if how == "busy":
                threading.Event().wait(message["arguments"][0] / 1000)
                reply = {"code": "CUDA_ERROR_NOT_READY"}
            if how in ("", "die-after"):
                reply = self._do(message)
            connection.sendall(json.dumps({**reply, "die": how.startswith("die")}).encode())

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._change:
                return {"value": getattr(self, message["call"])(*message["arguments"])}
        except _Refusal as refusal:
            return {"code": refusal.code}

    def _fault(self, call: str) -> str:
        path = self._rack / FAULTS_NAME
        try:
            fault = json.loads(path.read_text())
            if fault["call"] != call:
                return ""
            path.unlink()  # of two calls at the same time only one takes it
        except FileNotFoundError:
            return ""
        return str(fault["how"])


class _Refusal(Exception):
    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)
