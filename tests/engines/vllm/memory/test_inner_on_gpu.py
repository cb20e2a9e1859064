"""The whole inner half over vLLM's allocator: a worker as its controller sees it, and vLLM's main thread beside it.

Everything of coldsnap's is real but the driver; vLLM's allocator and its loop are fakes, and the model is a checksum.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest

from coldsnap.core.extents import AllocationIndex
from coldsnap.core.messages import Answer, PackSource, Prompt, WorkerSettings, WorkerState
from coldsnap.engines.control import ControlClient, ControlServer
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.protocol import EngineWorker, ResolvedModel
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.vllm.account import account
from coldsnap.engines.vllm.cumem import PINNED_SLACK_BYTES, CuMemMemory
from coldsnap.engines.vllm.front import FrontWorker
from coldsnap.engines.vllm.inner import WorkerHalf
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontServer, inner_socket_name
from coldsnap.engines.vllm.loading import Load, Way
from coldsnap.engines.vllm.provenance import Provenance, Stored
from coldsnap.engines.vllm.quiet import QuietWorkers
from coldsnap.errors import EngineError, OutOfSpace, Refused
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.cuda import GARBAGE, FakeDriver
from coldsnap.testing.cumem import FakeBackup, FakeCuMem
from coldsnap.testing.engine import PLUGIN, FakeEngine
from coldsnap.testing.engine_harness import Driven
from coldsnap.testing.engine_suite import EngineContract

from .conftest import MIB, LoadedVllm  # isort: skip

LONG_S = 60.0
COMPUTED = ("rotary", bytes((5 * i + 1) % 251 for i in range(5000)))
KV_BYTES = 4 * MIB
TENSORS = {"embed": 24_000_000, "layers.0": 9_000, "layers.1": 9_000, "norm": 3000, "empty": 0}
Form = Literal["0.26", "0.33"]


class Model:
    """A torch module, as far as its layout is asked."""

    def __init__(self, tensors: Mapping[str, tuple[int, int]]) -> None:
        self._tensors = tensors

    def named_parameters(self, *, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        return [(name, Tensor(*place)) for name, place in self._tensors.items()]

    def named_buffers(self, *, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        return []


class Tensor:
    """Bytes somewhere."""

    def __init__(self, ptr: int, size: int) -> None:
        self._place = ptr, size

    def data_ptr(self) -> int:
        return self._place[0]

    def numel(self) -> int:
        return self._place[1]

    def element_size(self) -> int:
        return 1


class Seen:
    """Device memory as the fake model computes over it."""

    def __init__(self, vllm: LoadedVllm) -> None:
        self._vllm = vllm

    @property
    def mapped(self) -> bool:
        return not any(self._vllm.asleep()["weights"])

    def view(self, ptr: int, size: int) -> bytes:
        return self._vllm.driver.peek(ptr, size)


class Core:
    """vLLM's process with the weights: its allocator, its main thread, and what the front puts to sleep."""

    def __init__(self, engine: FakeEngine, *, form: Form, room: int, late: Mapping[str, int]) -> None:
        driver = FakeDriver()
        self.vllm = LoadedVllm(driver, FakeCuMem(driver, form=form))
        self.memory = CuMemMemory(driver, ordinal=0, cumem=self.vllm.lent())
        self.half: WorkerHalf
        self.service: Any = None
        self.ways: list[Way] = []
        self.kv_at_sleep: list[bool] = []
        self._engine = engine
        self._late = late
        if room:
            with self.vllm.allocator.use_memory_pool("runtime"):
                self.vllm.allocate("other", room)  # so that this process has other addresses
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self.half.start()
        self._thread.start()

    def join(self) -> None:
        self.half.handover.fail(EngineError("the test is over"))
        self._thread.join(LONG_S)
        self.half.close()

    def _run(self) -> None:
        try:
            load = self.half.next_load()
            self.ways.append(load.way)
            with self.vllm.allocator.use_memory_pool("weights"):
                self._load(load)
                load.laid_out()
                for name, size in self._late.items():
                    self.vllm.allocate(name, size)
            with self.vllm.allocator.use_memory_pool("kv_cache"):
                for layer in range(2):
                    self.vllm.allocate(f"kv{layer}", KV_BYTES // 2)
        except Exception as error:  # noqa: BLE001 - the process ends, and vLLM knows nothing of why
            self.service.fail(EngineError(f"the engine core died: {type(error).__name__}"))
        else:
            self.service.phase = "up"

    def _load(self, load: Load) -> None:
        stored = [(file, tensor) for file in load.files for tensor in file.tensors]
        order = list(stored)
        if self._engine._shuffle is not None:
            random.Random(self._engine._shuffle).shuffle(order)
        for _, tensor in order:
            self.vllm.allocate(tensor.name, max(tensor.size, 1))
        self.vllm.allocate("thrown away", 100_000)
        self.vllm.allocate(COMPUTED[0], len(COMPUTED[1]))
        self.vllm.free("thrown away")
        load.memory.prepare(None, None)  # type: ignore[arg-type]
        load.memory.settle(Model(self.vllm.tensors), None)  # type: ignore[arg-type]
        if load.is_template:
            load.memory.seal()
        assert isinstance(load.memory, CuMemMemory)
        provenance = Provenance()
        for file, tensor in stored:
            if tensor.size:
                ptr, _ = self.vllm.tensors[tensor.name]
                if load.way is Way.LOAD:
                    data = (self._engine.model_path / file.name).read_bytes()
                    load.memory.copy_in(ptr, memoryview(data[tensor.offset : tensor.offset + tensor.size]))
                provenance.store(
                    ptr, Stored(tensor=tensor.name, file=file.name, offset=tensor.offset, size=tensor.size)
                )
        ptr, computed_bytes = self.vllm.tensors[COMPUTED[0]]
        if load.way is Way.LOAD:
            load.memory.copy_in(ptr, memoryview(COMPUTED[1]))
        provenance.spoil(ptr, computed_bytes, "computed")
        places = self.vllm.tensors.values()
        account(provenance, load.observer, allocations=load.memory.allocations, storages=places)
        self._engine._memory = Seen(self.vllm)  # type: ignore[assignment]
        self._engine._ranges = [place for name, place in sorted(self.vllm.tensors.items()) if name != "other"]

    def sleep(self) -> None:
        """As AsyncLLM does: the backend is asked, in the process with the weights."""
        self.half.engine.suspend(1)
        self.kv_at_sleep.extend(self.vllm.asleep()["kv_cache"])

    def resume(self) -> None:
        self.half.engine.resume(None)


class Around:
    """Implements `Surroundings`."""

    def versions(self) -> Mapping[str, str]:
        return {"vllm": "0"}

    def let_go(self) -> None:
        """Nothing is kept."""


@contextmanager
def begun(
    engine: FakeEngine,
    folder: Path,
    make_service: Callable[..., Any],
    cores: list[Core],
    *,
    form: Form,
    room: int = 0,
    late: Mapping[str, int] = MappingProxyType({}),
    port: int | None = None,
    template: bool = False,
) -> Iterator[Driven]:
    folder.mkdir(parents=True, exist_ok=True)
    source = engine.model_source
    options = {
        "model_id": source.model_id,
        "revision": source.revision,
        "metadata_sha256": str(source.metadata_sha256),
    }
    settings = WorkerSettings(
        worker="w0", unit="u0", rank=0, socket=str(folder / "w.sock"), port=port, template=template, options=options
    )
    core = Core(engine, form=form, room=room, late=late)
    environment: dict[str, str] = {}
    core.half = WorkerHalf(
        settings,
        engine.model_path,
        folder,
        make_memory=lambda: core.memory,
        surroundings=Around(),
        set_environment=environment.update,
    )
    core.service = service = make_service(engine)
    service.phase = "loading"
    service.workers = QuietWorkers(core.sleep, core.resume)
    cores.append(core)
    with ExitStack() as stack:
        stack.callback(core.memory.release)
        link = FrontServer(folder / FRONT_SOCKET, service)
        link.start()
        stack.callback(link.close)

        def start(given: Mapping[str, str] | None = None) -> None:
            stack.callback(core.join)
            core.start()

        front = FrontWorker(settings, folder / inner_socket_name("w0"), start=start, template=template)
        service.on_failure = front.fail
        stack.enter_context(ControlServer(Path(settings.socket), front))
        client = ControlClient(Path(settings.socket))
        front.imported({"python": "3"})
        if not template:
            start()
        client.wait_loaded(deadline_s=LONG_S)
        yield Driven(client=client, memory=core.memory, engine=core.half.engine, folder=folder, environment=environment)
    assert core.vllm.driver.violations == []
    assert core.vllm.books_are_true()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    """A checkpoint that nobody changes."""
    return PLUGIN.resolve_model(
        str(write_checkpoint(tmp_path_factory.mktemp("models") / "checkpoint", tensors=TENSORS))
    )


def make_engine(model: ResolvedModel, variant: int = 0) -> FakeEngine:
    source = model_source_from(PLUGIN.settings_options(model, {}))
    return FakeEngine(model.path, source, shuffle=variant or None)


class Bench:
    """Makes workers over vLLM's allocator of one form."""

    FORM: Form

    @pytest.fixture(autouse=True)
    def _factory(self, model: ResolvedModel, make_service: Callable[..., Any]) -> None:
        self.model = model
        self.make_service = make_service
        self.cores: list[Core] = []

    def make(self, variant: int) -> FakeEngine:
        return make_engine(self.model, variant)

    def make_damaged(self, folder: Path) -> FakeEngine:
        engine = make_engine(replace(self.model, path=shutil.copytree(self.model.path, folder)))
        (engine.model_path / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100)
        return engine

    def driven(self, engine: EngineWorker, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        assert isinstance(engine, FakeEngine)
        return begun(engine, folder, self.make_service, self.cores, form=self.FORM, **how)

    def beside(self, variant: int, folder: Path, **how: Any) -> AbstractContextManager[Driven]:
        return begun(self.make(variant), folder, self.make_service, self.cores, form=self.FORM, room=64 * MIB, **how)


class TestContract(Bench, EngineContract):
    """Nothing that a controller sees of an engine is changed by vLLM's allocator and threads between."""

    FORM = "0.33"


class OnGpu(Bench):
    """What a GPU has beside."""

    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[Driven]:
        """A loaded worker."""
        with self.driven(self.make(0), tmp_path / "a") as worker:
            yield worker

    def test_keys_and_values_go_when_vllm_sleeps_and_are_back_and_zero_before_it_goes_on(self, live: Driven) -> None:
        [core] = self.cores
        exported = live.export()
        before = core.vllm.driver.peek(*core.vllm.tensors["kv0"])
        live.sleep()
        assert core.kv_at_sleep == [True], "one allocation has both layers"
        assert all(flag for tag in ("weights", "kv_cache") for flag in core.vllm.asleep()[tag])
        assert core.vllm.books_are_true()
        live.wake(exported)
        assert not any(flag for flags in core.vllm.asleep().values() for flag in flags)
        assert core.vllm.driver.peek(*core.vllm.tensors["kv0"]) == bytes(KV_BYTES // 2) != before

    @pytest.mark.parametrize("what", ["backup", "pinned"])
    def test_a_level_1_sleep_by_hand_leaves_what_is_refused_and_nothing_is_done(self, live: Driven, what: str) -> None:
        [core] = self.cores
        row = core.vllm.allocator.pointer_to_data[live.memory.allocations[0].ptr]
        if what == "backup":
            row.cpu_backup_tensor = FakeBackup(bytes(10))
        else:
            core.vllm.pinned_bytes = PINNED_SLACK_BYTES + 1
        with pytest.raises(Refused, match=r"level-1|pinned"):
            live.sleep()
        assert live.client.status().state is WorkerState.IDLE
        assert not any(flag for flags in core.vllm.asleep().values() for flag in flags)
        live.answers((Prompt(text="x", max_tokens=1),))
        row.cpu_backup_tensor, core.vllm.pinned_bytes = None, 0
        live.sleep()

    @pytest.mark.parametrize("after", [0, 4])
    def test_a_device_without_room_leaves_it_asleep_and_it_can_be_woken_later(self, live: Driven, after: int) -> None:
        """The weights' memory cannot be had, or that of keys and values beside it."""
        [core] = self.cores
        prompts = (Prompt(text="x", max_tokens=4),)
        answers: tuple[Answer, ...] = live.answers(prompts)
        exported = live.export()
        live.sleep()
        rows = len(live.memory.allocations)
        core.vllm.driver.fail("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", after=min(after, rows))
        with pytest.raises(OutOfSpace):
            live.wake(exported)
        status = live.client.status()
        assert (status.state, status.mapped_bytes) == (WorkerState.ASLEEP, 0)
        assert all(flag for tag in ("weights", "kv_cache") for flag in core.vllm.asleep()[tag])
        assert core.vllm.books_are_true()
        live.wake(exported)
        assert live.answers(prompts) == answers

    def test_a_wake_from_the_checkpoint_alone(self, live: Driven) -> None:
        prompts = (Prompt(text="x", max_tokens=4),)
        answers, exported = live.answers(prompts), live.export()
        live.sleep()
        report = live.wake(exported, PackSource.RECOVERY)
        stored = sum(tensor.size for file in checkpoint_files(self.model.path) for tensor in file.tensors)
        assert report.model_bytes == stored
        assert live.answers(prompts) == answers

    def test_what_vllm_makes_later_is_no_part_of_a_template_and_made_anew_by_its_copies(self, tmp_path: Path) -> None:
        """Small enough for a free block among the weights, too large for one, and of a whole allocation."""
        late = {"seeds": 3000, "counts": 5 * MIB, "logits": 30 * MIB}
        prompts = (Prompt(text="x", max_tokens=4),)
        with self.driven(self.make(0), tmp_path / "a", template=True, late=late) as loaded:
            loaded.place()
            answers, exported = loaded.answers(prompts), loaded.export()
        with self.beside(0, tmp_path / "b", template=True, late=late) as copy:
            copy.place(exported)
            core = self.cores[1]
            assert core.ways == [Way.BUILD]
            assert copy.answers(prompts) == answers
            adopted = AllocationIndex(copy.memory.allocations)
            assert [adopted.holding(*core.vllm.tensors[name]) for name in late] == [None] * 3
            copy.sleep()
            assert {name: core.vllm.driver.peek(*core.vllm.tensors[name]) for name in late} == {
                name: bytes([GARBAGE]) * size for name, size in late.items()
            }
            copy.wake(exported)
            assert copy.answers(prompts) == answers

    def test_free_blocks_are_the_same_in_every_capture(self, live: Driven, tmp_path: Path) -> None:
        """A tensor that was thrown away leaves its bytes in a block; they are zeroed when the engine is up."""
        exported = live.export()
        with self.beside(0, tmp_path / "b") as other:
            again = other.export()
        assert exported.residual is not None
        assert again.residual is not None
        assert exported.residual.sha256 == again.residual.sha256


class TestVllm26(OnGpu):
    """vLLM 0.26's allocator."""

    FORM = "0.26"


class TestVllm33(OnGpu):
    """vLLM 0.32's and 0.33's."""

    FORM = "0.33"
