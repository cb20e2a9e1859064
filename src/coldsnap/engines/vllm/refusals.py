"""What of vLLM is refused, as data: options by their names, variables, and what a configuration turns out to be.

The same table judges a recipe's ``serve`` block, the words of a command, and vLLM's own record of its parsed options in
the front (`judges` knows the spellings). `FACTS` is for what no option says, such as how the checkpoint itself is
quantised: the front looks at vLLM's finished configuration before anything is loaded. Neither torch nor vllm is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coldsnap.engines.vllm.judges import Refusal, is_off, is_on, is_relative, is_several, none_of, one_of, refusals
from coldsnap.engines.vllm.loading import WATCHED_FORMATS
from coldsnap.errors import Problem

__all__ = [
    "FACTS",
    "KV_CACHE_SCHEME",
    "OPTIONS",
    "SLEEP_MODE",
    "VARIABLES",
    "Fact",
    "environment_problems",
    "fact_problems",
    "flag",
    "option_problems",
]

_FOLDER_ONLY = "the pinned checkpoint folder is all that is loaded from, and the artifact binds its digest"
_KV_SCALES = (
    "has scales, calibrated ones too, that vLLM 0.26 sets to 1.0 at each wake; a cache of that kind was never captured"
)
_PART_OF_FOLDER = "put it into the checkpoint folder, or leave it out"

OPTIONS: tuple[Refusal, ...] = (
    *refusals(
        is_on,
        "adapters (LoRA) are loaded beside the checkpoint, and no capture knows their bytes",
        "enable_lora",
        "lora_modules",
        "enable_tower_connector_lora",
        "default_mm_loras",
        cure="merge the adapter into the checkpoint, or leave it out",
    ),
    *refusals(
        is_on,
        "speculative decoding loads a second model, which no capture knows yet",
        "speculative_config",
        "spec_model",
        "spec_method",
        "spec_tokens",
    ),
    *refusals(
        is_on,
        "hands memory to other processes or hosts, whose connections cannot be frozen",
        "kv_transfer_config",
        "ec_transfer_config",
        "weight_transfer_config",
        "kv_events_config",
    ),
    *refusals(
        is_on,
        "keeps weights or keys and values in host memory, which would land in the process image",
        "cpu_offload_gb",
        "cpu_offload_params",
        "kv_offloading_size",
        "offload_group_size",
    ),
    *refusals(
        is_on,
        "changes workers, or where their bytes are, while it serves",
        "enable_eplb",
        "enable_elastic_ep",
        "enable_scale_out",
        "enable_fault_tolerance",
    ),
    *refusals(
        one_of("bitsandbytes", "gguf", "torchao", "inc", "auto-round"),
        "rewrites the checkpoint's bytes in ways that cannot be followed",
        "quantization",
        cure="use a checkpoint of another quantisation: FP8, compressed-tensors, AWQ or GPTQ",
    ),
    *refusals(
        none_of("auto", "bfloat16", "float16"),
        _KV_SCALES,
        "kv_cache_dtype",
        cure="leave it out; write bfloat16 where the checkpoint asks for a quantised one",
    ),
    *refusals(
        none_of(*WATCHED_FORMATS, "coldsnap"),
        "gives the model no tensor by its name in the checkpoint, so that nothing could be told of its bytes",
        "load_format",
        cure=f"use one of {', '.join(WATCHED_FORMATS)}, or leave it out",
    ),
    *refusals(none_of("coldsnap"), "is chosen by coldsnap", "sleep_mode_backend"),
    *refusals(
        is_on,
        "is done by another sleep-mode backend than coldsnap's, which keeps graphs",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
    ),
    *refusals(
        is_several,
        "coldsnap keeps one front process a unit, and opens its listener itself",
        "data_parallel_size",
        "data_parallel_size_local",
        "api_server_count",
    ),
    *refusals(
        is_several,
        "layers, contexts or machines apart are not captured yet: one unit on one host is",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ),
    *refusals(
        none_of("mp", "uni"),
        "starts workers that are not of this process tree",
        "distributed_executor_backend",
        cure="use mp or uni, or leave it out",
    ),
    *refusals(
        is_on,
        "coldsnap keeps one front process a unit, and opens its listener itself",
        "headless",
        "grpc",
        "grpc_port",
        "data_parallel_rank",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "data_parallel_rpc_port",
        "data_parallel_multi_port_external_lb",
        "data_parallel_start_rank",
    ),
    *refusals(is_on, "there is no Unix socket to serve on", "uds", cure="leave it out; coldsnap opens a TCP port"),
    Refusal(
        name="api_key",
        judge=is_on,
        message="the command is part of the artifact, and a key in it would be public",
        cure="set VLLM_API_KEY in the unit's environment and name it in allow_secrets",
        secret=True,
    ),
    Refusal(
        name="hf_token",
        judge=is_on,
        message="the command is part of the artifact, a token in it would be public, and the hub is never asked",
        cure="leave it out; what fetches the checkpoint has the caller's own token",
        secret=True,
    ),
    *refusals(
        is_on,
        "watching files leaves descriptors behind that cannot be frozen",
        "enable_ssl_refresh",
        cure="leave it out; certificate and key are read again whenever the listener is opened",
    ),
    *refusals(
        is_relative,
        "is read whenever the listener is opened, in a process whose folder is /",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        cure="write the whole path",
    ),
    *refusals(
        is_on,
        "opens connections to servers outside, which a restored process would not find",
        "otlp_traces_endpoint",
        "tool_server",
    ),
    *refusals(
        is_on,
        "acceptance asks in words and compares tokens, which needs the tokenizer",
        "skip_tokenizer_init",
        "tokens_only",
    ),
    *refusals(
        one_of("pooling"),
        "acceptance compares tokens, and such a model gives none",
        "runner",
        cure="serve a model that generates",
    ),
    *refusals(
        none_of("auto", "none"),
        "acceptance compares tokens, and such a model gives none",
        "convert",
        cure="serve a model that generates",
    ),
    *refusals(none_of(), "devices are placement", "device_ids", cure="name them in the recipe: devices"),
    *refusals(
        none_of("auto"),
        "replaces the worker that coldsnap's loader and sleep-mode backend are made for",
        "worker_cls",
    ),
    *refusals(is_on, _FOLDER_ONLY, "revision", "code_revision", cure="say it in the recipe: revision"),
    *refusals(is_on, _FOLDER_ONLY, "tokenizer", "tokenizer_revision", "hf_config_path", cure=_PART_OF_FOLDER),
    *refusals(
        is_on, "the command must say itself what the engine computes", "config", cure="write its options into serve"
    ),
)
"""By the name that vLLM gives an option, with underscores; one that is absent or None is never refused."""

SLEEP_MODE = Refusal(
    name="enable_sleep_mode",
    judge=is_off,
    message="is how memory on a GPU is given back before a freeze",
    cure="leave it out: coldsnap switches it on where there is a GPU",
)
"""Of a recipe or a command, where absent is not off; and of a configuration for a GPU."""

KV_CACHE_SCHEME = Refusal(
    name="kv_cache_scheme",
    judge=is_on,
    message="makes the checkpoint's KV cache a quantised one, which " + _KV_SCALES,
    cure="write kv-cache-dtype: bfloat16, which goes before what the checkpoint asks for",
)
"""Of a checkpoint whose attention layers choose the cache's number type, because nobody else has."""

_OFF = ("", "0", "false", "False")
_DEVELOPMENT = "vLLM's development endpoints let anybody put the engine to sleep"


def _leaves_us_out(value: object) -> bool:
    return "coldsnap" not in [one.strip() for one in str(value).split(",")]


VARIABLES: tuple[Refusal, ...] = (
    *refusals(lambda value: value not in _OFF, _DEVELOPMENT, "VLLM_SERVER_DEV_MODE", cure="unset VLLM_SERVER_DEV_MODE"),
    *refusals(
        lambda value: value not in _OFF,
        "the Rust front end cannot be frozen",
        "VLLM_USE_RUST_FRONTEND",
        cure="unset VLLM_USE_RUST_FRONTEND",
    ),
    *refusals(
        _leaves_us_out, "leaves coldsnap's plugin out", "VLLM_PLUGINS", cure="unset VLLM_PLUGINS, or add coldsnap to it"
    ),
    *refusals(
        lambda value: str(value) in _OFF,
        "runs the engine inside the process that serves",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        cure="unset VLLM_ENABLE_V1_MULTIPROCESSING",
    ),
    *refusals(
        is_on,
        "puts io_uring descriptors into the process, which cannot be frozen",
        "USE_LIBUV",
        cure="unset USE_LIBUV",
    ),
    *refusals(
        is_on,
        "is for servers that coldsnap does not start itself",
        "COLDSNAP_EXPORT_MODEL_PAYLOAD",
        cure="unset COLDSNAP_EXPORT_MODEL_PAYLOAD: a capture exports anyway",
    ),
)
"""Environment variables; one that is not set is never refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A value of vLLM's finished configuration, by attributes (``model_config.quantization``), and its refusal."""

    path: str
    refusal: Refusal


def _fact(path: str, name: str) -> Fact:
    found = next(one for one in OPTIONS if one.name == name)
    return Fact(path=path, refusal=found)


FACTS: tuple[Fact, ...] = (
    _fact("model_config.quantization", "quantization"),
    _fact("cache_config.cache_dtype", "kv_cache_dtype"),
    _fact("model_config.runner_type", "runner"),
    _fact("lora_config", "enable_lora"),
    _fact("speculative_config", "speculative_config"),
    _fact("kv_transfer_config", "kv_transfer_config"),
    _fact("ec_transfer_config", "ec_transfer_config"),
    _fact("weight_transfer_config", "weight_transfer_config"),
    _fact("parallel_config.pipeline_parallel_size", "pipeline_parallel_size"),
    _fact("parallel_config.data_parallel_size", "data_parallel_size"),
    _fact("parallel_config.distributed_executor_backend", "distributed_executor_backend"),
    _fact("parallel_config.enable_eplb", "enable_eplb"),
)


def option_problems(options: Mapping[str, object], *, field: Callable[[str], str]) -> tuple[Problem, ...]:
    """Every option that is refused, in the table's order. ``field`` says how an option's place is called.

    Names may have underscores or hyphens; of ``speculative-config.method`` what is before the dot is looked at.
    """
    found = []
    for refusal in OPTIONS:
        for name, value in options.items():
            plain = name.replace("-", "_")
            is_it = value is not None and plain.partition(".")[0] == refusal.name
            if is_it and ("." in plain or refusal.judge(value)):
                found.append(refusal.problem(field(name), value))
    return tuple(found)


def environment_problems(environment: Mapping[str, str], *, field: str = "environment") -> tuple[Problem, ...]:
    """Every variable that must not be so in a served tree."""
    return tuple(
        refusal.problem(f"{field}.{refusal.name}", environment[refusal.name])
        for refusal in VARIABLES
        if refusal.name in environment and refusal.judge(environment[refusal.name])
    )


def fact_problems(config: Any) -> tuple[Problem, ...]:
    """What vLLM's finished configuration says that no option said, in the table's order."""
    facts = FACTS
    if _at(config, "device_config.device_type") == "cuda":
        facts = (*facts, Fact(path="model_config.enable_sleep_mode", refusal=SLEEP_MODE))
    if _at(config, "cache_config.cache_dtype") == "auto":
        facts = (*facts, Fact(path="quant_config.kv_cache_scheme", refusal=KV_CACHE_SCHEME))
    return tuple(
        fact.refusal.problem(fact.path, value if isinstance(value, str | int) else type(value).__name__)
        for fact in facts
        if (value := _at(config, fact.path)) is not None and fact.refusal.judge(value)
    )


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def flag(name: str) -> str:
    """How a command spells an option."""
    return "--" + name.replace("_", "-")
