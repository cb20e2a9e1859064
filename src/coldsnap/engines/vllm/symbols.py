"""Everything of vLLM that this engine relies on, by name: where it is in each version, and what it must accept.

The table is what is compared with an installed or an unpacked vLLM (`contract`), so that a release that moved
something is refused with a list instead of failing in the middle of a load. A symbol that moved has several places,
the oldest first; one of them suffices. Parameters are those that we pass; others may come and go.

`Worker.sleep_mode_backend` is no symbol of ours: a worker builds its backend by its own factory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["SYMBOLS", "Found", "Lookup", "Missing", "Symbol", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
    """`name` (of a module, or `Class.member`) in one of the modules `places`; `parameters` must be accepted by it."""

    name: str
    places: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    use: str

    def __str__(self) -> str:
        return f"{' or '.join(self.places)}: {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A symbol that is there. `parameters` is None where it is no function, or one that accepts any name."""

    parameters: tuple[str, ...] | None = None


Lookup: TypeAlias = Callable[[str, str], Found | None]
"""(module, name) -> what is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A symbol that is gone, or that no longer accepts `parameters`."""

    symbol: Symbol
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.parameters:
            return f"{self.symbol} does not accept {', '.join(self.parameters)} ({self.symbol.use})"
        return f"{self.symbol} is gone ({self.symbol.use})"


def missing(lookup: Lookup, symbols: Sequence[Symbol] | None = None) -> tuple[Missing, ...]:
    """What of `symbols`, all of SYMBOLS by default, `lookup` does not find as we need it, in their order."""
    gone: list[Missing] = []
    for symbol in SYMBOLS if symbols is None else symbols:
        found = [one for place in symbol.places if (one := lookup(place, symbol.name)) is not None]
        if not found:
            gone.append(Missing(symbol=symbol))
            continue
        lacking = [_lacking(symbol, one) for one in found]
        if all(lacking):
            gone.append(Missing(symbol=symbol, parameters=lacking[0]))
    return tuple(gone)


def _lacking(symbol: Symbol, found: Found) -> tuple[str, ...]:
    if found.parameters is None:
        return ()
    return tuple(name for name in symbol.parameters if name not in found.parameters)


_LOADERS = "vllm.model_executor.model_loader"
_BASE = f"{_LOADERS}.base_loader"
_SLEEP = "vllm.device_allocator.sleep_mode_backend"
_CUMEM = "vllm.device_allocator.cumem"
_LLM = "vllm.v1.engine.async_llm"
_SERVER = "the HTTP server"
_MEMORY = "weights and keys and values in CuMem"
_LOAD = "load format coldsnap"
_BACKEND = "sleep-mode backend coldsnap"
_WORKER = "the process with the weights"

# What moved: 0.26 has the server in entrypoints.openai, 0.32 in entrypoints.launchers, 0.33 its arguments in
# entrypoints.common.
_ARGUMENTS = tuple(f"vllm.entrypoints.{place}.cli_args" for place in ("openai", "launchers", "common"))
_CHECKS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.launcher", _ARGUMENTS[-1])
_APP = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.app")
_STATE = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.app_state")
_UTILS = ("vllm.entrypoints.serve.utils", "vllm.entrypoints.launchers.utils")
_LOG = tuple(f"{place}.server_utils" for place in _UTILS)
_LIMITS = tuple(f"{place}.constants" for place in _UTILS)


def _symbol(use: str, places: str | tuple[str, ...], name: str, *parameters: str) -> Symbol:
    return Symbol(name=name, places=(places,) if isinstance(places, str) else places, parameters=parameters, use=use)


SYMBOLS: tuple[Symbol, ...] = (
    _symbol(_LOAD, _LOADERS, "register_model_loader", "load_format"),
    _symbol(_LOAD, _LOADERS, "get_model_loader", "load_config"),
    _symbol(_LOAD, _LOADERS, "_LOAD_FORMAT_TO_MODEL_LOADER"),
    _symbol(_LOAD, _BASE, "BaseModelLoader.__init__", "load_config"),
    _symbol(_LOAD, _BASE, "BaseModelLoader.load_model", "vllm_config", "model_config", "prefix"),
    _symbol(_LOAD, _BASE, "BaseModelLoader.load_weights", "model", "model_config"),
    _symbol(_LOAD, _BASE, "BaseModelLoader.download_model", "model_config"),
    _symbol(_LOAD, _BASE, "initialize_model", "vllm_config", "model_config", "prefix"),
    _symbol(_LOAD, _BASE, "process_weights_after_loading", "model", "model_config", "target_device"),
    _symbol(_LOAD, f"{_LOADERS}.default_loader", "DefaultModelLoader.load_weights", "model", "model_config"),
    _symbol(_LOAD, f"{_LOADERS}.runai_streamer_loader", "RunaiModelStreamerLoader.load_weights", "model"),
    _symbol(_LOAD, "vllm.config.load", "LoadConfig.load_format"),
    _symbol(_LOAD, "vllm.config.load", "LoadConfig.model_loader_extra_config"),
    _symbol(_LOAD, "vllm.config.model", "ModelConfig.model"),
    _symbol(_LOAD, "vllm.config.vllm", "VllmConfig.load_config"),
    _symbol(_LOAD, "vllm.config.vllm", "VllmConfig.model_config"),
    _symbol(_LOAD, "vllm.plugins", "load_general_plugins"),
    _symbol(_BACKEND, _SLEEP, "SleepModeBackend.suspend", "level"),
    _symbol(_BACKEND, _SLEEP, "SleepModeBackend.resume", "tags"),
    _symbol(_BACKEND, _SLEEP, "SleepModeBackend.state"),
    _symbol(_BACKEND, _SLEEP, "SleepModeBackendFactory.register_backend", "name", "module_path", "class_name"),
    _symbol(_BACKEND, "vllm.config.model", "ModelConfig.sleep_mode_backend"),
    _symbol(_BACKEND, "vllm.config.model", "ModelConfig.enable_sleep_mode"),
    _symbol(_WORKER, "vllm.config.parallel", "ParallelConfig.rank"),
    _symbol(_WORKER, "vllm.config.parallel", "ParallelConfig.world_size"),
    _symbol(_WORKER, "vllm.config.parallel", "ParallelConfig.data_parallel_size"),
    _symbol(_WORKER, "vllm.config.model", "ModelConfig.revision"),
    _symbol(_WORKER, "vllm.config.load", "LoadConfig.download_dir"),
    _symbol(_WORKER, "vllm.model_executor.models.registry", "ModelRegistry"),
    _symbol(_WORKER, "vllm.model_executor.models.registry", "_ModelRegistry.models"),
    _symbol(_WORKER, "vllm.config.compilation", "CompilationConfig.static_forward_context"),
    _symbol(_WORKER, "vllm.platforms", "current_platform"),
    _symbol(_WORKER, "vllm._custom_ops", "_supports_onednn"),
    _symbol(_WORKER, "vllm.platforms.interface", "Platform.is_cuda"),
    _symbol(_WORKER, "vllm.platforms.interface", "Platform.is_cpu"),
    _symbol(_MEMORY, _CUMEM, "CuMemAllocator.get_instance"),
    _symbol(_MEMORY, _CUMEM, "CuMemAllocator.pointer_to_data"),
    _symbol(_MEMORY, _CUMEM, "CuMemAllocator.allocator_and_pools"),
    _symbol(_MEMORY, _CUMEM, "CuMemAllocator.use_memory_pool", "tag"),
    _symbol(_MEMORY, _CUMEM, "CuMemAllocator.python_malloc_callback"),
    _symbol(_MEMORY, _CUMEM, "CuMemAllocator.python_free_callback"),
    _symbol(_MEMORY, _CUMEM, "get_pluggable_allocator", "python_malloc_fn", "python_free_func"),
    _symbol(_MEMORY, _CUMEM, "create_and_map", "allocation_handle"),
    _symbol(_MEMORY, _CUMEM, "unmap_and_release", "allocation_handle"),
    _symbol(_MEMORY, "vllm.platforms.interface", "Platform._global_graph_pool"),
    _symbol(_MEMORY, "vllm.device_allocator", "AllocationData.handle"),
    _symbol(_MEMORY, "vllm.device_allocator", "AllocationData.tag"),
    _symbol(_MEMORY, "vllm.device_allocator", "AllocationData.cpu_backup_tensor"),
    _symbol(_MEMORY, "vllm.device_allocator", "AllocationData.is_asleep"),
    _symbol(_SERVER, _ARGUMENTS, "make_arg_parser", "parser"),
    _symbol(_SERVER, _ARGUMENTS, "validate_parsed_serve_args", "args"),
    _symbol(_SERVER, _APP, "build_app", "args"),
    _symbol(_SERVER, _STATE, "init_app_state", "engine_client", "state", "args"),
    _symbol(_SERVER, _LOG, "get_uvicorn_log_config", "args"),
    _symbol(_SERVER, _LIMITS, "H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT"),
    _symbol(_SERVER, _LIMITS, "H11_MAX_HEADER_COUNT_DEFAULT"),
    _symbol(_SERVER, _CHECKS, "validate_api_server_args", "args"),
    _symbol(_SERVER, "vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    _symbol(_SERVER, "vllm.tool_parsers", "ToolParserManager.import_tool_parser", "plugin_path"),
    _symbol(_SERVER, "vllm.reasoning", "ReasoningParserManager.import_reasoning_parser", "plugin_path"),
    _symbol(_SERVER, "vllm.usage.usage_lib", "UsageContext.OPENAI_API_SERVER"),
    _symbol(_SERVER, "vllm.utils.system_utils", "decorate_logs", "process_name"),
    _symbol(_SERVER, "vllm.utils.system_utils", "set_ulimit"),
    _symbol(_SERVER, "vllm.exceptions", "VLLMValidationError"),
    _symbol(_SERVER, "vllm.envs", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    _symbol(_SERVER, "vllm.v1.engine.core", "EngineCoreProc"),
    _symbol(_SERVER, "vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", "args"),
    _symbol(_SERVER, "vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config", "usage_context"),
    _symbol(_SERVER, _LLM, "AsyncLLM.from_vllm_config", "vllm_config", "usage_context"),
    _symbol(_SERVER, _LLM, "AsyncLLM.generate", "prompt", "sampling_params", "request_id"),
    _symbol(_SERVER, _LLM, "AsyncLLM.get_supported_tasks"),
    _symbol(_SERVER, _LLM, "AsyncLLM.sleep", "level"),
    _symbol(_SERVER, _LLM, "AsyncLLM.wake_up", "tags"),
    _symbol(_SERVER, _LLM, "AsyncLLM.pause_generation", "mode", "clear_cache"),
    _symbol(_SERVER, _LLM, "AsyncLLM.resume_generation"),
    _symbol(_SERVER, _LLM, "AsyncLLM.reset_prefix_cache"),
    _symbol(_SERVER, _LLM, "AsyncLLM.reset_mm_cache"),
    _symbol(_SERVER, _LLM, "AsyncLLM.shutdown"),
    _symbol(_SERVER, _LLM, "AsyncLLM.errored"),
    _symbol(_SERVER, "vllm.sampling_params", "SamplingParams.temperature"),
    _symbol(_SERVER, "vllm.sampling_params", "SamplingParams.max_tokens"),
    _symbol(_SERVER, "vllm.sampling_params", "SamplingParams.skip_reading_prefix_cache"),
)
