"""The only place where implementations are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.errors import UserError

if TYPE_CHECKING:
    from coldsnap.capsule.containers.runtime import ContainerRuntime
    from coldsnap.capsule.cuda.accelerator import Accelerator
    from coldsnap.core.launch import Runtime
    from coldsnap.engines.protocol import EnginePlugin
    from coldsnap.ops.report import Reporter
    from coldsnap.ops.tools import Tools

__all__ = ["ENGINE_GROUP", "container_runtimes", "installed_engines", "make_tools", "this_accelerator"]

ENGINE_GROUP = "coldsnap.engines"
_RUNTIME_NAMES = frozenset(
    {"HOME", "PATH", "REGISTRY_AUTH_FILE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "XDG_CONFIG_HOME",
     "XDG_DATA_HOME", "XDG_RUNTIME_DIR"}
)  # fmt: skip
_RUNTIME_PREFIXES = ("DOCKER_", "CONTAINER_", "CONTAINERS_")
_PROXIES = frozenset({"http_proxy", "https_proxy", "no_proxy", "all_proxy"})


def installed_engines() -> Mapping[str, EnginePlugin]:
    """Every engine plugin that this Python has, by name; found through entry points, imported here."""
    found: dict[str, EnginePlugin] = {}
    for point in entry_points(group=ENGINE_GROUP):
        try:
            found[point.name] = point.load()
        except ImportError as error:
            raise UserError(
                f"the engine plugin {point.name!r} ({point.value}) cannot be imported: {error}",
                cure="install the package it needs, or uninstall the plugin",
            ) from error
    return found


def make_tools(
    state_root: Path, *, reporter: Reporter | None = None, offline: bool = False, peers: Sequence[str] = ()
) -> Tools:
    """The real implementations, below ``state_root``. ``offline`` and ``peers`` say which stores may be asked."""
    from coldsnap.capsule.hostfacts import host_facts
    from coldsnap.capsule.probes import probe_features
    from coldsnap.capsule.unit import LinuxUnits
    from coldsnap.cli.remotes import make_remotes
    from coldsnap.ops.report import Silent
    from coldsnap.ops.tools import Tools
    from coldsnap.store.stateroot import StateRoot

    state = StateRoot.open(state_root)
    accelerator = this_accelerator(cache_dir=state.path)
    runtimes = container_runtimes()
    return Tools(
        state=state,
        engines=installed_engines(),
        units=LinuxUnits(runtimes=runtimes),
        host_facts=host_facts,
        probe=partial(probe_features, cache_dir=state.path, accelerator=accelerator),
        reporter=reporter or Silent(),
        remotes=make_remotes(offline=offline, peers=peers),
        accelerator=accelerator,
        runtimes=runtimes,
    )


def container_runtimes() -> Mapping[Runtime, ContainerRuntime]:
    """Docker and podman as this user's shell would find and run them; nothing else of our environment."""
    import os
    import shutil

    from coldsnap.capsule.containers.runtime import ContainerRuntime
    from coldsnap.core.launch import Runtime

    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _RUNTIME_NAMES or name.startswith(_RUNTIME_PREFIXES) or name.lower() in _PROXIES
    }
    return {
        kind: ContainerRuntime(
            runtime=kind, program=Path(found) if (found := shutil.which(kind)) else None, environment=environment
        )
        for kind in Runtime
    }


def this_accelerator(cache_dir: Path | None = None) -> Accelerator:
    """The GPUs of this machine. Where the driver's library may lie is all that a helper gets of our environment."""
    import os

    from coldsnap.capsule.cuda.accelerator import nvidia

    names = ("LD_LIBRARY_PATH",)
    return nvidia(environment={name: os.environ[name] for name in names if name in os.environ}, cache_dir=cache_dir)
