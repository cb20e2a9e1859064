"""Which processes of a unit have CUDA state: facts of the tree and the driver's word in, holders or refusals out. Pure.

A *holder* is a process that has a device open (or mapped) and that the driver knows. A process that has one open and
that the driver does not know got it from its parent by a fork, or opened it without CUDA (NVML): neither can be taken
off the device from outside, so it is named, with the cure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.tree import ProcessFacts, TreeFacts
from coldsnap.errors import Problem

__all__ = [
    "DEVICE_PATHS",
    "Holder",
    "device_users",
    "driver_libraries",
    "find_holders",
    "holder_problems",
    "leftover_problems",
    "template_problems",
]

DEVICE_PATHS = ("/dev/nvidia",)
"""How the paths of devices begin."""

_NVML = "libnvidia-ml.so"
_DRIVER = "libcuda.so"
_COMMAND_WORDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process with CUDA state. ``inside_pid`` is the PID that its unit sees, the same after a restore."""

    unit: str
    pid: int
    inside_pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} of unit {self.unit} ({self.command})"


def device_users(tree: TreeFacts, paths: Sequence[str] = DEVICE_PATHS) -> dict[int, tuple[str, ...]]:
    """PID -> the devices that it has open or mapped, for each process that has any."""
    users = {}
    for process in tree.processes:
        held = {fd.target for fd in process.fds} | {one.path for one in process.maps if one.path is not None}
        devices = tuple(sorted(path for path in held if path.startswith(tuple(paths))))
        if devices:
            users[process.pid] = devices
    return users


def find_holders(
    unit: str, tree: TreeFacts, states: Mapping[int, ProcessState | None], paths: Sequence[str] = DEVICE_PATHS
) -> tuple[Holder, ...]:
    """The holders of one unit, by the PID that the unit sees."""
    users = device_users(tree, paths)
    found = [
        Holder(unit=unit, pid=process.pid, inside_pid=process.inside_pid, command=_command(process))
        for process in tree.processes
        if process.pid in users and states.get(process.pid) is not None
    ]
    return tuple(sorted(found, key=lambda one: one.inside_pid))


def holder_problems(
    unit: str, tree: TreeFacts, states: Mapping[int, ProcessState | None], paths: Sequence[str] = DEVICE_PATHS
) -> Iterator[Problem]:
    """Why the CUDA state of a unit cannot be taken off its devices, before anything is tried."""
    users = device_users(tree, paths)
    for process in tree.processes:
        state = states.get(process.pid)
        if state not in (None, ProcessState.RUNNING):
            yield _problem(
                unit,
                process,
                f"is {state} already: another program began to checkpoint it, and did not end",
                "end that program, let it restore and unlock the process, or start the engine again",
            )
        elif state is None and process.pid in users:
            devices = ", ".join(users[process.pid])
            if _maps(process, _NVML) and not _maps(process, _DRIVER):
                yield _problem(unit, process, f"holds {devices} through NVML, without CUDA", _SHUT_NVML)
            else:
                yield _problem(
                    unit,
                    process,
                    f"has {devices} open, and the driver does not know it as a CUDA process: it was forked from one",
                    "start it with the method spawn (multiprocessing.set_start_method), or before the parent uses CUDA",
                )


def leftover_problems(unit: str, tree: TreeFacts, paths: Sequence[str] = DEVICE_PATHS) -> Iterator[Problem]:
    """Devices that processes hold although their CUDA state was taken off."""
    users = device_users(tree, paths)
    for process in tree.processes:
        if process.pid in users:
            held = ", ".join(users[process.pid])
            message = f"still holds {held} after its CUDA state was taken off the devices"
            yield _problem(unit, process, message, _SHUT_NVML)


def template_problems(unit: str, tree: TreeFacts, paths: Sequence[str] = DEVICE_PATHS) -> Iterator[Problem]:
    """Whatever of a device processes have that are to be frozen before they were placed.

    The driver is not asked: 580.159 calls a process "running" that has loaded libcuda and opened and closed NVML, in
    which ``cuCtxGetCurrent`` still says that nothing was initialised. What was initialised keeps devices open.
    """
    users = device_users(tree, paths)
    for process in tree.processes:
        if process.pid in users:
            message = f"holds {', '.join(users[process.pid])} before it was placed, so it is no template"
            if _maps(process, _NVML) and not _maps(process, _DRIVER):
                message += "; it has not loaded CUDA, so NVML opened them"
            yield _problem(unit, process, message, _PUT_OFF)


def driver_libraries(tree: TreeFacts) -> dict[str, tuple[ProcessFacts, ...]]:
    """The NVIDIA driver's own libraries that are mapped, each with the processes that map it.

    A library is no state: many packages link to one and never call it before they must. But it is that driver's.
    """
    found: dict[str, list[ProcessFacts]] = {}
    for process in tree.processes:
        libraries = {one.path for one in process.maps if one.path is not None}
        for path in sorted(libraries):
            if PurePosixPath(path).name.startswith((_DRIVER, _NVML)):
                found.setdefault(path, []).append(process)
    return {path: tuple(processes) for path, processes in found.items()}


_PUT_OFF = "find what touches CUDA or NVML when it is imported (torch.cuda, pynvml), and put it off"
_SHUT_NVML = "let it end NVML (nvmlShutdown) and close what it opened itself before the capture, or not open it at all"


def _problem(unit: str, process: ProcessFacts, message: str, cure: str) -> Problem:
    return Problem(field=f"{unit}: process {process.pid}", message=message, value=_command(process), cure=cure)


def _command(process: ProcessFacts) -> str:
    """What people recognise it by; no more than the first words, which may not hold secrets."""
    words = process.cmdline[:_COMMAND_WORDS]
    return " ".join([PurePosixPath(words[0]).name, *words[1:]]) if words else "?"


def _maps(process: ProcessFacts, library: str) -> bool:
    return any(one.path is not None and PurePosixPath(one.path).name.startswith(library) for one in process.maps)
