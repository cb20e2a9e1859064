"""Process trees of this machine: namespaces of ours and CRIU, behind the one page of ``driver.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coldsnap.capsule.containers.maker import ContainerMaker
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.criu import Criu, find_criu
from coldsnap.capsule.driver import RUN_DIR, BindMount, ContainerRoot, DumpReport, RunningUnit, UnitRecord, UnitSpec
from coldsnap.capsule.dump import dump
from coldsnap.capsule.makers import UnitMaker
from coldsnap.capsule.restore import restore
from coldsnap.capsule.running import NATIVE, attach, launch
from coldsnap.core.launch import Runtime

__all__ = [
    "RUN_DIR",
    "BindMount",
    "DumpReport",
    "LinuxUnits",
    "RunningUnit",
    "UnitRecord",
    "UnitSpec",
    "attach",
    "dump",
    "launch",
    "restore",
]


class LinuxUnits:
    """``driver.UnitDriver``. Without a ``criu`` the machine's own is looked for when it is first needed, and a
    machine without one can still launch, attach and kill."""

    def __init__(self, criu: Criu | None = None, runtimes: Mapping[Runtime, ContainerRuntime] | None = None) -> None:
        self._criu = criu
        self._containers = ContainerMaker(runtimes or {})

    @property
    def criu(self) -> Criu:
        """The CRIU in use. Raises MissingCapability."""
        return self._criu or find_criu()

    def launch(self, spec: UnitSpec, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """Start a unit."""
        return launch(spec, deadline_s=deadline_s, tied=tied, maker=self._maker(spec))

    def dump(
        self, unit: RunningUnit, images_dir: Path, *, deadline_s: float, leave_running: bool = False
    ) -> DumpReport:
        """Freeze a unit into ``images_dir``, which must not exist."""
        return dump(unit, images_dir, criu=self.criu, deadline_s=deadline_s, leave_running=leave_running)

    def restore(self, spec: UnitSpec, images_dir: Path, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """Bring a frozen tree back."""
        maker = self._maker(spec)
        return restore(spec, images_dir, criu=self.criu, deadline_s=deadline_s, tied=tied, maker=maker)

    def attach(self, record: UnitRecord) -> RunningUnit | None:
        """The unit of a record, or None when it is gone."""
        return attach(record, NATIVE if record.container is None else self._containers)

    def clear(self, record: UnitRecord) -> None:
        """Take away what a unit that is gone may have left."""
        self._containers.clear(record.container)

    def _maker(self, spec: UnitSpec) -> UnitMaker:
        return self._containers if isinstance(spec.root, ContainerRoot) else NATIVE
