"""What the verbs need of this machine's GPUs, in one record. ``cli/wiring.py`` makes the real one, tests a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coldsnap.capsule.cuda.api import CheckpointApi
from coldsnap.capsule.cuda.holders import DEVICE_PATHS
from coldsnap.capsule.cuda.inventory import Inventory, read_inventory
from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.capsule.hostfacts import nvidia_driver
from coldsnap.capsule.tree import TreeFacts, read_tree

__all__ = ["Accelerator", "nvidia"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """``open_api``: a new ``CheckpointApi``, which its opener closes. ``look``: the facts of living processes.

    ``device_paths``: how the paths of devices begin. ``environment``: what a process needs to find the driver.
    """

    inventory: Callable[[], Inventory]
    open_api: Callable[[], CheckpointApi]
    look: Callable[[Iterable[int]], TreeFacts] = read_tree
    device_paths: tuple[str, ...] = DEVICE_PATHS
    environment: Mapping[str, str] = field(default_factory=dict)


def nvidia(*, environment: Mapping[str, str] | None = None, cache_dir: Path | None = None) -> Accelerator:
    """The real one. ``environment`` is what a helper needs to find the driver's library (``LD_LIBRARY_PATH``)."""
    known = dict(environment or {})

    def open_api() -> HelperApi:
        return HelperApi(known)

    def inventory() -> Inventory:
        return read_inventory(nvidia_driver(), open_helper=open_api, cache_dir=cache_dir)

    return Accelerator(inventory=inventory, open_api=open_api, environment=known)
