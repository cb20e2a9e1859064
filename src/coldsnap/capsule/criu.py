"""CRIU as we use it: where it is, the command lines we give it, and what its log means.

The command lines are pure so that they can be read and tested without root. They name descriptors by fixed
numbers (``inside.py``), because CRIU runs in the unit's mount namespace, where a path of the host may mean
something else or nothing. Options and their reasons:

- ``--external mnt[]``: the unit's mounts are ours to make, not CRIU's to dump.
- ``--link-remap``, ``--ghost-limit``: files that were unlinked while open (semaphores, shared memory).
- ``--tcp-established``: connections within the tree, such as those of PyTorch's store to itself; one that leads out is
  refused before (``hygiene``).
- ``--ext-unix-sk``: a datagram socket that talks to a host service (syslog) does not stop a dump.
- ``--file-locks``: lock files of libraries; ``--manage-cgroups=ignore``: a restored tree lives in the cgroup of
  whoever restores it.
- ``--network-lock skip`` (dump): there are no connections to guard but those between frozen processes; the engine has
  closed its port before.
- ``--libdir``: an empty folder, so that no plugin of another CRIU is loaded; ``--no-default-config`` likewise.
- ``--leave-stopped`` (dump): the tree stays, stopped, until its private files are saved and we end it; had CRIU
  killed it, the init would have ended too, and CRIU with it in the middle of its last lines.
- ``--leave-stopped`` (restore): the tree stands still, and has executed nothing, until the memory that is not in
  CRIU's images is back; the unit's init lets it run.

The log goes to stderr (a memory file of the controller), so no log file is left anywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from coldsnap.capsule.inside import IMAGES_FD, OUTPUT_FD, WORK_DIR
from coldsnap.errors import MissingCapability

__all__ = ["MINIMUM_VERSION", "Criu", "criu_prefix", "dump_command", "find_criu", "parse_version", "restore_command"]

MINIMUM_VERSION: Final = (4, 1, 1)
_PREFERRED = Path("/opt/coldsnap/criu/bin/criu")
_SYSTEM_PREFIXES = (Path("/"), Path("/usr"), Path("/usr/local"))
_GHOST_LIMIT_BYTES = 1 << 30
_VERSION_TIMEOUT_S = 20.0
_INSTALL = "run scripts/install-criu as root, or install CRIU 4.1.1 or newer"

_COMMON = (
    "--no-default-config",
    "--images-dir",
    f"/proc/self/fd/{IMAGES_FD}",
    "--work-dir",
    WORK_DIR,
    "--libdir",
    WORK_DIR,
    "-v2",
    "--external",
    "mnt[]",
    "--link-remap",
    "--tcp-established",
    "--file-locks",
    "--ext-unix-sk",
    "--manage-cgroups=ignore",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Criu:
    """One CRIU that runs here and is new enough."""

    path: Path
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        """As CRIU prints it: ``4.1.1``."""
        return _dotted(self.version)


def dump_command(criu: Path, *, root_pid: int, timeout_s: float, leave_running: bool = False) -> tuple[str, ...]:
    """The command that dumps the tree under ``root_pid`` (as the unit sees it) into descriptor ``IMAGES_FD``."""
    return (
        str(criu),
        "dump",
        "--tree",
        str(root_pid),
        *_COMMON,
        "--network-lock",
        "skip",
        "--ghost-limit",
        str(_GHOST_LIMIT_BYTES),
        "--timeout",
        str(max(1, int(timeout_s))),
        "--leave-running" if leave_running else "--leave-stopped",
    )


def restore_command(criu: Path, *, log_pipe: int) -> tuple[str, ...]:
    """The command that restores from ``IMAGES_FD``; ``OUTPUT_FD`` stands in for the old stdout pipe ``log_pipe``."""
    return (
        str(criu),
        "restore",
        "--restore-detached",
        "--leave-stopped",
        *_COMMON,
        "--inherit-fd",
        f"fd[{OUTPUT_FD}]:pipe:[{log_pipe}]",
    )


def criu_prefix() -> Path:
    """The folder that holds CRIU and everything that it needs, for a unit whose root is not the host's.

    Raises MissingCapability when the only CRIU is one of the system's.
    """
    prefix = find_criu().path.parent.parent
    if prefix in _SYSTEM_PREFIXES:
        message = f"a unit with an image needs a CRIU in a folder of its own, and the one here is in {prefix}"
        raise MissingCapability(message, cure="run scripts/install-criu as root")
    return prefix


def parse_version(output: str) -> tuple[int, ...] | None:
    """The version in what ``criu --version`` prints, None when there is none."""
    match = re.search(r"^Version:\s*(\d+(?:\.\d+)*)", output, re.MULTILINE)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def find_criu(candidates: Sequence[Path] | None = None) -> Criu:
    """The first CRIU that runs and is new enough. Raises MissingCapability naming what was tried.

    Without ``candidates``: the private prefix that ``scripts/install-criu`` fills, then ``PATH``.
    """
    if candidates is None:
        on_path = shutil.which("criu")
        candidates = (_PREFERRED, *([Path(on_path)] if on_path else []))
    tried = []
    for path in candidates:
        try:
            found = path.stat()
            version = _version(path.absolute(), (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
            return Criu(path=path.absolute(), version=version)
        except FileNotFoundError:
            tried.append(f"{path}: does not exist")
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            tried.append(f"{path}: {error}")
    raise MissingCapability(
        f"no usable CRIU ({'; '.join(tried) or 'none found'})", cure=_INSTALL, facts={"tried": tried}
    )


@lru_cache(maxsize=8)
def _version(path: Path, identity: tuple[int, ...]) -> tuple[int, ...]:
    """Ask once for each file. Raises ValueError saying what is wrong with it; that is not remembered."""
    done = subprocess.run(
        [str(path), "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_VERSION_TIMEOUT_S,
        check=False,
        text=True,
        errors="replace",
    )
    version = parse_version(done.stdout)
    if version is None:
        raise ValueError(f"prints no version (exit status {done.returncode})")
    if version < MINIMUM_VERSION:
        raise ValueError(f"version {_dotted(version)} is older than {_dotted(MINIMUM_VERSION)}")
    return version


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
