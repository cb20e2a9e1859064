"""vLLM's load format `coldsnap`: one of vLLM's own loaders does the work, watched. Needs torch and vllm.

`--load-format coldsnap` loads as `auto` does, or as `load_format` in `model_loader_extra_config` says, whose other
members go to that loader. Its reading is not replaced. Each tensor that it gives to the model's `load_weights` is known
by name and header, and every operation on tensors from there to the end of the finalizers is followed (`tracing`), so
the observer is told which bytes of the weights' memory are which bytes of the checkpoint.

A model that is built (`Way.BUILD`) goes through the same steps without one byte: the tensors that it is given have
names and nothing in them (`unread`), and the observer is told of the copies that a load would have made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import (
    _LOAD_FORMAT_TO_MODEL_LOADER,
    get_model_loader,
    register_model_loader,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from coldsnap.engines.vllm.account import account
from coldsnap.engines.vllm.loading import WATCHED_FORMATS, Load, Way, reloaded, taken
from coldsnap.engines.vllm.sources import Sources
from coldsnap.engines.vllm.storages import storages_of
from coldsnap.engines.vllm.templates import template_problems
from coldsnap.engines.vllm.tracing import Tracer
from coldsnap.engines.vllm.unread import unread_tensors
from coldsnap.errors import Refused, UserError

__all__ = ["LOAD_FORMAT", "WATCHED_FORMATS", "ColdsnapLoader", "register", "watch_every_format"]

LOAD_FORMAT = "coldsnap"
HOST_FORMATS = ("auto", "hf", "safetensors")
"""Of the watched ones, those that read into host memory."""

_replaced: dict[str, type[BaseModelLoader]] = {}
"""vLLM's own loaders, by format, where ours has taken their place."""


class _Watching:
    """One load that is watched. `told`: the name of each tensor that the model got, and whether a header has it."""

    def __init__(self, load: Load, tracer: Tracer) -> None:
        self.load = load
        self.tracer = tracer
        self.told: list[tuple[str, bool]] = []
        self._sources = Sources(load.files)

    def tell(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, with the tracer told of each."""
        for name, tensor in weights:
            stored = self._sources.find(name, str(tensor.dtype), tuple(tensor.shape))
            self.told.append((name, stored is not None))
            if stored is not None:
                self.tracer.loaded(tensor, stored)
            yield name, tensor


class ColdsnapLoader(BaseModelLoader):  # type: ignore[misc] # vllm is not type-checked here
    """See the module. Watches a load that `loading.taken` hands out, and is vLLM's own loader otherwise."""

    def __init__(self, load_config: LoadConfig) -> None:
        """Raises UserError for a load format that gives no tensor by its name."""
        super().__init__(load_config)
        delegated = _delegated(load_config)
        self._format: str = delegated.load_format
        own = _replaced.get(delegated.load_format)
        self._delegate = own(delegated) if own is not None else get_model_loader(delegated)
        self._watching: _Watching | None = None

    def download_model(self, model_config: ModelConfig) -> None:
        """Make the files be there."""
        self._delegate.download_model(model_config)

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, for whoever loads them into a model once more."""
        reloaded()
        weights: Iterator[tuple[str, torch.Tensor]] = self._delegate.get_all_weights(model_config, model)
        return weights

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        """The model, loaded and finalized; its weights are in the memory of the load that was handed out."""
        if not Path(model_config.model).is_dir():
            self.download_model(model_config)  # whoever hands out a load looks at the files
        load = taken(vllm_config)
        if load is None:
            return self._delegate.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        try:
            model = self._load(load, vllm_config, model_config, prefix)
            load.laid_out()
        except Exception as error:
            load.failed(error)
            raise
        return model

    def _load(self, load: Load, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> torch.nn.Module:
        build = load.way is Way.BUILD
        strict = build or load.is_template
        if strict and self._format not in HOST_FORMATS:
            raise UserError(
                f"load format {self._format!r} takes memory of the device among the weights while it reads, so a "
                f"model that is built without reading is laid out in another way",
                cure=f"use one of {', '.join(HOST_FORMATS)} for a template",
                facts={"load_format": self._format},
            )
        tracer = Tracer(follow=strict, unread=build)
        watching = self._watching = _Watching(load, tracer)
        if not strict:
            load.memory.keep_graphs()  # a template's copies capture graphs of their own
        try:
            with tracer:
                model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                load.memory.settle(model, tracer)
        finally:
            self._watching = None
        allocations, storages = load.memory.allocations, storages_of(model)
        if strict:
            problems = template_problems(
                files=load.files,
                told=watching.told,
                host_reads=tracer.host_reads,
                allocations=allocations,
                storages=storages,
                made_from=tracer.made_from,
            )
            if problems:
                raise Refused("a template of this model", problems)
            load.memory.seal()
        account(tracer.provenance, load.observer, allocations=allocations, storages=storages)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """vLLM calls this between building and finalizing a model, and to load other weights into it later."""
        if self._watching is None:
            reloaded()
            self._delegate.load_weights(model, model_config)
            return
        watching = self._watching
        watching.load.memory.prepare(model, watching.tracer)
        own: Callable[..., Any] = model.load_weights
        if watching.load.way is Way.BUILD:
            own(watching.tell(unread_tensors(watching.load.files)))
            return

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **keywords: Any) -> Any:
            return own(watching.tell(weights), *args, **keywords)

        model.load_weights = load_weights  # of this object alone, and for this call
        try:
            self._delegate.load_weights(model, model_config)
        finally:
            del model.load_weights


def register() -> None:
    """Make the load format known to this process. Idempotent."""
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not ColdsnapLoader:
        register_model_loader(LOAD_FORMAT)(ColdsnapLoader)


def watch_every_format() -> None:
    """Let our loader take the place of vLLM's own for each load format: watched where it can be, else refused.

    Idempotent.
    """
    for name, own in list(_LOAD_FORMAT_TO_MODEL_LOADER.items()):
        if not issubclass(own, ColdsnapLoader):
            _replaced[name] = own
            register_model_loader(name)(ColdsnapLoader)


def _delegated(load_config: LoadConfig) -> LoadConfig:
    """The same, for the loader that does the work."""
    extra = dict(load_config.model_loader_extra_config or {})
    wanted = load_config.load_format
    if wanted == LOAD_FORMAT:
        wanted = extra.pop("load_format", "auto")
    if wanted not in WATCHED_FORMATS:
        raise UserError(
            f"load format {wanted!r} cannot be watched by {LOAD_FORMAT}",
            cure=f"use one of {', '.join(WATCHED_FORMATS)}",
            facts={"load_format": wanted},
        )
    delegated = copy.copy(load_config)
    delegated.load_format = wanted
    delegated.model_loader_extra_config = extra
    return delegated
