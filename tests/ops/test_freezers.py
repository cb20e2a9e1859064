"""What snapshot drivers do around a freeze and a thaw: the exact order of steps, for several ranks as for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.suspend import Patience, suspend
from coldsnap.capsule.tree import MapFacts, ProcessFacts, TreeFacts
from coldsnap.core.bindings import Severity, cuda_states_of, hygiene_of
from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.drivers import DriverId
from coldsnap.core.messages import WorkerState
from coldsnap.core.points import Hook, install
from coldsnap.core.request import OperationRequest, request_document, request_from
from coldsnap.errors import CriuError, CudaError, DeadlineExceeded, EngineError, HelperLost, Refused
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import CaptureResult, capture
from coldsnap.ops.planning import PlannedCapture
from coldsnap.ops.restore import restore
from coldsnap.ops.tools import Tools
from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, FakeCudaProcess, fake_inventory
from coldsnap.testing.desk import Desk, plan
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.processes import FakeUnits
from coldsnap.testing.source import running_source
from coldsnap.testing.stand import UNSEEN

RANKS = (1, 2, 8)
PATIENT = Patience()


class DeskGpus(FakeCheckpoints):
    """CUDA state for whatever runs in fake units: launched processes have it, restored ones bring it back."""

    def __init__(self, units: FakeUnits, num_gpus: int) -> None:
        super().__init__(log=units.calls, label="cuda ")
        self._units = units
        self.inventory = fake_inventory(num_gpus)
        self.restored: set[int] = set()

    def look(self, pids: Any) -> Any:
        pids = tuple(pids)
        for pid in pids:
            if pid not in self.processes:
                back = any(verb == "restore" for verb, _ in self._units.calls)
                self.processes[pid] = FakeCudaProcess(
                    state=ProcessState.CHECKPOINTED if back else ProcessState.RUNNING,
                    inside_pid=os.getpid(),  # the fake engine says that it is this process
                    device=self.inventory.gpus[0].uuid,
                )
        return super().look(pids)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A desk with GPUs, and the capture of an engine with one unit a rank."""

    kit: Desk
    gpus: DeskGpus
    planned: PlannedCapture

    @property
    def tools(self) -> Tools:
        return self.kit.tools

    def capture(self) -> CaptureResult:
        return capture(self.tools, self.planned.request, self.planned.model)

    def restore(self, loaded: LoadedArtifact, operation_id: str = "restore-1", **changes: Any) -> None:
        request = activation_request(loaded, operation_id=operation_id, port=free_port(), **changes)
        restore(self.tools, loaded, request, host="127.0.0.1", port=free_port())

    def phases(self) -> list[tuple[str, int]]:
        """The calls of units and CUDA so far, equal neighbours as one with their number; forgotten afterwards."""
        found = [(verb, len(list(run))) for verb, run in groupby(verb for verb, _ in self.kit.units.calls)]
        self.kit.units.calls.clear()
        return found


def with_ranks(request: OperationRequest, num_ranks: int, driver: DriverId) -> OperationRequest:
    """The same engine, ``num_ranks`` times, each in a unit and on a GPU of its own, all in one world."""
    document = request_document(request)
    launch, execution = document["launch"], document["launch"]["execution"]
    (unit,), (worker,), (group,), (service,) = (
        launch["units"], execution["workers"], execution["groups"], execution["services"]
    )  # fmt: skip
    names = [f"w{rank}" for rank in range(num_ranks)]
    launch["units"] = [{**unit, "id": f"u{rank}", "index": rank, "devices": [str(rank)]} for rank in range(num_ranks)]
    execution["workers"] = [
        {**worker, "id": name, "unit": f"u{rank}", "device_slots": [0]} for rank, name in enumerate(names)
    ]
    execution["groups"] = [{**group, "members": names}]
    execution["services"] = [{**service, "workers": names}]
    payload = {"workers": names}
    execution["adapter"] = {**execution["adapter"], "payload": payload, "digest": str(canonical_sha256(payload))}
    document["snapshot_driver"] = {"id": driver.value}
    document["policy"].pop("process")
    return request_from(document)


@pytest.fixture(params=RANKS)
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[DriverId.N610])
def driver(request: pytest.FixtureRequest) -> DriverId:
    return DriverId(request.param)


@pytest.fixture
def ranks(kit: Desk, model: Path, tmp_path: Path, num_ranks: int, driver: DriverId) -> Iterator[Ranks]:
    gpus = DeskGpus(kit.units, num_ranks)
    kit.facts.append(replace(kit.facts[-1], nvidia_driver="580.159.04"))
    kit.tools = replace(
        kit.tools,
        accelerator=gpus.accelerator(gpus.inventory),
        deadlines=replace(kit.tools.deadlines, cuda=PATIENT),
    )
    planned = plan(model, tmp_path / "artifact.json")
    request = with_ranks(planned.request, num_ranks, driver)
    yield Ranks(kit=kit, gpus=gpus, planned=replace(planned, request=request))
    assert gpus.num_open == 0, "every helper was let go"


def test_the_order_of_a_capture_and_a_restore(ranks: Ranks, num_ranks: int) -> None:
    result = ranks.capture()
    assert ranks.phases() == [
        ("launch", num_ranks),
        ("cuda lock", num_ranks),
        ("cuda checkpoint", num_ranks),
        ("dump", num_ranks),
    ]
    assert ranks.kit.units.running() == ()
    loaded = load_artifact(result.artifact_path)
    states = cuda_states_of(loaded.artifact.runtime.bindings)
    assert [(state.unit, state.devices) for state in states] == [
        (f"u{rank}", (gpu.uuid,)) for rank, gpu in enumerate(ranks.gpus.inventory.gpus)
    ]
    ranks.restore(loaded)
    assert ranks.phases() == [("restore", num_ranks), ("cuda restore", num_ranks), ("cuda unlock", num_ranks)]
    assert sorted(ranks.kit.units.running()) == [f"u{rank}" for rank in range(num_ranks)]


def test_holders_are_handled_in_rank_order(ranks: Ranks, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    def watched(api: Any, holders: Any, **keywords: Any) -> Any:
        seen.append(tuple(one.unit for one in holders))
        return suspend(api, holders, **keywords)

    monkeypatch.setattr("coldsnap.ops.freezers.initialised.suspend", watched)
    ranks.capture()
    assert seen == [tuple(f"u{rank}" for rank in range(num_ranks))]


def test_a_restore_elsewhere_maps_every_device(ranks: Ranks, num_ranks: int) -> None:
    loaded = load_artifact(ranks.capture().artifact_path)
    before = [gpu.uuid for gpu in ranks.gpus.inventory.gpus]
    ranks.gpus.inventory = fake_inventory(num_ranks, first=100)
    told: list[dict[str, str]] = []
    restore_call = ranks.gpus.restore

    def watched(pid: int, *, devices: Any, deadline_s: float) -> None:
        told.append(dict(devices))
        restore_call(pid, devices=devices, deadline_s=deadline_s)

    ranks.gpus.restore = watched  # type: ignore[method-assign]
    ranks.kit.tools = replace(ranks.kit.tools, accelerator=ranks.gpus.accelerator(ranks.gpus.inventory))
    ranks.restore(loaded)
    after = [gpu.uuid for gpu in ranks.gpus.inventory.gpus]
    assert sorted(told, key=str) == sorted(({old: new} for old, new in zip(before, after, strict=True)), key=str)


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "carried_out"),
    [
        ("lock", DeadlineExceeded("it does not come to rest", facts={"phase": "lock"}), False),
        ("lock", HelperLost("killed", facts={"call": "lock"}), True),
        ("checkpoint", CudaError("no", facts={"code": "CUDA_ERROR_UNKNOWN"}), False),
        ("checkpoint", HelperLost("killed", facts={"call": "checkpoint"}), False),
        ("checkpoint", HelperLost("killed", facts={"call": "checkpoint"}), True),
    ],
)
def test_a_rank_that_fails_leaves_every_source_serving(
    ranks: Ranks, num_ranks: int, call: str, error: Exception, *, carried_out: bool
) -> None:
    with running_source(ranks.tools, ranks.planned) as source:
        expected = source.serve_again(UNSEEN)
        pids = [unit.pids()[0] for unit in source.units.values()]
        ranks.gpus.fail_next(call, pids[-1], error, carried_out=carried_out)
        with pytest.raises(type(error)):
            source.freeze()
        assert {ranks.gpus.processes[pid].state for pid in pids} == {ProcessState.RUNNING}
        assert source.serve_again(UNSEEN) == expected
        assert {live.client.status(deadline_s=60).state for live in source.workers} == {WorkerState.IDLE}
        assert "dump" not in [verb for verb, _ in ranks.kit.units.calls]
        assert len(source.freeze().dumps) == num_ranks, "and the next try works"


@contextmanager
def at_points(hook: Hook) -> Iterator[None]:
    """Call ``hook`` at every point that is reached in the block."""
    install(hook)
    try:
        yield
    finally:
        install(None)


def last_words(tools: Tools, name: str, unit: str) -> None:
    """The unit's engine prints something and ends."""
    (log,) = tools.services.folder(name).glob(f"{unit}.log")
    log.write_text("loaded\nout of memory\n")


@pytest.mark.parametrize("point", ["capture.held", "capture.suspended"])
def test_an_engine_that_ends_while_it_is_frozen_is_told_as_that(ranks: Ranks, num_ranks: int, point: str) -> None:
    """And not as what the driver, or CRIU, has to say about a process that is gone."""
    with running_source(ranks.tools, ranks.planned) as source:
        name, unit = list(source.units.items())[-1]
        pid = unit.pids()[0]

        def end(at: str) -> None:
            if at == point:
                last_words(ranks.tools, f"source-{ranks.planned.request.id}", name)
                ranks.kit.units.crash(unit)
                del ranks.gpus.processes[pid]

        with at_points(end), pytest.raises(EngineError) as caught:
            source.freeze()
        doing = "suspend" if point == "capture.held" else "freeze"
        assert caught.value.message.endswith(f" ended during {doing}: out of memory")
        assert caught.value.facts == {"unit": name, "log": ["loaded", "out of memory"]}
        if doing == "suspend":
            assert caught.value.message.startswith(f"process {pid} of unit {name} (worker)")
        brought = [line for line in caught.value.__notes__ if line.startswith(("restored", "unlocked"))]
        assert bool(brought) == (num_ranks > 1), "the others run again, and it is said"


def test_an_engine_that_ends_while_it_is_restored_is_told_as_that(ranks: Ranks) -> None:
    loaded = load_artifact(ranks.capture().artifact_path)
    ended: list[str] = []

    def end(at: str) -> None:
        if at == "restore.thawed" and not ended:
            last_words(ranks.tools, "svc", "u0")
            ended.extend(ranks.kit.units.running())
            for process in ranks.kit.program.started:
                process.stop()

    with at_points(end), pytest.raises(EngineError, match="unit u0 ended during resume: out of memory"):
        ranks.restore(loaded)
    assert ended
    assert ranks.kit.units.running() == ()


def test_a_dump_that_fails_leaves_every_source_serving(ranks: Ranks, num_ranks: int) -> None:
    with running_source(ranks.tools, ranks.planned) as source:
        expected = source.serve_again(UNSEEN)
        ranks.kit.units.fail_next("dump", CriuError("CRIU gave up", facts={"log": []}))
        with pytest.raises(CriuError):
            source.freeze()
        assert len(ranks.kit.units.running()) == num_ranks, "no unit ends before all are dumped"
        assert {process.state for process in ranks.gpus.processes.values()} == {ProcessState.RUNNING}
        assert source.serve_again(UNSEEN) == expected
    assert [verb for verb, _ in ranks.phases()] == [
        "launch",
        "cuda lock",
        "cuda checkpoint",
        "dump",
        "cuda restore",
        "cuda unlock",
    ]


def test_what_still_holds_a_device_is_refused_after_all_came_back(ranks: Ranks) -> None:
    with running_source(ranks.tools, ranks.planned) as source:
        expected = source.serve_again(UNSEEN)
        (*_, last) = [unit.pids()[0] for unit in source.units.values()]
        ranks.gpus.look([last])
        ranks.gpus.processes[last].keeps_nvml = True
        with pytest.raises(Refused, match="holds devices") as caught:
            source.freeze()
        (problem,) = caught.value.problems
        assert "still holds /dev/nvidia0" in problem.message
        assert source.serve_again(UNSEEN) == expected


def test_a_forked_holder_is_refused_before_anything_is_locked(ranks: Ranks) -> None:
    with running_source(ranks.tools, ranks.planned) as source:
        (first, *_) = [unit.pids()[0] for unit in source.units.values()]
        ranks.gpus.look([first])
        ranks.gpus.processes[first].known = False
        with pytest.raises(Refused) as caught:
            source.freeze()
        assert "forked" in caught.value.problems[0].message
        assert [verb for verb, _ in ranks.phases()] == ["launch"]


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_restore_that_fails_on_one_rank_ends_all(ranks: Ranks, call: str) -> None:
    loaded = load_artifact(ranks.capture().artifact_path)
    look = ranks.gpus.look
    failing: list[int] = []

    def watched(pids: Any) -> Any:
        tree = look(pids)
        for process in tree.processes:
            if not failing and ranks.gpus.processes[process.pid].state is ProcessState.CHECKPOINTED:
                failing.append(process.pid)
                ranks.gpus.refuse_next(call, process.pid)
        return tree

    ranks.gpus.look = watched  # type: ignore[method-assign]
    ranks.kit.tools = replace(ranks.kit.tools, accelerator=ranks.gpus.accelerator(ranks.gpus.inventory))
    with pytest.raises(CudaError) as caught:
        ranks.restore(loaded)
    assert failing
    assert ranks.kit.units.running() == ()
    assert any("stopped restored unit" in note for note in caught.value.__notes__)
    assert ranks.tools.services.names() == ()


def test_an_engine_that_left_its_gpu_alone_is_for_another_driver(ranks: Ranks) -> None:
    ranks.gpus.look = lambda pids: TreeFacts(processes=())  # type: ignore[method-assign]
    ranks.kit.tools = replace(ranks.kit.tools, accelerator=ranks.gpus.accelerator(ranks.gpus.inventory))
    with pytest.raises(Refused) as caught:
        ranks.capture()
    (problem, *_) = caught.value.problems
    assert "has no process with CUDA state" in problem.message
    assert "driver host" in str(problem.cure)


# -- templates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", [DriverId.N580], indirect=True)
def test_a_template_is_dumped_before_it_is_placed_and_no_cuda_call_is_made(ranks: Ranks, num_ranks: int) -> None:
    ranks.gpus.look = lambda pids: TreeFacts(processes=())  # type: ignore[method-assign]
    ranks.kit.tools = replace(ranks.kit.tools, accelerator=ranks.gpus.accelerator(ranks.gpus.inventory))
    result = ranks.capture()
    assert ranks.phases() == [("launch", num_ranks), ("dump", num_ranks)]
    assert ranks.kit.units.running() == ()
    loaded = load_artifact(result.artifact_path)
    assert cuda_states_of(loaded.artifact.runtime.bindings) == ()
    ranks.restore(loaded)
    assert ranks.phases() == [("restore", num_ranks)]


@pytest.mark.parametrize("driver", [DriverId.N580], indirect=True)
def test_a_template_that_holds_a_device_is_refused_before_the_dump(ranks: Ranks, num_ranks: int) -> None:
    with pytest.raises(Refused, match="the template touched a device") as caught:
        ranks.capture()
    assert len(caught.value.problems) == num_ranks
    assert "before it was placed, so it is no template" in caught.value.problems[0].message
    assert "dump" not in [verb for verb, _ in ranks.kit.units.calls]


@pytest.mark.parametrize("driver", [DriverId.N580], indirect=True)
def test_a_template_that_holds_no_device_is_one_whatever_the_driver_says(ranks: Ranks, num_ranks: int) -> None:
    """Driver 580.159 says running of a process that only loaded its libraries."""
    look = ranks.gpus.look

    def without_devices(pids: Any) -> TreeFacts:
        return TreeFacts(processes=tuple(replace(process, fds=()) for process in look(pids).processes))

    ranks.gpus.look = without_devices  # type: ignore[method-assign]
    ranks.kit.tools = replace(ranks.kit.tools, accelerator=ranks.gpus.accelerator(ranks.gpus.inventory))
    ranks.capture()
    assert ranks.phases() == [("launch", num_ranks), ("dump", num_ranks)]


@pytest.mark.parametrize("driver", [DriverId.N580], indirect=True)
def test_a_library_of_the_driver_in_a_template_is_a_warning_in_the_artifact(ranks: Ranks, num_ranks: int) -> None:
    library = MapFacts(start=0, end=4096, perms="r-xp", offset=0, inode=1, path="/usr/lib/libcuda.so.580.159.04")

    def with_library(pids: Any) -> TreeFacts:
        return TreeFacts(
            processes=tuple(
                ProcessFacts(pid=pid, ppid=1, cmdline=("engine",), environ={}, fds=(), maps=(library,), num_threads=1)
                for pid in pids
            )
        )

    ranks.gpus.look = with_library  # type: ignore[method-assign]
    ranks.kit.tools = replace(ranks.kit.tools, accelerator=ranks.gpus.accelerator(ranks.gpus.inventory))
    loaded = load_artifact(ranks.capture().artifact_path)
    reports = hygiene_of(loaded.artifact.runtime.bindings)
    found = [one for report in reports for one in report.findings if one.kind == "driver-library"]
    assert len(found) == num_ranks
    assert {one.severity for one in found} == {Severity.WARN}
    assert "libcuda.so.580.159.04" in found[0].subject
