"""What this machine needs before captures and restores can run, each with its cure. Changes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.criu import find_criu
from coldsnap.capsule.cuda.accelerator import Accelerator, nvidia
from coldsnap.capsule.hostfacts import host_facts
from coldsnap.capsule.probes import PROCESS_TREE, probe_features
from coldsnap.core.drivers import DRIVERS, DriverId, FeatureState
from coldsnap.core.launch import Runtime
from coldsnap.engines.protocol import EnginePlugin, Installed
from coldsnap.errors import ColdsnapError, MissingCapability
from coldsnap.store.stateroot import StateRoot

__all__ = ["Need", "examine"]

_LOW_SPACE_BYTES = 10 * 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """One need: ``ok``, ``missing`` (``blocking`` when nothing works without it) or ``note``."""

    name: str
    state: str
    found: str
    cure: str = ""
    blocking: bool = False

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "state": self.state,
            "found": self.found,
            "cure": self.cure,
            "blocking": self.blocking,
        }


def examine(
    state_root: Path,
    engines: Mapping[str, EnginePlugin],
    accelerator: Accelerator | None = None,
    runtimes: Mapping[Runtime, ContainerRuntime] | None = None,
    pythons: Sequence[str] = (),
) -> tuple[Need, ...]:
    """Every need, in the order to cure them. What drivers need of GPUs is proved where there are any: some seconds.

    ``pythons``: interpreters, beside this one, that engines are looked for in.
    """
    return (*_needs(state_root, engines, accelerator or nvidia(), pythons), *_runtimes(runtimes or {}))


def _needs(
    state_root: Path, engines: Mapping[str, EnginePlugin], accelerator: Accelerator, pythons: Sequence[str]
) -> Iterator[Need]:
    yield _ok("Python", f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}")
    root = os.geteuid() == 0
    yield (
        _ok("root", "yes")
        if root
        else _missing("root", f"user {os.geteuid()}", "run as root: process trees are frozen and restored with it")
    )
    facts = host_facts()
    yield _ok("kernel", f"{facts.kernel} on {facts.architecture}")
    yield from _criu(root=root)
    yield from _state(state_root)
    for name, plugin in sorted(engines.items()):
        for python in (sys.executable, *pythons):
            yield _engine(name, plugin.installed(python, {}))
    if facts.nvidia_driver is None:
        yield Need(name="NVIDIA driver", state="note", found="none: only driver `host` works here")
    else:
        yield Need(name="NVIDIA driver", state="note", found=facts.nvidia_driver)
        yield from _gpus(accelerator)


def _engine(name: str, found: Installed) -> Need:
    """What one interpreter has of an engine; none is needed before a recipe asks for it."""
    need = f"engine {name}" if found.python == sys.executable else f"engine {name} in {found.python}"
    versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
    if not found.problems:
        return _ok(need, versions or "its packages are installed")
    told = "; ".join(f"{one.field} {one.message}" for one in found.problems)
    return Need(name=need, state="missing", found=told, cure=found.problems[0].cure or "")


def _runtimes(runtimes: Mapping[Runtime, ContainerRuntime]) -> Iterator[Need]:
    """Nothing needs one of these unless a recipe says so."""
    for kind, runtime in runtimes.items():
        if runtime.program is None:
            yield Need(name=kind.value, state="note", found=f"not here: only recipes with `runtime: {kind}` need it")
            continue
        try:
            yield _ok(kind.value, f"{runtime.version()} at {runtime.program}")
        except ColdsnapError as error:
            yield Need(name=kind.value, state="note", found=error.message, cure=error.cure or "")


def _gpus(accelerator: Accelerator) -> Iterator[Need]:
    """The devices, and each driver for them with the first feature that is in its way."""
    inventory = accelerator.inventory()
    if not inventory.gpus:
        cure = "see whether nvidia-smi lists them; snapshot drivers n580 and n610 need one"
        yield Need(name="GPUs", state="missing", found=inventory.why_not, cure=cure)
        return
    yield _ok("GPUs", ", ".join(f"{gpu.index}: {gpu.name}" for gpu in inventory.gpus))
    contracts = [contract for driver, contract in DRIVERS.items() if driver is not DriverId.HOST]
    features = dict.fromkeys(feature for contract in contracts for feature in contract.base_features)
    results = {one.feature: one for one in probe_features(tuple(features), accelerator=accelerator)}
    for contract in contracts:
        found = [results[feature] for feature in contract.base_features]
        first = next((one for one in found if one.state is not FeatureState.PASSED), None)
        driver = contract.id
        if first is None:
            yield _ok(f"snapshot driver {driver}", f"all {len(found)} features passed")
        else:
            yield Need(
                name=f"snapshot driver {driver}",
                state="missing",
                found=f"{first.feature} {first.state.value}: {first.reason}",
                cure="use another driver; `coldsnap capabilities` shows every feature",
            )


def _criu(*, root: bool) -> Iterator[Need]:
    try:
        criu = find_criu()
    except MissingCapability as error:
        yield _missing("CRIU", error.message, error.cure or "run scripts/install-criu")
        return
    yield _ok("CRIU", f"{criu.version_text} at {criu.path}")
    if not root:
        return
    result = probe_features((PROCESS_TREE,))[0]
    if result.state is FeatureState.PASSED:
        yield _ok("freeze and restore", result.reason)
    else:
        yield _missing(
            "freeze and restore", result.reason, "see the reason; docs/troubleshooting.md has the frequent ones"
        )


def _state(path: Path) -> Iterator[Need]:
    if not path.exists():
        parent = next(folder for folder in path.parents if folder.exists())
        if os.access(parent, os.W_OK):
            yield _ok("state root", f"{path} will be created")
        else:
            yield _missing("state root", f"{path} cannot be created", "use --state-root, or run as root")
    else:
        try:
            StateRoot.open(path, create=False)
        except ColdsnapError as error:
            yield _missing("state root", error.message, error.cure or "choose another --state-root")
        else:
            if os.access(path, os.W_OK):
                yield _ok("state root", str(path))
            else:
                yield _missing("state root", f"{path} cannot be written", "mount it read-write, or use --state-root")
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1024**3:.1f} GiB free"
    if free < _LOW_SPACE_BYTES:
        yield Need(name="space", state="note", found=found, cure="packs are as large as the model; see `coldsnap gc`")
    else:
        yield _ok("space", found)


def _ok(name: str, found: str) -> Need:
    return Need(name=name, state="ok", found=found)


def _missing(name: str, found: str, cure: str) -> Need:
    return Need(name=name, state="missing", found=found, cure=cure, blocking=True)
