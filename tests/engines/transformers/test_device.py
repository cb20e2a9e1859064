"""What `device: cuda` changes, as far as it can be seen without a GPU: the books of a fake driver, and a fake graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.observer import Observer
from coldsnap.engines.transformers import filling
from coldsnap.engines.transformers.arena import Place
from coldsnap.engines.transformers.device import (
    CpuAccelerator,
    CudaAccelerator,
    EagerSteps,
    GraphSteps,
    accelerator_for,
)
from coldsnap.engines.transformers.filling import COMPUTED
from coldsnap.engines.transformers.loading import load_model, read_config
from coldsnap.engines.transformers.options import Device, parse_command, parse_options
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.errors import EngineError, UserError
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.hydrate.memory import StableMemory
from coldsnap.testing.cuda import FakeDriver
from coldsnap.testing.memory import FakeMemory


def test_a_worker_without_a_device_has_no_slot() -> None:
    (worker,) = PLUGIN.execution(PLUGIN.options({})).workers
    assert worker.device_slots == ()


def test_a_worker_with_a_device_has_its_unit_s_first() -> None:
    (worker,) = PLUGIN.execution(PLUGIN.options({"device": "cuda"})).workers
    assert worker.device_slots == (0,)


def test_the_command_says_what_computes() -> None:
    line = parse_command(["--model", "/m", "--device", "cuda"])
    assert line.options.device is Device.CUDA
    assert parse_options({}).device is Device.CPU


@pytest.mark.model
def test_a_checkpoint_travels_onto_the_device_and_each_copy_is_reported(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: dict[int, torch.Tensor] = {}

    def over_memory(memory: StableMemory, place: Place, like: torch.Tensor) -> torch.Tensor:
        return computed.setdefault(place.ptr, torch.zeros_like(like))

    monkeypatch.setattr(filling, "over_memory", over_memory)  # torch has no CUDA here
    driver, observer = FakeDriver(), Observer()
    files = checkpoint_files(tiny)
    with CudaMemory(driver) as memory:
        load_model(tiny, read_config(tiny), files, parse_options({}), memory, observer)
        extents = observer.observation(memory.allocations).extents
        content = {file.name: file.path.read_bytes() for file in files}
        stored = {tensor.name: (file.name, tensor) for file in files for tensor in file.tensors}
        assert {name for one in extents for name, _, _ in one.range.tensors} == set(stored)
        for one in extents:
            name, tensor = stored[one.range.tensors[0][0]]
            expected = content[name][tensor.offset : tensor.offset + tensor.size]
            assert driver.peek(one.range.ptr, one.range.size) == expected
        labels = observer.observation(memory.allocations).labels
        assert {label.ptr for label in labels if label.reason == COMPUTED} <= set(computed)
        assert driver.registered_bytes == 0, "locked memory would lie in an image"
    assert (driver.leftovers(), driver.violations) == ({}, [])


class FakeCuda:
    """Writes down what torch was asked for, and runs captured work never but at replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.events: list[str] = []
        self.refuses = refuses
        fake = self

        class Stream:
            def wait_stream(self, other: object) -> None:
                fake.events.append("wait")

        class Graph:
            def replay(self) -> None:
                fake.events.append("replay")

        @contextmanager
        def stream(which: object) -> Iterator[None]:
            fake.events.append("side")
            yield
            fake.events.append("main")

        @contextmanager
        def graph(which: object, *, capture_error_mode: str) -> Iterator[None]:
            fake.events.append(f"capture {capture_error_mode}")
            if fake.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            yield
            fake.events.append("captured")

        names: dict[str, Any] = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": Stream,
            "stream": stream,
            "graph": graph,
            "synchronize": lambda device=None: fake.events.append("synchronize"),
            "empty_cache": lambda: fake.events.append("empty_cache"),
            "set_device": lambda device: fake.events.append(f"set {device}"),
            "memory_reserved": lambda device: 12345,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_graph_is_warmed_up_on_a_side_stream_and_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, steps = FakeCuda(monkeypatch), GraphSteps()
    assert not steps.ready
    with pytest.raises(EngineError, match="before its graph"):
        steps.replay()
    steps.prepare(lambda: cuda.events.append("work"))
    assert steps.ready
    assert cuda.events == [
        *("wait", "side", "work", "work", "work", "main", "wait", "synchronize"),
        *("capture thread_local", "work", "captured"),
    ]
    cuda.events.clear()
    steps.replay()
    steps.replay()
    assert cuda.events == ["replay", "replay"]


def test_what_cannot_be_captured_is_the_user_s_to_turn_off(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, refuses=True)
    steps = GraphSteps()
    with pytest.raises(UserError, match="not permitted when stream is capturing") as caught:
        steps.prepare(lambda: None)
    assert caught.value.cure == "write 'cuda_graph: false' below 'serve'"
    assert not steps.ready


def test_a_gpu_gives_back_what_it_keeps_for_later_and_never_asks_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: cuda.events.append("host"), raising=False)
    clear = lambda: cuda.events.append("workspaces")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 8)
    driver = FakeDriver()
    with CudaMemory(driver) as memory:
        accelerator = accelerator_for(memory)
        assert isinstance(accelerator, CudaAccelerator)
        assert accelerator.device == torch.device("cuda", 0)
        assert torch.cuda._device_count_nvml() == -1
        accelerator.settle()
        assert cuda.events == ["set cuda:0", "synchronize", "workspaces", "empty_cache", "host"]
        assert accelerator.held_bytes() == 12345
        weights = memory.reserve(4096, tag="weights")
        cache = accelerator.cache_memory()
        assert isinstance(cache, CudaMemory)
        with cache:
            kv = cache.reserve(4096, tag="kv")
            assert kv.ptr // (1 << 40) != weights.ptr // (1 << 40)
        assert isinstance(accelerator.steps(graph=True), GraphSteps)
        assert isinstance(accelerator.steps(graph=False), EagerSteps)
    assert (driver.leftovers(), driver.violations) == ({}, [])


def test_a_processor_has_nothing_to_give_back() -> None:
    accelerator = accelerator_for(FakeMemory())
    assert isinstance(accelerator, CpuAccelerator)
    accelerator.settle()
    assert accelerator.held_bytes() == 0
    steps = accelerator.steps(graph=True)
    with pytest.raises(EngineError, match="before there was any"):
        steps.replay()
    done: list[int] = []
    steps.prepare(lambda: done.append(1))
    steps.replay()
    steps.replay()
    assert (steps.ready, done) == (True, [1, 1])
