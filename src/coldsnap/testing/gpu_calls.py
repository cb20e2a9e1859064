"""The calls of a helper process for fake GPUs, as ``capsule/cuda/libcuda.py`` is for real ones. Standard library only.

A process with a fake GPU listens on a socket beside its unit's other sockets; one that does not is no CUDA process.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from coldsnap.testing.gpu_device import FakeGpu, agent_name

__all__ = ["AGENTS_VARIABLE", "RACK_VARIABLE", "open_calls"]

_RUN_DIR = "run/coldsnap"
AGENTS_VARIABLE = "COLDSNAP_FAKE_GPU_AGENTS"
RACK_VARIABLE = "COLDSNAP_FAKE_GPU_RACK"


class CallError(Exception):
    """As the calls of a real driver fail."""

    def __init__(self, call: str, code: str) -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {code}")


def open_calls() -> Calls:
    """Nothing has to be initialised."""
    return Calls()


class Calls:
    """See ``libcuda.LibCuda``."""

    def __init__(self) -> None:
        self._gpu: FakeGpu | None = None

    def version(self) -> int:
        """A driver of CUDA 13."""
        return 13000

    def checkpoint_calls(self) -> list[str]:
        """None is missing."""
        return []

    def devices(self) -> list[dict[str, Any]]:
        """See ``LibCuda.devices``."""
        names = sorted(path.name for path in self._rack().iterdir() if path.is_dir())
        return [
            {"index": index, "uuid": name, "name": "Fake GPU", "compute_capability": "9.0"}
            for index, name in enumerate(names)
        ]

    def plant(self, index: int, num_bytes: int) -> str:
        """See ``LibCuda.plant``."""
        run_dir = Path("/", _RUN_DIR)
        agents = run_dir if run_dir.is_mount() else Path(os.environ[AGENTS_VARIABLE])  # mounted in a unit alone
        self._gpu = FakeGpu(self._rack(), agents, visible=self.devices()[index]["uuid"], num_bytes=num_bytes)
        data = os.urandom(num_bytes)
        self._gpu.write(data)
        return hashlib.sha256(data).hexdigest()

    def harvest(self) -> str:
        """See ``LibCuda.harvest``."""
        if self._gpu is None:
            raise CallError("harvest", "nothing was planted")
        return hashlib.sha256(self._gpu.read()).hexdigest()

    def map_at(self, index: int, hint: int) -> int:
        """See ``LibCuda.map_at``; what ``moves`` in the rack's folder says is added to the hint."""
        moves = self._rack() / "moves"
        return (hint or 0x7000_0000_0000) + (int(moves.read_text()) if moves.exists() else 0)

    def _rack(self) -> Path:
        return Path(os.environ[RACK_VARIABLE])

    def state(self, pid: int) -> str | None:
        """See ``LibCuda.state``."""
        try:
            return str(self._ask("state", pid))
        except OSError:
            return None

    def lock(self, pid: int, timeout_ms: int) -> None:
        """See ``LibCuda.lock``."""
        self._ask("lock", pid, timeout_ms)

    def checkpoint(self, pid: int) -> None:
        """See ``LibCuda.checkpoint``."""
        self._ask("checkpoint", pid)

    def restore(self, pid: int, devices: dict[str, str]) -> None:
        """See ``LibCuda.restore``."""
        self._ask("restore", pid, devices)

    def unlock(self, pid: int) -> None:
        """See ``LibCuda.unlock``."""
        self._ask("unlock", pid)

    def _ask(self, call: str, pid: int, *arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(_agent(pid)))
            sock.sendall(json.dumps({"call": call, "arguments": arguments}).encode())
            with sock.makefile("rb") as answer:
                reply = json.loads(answer.read())  # to its end: then the process no longer holds the connection
        if reply.get("die"):
            os._exit(9)
        if "code" in reply:
            raise CallError(f"cuCheckpointProcess{call.capitalize()}", reply["code"])
        return reply["value"]


def _agent(pid: int) -> Path:
    status = Path(f"/proc/{pid}/status").read_text()
    inside = next((line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")), str(pid))
    name = agent_name(int(inside))
    in_unit = Path(f"/proc/{pid}/root", _RUN_DIR, name)
    return in_unit if in_unit.exists() else Path(os.environ[AGENTS_VARIABLE], name)
