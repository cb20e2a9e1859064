"""The GPUs of this machine, and how a launch names them.

Asked of the driver in the helper process, because ``cuInit`` takes some tenths of a second and opens every device, and
remembered as long as it must be true: for this boot, this driver, and these device nodes.

A *selector* is what ``launch.units[].devices`` holds: an index in PCI order as ``nvidia-smi`` prints it, or a UUID. It
is placement: at a restore another may stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.capsule.identity import boot_id
from coldsnap.core.compat import DeviceFacts
from coldsnap.errors import ColdsnapError, HostError, Problem
from coldsnap.store.documents import read_private, try_replace

__all__ = ["CACHE_NAME", "Gpu", "Inventory", "chosen_gpus", "device_facts", "read_inventory", "selector_problems"]

CACHE_NAME = "gpu-inventory.json"
_LIMIT_BYTES = 1 << 20
_INFORMATION = Path("/proc/driver/nvidia/gpus")
_NODES = "nvidia[0-9]*"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Gpu(_Record):
    """One GPU. ``index`` in PCI order; ``compute_capability`` such as ``9.0``."""

    index: int
    uuid: str
    name: str
    compute_capability: str


class Inventory(_Record):
    """What CUDA finds here. ``cuda_userspace`` is the major version of the CUDA that the driver speaks: ``13``.

    ``why_not``: why there is nothing, when there is nothing.
    """

    gpus: tuple[Gpu, ...] = ()
    cuda_userspace: str | None = None
    why_not: str = ""


class _Remembered(_Record):
    format: Literal[1] = 1
    kind: Literal["coldsnap-gpu-inventory"] = "coldsnap-gpu-inventory"
    boot_id: str
    nvidia_driver: str
    nodes: tuple[str, ...]
    inventory: Inventory


def read_inventory(
    nvidia_driver: str | None, *, open_helper: Callable[[], HelperApi], cache_dir: Path | None
) -> Inventory:
    """The GPUs that CUDA can use here; empty without a driver, or when the driver does not answer. Never raises."""
    if nvidia_driver is None:
        return Inventory(why_not="this machine has no NVIDIA driver")
    nodes = _device_nodes()
    path = cache_dir / CACHE_NAME if cache_dir is not None else None
    known = _remembered(path) if path is not None else None
    if known is not None and (known.boot_id, known.nvidia_driver, known.nodes) == (boot_id(), nvidia_driver, nodes):
        return known.inventory
    helper = open_helper()
    try:
        version = int(helper.ask("version"))
        gpus = tuple(Gpu.model_validate(one) for one in helper.ask("devices"))
    except ColdsnapError as error:
        return Inventory(why_not=error.message)
    finally:
        helper.close()
    found = Inventory(gpus=gpus, cuda_userspace=str(version // 1000), why_not="" if gpus else "CUDA sees no device")
    if path is not None and gpus:
        kept = _Remembered(boot_id=boot_id(), nvidia_driver=nvidia_driver, nodes=nodes, inventory=found)
        try_replace(path, kept.model_dump_json().encode())
    return found


def chosen_gpus(inventory: Inventory, selectors: Sequence[str]) -> tuple[Gpu | None, ...]:
    """The GPU that each selector names, None for one that names none."""
    return tuple(_chosen(inventory, selector) for selector in selectors)


def selector_problems(inventory: Inventory, selectors: Sequence[str], *, field: str) -> tuple[Problem, ...]:
    """One problem for each selector that names no GPU of this machine, or one that an earlier selector has."""
    known = ", ".join(f"{one.index} ({one.uuid}, {one.name})" for one in inventory.gpus)
    cure = f"it has {known}" if known else inventory.why_not or "it has none"
    problems, seen = [], set()
    for slot, (selector, gpu) in enumerate(zip(selectors, chosen_gpus(inventory, selectors), strict=True)):
        if gpu is None:
            message = "names no GPU of this machine"
        elif gpu.uuid in seen:
            message = "is the GPU of an earlier slot, under another name"
        else:
            seen.add(gpu.uuid)
            continue
        problems.append(Problem(field=f"{field}[{slot}]", message=message, value=selector, cure=cure))
    return tuple(problems)


def device_facts(gpus: Sequence[Gpu]) -> tuple[DeviceFacts, ...]:
    """The GPUs of a unit as compatibility compares them, by slot."""
    return tuple(
        DeviceFacts(slot=slot, gpu_name=gpu.name, compute_capability=gpu.compute_capability)
        for slot, gpu in enumerate(gpus)
    )


def _chosen(inventory: Inventory, selector: str) -> Gpu | None:
    for gpu in inventory.gpus:
        if selector == str(gpu.index) or selector.lower() == gpu.uuid.lower():
            return gpu
    return None


def _device_nodes() -> tuple[str, ...]:
    """Names that change when another set of GPUs is visible."""
    nodes = [str(path) for path in Path("/dev").glob(_NODES)]
    buses = [path.name for path in _INFORMATION.iterdir()] if _INFORMATION.is_dir() else []
    return tuple(sorted(nodes + buses))


def _remembered(path: Path) -> _Remembered | None:
    try:
        return _Remembered.model_validate_json(read_private(path, _LIMIT_BYTES))
    except (HostError, ValidationError):
        return None
