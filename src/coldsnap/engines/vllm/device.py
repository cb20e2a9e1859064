"""What computes under a worker of vLLM's: where weights lie, and what torch keeps for later. Needs torch and vllm."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from coldsnap.engines.kernel import close_nvml, trim_heap
from coldsnap.engines.vllm.compat import keep_parameters, resolve, versions
from coldsnap.engines.vllm.cumem import CuMemMemory
from coldsnap.engines.vllm.hostpool import HostPool
from coldsnap.engines.vllm.loading import WeightMemory
from coldsnap.engines.vllm.logfiles import close_log_files
from coldsnap.engines.vllm.pages import installed_cumem
from coldsnap.engines.vllm.unlisten import close_own_tcp
from coldsnap.errors import MissingCapability, UserError
from coldsnap.hydrate.cuda import open_driver

__all__ = ["TorchSurroundings", "cache_tensors", "memory_maker"]


class TorchSurroundings:
    """Implements `Surroundings`."""

    def __init__(self, *, on_gpu: bool, alone: bool) -> None:
        """`alone`: this worker is the whole world, and nobody will ever connect to it."""
        self._on_gpu = on_gpu
        self._alone = alone

    def versions(self) -> Mapping[str, str]:
        """As `EngineWorker.versions`."""
        return versions()

    def let_go(self) -> None:
        """See `Surroundings.let_go`."""
        gc.collect()
        close_log_files()
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
            close_nvml()
        if self._alone:
            close_own_tcp()
        trim_heap()


def memory_maker(vllm_config: Any) -> tuple[Callable[[], WeightMemory], TorchSurroundings]:
    """Makes the memory of this process's weights, and what surrounds it. Called on the thread that loads them.

    Raises UserError for a GPU without sleep mode, MissingCapability for a device that is neither GPU nor processor.
    """
    platform = resolve("current_platform")
    around = TorchSurroundings(on_gpu=platform.is_cuda(), alone=vllm_config.parallel_config.world_size == 1)
    if platform.is_cpu():
        keep_parameters()
        return lambda: HostPool(cache=lambda: cache_tensors(vllm_config)), around
    if not platform.is_cuda():
        raise MissingCapability(
            f"vLLM computes on {platform.device_name!r} here, and coldsnap knows NVIDIA GPUs and processors",
            cure="serve on one of these",
        )
    if not vllm_config.model_config.enable_sleep_mode:
        raise UserError(
            "vLLM's sleep mode is off, so its weights lie in memory that cannot be given back",
            cure="add --enable-sleep-mode to the command",
        )
    ordinal = torch.cuda.current_device()
    cumem = installed_cumem()
    return lambda: CuMemMemory(open_driver(), ordinal=ordinal, cumem=cumem), around


def cache_tensors(vllm_config: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold keys and values, of every layer that has some."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        yield from _tensors(getattr(layer, "kv_cache", ()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """One tensor, a list of them (one a virtual engine, up to 0.2x), or lists of lists."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
