"""Everything the verbs work with, without root, CRIU or processes: the shipped fakes put together.

``EngineProgram`` runs the fake engine inside a ``FakeUnits`` unit: the worker, its control socket and its HTTP
listener are the real ones, in threads of this process. A freeze keeps what the process was started from; a thaw
starts it again, puts it to sleep, and leaves its memory without one byte of the model, as after a real restore.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from coldsnap.capsule.driver import RUN_DIR, UnitSpec
from coldsnap.core.compat import HostFacts
from coldsnap.core.drivers import DriverId, FeatureResult, FeatureState
from coldsnap.core.messages import Request, Verb, WorkerSettings, WorkerState
from coldsnap.engines.control import Call, ControlServer
from coldsnap.engines.inner import InnerWorker
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.template import make_worker
from coldsnap.errors import CriuError
from coldsnap.ops.planning import PlannedCapture, plan_capture
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.report import Reporter, Silent
from coldsnap.ops.tools import Tools
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.engine import PLUGIN, FakeEngine
from coldsnap.testing.memory import FakeMemory
from coldsnap.testing.memoryfs import FakeMemoryFs
from coldsnap.testing.processes import FakeUnits

__all__ = ["EngineProcess", "EngineProgram", "desk", "plan"]


class EngineProcess:
    """The fake engine as a ``FakeProcess``. ``memory`` and ``engine`` are there for a test to damage."""

    def __init__(self, started_from: dict[str, Any], run_dir: Path) -> None:
        self._started_from = started_from
        command = [str(word) for word in started_from["command"]]
        settings = WorkerSettings.model_validate_json(json.dumps(started_from["settings"]))
        said = dict(pairwise(command))
        self.memory = FakeMemory(base=int(said.get("--arena-base", "0x10000000"), 0))
        self.engine = FakeEngine(
            PLUGIN.read_command(command).model,
            model_source_from(settings.options),
            shuffle=int(said["--shuffle"]) if "--shuffle" in said else None,
        )
        # In the test's own process: what a template is told about its place is nothing that others should see.
        self.worker = make_worker(settings, self.engine, lambda: self.memory, set_environment=lambda places: None)
        self._server = ControlServer(run_dir / Path(settings.socket).name, self.worker)
        self._alive = True

    @property
    def inner(self) -> InnerWorker:
        """The worker, of a process that is no template."""
        assert isinstance(self.worker, InnerWorker)
        return self.worker

    def begin(self, *, asleep: bool) -> None:
        """Load; ``asleep`` lets go of everything again before anybody can ask."""
        self.worker.load()
        if asleep and self.worker.state is not WorkerState.TEMPLATE:
            self.worker(Call(Request(id=1, verb=Verb.SLEEP), lambda frame: None))
        self._server.start()

    def alive(self) -> bool:
        """Until stopped."""
        return self._alive

    def freeze(self) -> bytes:
        """What it was started from. Raises CriuError unless it is asleep or a template: it has open sockets."""
        if self.worker.state not in (WorkerState.ASLEEP, WorkerState.TEMPLATE):
            raise CriuError(f"the process is {self.worker.state.value}, not asleep", facts={"log": []})
        return json.dumps(self._started_from).encode()

    def stop(self) -> None:
        """Close the listener and the socket."""
        self._alive = False
        self._server.close()
        self.worker.close()
        self.memory.release()


class EngineProgram:
    """A ``FakeProgram``; ``started`` are all processes it made, in order."""

    def __init__(self) -> None:
        self.started: list[EngineProcess] = []

    def start(self, spec: UnitSpec, run_dir: Path) -> EngineProcess:
        """A cold start."""
        settings = json.loads(spec.files[Path(spec.environment["COLDSNAP_SETTINGS"]).relative_to(RUN_DIR).name])
        return self._begin({"command": list(spec.command), "settings": settings}, run_dir, asleep=False)

    def thaw(self, spec: UnitSpec, run_dir: Path, frozen: bytes) -> EngineProcess:
        """What was frozen, asleep."""
        return self._begin(json.loads(frozen), run_dir, asleep=True)

    def _begin(self, started_from: dict[str, Any], run_dir: Path, *, asleep: bool) -> EngineProcess:
        process = EngineProcess(started_from, run_dir)
        process.begin(asleep=asleep)
        self.started.append(process)
        return process


@dataclass(kw_only=True)
class Desk:
    """Tools made of fakes, and the fakes themselves. ``facts`` and ``failed`` may be changed at any time."""

    tools: Tools
    units: FakeUnits
    program: EngineProgram
    facts: list[HostFacts]
    memory_fs: FakeMemoryFs
    failed: dict[str, str] = field(default_factory=dict)
    """Feature -> why the probe says that it does not work."""


@contextmanager
def desk(state_root: Path, *, reporter: Reporter | None = None) -> Iterator[Desk]:
    """A desk whose state is below ``state_root``; every unit is ended on the way out."""
    program = EngineProgram()
    units = FakeUnits(program)
    facts = [
        HostFacts(architecture="x86_64", kernel="6.1.0", cpu_flags=frozenset({"avx2", "fma"}), criu_version="4.2.1")
    ]
    failed: dict[str, str] = {}
    memory_fs = FakeMemoryFs()

    def probe(features: tuple[str, ...]) -> tuple[FeatureResult, ...]:
        return tuple(
            FeatureResult(
                feature=one,
                state=FeatureState.FAILED if one in failed else FeatureState.PASSED,
                reason=failed.get(one, "the fake passes it"),
            )
            for one in features
        )

    tools = Tools(
        state=StateRoot.open(state_root),
        engines={PLUGIN.name: PLUGIN},
        units=units,
        host_facts=lambda: facts[-1],
        probe=probe,
        reporter=reporter or Silent(),
        memory_fs=memory_fs,
    )
    try:
        yield Desk(tools=tools, units=units, program=program, facts=facts, failed=failed, memory_fs=memory_fs)
    finally:
        units.end_all()
        tools.host.close()


def plan(model: Path, output: Path, *, operation_id: str = "capture-1", **changes: Any) -> PlannedCapture:
    """A capture of the fake engine with ``model``; ``changes`` are recipe fields."""
    recipe = Recipe(name="svc", engine=PLUGIN.name, model=str(model)).model_copy(update=changes)
    return plan_capture(recipe, PLUGIN, operation_id=operation_id, output=output, driver=DriverId.HOST)
