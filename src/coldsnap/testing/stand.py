"""A whole coldsnap with the fake engine in real processes: captured by CRIU, restored, and watched for leaks.

with stand(folder, model) as one:
    one.restore("restore-1")
    assert one.ask(UNSEEN) == one.cold(UNSEEN)
    one.stop_all()
    one.assert_nothing_left()
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from coldsnap.cli.wiring import make_tools
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.drivers import FeatureResult, FeatureState
from coldsnap.core.messages import Answer, Prompt
from coldsnap.core.request import DriverId, OperationRequest
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.ops.activating import activation_request, live_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import CaptureResult, capture
from coldsnap.ops.choosing import choose_driver
from coldsnap.ops.coldstart import cold_engine
from coldsnap.ops.devices import device_environment
from coldsnap.ops.live import sleep_service, stop_service, wake_service
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.planning import PlannedCapture, plan_capture
from coldsnap.ops.preparing import PrepareResult, prepare
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.restore import RestoreResult, restore
from coldsnap.ops.tools import Tools
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.gpu import GpuRack

__all__ = ["HOST", "PATIENCE_S", "UNSEEN", "Stand", "children", "plugin_path", "processes_of", "wait_for", "with_gpus"]

HOST = "127.0.0.1"
NVIDIA_DRIVER = "580.159.04"
PATIENCE_S = 180.0
"""How long a test waits for something that takes milliseconds on a machine with nothing else to do."""

UNSEEN = (
    Prompt(text="The quick brown fox", max_tokens=6),
    Prompt(text="def add(a, b):", max_tokens=6),
    Prompt(text="", max_tokens=6),
    Prompt(text="ünïcödé \N{SNOWMAN}", max_tokens=6),
)
"""Prompts that no capture asks."""


def wait_for(what: str, seen: Any, *, patience_s: float = PATIENCE_S) -> None:
    """Return once ``seen()`` is true; AssertionError naming ``what`` when it stays false."""
    ends = time.monotonic() + patience_s
    while not seen():
        if time.monotonic() > ends:
            raise AssertionError(f"waited {patience_s:g} s in vain for: {what}")
        time.sleep(0.01)


def processes_of(folder: Path) -> dict[int, str]:
    """Processes that have to do with ``folder``, by PID: it is in their command, or they have a file of it open."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if str(folder) in command or any(
                    str(fd.readlink()).startswith(f"{folder}/") for fd in (entry / "fd").iterdir()
                ):
                    found[int(entry.name)] = command
    return found


def plugin_path(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes the fake engine an installed one, for programs started from here."""
    info = folder / "coldsnap_fake_engine-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coldsnap-fake-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[coldsnap.engines]\nfake = coldsnap.testing.engine:PLUGIN\n")
    return folder


@dataclass(kw_only=True)
class Stand:
    """Everything below one folder. ``tools`` are the real ones but for the engine."""

    folder: Path
    model: Path
    plugin: EnginePlugin = PLUGIN
    state_root: Path | None = None
    """Below the folder by default."""
    driver: DriverId = DriverId.HOST
    gpus: GpuRack | None = None
    """What the engine computes on; the features of snapshot drivers are then taken as proved, but for CRIU's."""
    tools: Tools = field(init=False)
    result: CaptureResult = field(init=False)
    loaded: LoadedArtifact = field(init=False)
    planned: PlannedCapture = field(init=False)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        tools = make_tools(self.state_root or self.folder / "state")
        self.tools = replace(tools, engines={self.plugin.name: self.plugin})
        if self.gpus is not None:
            self.tools = with_gpus(self.tools, self.gpus)

    @property
    def pack(self) -> Path:
        """Where the capture's pack is in the store."""
        return self.tools.store.path(self.result.pack_digests[0])

    # -- making -------------------------------------------------------------------------------------------

    def plan(self, operation_id: str, output: str, **changes: Any) -> PlannedCapture:
        """A capture of the model, on a machine where captures work; ``changes`` are fields of the recipe."""
        planned = self.plan_unchecked(operation_id, output, **changes)
        choose_driver(self.tools, self.plugin, planned.request.launch.execution)
        return planned

    def plan_unchecked(self, operation_id: str, output: str, **changes: Any) -> PlannedCapture:
        """The same on any machine."""
        if self.gpus is not None:
            changes["serve"] = {"gpu": str(self.gpus.folder), **changes.get("serve", {})}
        recipe = Recipe.model_validate({"name": "svc", "engine": self.plugin.name, "model": str(self.model), **changes})
        return plan_capture(
            recipe,
            self.plugin,
            operation_id=operation_id,
            output=self.folder / output,
            driver=self.driver,
            port=self.port,
        )

    def capture(self, operation_id: str = "capture-1", output: str = "artifact.json", **changes: Any) -> CaptureResult:
        """Capture; the first one becomes the stand's own artifact."""
        planned = self.plan(operation_id, output, **changes)
        result = capture(self.tools, planned.request, planned.model)
        if not hasattr(self, "loaded"):
            self.planned, self.result, self.loaded = planned, result, load_artifact(result.artifact_path)
        return result

    # -- asking -------------------------------------------------------------------------------------------

    def request(self, operation_id: str, loaded: LoadedArtifact | None = None, **changes: Any) -> OperationRequest:
        """A restore request at the stand's port."""
        return activation_request(loaded or self.loaded, operation_id=operation_id, **{"port": self.port, **changes})

    def prepare(self, operation_id: str, loaded: LoadedArtifact | None = None, **changes: Any) -> PrepareResult:
        """Prepare."""
        return prepare(self.tools, loaded or self.loaded, self.request(operation_id, loaded, **changes))

    def restore(
        self,
        operation_id: str,
        loaded: LoadedArtifact | None = None,
        *,
        negative_control: bool = False,
        **changes: Any,
    ) -> RestoreResult:
        """Restore, as service ``svc`` at the stand's port unless told otherwise."""
        request = self.request(operation_id, loaded, **changes)
        return restore(
            self.tools,
            loaded or self.loaded,
            request,
            host=HOST,
            port=changes.get("port", self.port),
            negative_control=negative_control,
        )

    def sleep(self, operation_id: str, name: str = "svc") -> None:
        """Sleep."""
        request = live_request(self.loaded, "sleep", operation_id=operation_id, name=name)
        sleep_service(self.tools, request)

    def wake(self, operation_id: str, name: str = "svc") -> None:
        """Wake."""
        request = live_request(self.loaded, "wake", operation_id=operation_id, name=name)
        wake_service(self.tools, request)

    def ask(self, prompts: Sequence[Prompt], port: int | None = None) -> tuple[Answer, ...]:
        """Over HTTP, as a client outside."""
        return OutsideClient(host=HOST, port=port or self.port).complete(prompts, timeout_s=PATIENCE_S)

    def cold(self, prompts: Sequence[Prompt], *, deadline_s: float = PATIENCE_S * 3) -> tuple[Answer, ...]:
        """The same from a separate cold process with nothing of ours around it, up within `deadline_s`."""
        with cold_engine(
            self.planned.request,
            self.plugin,
            self.planned.model,
            host=HOST,
            port=free_port(),
            first_prompt="x",
            deadline_s=deadline_s,
            devices=device_environment(self.tools, self.planned.request.launch.units[0]),
        ) as engine:
            return engine.client.complete(prompts, timeout_s=PATIENCE_S)

    # -- changing -----------------------------------------------------------------------------------------

    def rewritten(self, name: str, change: Any) -> LoadedArtifact:
        """The artifact with ``change`` made to its document, in a file of its own."""
        document = artifact_document(self.loaded.artifact)
        change(document)
        path = self.folder / name
        path.write_bytes(artifact_bytes(artifact_from(document)))
        return load_artifact(path)

    # -- the command line ---------------------------------------------------------------------------------

    def cli(
        self, *words: str | Path, program: Sequence[str] = ("-m", "coldsnap.cli"), **options: Any
    ) -> subprocess.Popen[str]:
        """``coldsnap WORDS --state-root ...`` as a process of its own, with the fake engine installed.

        ``program`` is what Python runs instead of the command, with the same words.
        """
        command = [sys.executable, *program, *map(str, words), "--state-root", str(self.tools.state.path)]
        environment = {**os.environ, "PYTHONPATH": str(plugin_path(self.folder / "plugins"))}
        defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, **{**defaults, **options})

    def recipe_file(self, name: str = "recipe.yaml", **changes: Any) -> Path:
        """A recipe for the stand's model (JSON is YAML)."""
        path = self.folder / name
        recipe = {"name": "svc", "engine": self.plugin.name, "model": str(self.model), "driver": "host", **changes}
        path.write_text(json.dumps(recipe))
        return path

    def cli_plan(self) -> Path:
        """What ``coldsnap plan`` prints for that recipe, in a file; asked once."""
        path = self.folder / "plan.json"
        if not path.exists():
            with self.cli("plan", self.recipe_file(), "--port", str(self.port), "--quiet") as process:
                out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, err
            path.write_text(out)
        return path

    # -- leaving ------------------------------------------------------------------------------------------

    def stop_all(self) -> None:
        """End every service."""
        for name in self.tools.services.names():
            stop_service(self.tools, name)

    def leftovers(self, *, but_for: Sequence[str] = ()) -> list[str]:
        """What is left of operations, services ``but_for`` these aside: processes, mounts, staged files, locks."""
        kept = {unit.record["init_pid"] for name in but_for for unit in self.tools.services.must_load(name).units}
        kept |= {child for pid in kept for child in children(pid)}
        left = [f"process {pid}: {line}" for pid, line in processes_of(self.folder).items() if pid not in kept]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        left += [f"mount {line}" for line in mounts if f" {self.tools.state.path}/" in line]
        left += [f"record of {name}" for name in self.tools.services.names() if name not in but_for]
        left += [f"file {path}" for path in self.tools.state.staging.iterdir()]
        left += [f"file {path}" for path in self.folder.rglob("*.partial")]
        for path in (*self.tools.state.locks.iterdir(), *self.tools.state.services.glob("*/lock")):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    left.append(f"lock {path}")
        return left

    def assert_nothing_left(self, *, but_for: Sequence[str] = ()) -> None:
        """AssertionError naming what an operation left behind."""
        left = self.leftovers(but_for=but_for)
        if left:
            raise AssertionError("left behind:\n" + "\n".join(left))


def with_gpus(tools: Tools, rack: GpuRack) -> Tools:
    """The same on a machine that has these GPUs. Features of theirs are taken as proved, the others are asked for."""
    return replace(
        tools,
        accelerator=rack.accelerator(),
        host_facts=lambda: replace(tools.host_facts(), nvidia_driver=NVIDIA_DRIVER),
        probe=partial(_proved, tools.probe),
    )


def _proved(
    probe: Callable[[tuple[str, ...]], tuple[FeatureResult, ...]], features: tuple[str, ...]
) -> tuple[FeatureResult, ...]:
    """Features of GPUs pass; the others are asked for."""
    others = iter(probe(tuple(one for one in features if not one.startswith("cuda-"))))
    passed = FeatureState.PASSED
    return tuple(
        FeatureResult(feature=one, state=passed, reason="fake GPUs have it")
        if one.startswith("cuda-")
        else next(others)
        for one in features
    )


def children(pid: int) -> Iterator[int]:
    """Every process below ``pid``; none when it is gone."""
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from children(child)
