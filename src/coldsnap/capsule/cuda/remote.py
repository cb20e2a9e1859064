"""``CheckpointApi`` through the helper process, and the helper's other calls.

A helper is started by the first call (or by ``start``, beside other work: ``cuInit`` takes some tenths of a
second), and again by the first call after one was lost. A call that does not return in time loses the helper: it is
killed, its calls in flight raise HelperLost, and what they did is for ``state`` to tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.programs import spawn_program
from coldsnap.errors import ColdsnapError, CudaError, DeadlineExceeded, HelperLost, MissingCapability, OutOfSpace

__all__ = ["HelperApi"]

_START_S = 60.0
_QUICK_S = 60.0
_GRACE_S = 30.0
_KILL_S = 60.0
_MODULE = "cuda.helper"
_NOT_READY = ("CUDA_ERROR_NOT_READY", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_TIMEOUT")


class HelperApi:
    """See ``api.CheckpointApi`` for the promises; ``environment`` is all that a helper gets of it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(environment or {})}
        self._helper: _Helper | None = None
        self._starting: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def helper_pid(self) -> int | None:
        """The helper's PID while there is one; for tests that kill it."""
        helper = self._helper
        return helper.pid if helper is not None else None

    def start(self) -> None:
        """See ``CheckpointApi.start``."""
        if self._starting is None:
            self._starting = threading.Thread(target=self._start_quietly, name="cuda-helper-start", daemon=True)
            self._starting.start()

    def _start_quietly(self) -> None:
        with contextlib.suppress(ColdsnapError):
            self._ready()

    def state(self, pid: int) -> ProcessState | None:
        """See ``CheckpointApi.state``."""
        found = self.ask("state", pid, pid=pid, deadline_s=_QUICK_S)
        if found is None:
            return None
        try:
            return ProcessState(found)
        except ValueError as error:
            raise CudaError(
                f"the driver says that process {pid} is in {found}, which this version does not know",
                cure="use a newer coldsnap",
                facts={"call": "state", "code": str(found), "pid": pid},
            ) from error

    def lock(self, pid: int, *, deadline_s: float) -> None:
        """See ``CheckpointApi.lock``."""
        try:
            self.ask("lock", pid, max(1, int(deadline_s * 1000)), pid=pid, deadline_s=deadline_s + _GRACE_S)
        except CudaError as error:
            if error.facts["code"] not in _NOT_READY:
                raise
            raise DeadlineExceeded(
                f"process {pid} could not be locked within {deadline_s:g} s: its device work did not end",
                cure="stop what it computes (a request, another rank that waits for it), or allow more time",
                facts={"phase": "lock", "deadline_s": deadline_s, "pid": pid},
            ) from error

    def checkpoint(self, pid: int, *, deadline_s: float) -> None:
        """See ``CheckpointApi.checkpoint``."""
        self.ask("checkpoint", pid, pid=pid, deadline_s=deadline_s)

    def restore(self, pid: int, *, devices: Mapping[str, str], deadline_s: float) -> None:
        """See ``CheckpointApi.restore``."""
        self.ask("restore", pid, dict(devices), pid=pid, deadline_s=deadline_s)

    def unlock(self, pid: int, *, deadline_s: float) -> None:
        """See ``CheckpointApi.unlock``."""
        self.ask("unlock", pid, pid=pid, deadline_s=deadline_s)

    def close(self) -> None:
        """See ``CheckpointApi.close``."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.join()
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()

    def ask(self, call: str, *arguments: Any, pid: int | None = None, deadline_s: float = _QUICK_S) -> Any:
        """Make one call of ``libcuda.LibCuda`` in the helper. Raises CudaError, HelperLost, MissingCapability."""
        helper = self._ready()
        try:
            reply = helper.ask(call, arguments, deadline_s)
        except TimeoutError:
            helper.end()
            raise _lost(call, pid, f"did not return within {deadline_s:g} s", deadline_s) from None
        except ConnectionError:
            helper.end()
            raise _lost(call, pid, "was lost with the helper process that made it", None) from None
        if "code" in reply:
            raise _refused(reply["call"], reply["code"], pid)
        return reply["value"]

    def _ready(self) -> _Helper:
        with self._lock:
            if self._helper is not None and self._helper.is_lost:
                self._helper.end()  # nobody else waits for a process that ended by itself
                self._helper = None
            if self._helper is None:
                self._helper = _start(self._environment)
            return self._helper


def _lost(call: str, pid: int | None, what: str, deadline_s: float | None) -> HelperLost:
    about = f" of process {pid}" if pid is not None else ""
    return HelperLost(
        f"the CUDA call {call}{about} {what}",
        cure="look for Xid lines in the kernel log; the helper was ended, and a new one tidies up",
        facts={"call": call, "pid": pid, "deadline_s": deadline_s},
    )


def _refused(call: str, code: str, pid: int | None) -> ColdsnapError:
    facts = {"call": call, "code": code, "pid": pid}
    about = f" of process {pid}" if pid is not None else ""
    if code == "CUDA_ERROR_OUT_OF_MEMORY":
        return OutOfSpace(
            f"{call}{about} failed: the device, or the host's memory, has no room",
            cure="stop what else uses the GPU (nvidia-smi lists it), or restore onto another one with --devices",
            facts=facts,
        )
    if "no such call" in code or code == "CUDA_ERROR_NOT_SUPPORTED":
        return MissingCapability(
            f"{call}{about}: {code}", cure="use a driver that can checkpoint processes (570 or newer)", facts=facts
        )
    return CudaError(f"{call}{about} failed: {code}", cure="see the driver's release notes for this code", facts=facts)


class _Helper:
    """One helper process; any thread may ask."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._socket = sock
        self._process = process
        self._hello: Future[dict[str, Any]] = Future()
        self._futures = {0: self._hello}
        self._next = 1
        self._lock = threading.Lock()
        self._ended = False
        threading.Thread(target=self._read, name=f"cuda-helper-{process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        return self._ended

    def hello(self, deadline_s: float) -> dict[str, Any]:
        """What it says once it is ready, or is not."""
        return self._hello.result(deadline_s)

    def ask(self, call: str, arguments: tuple[Any, ...], deadline_s: float) -> dict[str, Any]:
        """Its reply. Raises TimeoutError, ConnectionError."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended:
                raise ConnectionError
            number, self._next = self._next, self._next + 1
            self._futures[number] = future
            line = json.dumps({"id": number, "call": call, "arguments": list(arguments)}).encode() + b"\n"
            try:
                self._socket.sendall(line)
            except OSError as error:
                raise ConnectionError from error
        return future.result(deadline_s)

    def end(self) -> None:
        """Kill it and wait: from here on no call of it is carried out. May be repeated."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)  # one that hangs in the kernel cannot be waited for
        self._lose()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                future = self._futures.pop(message["id"], None)
                if future is not None:
                    future.set_result(message)
        self._lose()
        self._socket.close()

    def _lose(self) -> None:
        with self._lock:
            self._ended = True
            waiting, self._futures = self._futures, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionError())


def _start(environment: Mapping[str, str]) -> _Helper:
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        sock, process = spawn_program(_MODULE, (), label="cuda", output_fd=null, environment=environment)
    finally:
        os.close(null)
    helper = _Helper(sock, process)
    try:
        reply = helper.hello(_START_S)
    except (TimeoutError, ConnectionError) as error:
        helper.end()
        raise HelperLost(
            "the helper process for CUDA calls did not come up",
            cure="see whether `nvidia-smi` answers, and look for Xid lines in the kernel log",
            facts={"call": "cuInit", "pid": None, "deadline_s": _START_S},
        ) from error
    if "code" in reply:
        helper.end()
        raise MissingCapability(
            f"CUDA cannot be used on this machine: {reply['call']}: {reply['code']}",
            cure="install the NVIDIA driver, and check it with nvidia-smi",
            facts={"call": reply["call"], "code": reply["code"]},
        )
    return helper
