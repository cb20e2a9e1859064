"""vLLM's options as a recipe says them and as a command does: the same meaning, and nothing lost on the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.engines.vllm.options import (
    ENTRY,
    Device,
    command_arguments,
    number_of,
    parse_options,
    read_arguments,
    read_command,
)
from coldsnap.errors import InvalidDocument, UsageError


def words(serve: dict[str, Any], *, port: int = 8000) -> tuple[str, ...]:
    return command_arguments("/m", parse_options(serve), name="m", host="127.0.0.1", port=port)


def fields(serve: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        parse_options(serve)
    assert all(one.cure for one in caught.value.problems)
    return [one.field for one in caught.value.problems]


def test_without_a_word_it_is_a_gpu_with_sleep_mode_and_our_loader() -> None:
    assert parse_options({}) == {"device": "cuda"}
    said = "/m --enable-sleep-mode --load-format coldsnap --served-model-name m --host 127.0.0.1 --port 8000"
    assert " ".join(words({})) == said


def test_a_processor_has_no_sleep_mode() -> None:
    assert "--enable-sleep-mode" not in words({"device": "cpu"})
    assert read_arguments(words({"device": "cpu"})).device is Device.CPU
    assert read_arguments(words({})).device is Device.CUDA
    assert fields({"device": "cpu", "enable-sleep-mode": True}) == ["serve.enable-sleep-mode"]
    assert fields({"enable_sleep_mode": False}) == ["serve.enable_sleep_mode"]


def test_each_kind_of_value_has_its_spelling() -> None:
    said = words(
        {
            "max-model-len": 4096,
            "gpu_memory_utilization": 0.85,
            "enable-prefix-caching": False,
            "async_scheduling": True,
            "served-model-name": ["qwen", "qwen3"],
            "compilation-config": {"mode": 3, "cudagraph_mode": "FULL"},
            "compilation_config.level": "-1",
            "allowed_origins": ["*"],
            "quantization": None,
            "dtype": "bfloat16",
        }
    )
    assert " ".join(said[1:-4]) == (
        '--allowed-origins ["*"] --async-scheduling --compilation-config {"cudagraph_mode":"FULL","mode":3} '
        "--compilation-config.level=-1 --dtype bfloat16 --no-enable-prefix-caching --enable-sleep-mode "
        "--gpu-memory-utilization 0.85 --load-format coldsnap --max-model-len 4096 --served-model-name qwen qwen3"
    )


def test_the_order_and_the_spelling_of_names_change_no_command() -> None:
    assert words({"max-model-len": 8, "dtype": "auto"}) == words({"dtype": "auto", "max_model_len": 8})


@pytest.mark.parametrize("reader", ["safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "hf"])
def test_the_loader_that_reads_is_told_to_ours(reader: str) -> None:
    said = words({"load-format": reader, "model-loader-extra-config": {"concurrency": 16}})
    assert said[said.index("--load-format") + 1] == "coldsnap"
    extra = json.loads(said[said.index("--model-loader-extra-config") + 1])
    assert extra == {"concurrency": 16, "load_format": reader}


def test_the_usual_loader_needs_no_word() -> None:
    assert words({"load_format": "auto"}) == words({})
    assert words({"load_format": "coldsnap"}) == words({})
    as_text = words({"model_loader_extra_config": '{"num_threads": 4}'})
    assert json.loads(as_text[as_text.index("--model-loader-extra-config") + 1]) == {"num_threads": 4}


def test_a_reader_that_is_hidden_in_the_extra_configuration_is_refused_too() -> None:
    assert fields({"model_loader_extra_config": {"load_format": "dummy"}}) == [
        "serve.model_loader_extra_config.load_format"
    ]
    assert fields({"model-loader-extra-config": "[1"}) == ["serve.model-loader-extra-config"]


def test_every_wrong_option_is_named_at_once_as_it_was_written() -> None:
    wrong = {
        "--dtype": "auto",
        "Max": 1,
        "model": "/other",
        "enable-lora": True,
        "quantization": "gguf",
        "device": "tpu",
        "served-model-name": ["-x"],
        "seed": "1\0",
        "tensor-parallel-size": "two",
    }
    assert set(fields(wrong)) == {f"serve.{name}" for name in wrong}


def test_one_option_in_two_spellings_is_refused() -> None:
    assert fields({"max-model-len": 1, "max_model_len": 1}) == ["serve.max_model_len"]


@pytest.mark.parametrize("value", [0, -1, 1.5, "x", True, [2], 10000])
def test_a_number_of_workers_is_one(value: object) -> None:
    assert fields({"tensor_parallel_size": value}) == ["serve.tensor_parallel_size"]
    with pytest.raises(UsageError, match="--tensor-parallel-size is no number"):
        number_of({"tensor_parallel_size": value}, "tensor_parallel_size", 1)


NAMES = st.from_regex(r"x[a-z0-9]{0,6}(-[a-z0-9]{1,6}){0,2}", fullmatch=True)
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=12).filter(
    lambda text: not text.startswith("-")
)
VALUES = st.booleans() | st.integers(0, 10**9) | WORDS | st.lists(WORDS, min_size=2, max_size=4)


@given(serve=st.dictionaries(NAMES, VALUES, max_size=8), port=st.integers(1, 65535), cpu=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_command_says_what_was_meant(serve: dict[str, Any], port: int, cpu: bool) -> None:
    options = parse_options({**serve, "device": "cpu" if cpu else "cuda"})
    assert parse_options(options) == options, "its own result is accepted"
    line = read_arguments(command_arguments("/a model", options, name="n", host="::1", port=port))
    assert (line.model, line.host, line.port, line.device) == ("/a model", "::1", port, options["device"])
    said = {
        name.replace("-", "_"): tuple(value)
        if isinstance(value, list)
        else value
        if isinstance(value, bool)
        else str(value)
        for name, value in serve.items()
    }
    ours = {"load_format": "coldsnap", "served_model_name": "n"} | ({} if cpu else {"enable_sleep_mode": True})
    assert line.options == {**ours, **said}


def test_a_text_that_looks_like_an_option_stays_a_value() -> None:
    for text in ("-1", "--x", ""):
        assert read_arguments(words({"chat-template": text})).options["chat_template"] == text


def test_a_command_by_hand_is_read_in_its_other_spellings() -> None:
    line = read_arguments(["--model", "/m", "--port=9", "--host", "::1", "--no-async-scheduling", "--max_model_len=5"])
    assert (line.model, line.port, line.host) == ("/m", 9, "::1")
    assert line.options == {"async_scheduling": False, "max_model_len": "5"}


@pytest.mark.parametrize(
    "arguments",
    [[], ["--max-model-len", "5"], ["/a", "/b"], ["/m", "--port", "x"], ["/m", "-tp", "2"], ["/m", "--port"]],
)
def test_a_command_that_says_less_or_more_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        read_arguments(arguments)


@pytest.mark.parametrize(
    "command",
    [("vllm", "serve", "/m"), ("python", "-m", ENTRY), ("python", "-m", ENTRY, "bench", "/m"), ()],
)
def test_a_command_of_another_program_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="no command of the vllm engine"):
        read_command(command)
