"""What the verbs need from a process tree: start it, freeze it to files, bring it back, find it again.

One page and its contract; ``capsule/unit.py`` is the real one, ``coldsnap.testing.processes`` the fake, and
``coldsnap.testing.processes_suite`` holds both to this page.

- ``launch`` and ``restore`` return a unit that runs, or raise and leave nothing: no process, mount or file.
- A *tied* unit ends when the process that made it ends, until ``release``; an untied one is on its own at once.
- ``dump`` fills a folder and ends the unit (unless told to leave it running). A failed dump leaves the unit
  running and the folder gone.
- One images folder may be restored any number of times, also side by side; nothing is ever written to it.
- ``kill`` may be called any number of times, by anybody, also when the unit is long gone.
- ``attach`` never returns somebody else's process: a PID that was reused is "gone".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from coldsnap.core.launch import Runtime
from coldsnap.core.parsing import Record

__all__ = [
    "RUN_DIR",
    "BindMount",
    "ContainerMark",
    "ContainerRoot",
    "DumpReport",
    "DumpedFile",
    "RunningUnit",
    "UnitDriver",
    "UnitRecord",
    "UnitRoot",
    "UnitSpec",
]

RUN_DIR = Path("/run/coldsnap")
"""Where a unit finds its private tmpfs: its settings files and its sockets."""

_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BindMount:
    """A folder or file of the host, seen at ``target`` inside the unit. Both exist; both are absolute.

    Only what lies in the host's ``/dev/shm`` needs one to be seen at all, because a unit has its own; there the
    target is made.
    """

    source: Path
    target: Path
    read_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRoot:
    """An unpacked image that a unit has as its root. ``visible`` are absolute places of the host that it sees too.

    What is written into it goes to memory, at most ``upper_bytes`` (0: half of it), and is lost with the unit.
    """

    lower: Path
    visible: tuple[Path, ...] = ()
    upper_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerRoot:
    """An image that docker or podman makes a container of. ``visible``: places of the host that it sees too, each with
    whether it may only read there.

    ``python`` is the interpreter inside, which runs the unit's init. ``labels`` are how leftovers are found again.
    """

    runtime: Runtime
    image: str
    python: str
    visible: tuple[tuple[Path, bool], ...] = ()
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


class ContainerMark(Record):
    """Which container a unit is in."""

    runtime: Runtime = Field(strict=False)
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """One process tree to start, or to bring back.

    ``command``, ``environment`` and ``cwd`` are for a launch; a restored tree has its own. ``files`` are written
    into ``RUN_DIR`` (by plain name, mode 0600) before anything starts, and win over those saved by a dump.
    ``log_path`` is a file of the host that stdout and stderr are appended to.
    """

    unit: str
    log_path: Path
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/")
    mounts: tuple[BindMount, ...] = ()
    root: UnitRoot | ContainerRoot | None = None
    """None: the host's own root. With one, targets of mounts are made where they are missing."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    run_dir_bytes: int = 64 * _MIB
    shm_bytes: int = 0
    """Limit of the private ``/dev/shm``; 0 means half of the memory."""


class UnitRecord(Record):
    """How to find a running unit again, from any process, until the machine restarts."""

    format: Literal[1] = 1
    unit: str
    init_pid: int = Field(gt=0)
    init_start_ticks: int = Field(ge=0)
    boot_id: str
    root_pid: int = Field(gt=0)
    """PID of the engine's root process as the unit itself sees it."""
    log_pipe: int
    """Inode of the pipe behind stdout and stderr."""
    log_path: str
    container: ContainerMark | None = None
    """None: namespaces of our own making."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpedFile:
    """One file of an images folder."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpReport:
    """What a dump made and how long the whole call took."""

    images_dir: Path
    seconds: float
    bytes: int
    files: tuple[DumpedFile, ...]
    phases: Mapping[str, float]
    """Seconds from the call's start to the end of each phase, in order."""
    notes: tuple[str, ...] = ()
    """What people should know of an image that is right but not as it might be."""


class RunningUnit(Protocol):
    """A handle on one unit; it stays valid (and says so) after the unit is gone."""

    @property
    def unit(self) -> str:
        """The unit's id."""

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds from the start of launch or restore to the end of each phase; empty when attached."""

    def record(self) -> UnitRecord:
        """What ``attach`` needs."""

    def alive(self) -> bool:
        """Whether the unit's processes exist."""

    def pids(self) -> tuple[int, ...]:
        """Host PIDs of the tree, ascending, without the unit's init; empty when it is gone."""

    def socket_path(self, name: str) -> Path:
        """Host path of ``RUN_DIR / name``; usable while the unit lives."""

    def release(self) -> None:
        """Let a tied unit outlive this process. Raises PeerError when the unit is gone."""

    def kill(self, deadline_s: float = 60.0) -> None:
        """End every process of the unit and wait until they are gone. Raises DeadlineExceeded."""

    def log_tail(self, num_lines: int) -> tuple[str, ...]:
        """The last lines of the log file, oldest first; empty when there is none."""


class UnitDriver(Protocol):
    """How units are started, frozen and brought back. See the module's promises."""

    def launch(self, spec: UnitSpec, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """Start a unit.

        Raises UsageError (spec), MissingCapability (no root), HostError (mounts), EngineError (the command
        cannot be executed), DeadlineExceeded.
        """

    def dump(
        self, unit: RunningUnit, images_dir: Path, *, deadline_s: float, leave_running: bool = False
    ) -> DumpReport:
        """Freeze a unit into ``images_dir``, which must not exist. Raises CriuError, DeadlineExceeded."""

    def restore(self, spec: UnitSpec, images_dir: Path, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """Bring a frozen tree back. Raises CriuError, IntegrityError, DeadlineExceeded, and as ``launch``."""

    def attach(self, record: UnitRecord) -> RunningUnit | None:
        """The unit of a record, or None when it is gone (or the machine restarted, or its PID is another's)."""

    def clear(self, record: UnitRecord) -> None:
        """Take away what a unit that is gone may have left: the ended container. Nothing to do otherwise."""
