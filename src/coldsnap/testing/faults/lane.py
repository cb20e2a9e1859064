"""Where faults are injected: a captured artifact, and a state root that can be made new in no time.

    <root>/desk/    notes, the strike that is due, logs, fake GPUs: never full, never damaged
    <root>/yard/    a file system of its own: model, base (never touched), state, artifacts, temporary files

``base`` is a state root with one captured and prepared artifact. Each case gets a copy in which the large files are
hard links, so that proofs bound to an inode still hold; nothing of coldsnap's ever writes into one.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldsnap.capsule.hostfacts import host_facts
from coldsnap.capsule.probes import probe_features
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, Prompt
from coldsnap.core.request import DriverId
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.planning import PlannedCapture, plan_capture
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.tools import Deadlines, Tools
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.faults.running import Child, Outcome, start
from coldsnap.testing.faults.strikes import Notes, Strike, write_strike
from coldsnap.testing.faults.worker import NOTES, STRIKE, YARD
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.stand import with_gpus

if TYPE_CHECKING:
    from coldsnap.capsule.driver import UnitDriver
    from coldsnap.engines.protocol import EnginePlugin

__all__ = ["HOST", "IMPATIENT_S", "NAME", "PATIENT", "PORT", "PROMPTS", "YARD_BYTES", "Lane", "Verb"]

HOST = "127.0.0.1"
PORT = 8000
"""The pen has a loopback of its own."""
NAME = "svc"
PROMPTS = tuple(
    Prompt(text=text, max_tokens=6) for text in ("The quick brown fox", "def add(a, b):", "x", "ünï \N{SNOWMAN}")
)
"""Asked after every fault; no capture asked them."""
YARD_BYTES = 4 << 30
PATIENT = Deadlines(
    load_s=120.0,
    answer_s=60.0,
    export_s=60.0,
    sleep_s=60.0,
    dump_s=60.0,
    thaw_s=60.0,
    wake_s=60.0,
    serve_s=60.0,
    kill_s=60.0,
)
"""For what must succeed, also on a machine that gives it no processor for a while."""
IMPATIENT_S = 6.0
"""For what a fault made silent: each case waits it out."""
_VERB_S = 60.0
_LINKED_BYTES = 16 * 1024  # larger files are linked, smaller ones copied


class Lane:
    """See the module's head. Lives in a pen, single-threaded, so that it may fork."""

    def __init__(
        self,
        root: Path,
        make_plugin: Callable[[Path], EnginePlugin],
        *,
        driver: DriverId = DriverId.HOST,
    ) -> None:
        self.deadlines = PATIENT
        self.driver = driver
        self.gpus: GpuRack | None = None
        self.patience_s = 60.0
        self.desk = root / "desk"
        self.yard = root / YARD
        self.state = self.yard / "state"
        self.base = self.yard / "base"
        self.model = self.yard / "model"
        self.temporary = self.yard / "tmp"
        self.cache = self.yard / "cache"
        self.artifact = self.yard / "artifact.json"
        self.second = self.yard / "second.json"
        self.third = self.yard / "third.json"
        self.notes = Notes(self.desk / NOTES)
        self.log = self.desk / "log"
        self.plugin = make_plugin(self.desk)
        self.reference: tuple[Answer, ...] = ()
        self.committed: Mapping[str, Digest] = {}
        self.mounts: frozenset[str] = frozenset()

    # -- files ------------------------------------------------------------------------------------

    def mount(self) -> None:
        """Make the folders, and mount the yard's file system."""
        self.desk.mkdir(mode=0o700)
        self.yard.mkdir(mode=0o700)
        options = f"size={YARD_BYTES},mode=700"
        _mount("-t", "tmpfs", "-o", options, "coldsnap-faults", str(self.yard))
        self.temporary.mkdir(mode=0o700)
        if self.driver is not DriverId.HOST:
            self.gpus = GpuRack.make(self.desk / "gpus", 2)

    def remount(self, options: str) -> None:
        """Change the yard's file system: ``size=BYTES``, ``ro``, ``rw``."""
        _mount("-o", f"remount,{options}", str(self.yard))

    def reset(self) -> None:
        """The state root and the artifact as they were captured, and an empty desk."""
        for mount in _mounts_below(self.state):  # copies of packs in memory, where a case went wrong
            subprocess.run([_program("umount"), "--lazy", mount], check=True)
        shutil.rmtree(self.state, ignore_errors=True)
        for path in self.yard.glob("*.json*"):
            path.unlink()
        for folder, _, names in os.walk(self.base):
            here = self.state / Path(folder).relative_to(self.base)
            here.mkdir(mode=0o700)
            for name in names:
                source = Path(folder, name)
                if source == self.base / self.artifact.name:
                    shutil.copy2(source, here / name)  # it does not stay in the state root, so nothing would heal it
                elif source.stat().st_size > _LINKED_BYTES or here.is_relative_to(self.state / "prepared"):
                    os.link(source, here / name)
                else:
                    shutil.copy2(source, here / name)
        (self.state / self.artifact.name).rename(self.artifact)
        self.make_cache()
        self.notes.clear()
        for path in (self.desk / STRIKE, *self.desk.glob("*.sock")):
            path.unlink(missing_ok=True)

    def make_cache(self) -> None:
        """The engine's derived cache, of which a restore brings back what is missing."""
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir()
        (self.cache / "kept").write_bytes(b"k" * 100)

    def digests(self) -> dict[str, Digest]:
        """Of everything that is committed: descriptors, packs, capsules; by path below the yard."""
        found = [*self.yard.glob("*.json"), *(self.state / "model-payloads" / "sha256").glob("*.pack")]
        found += [path for path in (self.state / "capsules").rglob("*") if path.is_file()]
        return {
            str(path.relative_to(self.yard)): Digest.of(path.read_bytes())
            for path in found
            if not any(part.endswith(".partial") for part in path.parts)
        }

    # -- looking ----------------------------------------------------------------------------------

    def tools(self, *, deadlines: Deadlines | None = None, units: UnitDriver | None = None) -> Tools:
        """The real implementations on this lane's state root. Only for a forked child: they start threads."""
        state = StateRoot.open(self.state)
        tools = Tools(
            state=state,
            engines={self.plugin.name: self.plugin},
            units=units or LinuxUnits(),
            host_facts=host_facts,
            probe=partial(probe_features, cache_dir=state.path),
            deadlines=deadlines or self.deadlines,
        )
        return with_gpus(tools, self.gpus) if self.gpus is not None else tools

    def loaded(self) -> LoadedArtifact:
        """The artifact."""
        return load_artifact(self.artifact)

    def plan(self, output: Path) -> PlannedCapture:
        """A capture to ``output``."""
        serve: dict[str, str] = {} if self.gpus is None else {"gpu": str(self.gpus.folder)}
        if self.driver is DriverId.N610:
            serve["companion"] = "spawn"
        recipe = Recipe(
            name=NAME, engine=self.plugin.name, model=str(self.model), cache_seeds=(str(self.cache),), serve=serve
        )
        return plan_capture(
            recipe, self.plugin, operation_id=new_id("capture"), output=output, driver=self.driver, port=PORT
        )

    def ask(self) -> tuple[Answer, ...] | None:
        """What the service answers now; None when nobody listens. Raises EngineError when it does not answer."""
        try:
            socket.create_connection((HOST, PORT), timeout=60).close()
        except ConnectionRefusedError:
            return None
        return OutsideClient(host=HOST, port=PORT).complete(PROMPTS, timeout_s=60.0)

    # -- running ----------------------------------------------------------------------------------

    def run(
        self,
        verb: Verb,
        *,
        strike: Strike | None = None,
        worker: Strike | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Outcome:
        """Run a verb in a child, with a strike for it or for the engine process, and wait for its end.

        ``options`` are those of ``tools`` and of ``running.start``.
        """
        if worker is not None:
            write_strike(self.desk / STRIKE, worker)
        try:
            return self.begin(verb, strike=strike, **options).wait(timeout_s or _VERB_S + self.deadlines.load_s)
        finally:
            (self.desk / STRIKE).unlink(missing_ok=True)

    def begin(
        self,
        verb: Verb,
        *,
        deadlines: Deadlines | None = None,
        units: Callable[[], UnitDriver] = LinuxUnits,
        **options: Any,
    ) -> Child:
        """Start a verb in a child."""

        def act() -> Mapping[str, Any]:
            return verb(self, self.tools(deadlines=deadlines, units=units()))

        return start(act, notes=self.notes, log=self.log, **options)

    def must(self, verb: Verb) -> Outcome:
        """Run a verb that has to succeed: no fault is in it."""
        outcome = self.run(verb)
        if outcome.status != "done":
            raise AssertionError(f"without a fault: {outcome.status}: {outcome.reason}")
        return outcome

    def struck(self, token: str) -> bool:
        """Whether the strike fell."""
        return ["struck", token] in self.notes.lines()

    def thawed_before(self, token: str) -> bool:
        """Whether CRIU had begun to restore a tree when the strike fell."""
        lines = self.notes.lines()
        struck = lines.index(["struck", token]) if ["struck", token] in lines else len(lines)
        return any(line[0] == "point" and line[2:] == ["unit.criu"] for line in lines[:struck])

    def points(self) -> set[str]:
        """Points reached since the last reset."""
        return {line[2] for line in self.notes.lines() if line[0] == "point" and len(line) == 3}


Verb = Callable[[Lane, Tools], Mapping[str, Any]]
"""Something to run in a child."""


def _mount(*words: str) -> None:
    subprocess.run([_program("mount"), *words], check=True)


def _program(name: str) -> str:
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") or f"/bin/{name}"


def _mounts_below(folder: Path) -> list[str]:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [mount for mount in reversed(mounts) if mount.startswith(f"{folder}/")]


def new_id(word: str) -> str:
    """An operation id that was not used before."""
    return f"{word}-{time.time_ns()}"
