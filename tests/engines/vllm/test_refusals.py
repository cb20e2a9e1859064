"""Every refusal of the table: of what is refused, not of its neighbour, with field, value and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coldsnap.engines.vllm.refusals import (
    FACTS,
    OPTIONS,
    SLEEP_MODE,
    VARIABLES,
    environment_problems,
    fact_problems,
    option_problems,
)

# name -> (refused values, values that are not). As YAML, a command and vLLM's own record spell them.
CASES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "enable_lora": ((True, "true"), (False, None)),
    "lora_modules": ((["a=/x"], "a=/x"), (None, [])),
    "enable_tower_connector_lora": ((True,), (False,)),
    "default_mm_loras": (({"image": "/x"},), (None,)),
    "speculative_config": (({"method": "ngram"}, '{"method":"ngram"}'), (None, "", {})),
    "spec_model": (("/draft",), (None,)),
    "spec_method": (("ngram",), (None,)),
    "spec_tokens": ((3, "3"), (None, 0)),
    "kv_transfer_config": (({"kv_connector": "x"},), (None,)),
    "ec_transfer_config": (({"x": 1},), (None,)),
    "weight_transfer_config": (({"backend": "nccl"},), (None,)),
    "kv_events_config": (({"publisher": "zmq"},), (None,)),
    "cpu_offload_gb": ((4, "4", 0.5), (0, "0", 0.0, "0.0")),
    "cpu_offload_params": ((["x"],), ([], None, set())),
    "kv_offloading_size": ((1.5, "1.5"), (None, 0)),
    "offload_group_size": ((2,), (0, None)),
    "enable_eplb": ((True,), (False,)),
    "enable_elastic_ep": ((True,), (False,)),
    "enable_scale_out": ((True,), (False,)),
    "enable_fault_tolerance": ((True,), (False,)),
    "quantization": (("bitsandbytes", "gguf", "torchao", "GGUF"), (None, "fp8", "awq", "gptq", "compressed-tensors")),
    "kv_cache_dtype": (
        ("fp8", "fp8_e4m3", "fp8_e5m2", "FP8", "fp8_ds_mla", "nvfp4", "int8_per_token_head", "turboquant_k8v4"),
        ("auto", "bfloat16", "float16", None),
    ),
    "load_format": (
        ("pt", "npcache", "dummy", "tensorizer", "sharded_state", "mistral", "ipc_cache", "modelexpress", "gguf"),
        ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "coldsnap", None),
    ),
    "sleep_mode_backend": (("cumem",), ("coldsnap", None)),
    "sleep_mode_offload_cudagraph": ((True,), (False,)),
    "sleep_preserve_parameter_names": ((["lm_head"],), (None, [])),
    "data_parallel_size": ((2, "2"), (1, "1", None)),
    "data_parallel_size_local": ((2, 0), (1, None)),
    "api_server_count": ((2, 0), (1, None)),
    "pipeline_parallel_size": ((2, "4"), (1, "1")),
    "decode_context_parallel_size": ((2,), (1,)),
    "prefill_context_parallel_size": ((2,), (1,)),
    "nnodes": ((2,), (1,)),
    "distributed_executor_backend": (("ray", "external_launcher"), ("mp", "uni", None)),
    "headless": ((True,), (False,)),
    "grpc": ((True,), (False,)),
    "grpc_port": ((9000,), (None,)),
    "data_parallel_rank": ((1,), (None,)),
    "data_parallel_hybrid_lb": ((True,), (False,)),
    "data_parallel_external_lb": ((True,), (False,)),
    "data_parallel_rpc_port": ((29550,), (None,)),
    "data_parallel_multi_port_external_lb": ((True,), (False,)),
    "data_parallel_start_rank": ((1,), (None,)),
    "uds": (("/run/x.sock",), (None,)),
    "api_key": ((["sk-1"], "sk-1"), (None, [])),
    "hf_token": (("hf_sk-1",), (None, False)),
    "enable_ssl_refresh": ((True,), (False,)),
    "ssl_keyfile": (("key.pem", "./key.pem"), ("/etc/key.pem", None)),
    "ssl_certfile": (("cert.pem",), ("/etc/cert.pem", None)),
    "ssl_ca_certs": (("ca.pem",), ("/etc/ca.pem", None)),
    "otlp_traces_endpoint": (("http://collector:4317",), (None,)),
    "tool_server": (("demo",), (None,)),
    "skip_tokenizer_init": ((True,), (False,)),
    "tokens_only": ((True,), (False,)),
    "runner": (("pooling",), ("auto", "generate", None)),
    "convert": (("embed", "classify"), ("auto", "none", None)),
    "device_ids": (([0, 1], "0"), (None,)),
    "worker_cls": (("my.Worker",), ("auto", None)),
    "revision": (("main",), (None,)),
    "code_revision": (("main",), (None,)),
    "tokenizer": (("/other",), (None,)),
    "tokenizer_revision": (("main",), (None,)),
    "hf_config_path": (("/other",), (None,)),
    "config": (("/etc/vllm.yaml",), (None, "")),
}
VARIABLE_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "VLLM_SERVER_DEV_MODE": (("1", "true"), ("0", "", "false")),
    "VLLM_USE_RUST_FRONTEND": (("1",), ("0", "")),
    "VLLM_PLUGINS": (("", "lora_resolver", "other, another"), ("coldsnap", "other, coldsnap")),
    "VLLM_ENABLE_V1_MULTIPROCESSING": (("0",), ("1",)),
    "USE_LIBUV": (("1",), ("0",)),
    "COLDSNAP_EXPORT_MODEL_PAYLOAD": (("1",), ("0", "")),
}


def place(name: str) -> str:
    return f"serve.{name}"


def test_the_cases_are_of_every_row_of_the_table() -> None:
    assert list(CASES) == [one.name for one in OPTIONS], "each row once, and a case for each"
    assert list(VARIABLE_CASES) == [one.name for one in VARIABLES]


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_is_named_with_its_value_and_a_way_out(name: str) -> None:
    refused, taken = CASES[name]
    for value in refused:
        (problem,) = option_problems({name: value, "max_model_len": 512}, field=place)
        assert problem.field == f"serve.{name}"
        assert problem.message
        assert problem.cure
        assert problem.value == (None if name in ("api_key", "hf_token") else str(value)[:80])
        assert "sk-1" not in str(problem), "a key is not repeated"
    for value in taken:
        assert option_problems({name: value}, field=place) == ()


def test_hyphens_and_parts_of_an_option_are_that_option() -> None:
    assert [one.field for one in option_problems({"enable-lora": True}, field=place)] == ["serve.enable-lora"]
    (problem,) = option_problems({"speculative-config.num_speculative_tokens": 0}, field=place)
    assert problem.field == "serve.speculative-config.num_speculative_tokens"
    assert option_problems({"compilation-config.mode": 3}, field=place) == ()


def test_all_problems_are_told_together_in_the_order_of_the_table() -> None:
    found = option_problems({"uds": "/x", "quantization": "gguf", "enable_lora": True}, field=place)
    assert [one.field for one in found] == ["serve.enable_lora", "serve.quantization", "serve.uds"]


@pytest.mark.parametrize("name", VARIABLE_CASES)
def test_variables_are_judged_only_when_they_are_set(name: str) -> None:
    refused, taken = VARIABLE_CASES[name]
    assert environment_problems({}) == ()
    for value in refused:
        (problem,) = environment_problems({name: value}, field="environment")
        assert (problem.field, problem.value) == (f"environment.{name}", value)
        assert problem.cure
    for value in taken:
        assert environment_problems({name: value}) == ()


def config(device: str = "cuda", **changed: Any) -> SimpleNamespace:
    """As vLLM's: what our table looks at, all of it plain, but for ``changed`` (path with __ for dots)."""
    plain: dict[str, Any] = {
        "model_config": SimpleNamespace(quantization=None, runner_type="generate", enable_sleep_mode=device == "cuda"),
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, distributed_executor_backend="mp", enable_eplb=False
        ),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "quant_config": SimpleNamespace(),
        "device_config": SimpleNamespace(device_type=device),
        "lora_config": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "ec_transfer_config": None,
        "weight_transfer_config": None,
    }
    for path, value in changed.items():
        owner, _, member = path.partition("__")
        if member:
            setattr(plain[owner], member, value)
        else:
            plain[owner] = value
    return SimpleNamespace(**plain)


def test_a_plain_configuration_is_taken_on_either_device() -> None:
    assert fact_problems(config()) == ()
    assert fact_problems(config("cpu")) == ()


FACT_CASES: dict[str, tuple[Any, str]] = {
    "model_config.quantization": ("torchao", "torchao"),
    "cache_config.cache_dtype": ("fp8_e4m3", "fp8_e4m3"),
    "model_config.runner_type": ("pooling", "pooling"),
    "lora_config": (SimpleNamespace(), "SimpleNamespace"),
    "speculative_config": (SimpleNamespace(), "SimpleNamespace"),
    "kv_transfer_config": (SimpleNamespace(), "SimpleNamespace"),
    "ec_transfer_config": (SimpleNamespace(), "SimpleNamespace"),
    "weight_transfer_config": (SimpleNamespace(), "SimpleNamespace"),
    "parallel_config.pipeline_parallel_size": (2, "2"),
    "parallel_config.data_parallel_size": (2, "2"),
    "parallel_config.distributed_executor_backend": ("ray", "ray"),
    "parallel_config.enable_eplb": (True, "True"),
    "model_config.enable_sleep_mode": (False, "False"),
    "quant_config.kv_cache_scheme": ({"num_bits": 8, "type": "float"}, "dict"),
}


@pytest.mark.parametrize("path", FACT_CASES)
def test_what_no_option_said_is_found_in_the_finished_configuration(path: str) -> None:
    value, shown = FACT_CASES[path]
    (problem,) = fact_problems(config(**{path.replace(".", "__"): value}))
    assert (problem.field, problem.value) == (path, shown)
    assert problem.cure


def test_every_fact_has_a_case_above() -> None:
    besides = ["model_config.enable_sleep_mode", "quant_config.kv_cache_scheme"]
    assert [*(one.path for one in FACTS), *besides] == list(FACT_CASES)


def test_a_vllm_without_a_configuration_has_nothing_to_refuse_there() -> None:
    assert fact_problems(SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))) == ()


def test_sleep_mode_is_missed_on_a_gpu_alone() -> None:
    assert fact_problems(config("cpu", model_config__enable_sleep_mode=False)) == ()
    (problem,) = fact_problems(config("cuda", model_config__enable_sleep_mode=False))
    assert problem.message == SLEEP_MODE.message


def test_a_checkpoint_that_asks_for_a_quantised_cache_is_taken_when_an_option_says_another() -> None:
    """vLLM's attention layers follow the checkpoint only where the cache's number type is `auto`."""
    scheme = {"num_bits": 8, "type": "float"}
    (problem,) = fact_problems(config(quant_config__kv_cache_scheme=scheme))
    assert "kv-cache-dtype: bfloat16" in (problem.cure or "")
    assert fact_problems(config(quant_config__kv_cache_scheme=None)) == ()
    said = config(quant_config__kv_cache_scheme=scheme, cache_config__cache_dtype="bfloat16")
    assert fact_problems(said) == ()
