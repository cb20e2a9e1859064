"""A GPU for a process that has none: a freeze loses its memory unless its state is taken off and put back in order.

``FakeGpu`` lives in the process that "has a CUDA context". Its device memory is a file of the GPU's folder that it has
open and mapped; ``checkpoint`` moves it into the process's own memory and lets go of the file, as the driver does with
a real one. A process that comes back from a freeze without having been checkpointed and restored reads zeros. The
calls reach it over a socket, from a helper process whose calls are ``coldsnap.testing.gpu_calls``.

``GpuRack`` is the machine's side: the folder, its GPUs, and what shall go wrong next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.cuda.accelerator import Accelerator
from coldsnap.capsule.cuda.helper import CALLS_VARIABLE
from coldsnap.capsule.cuda.inventory import Gpu, Inventory
from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.errors import UsageError
from coldsnap.testing.cuda_checkpoint import fake_inventory
from coldsnap.testing.gpu_calls import AGENTS_VARIABLE, RACK_VARIABLE
from coldsnap.testing.gpu_device import FAULTS_NAME

__all__ = ["GpuRack"]

_CALLS = "coldsnap.testing.gpu_calls"


@dataclass(kw_only=True)
class GpuRack:
    """The GPUs of a machine, below ``folder``; one folder each, named like its UUID."""

    folder: Path
    inventory: Inventory

    @classmethod
    def make(cls, folder: Path, num_gpus: int = 1, *, first: int = 0) -> GpuRack:
        """A machine with new GPUs."""
        inventory = fake_inventory(num_gpus, first=first)
        for gpu in inventory.gpus:
            (folder / gpu.uuid).mkdir(parents=True, exist_ok=True)
        return cls(folder=folder, inventory=inventory)

    def environment(self) -> dict[str, str]:
        """What makes a process's CUDA calls those of this rack."""
        return {CALLS_VARIABLE: _CALLS, RACK_VARIABLE: str(self.folder), AGENTS_VARIABLE: str(self.folder)}

    def accelerator(self) -> Accelerator:
        """These GPUs as the accelerator of a machine, with the real helper process."""
        return Accelerator(
            inventory=lambda: self.inventory,
            open_api=lambda: HelperApi(self.environment()),
            device_paths=(f"{self.folder}/",),
            environment=self.environment(),
        )

    def users(self) -> tuple[int, ...]:
        """Host PIDs of the processes that have any of these devices open."""
        return _users(self.folder)

    def users_of(self, gpu: Gpu) -> tuple[int, ...]:
        """The same for one of them."""
        return _users(self.folder / gpu.uuid)

    def fail_next(self, call: str, how: str) -> None:
        """``how`` the next ``call`` goes wrong, whoever it is about.

        fail: refused, nothing done. full: the device has no room. busy: not ready in time. hang: never answered,
        nothing done. die: the helper is lost, nothing done. die-after: it is lost once the work is done.
        """
        if how not in ("fail", "full", "busy", "hang", "die", "die-after"):
            raise UsageError(f"no such fault: {how!r}", cure="fail, full, busy, hang, die or die-after")
        aside = self.folder / f"{FAULTS_NAME}.new"
        aside.write_text(json.dumps({"call": call, "how": how}))
        aside.rename(self.folder / FAULTS_NAME)


def _users(folder: Path) -> tuple[int, ...]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            targets = [str(fd.readlink()) for fd in (entry / "fd").iterdir()] if entry.name.isdigit() else []
        except OSError:
            continue
        if any(target.startswith(f"{folder}/") for target in targets):
            found.append(int(entry.name))
    return tuple(sorted(found))
