"""What a template imports ahead of its freeze, so that no copy of it has to.

Imports alone, which touch no device: no configuration of the engine is made, for that asks devices, and what a module
asks when it is imported is answered without one (`questions`). A module that this version of vLLM has not is passed by;
it would cost time in each copy, and nothing else. Imports vllm when it is called.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from coldsnap.engines.vllm.compat import resolve
from coldsnap.engines.vllm.questions import import_askers

__all__ = ["import_engine"]

_log = logging.getLogger(__name__)

_EVERYWHERE = (
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.renderers.hf",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.sample.sampler",
    "coldsnap.engines.vllm.backend",
    "coldsnap.engines.vllm.device",
    "coldsnap.engines.vllm.inner",
    "coldsnap.engines.vllm.loader",
)
_ON_GPU = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.compilation.backends",
    "cuda.bindings.driver",
)
_ASKERS = ("flashinfer",)  # vLLM imports it where it is there, and it imports cutlass
_ON_PROCESSOR = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
)


def import_engine(model: Path) -> tuple[str, ...]:
    """Import what an engine process of this vLLM runs to serve the checkpoint in `model`; what it has not of that."""
    on_processor = resolve("current_platform").is_cpu()
    if not on_processor:
        import_askers(_ASKERS)
    here = _ON_PROCESSOR if on_processor else _ON_GPU
    missing = [*_import([*_EVERYWHERE, *here]), *_import_classes(_architectures(model))]
    if missing:
        _log.info("not imported ahead: %s", ", ".join(missing))
    return tuple(missing)


def _import(modules: Iterable[str]) -> Iterable[str]:
    for name in modules:
        try:
            there = find_spec(name) is not None
        except ModuleNotFoundError:  # a package above it is not there
            there = False
        if there:
            import_module(name)
        else:
            yield name


def _architectures(model: Path) -> Sequence[str]:
    """As the checkpoint's own configuration names them. () for one that does not."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        return [str(one) for one in config.get("architectures") or ()]
    except (OSError, ValueError, AttributeError):  # vLLM says what is wrong with it, and better
        return ()


def _import_classes(names: Iterable[str]) -> Iterable[str]:
    known = resolve("ModelRegistry").models
    for name in names:
        if name in known:
            known[name].load_model_cls()
        else:
            yield name
