"""``capsule.cuda.api.CheckpointApi`` without CUDA: processes that are entries of a table, and a log of every call.

Any call can be told to fail once, with or without being carried out, as when a helper is lost in the middle:

    api = FakeCheckpoints({10: "worker", 11: "worker"})
    api.fail_next("checkpoint", 11, HelperLost("..."), carried_out=True)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coldsnap.capsule.cuda.accelerator import Accelerator
from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.inventory import Gpu, Inventory
from coldsnap.capsule.tree import FdFacts, FdKind, ProcessFacts, TreeFacts
from coldsnap.errors import CudaError

__all__ = ["FakeCheckpoints", "FakeCudaProcess", "fake_inventory"]

_RULES = {
    "lock": (ProcessState.RUNNING, ProcessState.LOCKED),
    "checkpoint": (ProcessState.LOCKED, ProcessState.CHECKPOINTED),
    "restore": (ProcessState.CHECKPOINTED, ProcessState.LOCKED),
    "unlock": (ProcessState.LOCKED, ProcessState.RUNNING),
}
_DEVICE = "/dev/nvidia0"


def fake_inventory(num_gpus: int = 1, *, first: int = 0, name: str = "Fake GPU") -> Inventory:
    """A machine with GPUs that differ in nothing but their UUIDs; ``first`` numbers the first of those."""
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-00000000-0000-0000-0000-{first + index:012x}",
            name=name,
            compute_capability="9.0",
        )
        for index in range(num_gpus)
    )
    return Inventory(gpus=gpus, cuda_userspace="13")


@dataclass(kw_only=True)
class FakeCudaProcess:
    """A process as the driver and ``/proc`` see it. ``known`` False: a fork, whose device the driver does not know of.

    ``keeps_nvml``: it holds a device after its CUDA state was taken off.
    """

    command: str = "worker"
    state: ProcessState = ProcessState.RUNNING
    inside_pid: int = 0
    known: bool = True
    keeps_nvml: bool = False
    device: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    error: BaseException
    carried_out: bool


class FakeCheckpoints:
    """``log`` gets (call, PID as text) of every call that changes something, in the order they began.

    ``label`` is put before each call's name, for a log that others write to as well.
    """

    def __init__(
        self,
        processes: Mapping[int, FakeCudaProcess] | None = None,
        log: list[tuple[str, str]] | None = None,
        label: str = "",
    ) -> None:
        self._label = label
        self.processes: dict[int, FakeCudaProcess] = dict(processes or {})
        self.log: list[tuple[str, str]] = log if log is not None else []
        self.num_open = 0
        self._failures: dict[tuple[str, int], list[_Failure]] = {}
        self._lock = threading.Lock()

    def fail_next(self, call: str, pid: int, error: BaseException, *, carried_out: bool = False) -> None:
        """Let the next ``call`` about ``pid`` raise ``error``, after doing its work or instead of it."""
        self._failures.setdefault((call, pid), []).append(_Failure(error=error, carried_out=carried_out))

    def refuse_next(self, call: str, pid: int) -> None:
        """Let the driver refuse the next ``call`` about ``pid``."""
        self.fail_next(call, pid, _refusal(call, pid, "the driver says no", "CUDA_ERROR_UNKNOWN"))

    # -- the api ----------------------------------------------------------------------------------

    def start(self) -> None:
        """See ``CheckpointApi.start``."""

    def state(self, pid: int) -> ProcessState | None:
        """See ``CheckpointApi.state``."""
        process = self.processes.get(pid)
        return process.state if process is not None and process.known else None

    def lock(self, pid: int, *, deadline_s: float) -> None:
        """See ``CheckpointApi.lock``."""
        self._move("lock", pid)

    def checkpoint(self, pid: int, *, deadline_s: float) -> None:
        """See ``CheckpointApi.checkpoint``."""
        self._move("checkpoint", pid)

    def restore(self, pid: int, *, devices: Mapping[str, str], deadline_s: float) -> None:
        """See ``CheckpointApi.restore``."""
        self._move("restore", pid)
        process = self.processes[pid]
        process.device = devices.get(process.device, process.device)

    def unlock(self, pid: int, *, deadline_s: float) -> None:
        """See ``CheckpointApi.unlock``."""
        self._move("unlock", pid)

    def close(self) -> None:
        """See ``CheckpointApi.close``."""
        self.num_open -= 1

    def _move(self, call: str, pid: int) -> None:
        with self._lock:
            self.log.append((f"{self._label}{call}", str(pid)))
            failures = self._failures.get((call, pid))
            failure = failures.pop(0) if failures else None
            if failure is None or failure.carried_out:
                before, after = _RULES[call]
                process = self.processes.get(pid)
                if process is None or not process.known or process.state is not before:
                    found = process.state if process is not None and process.known else "unknown"
                    raise _refusal(call, pid, f"it is {found}", "CUDA_ERROR_ILLEGAL_STATE")
                process.state = after
            if failure is not None:
                raise failure.error

    # -- the machine around it --------------------------------------------------------------------

    def accelerator(self, inventory: Inventory | None = None) -> Accelerator:
        """This api as the accelerator of a machine."""

        def open_api() -> FakeCheckpoints:
            self.num_open += 1
            return self

        found = inventory if inventory is not None else fake_inventory()
        return Accelerator(inventory=lambda: found, open_api=open_api, look=self.look)

    def look(self, pids: Iterable[int]) -> TreeFacts:
        """What ``/proc`` would say: who is not checkpointed has a device open."""
        return TreeFacts(processes=tuple(self._facts(pid) for pid in pids if pid in self.processes))

    def _facts(self, pid: int) -> ProcessFacts:
        process = self.processes[pid]
        holds = process.state is not ProcessState.CHECKPOINTED or process.keeps_nvml
        device = FdFacts(number=5, target=_DEVICE, kind=FdKind.CHARACTER, flags=2)
        return ProcessFacts(
            pid=pid,
            ppid=1,
            cmdline=(process.command,),
            environ={},
            fds=(device,) if holds else (),
            maps=(),
            num_threads=1,
            inside_pid=process.inside_pid or pid,
        )


def _refusal(call: str, pid: int, why: str, code: str) -> CudaError:
    return CudaError(f"{call} of process {pid} failed: {why}", facts={"call": call, "code": code, "pid": pid})
