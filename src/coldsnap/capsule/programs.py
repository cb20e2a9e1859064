"""How the controller starts the small programs that live inside a unit."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import coldsnap
from coldsnap.capsule.channel import Channel

__all__ = ["boot_words", "program_command", "spawn_program", "start_program"]

# The package's folder goes to the end of the path, so that a package beside it cannot stand in for the standard
# library. The numbers are descriptors, in the order of the program's own `main`.
_BOOT = """\
import sys
sys.path.append(sys.argv[1])
from coldsnap.capsule.{module} import main
main(*map(int, sys.argv[3:]))
"""
_SOURCE = str(Path(coldsnap.__file__).parent.parent)


def start_program(
    module: str, descriptors: Sequence[int], *, label: str, output_fd: int
) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start ``coldsnap.capsule.<module>`` in a session of its own with our end of its channel and the descriptors.

    It inherits nothing else: no environment, no site-packages, no open file. -1 stands for "none".
    ``label`` is only there for people who read ``ps``. ``output_fd`` takes what it prints, which is only ever a
    traceback of a bug.
    """
    ours, process = spawn_program(module, descriptors, label=label, output_fd=output_fd)
    return Channel(ours), process


def program_command(module: str, label: str, numbers: Sequence[int] = ()) -> list[str]:
    """The command that runs ``coldsnap.capsule.<module>`` with these numbers, and nothing but the standard library."""
    return [sys.executable, *boot_words(module, _SOURCE, label, numbers)]


def boot_words(module: str, source: str, label: str, numbers: Sequence[int] = ()) -> tuple[str, ...]:
    """What follows the interpreter in such a command; ``source`` is the folder that has the package."""
    return ("-I", "-S", "-c", _BOOT.format(module=module), source, label, *map(str, numbers))


def spawn_program(
    module: str,
    descriptors: Sequence[int],
    *,
    label: str,
    output_fd: int,
    environment: Mapping[str, str] | None = None,
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """As ``start_program``, with the bare socket, and with ``environment`` where the program needs one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        numbers = (theirs.fileno(), *descriptors)
        process = subprocess.Popen(
            program_command(module, label, numbers),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            env=dict(environment or {}),
            cwd="/",
            pass_fds=[number for number in numbers if number >= 0],
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process
