"""What an init's complaint means to the caller."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from coldsnap.capsule.driver import UnitSpec
from coldsnap.errors import (
    ColdsnapError,
    EngineError,
    HostError,
    IntegrityError,
    MissingCapability,
    OutOfSpace,
    PeerError,
)

__all__ = ["ended_early", "init_error"]


def ended_early(spec: UnitSpec, phase: str) -> PeerError:
    """The error for an init whose channel closed in ``phase`` without a word."""
    return PeerError(
        f"unit {spec.unit} ended in its phase {phase!r}",
        cure=f"somebody killed its init, or memory ran out; see {spec.log_path} and dmesg",
    )


def init_error(unit: str, phase: str, message: Mapping[str, Any]) -> ColdsnapError:
    """The error for an ``error`` or ``ended`` event that arrived in ``phase``."""
    facts = {"unit": unit, "phase": message.get("phase", phase)}
    if message["event"] == "ended":
        return PeerError(
            f"unit {unit}: its root process ended with {message['code']} before it was ready",
            cure="read its log",
            facts=facts,
        )
    number, text = message.get("errno"), message["message"]
    if message.get("damaged"):
        return IntegrityError(
            f"unit {unit}: the process image {text}", cure="prepare the capsule again, or capture again", facts=facts
        )
    if number in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return OutOfSpace(
            f"unit {unit}: {text}",
            cure="give the unit's run folder more room (run_dir_bytes, shm_bytes), or free some memory",
            facts=facts,
        )
    match facts["phase"]:
        case "exec":
            return EngineError(f"unit {unit} cannot be started: {text}", cure="check the command and cwd", facts=facts)
        case "namespaces" | "pids" | "clock":
            return MissingCapability(
                f"unit {unit}: {text}",
                cure="run as root with CAP_SYS_ADMIN, on a kernel with CONFIG_CHECKPOINT_RESTORE and CONFIG_TIME_NS",
                facts=facts,
            )
        case "mounts":
            return HostError(
                f"unit {unit}: {text}", cure="check the unit's mounts; Linux 5.12 or newer is needed", facts=facts
            )
        case "memory":
            cure = "see dmesg for what ended a process; if nothing did, prepare the capsule again, or capture again"
            return PeerError(f"unit {unit}: its memory did not come back: {text}", cure=cure, facts=facts)
        case _:
            return PeerError(f"unit {unit}: {text}", cure="read its log", facts=facts)
