"""Where weights lie, decided by what vLLM computes on; without vLLM, and with torch's build for processors."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coldsnap.engines.vllm import device
from coldsnap.engines.vllm.cumem import CuMemMemory
from coldsnap.engines.vllm.device import TorchSurroundings, cache_tensors, memory_maker
from coldsnap.engines.vllm.hostpool import HostPool
from coldsnap.engines.vllm.loading import WeightMemory
from coldsnap.errors import MissingCapability, UserError
from coldsnap.testing.cuda import FakeDriver
from coldsnap.testing.cumem import FakeCuMem


class Platform:
    """As much of vLLM's platform as is asked."""

    def __init__(self, name: str) -> None:
        self.device_name = name

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"


def config(*, sleep_mode: bool = True, world_size: int = 1, layers: Mapping[str, object] | None = None) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        parallel_config=SimpleNamespace(world_size=world_size),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`on(name)`: vLLM computes there. What is done to vLLM's modules is written down."""
    kept: list[str] = []

    def be(name: str) -> list[str]:
        monkeypatch.setattr(device, "resolve", lambda symbol: Platform(name))
        monkeypatch.setattr(device, "keep_parameters", lambda: kept.append("keep_parameters"))
        return kept

    return be


def test_a_processor_keeps_weights_in_host_memory_of_ours(on: Any) -> None:
    done = on("cpu")
    layers = {"a": SimpleNamespace(kv_cache=torch.ones(4096))}
    make, _ = memory_maker(config(sleep_mode=False, layers=layers))
    with make() as memory:  # type: ignore[attr-defined]
        assert isinstance(memory, HostPool)
        assert isinstance(memory, WeightMemory)
        assert done == ["keep_parameters"], "before any model is made"
        memory.discard_kv()
        assert not layers["a"].kv_cache.any(), "it knows where keys and values are"


def test_a_gpu_keeps_them_where_vllm_put_them_on_its_own_device(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on("cuda")
    driver = FakeDriver()
    fake = FakeCuMem(driver, form="0.26")
    lent = SimpleNamespace(allocator=fake.allocator, create_and_map=None, unmap_and_release=None)
    monkeypatch.setattr(device, "installed_cumem", lambda: lent)
    monkeypatch.setattr(device, "open_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    make, _ = memory_maker(config())
    memory = make()
    assert isinstance(memory, CuMemMemory)
    assert isinstance(memory, WeightMemory)
    assert memory.ordinal == 0
    memory.release()


def test_a_gpu_without_sleep_mode_is_refused_with_the_option(on: Any) -> None:
    on("cuda")
    with pytest.raises(UserError, match="--enable-sleep-mode"):
        memory_maker(config(sleep_mode=False))


def test_another_device_is_named(on: Any) -> None:
    on("xpu")
    with pytest.raises(MissingCapability, match="'xpu'"):
        memory_maker(config())


def test_keys_and_values_are_found_in_every_form_of_vllm() -> None:
    one, two, three = (torch.zeros(size) for size in (1, 2, 3))
    layers = {
        "tensor": SimpleNamespace(kv_cache=one),
        "one a virtual engine": SimpleNamespace(kv_cache=[two]),
        "state space": SimpleNamespace(kv_cache=(three, [torch.zeros(0)])),
        "not bound yet": SimpleNamespace(kv_cache=[]),
        "none": SimpleNamespace(),
    }
    assert [tensor.numel() for tensor in cache_tensors(config(layers=layers))] == [1, 2, 3]


@pytest.mark.parametrize("alone", [True, False])
def test_only_a_worker_alone_in_its_world_closes_its_listeners(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    closed: list[str] = []
    monkeypatch.setattr(device, "close_own_tcp", lambda: closed.append("closed"))
    TorchSurroundings(on_gpu=False, alone=alone).let_go()
    assert closed == ["closed"] * alone
