"""Root and namespaces by system calls, without any daemon: ``makers.UnitMaker``."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from coldsnap.capsule.channel import Closed
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import ContainerMark, UnitRoot, UnitSpec
from coldsnap.capsule.identity import end_process, start_ticks
from coldsnap.capsule.makers import Begun, InitFiles
from coldsnap.capsule.programs import start_program
from coldsnap.capsule.starting import ended_early, init_error
from coldsnap.core.points import reached

__all__ = ["NativeMaker"]

_CLEANUP_S = 60.0


class NativeMaker:
    """The init makes its own namespaces, and root and mounts when it has its config."""

    def begin(self, spec: UnitSpec, files: InitFiles, deadline: Deadline) -> Begun:
        """Start the init's program, which leaves the init behind and ends."""
        phase = "start"
        channel, process = start_program("init", files.numbers, label=spec.unit, output_fd=files.log)
        pid, ticks = 0, None
        try:
            message = channel.receive(timeout_s=deadline.remaining(phase))
            if message["event"] != "init":
                raise init_error(spec.unit, phase, message)
            pid = int(message["pid"])
            ticks = start_ticks(pid)
            process.wait(deadline.remaining(phase))
            reached("unit.init")
            if ticks is None:
                raise Closed
            return Begun(channel=channel, pid=pid, ticks=ticks, world=_world(spec))
        except BaseException as error:
            channel.close()
            process.kill()
            process.wait()
            if ticks is not None:
                end_process(pid, ticks, timeout_s=_CLEANUP_S)
            if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
                raise deadline.exceeded(phase) from error
            if isinstance(error, Closed):
                raise ended_early(spec, phase) from error
            raise

    def clear(self, mark: ContainerMark | None) -> None:
        """Namespaces end with their first process."""


def _world(spec: UnitSpec) -> Mapping[str, Any]:
    root = spec.root
    return {
        "mounts": [
            {"source": str(one.source), "target": str(one.target), "read_only": one.read_only} for one in spec.mounts
        ],
        "root": {
            "lower": str(root.lower),
            "visible": [str(path) for path in root.visible],
            "upper_bytes": root.upper_bytes,
        }
        if isinstance(root, UnitRoot)
        else None,
    }
