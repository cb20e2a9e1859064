"""What the verbs work with. ``cli/wiring.py`` fills this record; tests fill it with the shipped fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.cuda.accelerator import Accelerator, nvidia
from coldsnap.capsule.cuda.suspend import Patience
from coldsnap.capsule.driver import UnitDriver
from coldsnap.capsule.hostfacts import host_identity
from coldsnap.capsule.memoryfs import LinuxMemoryFs, MemoryFs
from coldsnap.core.compat import HostFacts
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import FeatureResult
from coldsnap.core.launch import Runtime
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.hosts import Host, LocalHost, Placement
from coldsnap.ops.report import Reporter, Silent
from coldsnap.ops.services import Services
from coldsnap.ship.remotes import OFFLINE, Remotes
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot

__all__ = ["Deadlines", "Tools"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Bounds, in seconds, of the phases of an operation. All are settable by the caller."""

    load_s: float = 1800.0
    answer_s: float = 600.0
    export_s: float = 3600.0
    sleep_s: float = 120.0
    dump_s: float = 600.0
    thaw_s: float = 300.0
    wake_s: float = 1800.0
    serve_s: float = 30.0
    kill_s: float = 30.0
    cuda: Patience = field(default_factory=Patience)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Implementations, chosen once. Nothing below ``cli`` looks for them elsewhere."""

    state: StateRoot
    engines: Mapping[str, EnginePlugin]
    units: UnitDriver
    host_facts: Callable[[], HostFacts]
    probe: Callable[[tuple[str, ...]], tuple[FeatureResult, ...]]
    reporter: Reporter = field(default_factory=Silent)
    deadlines: Deadlines = field(default_factory=Deadlines)
    host: Host = field(default_factory=LocalHost)
    host_identity: Callable[[], Digest] = host_identity
    remotes: Remotes = OFFLINE
    memory_fs: MemoryFs = field(default_factory=LinuxMemoryFs)
    accelerator: Accelerator = field(default_factory=nvidia)
    runtimes: Mapping[Runtime, ContainerRuntime] = field(default_factory=dict)
    """What makes containers here; one whose program is missing says so when it is asked."""

    @property
    def store(self) -> PayloadStore:
        """The content-addressed store below the state root."""
        return PayloadStore(self.state)

    @property
    def services(self) -> Services:
        """The named services of this machine."""
        return Services(self.state)

    def place(self, units: tuple[str, ...]) -> Placement:
        """Where each unit runs. One host is a list of one."""
        return Placement(hosts=dict.fromkeys(units, self.host))
