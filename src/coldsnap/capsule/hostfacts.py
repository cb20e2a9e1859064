"""What this machine is, as compatibility compares it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from coldsnap.capsule.criu import find_criu
from coldsnap.capsule.identity import boot_id
from coldsnap.core.compat import HostFacts
from coldsnap.core.digest import Digest
from coldsnap.errors import MissingCapability

__all__ = ["host_facts", "host_identity", "parse_cpu_flags", "parse_nvidia_driver"]

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/version")
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"), Path("/sys/class/dmi/id/product_uuid"))


def host_facts() -> HostFacts:
    """The facts of this machine: kernel and processor, NVIDIA driver and CRIU where there are any."""
    kernel = os.uname()
    try:
        criu_version: str | None = find_criu().version_text
    except MissingCapability:
        criu_version = None
    return HostFacts(
        architecture=kernel.machine,
        kernel=kernel.release,
        nvidia_driver=nvidia_driver(),
        cpu_flags=parse_cpu_flags(_CPUINFO.read_text()),
        criu_version=criu_version,
    )


def host_identity() -> Digest:
    """Which machine this is: a digest of its machine id, so that the id itself is in no document.

    Without any lasting id it is this boot's, and what is bound to it ends with the boot.
    """
    for path in _MACHINE_IDS:
        try:
            text = path.read_text(encoding="ascii", errors="replace").strip().lower()
        except OSError:
            continue
        if text:
            return Digest.of(f"coldsnap-host:{text}".encode())
    return Digest.of(f"coldsnap-boot:{boot_id()}".encode())


def nvidia_driver() -> str | None:
    """The version of the loaded NVIDIA kernel driver, None when there is none."""
    try:
        return parse_nvidia_driver(_NVIDIA.read_text())
    except OSError:
        return None


def parse_nvidia_driver(text: str) -> str | None:
    """The driver version in ``/proc/driver/nvidia/version``, of the closed and of the open kernel module."""
    match = re.search(
        r"^NVRM version:.*?Kernel Module\b\D*?(?:for \S+\s+)?\s(\d+\.\d+(?:\.\d+)*)\b", text, re.MULTILINE
    )
    return match[1] if match else None


def parse_cpu_flags(text: str) -> frozenset[str]:
    """The flags that every processor of ``/proc/cpuinfo`` has (``flags`` on x86-64, ``Features`` on arm64)."""
    found = [frozenset(words.split()) for words in re.findall(r"^(?:flags|Features)[ \t]*:(.*)$", text, re.MULTILINE)]
    return frozenset.intersection(*found) if found else frozenset()
