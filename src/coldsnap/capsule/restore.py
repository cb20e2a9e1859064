"""Bringing a dumped tree back under a new init."""

from __future__ import annotations

import os
from pathlib import Path

from coldsnap.capsule.checks import check_spec
from coldsnap.capsule.criu import Criu, restore_command
from coldsnap.capsule.criulog import criu_error, telling_lines
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import UnitSpec
from coldsnap.capsule.dumped import read_dumped_unit
from coldsnap.capsule.makers import UnitMaker
from coldsnap.capsule.memlog import memory_log
from coldsnap.capsule.prepared import are_proved
from coldsnap.capsule.running import NATIVE, Unit, bring_up
from coldsnap.errors import DeadlineExceeded, IntegrityError, PeerError

__all__ = ["restore"]


def restore(
    spec: UnitSpec, images_dir: Path, *, criu: Criu, deadline_s: float, tied: bool = False, maker: UnitMaker = NATIVE
) -> Unit:
    """Bring the tree of ``images_dir`` back; see ``driver.UnitDriver.restore``. The folder is only read."""
    check_spec(spec, needs_command=False)
    what = f"restore of unit {spec.unit}"
    deadline = Deadline(what, deadline_s)
    dumped = read_dumped_unit(images_dir)
    config = {
        "criu": list(restore_command(criu.path, log_pipe=dumped.log_pipe)),
        "root_pid": dumped.root_pid,
        "private": [entry.model_dump(exclude_none=entry.bytes is None) for entry in dumped.private],
        "memory": [
            {"pid": one.pid, "name": one.name, "pieces": one.pieces, "sha256": one.sha256} for one in dumped.memory
        ],
        "proved": are_proved(images_dir, [one.name for one in dumped.memory]),
        "stopped": dumped.stopped,
    }
    try:
        images_fd = os.open(images_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise IntegrityError(f"the images folder {images_dir} cannot be opened: {error.strerror}") from error
    try:
        with memory_log() as log:
            try:
                return bring_up(spec, config, deadline, tied=tied, images_fd=images_fd, criu_log_fd=log.fd, maker=maker)
            except DeadlineExceeded as error:
                error.facts["log"] = list(telling_lines(log.text()))
                raise
            except PeerError as error:
                if error.facts.get("phase") != "criu":
                    raise
                raise criu_error(what, error.message, log.text()) from error
    finally:
        os.close(images_fd)
