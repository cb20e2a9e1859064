"""What must hold when a freeze or a restore of CUDA state goes wrong, on a live service with real processes.

The service is a restored one. Each fault goes wrong at its own moment of a real freeze: the processes are really
locked, and really checkpointed where the fault comes after that. Afterwards the same processes must have their CUDA
state back, take their memory again, and answer as before. A restore that fails must leave no process on the devices.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from coldsnap.capsule.cuda.accelerator import Accelerator
from coldsnap.capsule.cuda.api import CheckpointApi, ProcessState
from coldsnap.capsule.driver import UnitDriver
from coldsnap.core.messages import Answer, Prompt, WakeReport
from coldsnap.errors import ColdsnapError, CriuError, CudaError, DeadlineExceeded
from coldsnap.ops.activating import activation_request, live_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.demo_parts import free_port, new_id
from coldsnap.ops.freezers import Running, freezer_for
from coldsnap.ops.live import stop_service
from coldsnap.ops.operation import operation
from coldsnap.ops.outside import OutsideClient
from coldsnap.ops.prepare import prepare_artifact
from coldsnap.ops.restore import restore
from coldsnap.ops.scratch import scratch_folder
from coldsnap.ops.steps import attach_units, attach_workers, open_listeners
from coldsnap.ops.tools import Tools

NAME = "coldsnap-failures"
HOST = "127.0.0.1"
PROMPTS = (Prompt(text="Nobody asked this before", max_tokens=16), Prompt(text="1, 2, 3", max_tokens=16))


class FailingApi:
    """The real calls, but one: ``how`` is called instead of the first ``call``, or after it was made."""

    def __init__(self, api: CheckpointApi, call: str, how: Callable[[CheckpointApi], None]) -> None:
        self._api, self._call, self._how = api, call, how

    def state(self, pid: int) -> ProcessState | None:
        """See ``CheckpointApi``, here and below."""
        return self._api.state(pid)

    def lock(self, pid: int, *, deadline_s: float) -> None:
        self._fail("lock")
        self._api.lock(pid, deadline_s=deadline_s)

    def checkpoint(self, pid: int, *, deadline_s: float) -> None:
        self._fail("checkpoint")
        self._api.checkpoint(pid, deadline_s=deadline_s)

    def restore(self, pid: int, *, devices: Mapping[str, str], deadline_s: float) -> None:
        self._fail("restore")
        self._api.restore(pid, devices=devices, deadline_s=deadline_s)

    def unlock(self, pid: int, *, deadline_s: float) -> None:
        self._api.unlock(pid, deadline_s=deadline_s)

    def close(self) -> None:
        self._api.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def _fail(self, call: str) -> None:
        if call == self._call:
            self._call = ""
            self._how(self._api)


class FailingUnits:
    """The real unit driver, whose dumps fail once CUDA state is off the devices."""

    def __init__(self, units: UnitDriver) -> None:
        self._units = units

    def dump(self, *_: object, **__: object) -> NoReturn:
        raise CriuError("the dump fails on purpose", facts={"log": []})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._units, name)


def _refuse(_api: CheckpointApi) -> None:
    raise CudaError("the driver refuses on purpose", facts={"call": "checkpoint", "code": "CUDA_ERROR_UNKNOWN"})


def _too_late(_api: CheckpointApi) -> None:
    raise DeadlineExceeded("the process does not come to rest, on purpose", facts={"phase": "lock"})


def _kill_helper(api: CheckpointApi) -> None:
    """End the process that makes the calls; the call that comes next finds it gone."""
    pid = getattr(api, "helper_pid", None)
    if pid is None:
        raise RuntimeError("there is no helper process to kill")
    os.kill(pid, signal.SIGKILL)


def _with_api(tools: Tools, call: str, how: Callable[[CheckpointApi], None]) -> Tools:
    real = tools.accelerator

    def open_api() -> CheckpointApi:
        return FailingApi(real.open_api(), call, how)

    accelerator: Accelerator = replace(real, open_api=open_api)
    return replace(tools, accelerator=accelerator)


FAULTS: Mapping[str, Callable[[Tools], Tools]] = {
    "failed dump": lambda tools: replace(tools, units=FailingUnits(tools.units)),
    "failed CUDA checkpoint": lambda tools: _with_api(tools, "checkpoint", _refuse),
    "lock time-out": lambda tools: _with_api(tools, "lock", _too_late),
    "killed helper": lambda tools: _with_api(tools, "checkpoint", _kill_helper),
}


def prove_failures(tools: Tools, artifact: Path) -> dict[str, Any]:
    """Every fault on one service, then the failed restore. Each entry says what was raised and what held."""
    loaded, port = load_artifact(artifact), free_port()
    client = OutsideClient(host=HOST, port=port)
    found: dict[str, Any] = {}
    with _service(tools, loaded, port):
        before = client.complete(PROMPTS, timeout_s=120)
        for name, spoil in FAULTS.items():
            found[name] = _freeze_fails(tools, spoil(tools), loaded, port, client, before)
        found["frozen processes"] = list(device_users(tools))
    found["failed restore"] = _restore_fails(tools, loaded, port)
    return found


def device_users(tools: Tools) -> tuple[int, ...]:
    """Host PIDs of processes that have a device of the accelerator open, those of a helper left aside."""
    paths, users = tools.accelerator.device_paths, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                targets = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"coldsnap.capsule" not in command and any(target.startswith(paths) for target in targets):
                users.append(int(entry.name))
    return tuple(sorted(users))


@contextmanager
def _service(tools: Tools, loaded: LoadedArtifact, port: int) -> Iterator[None]:
    request = activation_request(loaded, operation_id=new_id("failures"), name=NAME, port=port)
    restore(tools, loaded, request, host=HOST, port=port)
    try:
        yield
    finally:
        stop_service(tools, NAME)


def _freeze_fails(
    tools: Tools,
    spoiled: Tools,
    loaded: LoadedArtifact,
    port: int,
    client: OutsideClient,
    before: Sequence[Answer],
) -> dict[str, Any]:
    record = tools.services.must_load(NAME)
    workers, units = attach_workers(tools, record), attach_units(tools, record)
    request = live_request(loaded, "wake", operation_id=new_id("failures"), name=NAME)
    launch, driver = loaded.artifact.launch, loaded.artifact.snapshot_driver.id
    pids = sorted(pid for unit in units.values() for pid in unit.pids())
    raised, notes, began = "", [], time.monotonic()
    with operation(tools, request) as op:
        with scratch_folder(tools.state, request.id) as scratch:
            try:
                with freezer_for(spoiled, op, driver) as freezer:
                    freezer.freeze(Running(launch=launch, units=units, workers=workers, scratch=scratch))
            except ColdsnapError as error:
                raised, notes = f"{type(error).__name__}: {error.message}", list(getattr(error, "__notes__", ()))
        failed_s = time.monotonic() - began
        prepared = prepare_artifact(tools, op, loaded, request, address=(HOST, port), ignore_quarantine=True)
        with freezer_for(tools, op, driver) as freezer:
            reports: dict[str, WakeReport] = freezer.fill(prepared, launch, workers)
        open_listeners(tools, workers, host=HOST, port=port)
        op.succeed({"workers": list(reports)})
    after = client.complete(PROMPTS, timeout_s=120)
    return {
        "raised": raised,
        "notes": notes,
        "seconds_to_failure": failed_s,
        "same_processes": sorted(pid for unit in attach_units(tools, record).values() for pid in unit.pids()) == pids,
        "serves_the_same": bool(raised) and tuple(after) == tuple(before),
    }


def _restore_fails(tools: Tools, loaded: LoadedArtifact, port: int) -> dict[str, Any]:
    before = device_users(tools)
    spoiled = _with_api(tools, "restore", _refuse)
    request = activation_request(loaded, operation_id=new_id("failures"), name=NAME, port=port, weights="native")
    raised = ""
    try:
        restore(spoiled, loaded, request, host=HOST, port=port)
        stop_service(tools, NAME)
    except ColdsnapError as error:
        raised = f"{type(error).__name__}: {error.message}"
    left = [pid for pid in device_users(tools) if pid not in before]
    no_service = tools.services.load(NAME) is None
    return {"raised": raised, "left_on_devices": left, "leaves_nothing": bool(raised) and not left and no_service}
