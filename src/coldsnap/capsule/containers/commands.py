"""The words that docker and podman are called with. Pure, so that they are read and tested without either.

What a container is given, and why:

- ``--network host``, ``--uts host``, ``--cgroupns host``: a unit of ours has PID, mount and IPC namespaces of its own
  and shares the rest; a tree is frozen and brought back by a CRIU that is in the same ones.
- ``CAPABILITIES`` and no seccomp, AppArmor or SELinux profile: CRIU runs inside at a restore, and a tree gets back
  what it was captured with. The list is written out, so that it is the same under both and does not move with a
  release: docker's own default, and what CRIU 4.1.1 was seen to fail without: ``SYS_ADMIN`` (mounts, namespaces, PIDs),
  ``NET_ADMIN`` (it forces the buffer sizes of sockets), ``SYS_TIME`` (the clock of the unit's time namespace); and
  ``SYS_PTRACE``, for trees whose processes are of several users. ``CHECKPOINT_RESTORE`` is a part of ``SYS_ADMIN``, and
  older dockers do not know its name.
- The image's entry point, health check, user and init are not used: the first process is our init.
- ``--pids-limit -1``: podman's own limit is for one small program.
- It stays when it has ended, until we remove it: its last words are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coldsnap.capsule.driver import BindMount
from coldsnap.core.launch import Runtime

__all__ = [
    "CAPABILITIES",
    "OWNER_LABEL",
    "SERVICE_LABEL",
    "UNIT_LABEL",
    "ContainerPlan",
    "bind_fault",
    "create_command",
    "find_command",
    "has_image_command",
    "inspect_command",
    "logs_command",
    "pull_command",
    "remove_command",
    "start_command",
    "version_command",
]

OWNER_LABEL: Final = "coldsnap.state-root"
SERVICE_LABEL: Final = "coldsnap.service"
UNIT_LABEL: Final = "coldsnap.unit"

CAPABILITIES: Final = (
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_ADMIN",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_ADMIN",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_TIME",
)
_STATE: Final = "{{.State.Status}} {{.State.Pid}} {{.State.ExitCode}}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerPlan:
    """A container to make. ``command`` is the whole command of its first process; ``devices`` are selectors of GPUs."""

    name: str
    image: str
    command: tuple[str, ...]
    mounts: tuple[BindMount, ...] = ()
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def create_command(runtime: Runtime, plan: ContainerPlan) -> tuple[str, ...]:
    """Make a container that is not started, of an image that is here. Prints its id."""
    return (
        "create",
        *("--name", plan.name, "--pull", "never"),
        *(word for label in sorted(plan.labels) for word in ("--label", f"{label}={plan.labels[label]}")),
        *("--network", "host", "--uts", "host", "--ipc", "private", "--cgroupns", "host"),
        *("--userns", "host", "--user", "0:0", "--workdir", "/"),
        *("--cap-drop", "ALL"),
        *(word for name in CAPABILITIES for word in ("--cap-add", name)),
        *(word for kind in ("seccomp=unconfined", "apparmor=unconfined", "label=disable") for word in _option(kind)),
        *("--pids-limit", "-1", "--restart", "no", "--stop-signal", "SIGTERM", "--no-healthcheck"),
        *(("--systemd", "false") if runtime is Runtime.PODMAN else ()),
        *(word for mount in plan.mounts for word in ("--mount", _bind(mount))),
        *_devices(runtime, plan.devices),
        *("--entrypoint", plan.command[0]),
        plan.image,
        *plan.command[1:],
    )


def start_command(container: str) -> tuple[str, ...]:
    """Start it; returns at once."""
    return ("start", container)


def inspect_command(container: str) -> tuple[str, ...]:
    """Print its status, the PID of its first process and its exit status."""
    return ("container", "inspect", "--format", _STATE, container)


def logs_command(container: str, num_lines: int) -> tuple[str, ...]:
    """Print what its first process printed last."""
    return ("logs", "--tail", str(num_lines), container)


def remove_command(container: str) -> tuple[str, ...]:
    """Remove it, running or not, with its anonymous volumes."""
    return ("rm", "--force", "--volumes", container)


def find_command(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Print the id and the name of every container with these labels, one a line."""
    return (
        *("ps", "--all", "--no-trunc"),
        *(word for label in sorted(labels) for word in ("--filter", f"label={label}={labels[label]}")),
        *("--format", "{{.ID}}\t{{.Names}}"),
    )


def has_image_command(image: str) -> tuple[str, ...]:
    """Succeed when the image is here."""
    return ("image", "inspect", "--format", "{{.Id}}", image)


def pull_command(runtime: Runtime, image: str, *, insecure: bool) -> tuple[str, ...]:
    """Bring an image. Docker takes a registry without TLS on this machine by itself, others from its daemon's list."""
    plain = ("--tls-verify=false",) if insecure and runtime is Runtime.PODMAN else ()
    return ("pull", "--quiet", *plain, image)


def version_command(runtime: Runtime) -> tuple[str, ...]:
    """Print the version of what makes containers: the daemon's, for docker."""
    return ("version", "--format", "{{.Server.Version}}" if runtime is Runtime.DOCKER else "{{.Client.Version}}")


def bind_fault(path: Path) -> str:
    """Why a path cannot be said in a ``--mount``; empty when it can."""
    return "holds a comma, a quote or a line break" if set(str(path)) & set(',"\n\r') else ""


def _option(value: str) -> tuple[str, str]:
    return ("--security-opt", value)


def _bind(mount: BindMount) -> str:
    return f"type=bind,source={mount.source},target={mount.target}" + (",readonly" if mount.read_only else "")


def _devices(runtime: Runtime, devices: tuple[str, ...]) -> Iterator[str]:
    """As NVIDIA's container toolkit takes them: docker's own flag, podman's through CDI."""
    if runtime is Runtime.DOCKER and devices:
        yield from ("--gpus", f'"device={",".join(devices)}"')
    elif runtime is Runtime.PODMAN:
        for device in devices:
            yield from ("--device", f"nvidia.com/gpu={device}")
