"""The engine's options in their two spellings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.engines.transformers.options import (
    Device,
    Dtype,
    TransformersOptions,
    command_arguments,
    parse_command,
    parse_options,
)
from coldsnap.errors import InvalidDocument, UsageError


@given(
    options=st.builds(
        TransformersOptions,
        dtype=st.sampled_from(Dtype),
        num_threads=st.integers(0, 1024),
        max_model_len=st.none() | st.integers(1, 10**6),
        kv_cache_tokens=st.integers(1, 1 << 20),
        cuda_graph=st.booleans(),
        device=st.sampled_from(Device),
        served_model_name=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,20}", fullmatch=True),
        load_order=st.sampled_from(["forward", "reverse"]) | st.integers(0, 999).map("shuffled:{}".format),
        arena_base=st.none() | st.integers(1, 2**35).map(lambda page: hex(page * 4096)),
    ),
    port=st.integers(1, 65535),
)
@settings(max_examples=50)
def test_a_command_says_what_was_meant(options: TransformersOptions, port: int) -> None:
    line = parse_command(command_arguments("/a model", options, host="::1", port=port))
    assert (line.model, line.host, line.port, line.options) == ("/a model", "::1", port, options)
    assert parse_options(options.model_dump(mode="json")) == options


def test_every_default_stands_in_the_command() -> None:
    # An old command would otherwise mean something else after a default has changed.
    said = " ".join(command_arguments("/m", parse_options({}), host="127.0.0.1", port=8000))
    options = "--dtype auto --device cpu --num-threads 0 --kv-cache-tokens 4096 --cuda-graph true --load-order forward"
    assert said == f"--model /m --host 127.0.0.1 --port 8000 {options}"


def test_every_wrong_option_is_named_at_once() -> None:
    wrong = {"dtype": "int3", "num_threads": -1, "load_order": "random", "arena_base": "0x1001", "tp": 2}
    with pytest.raises(InvalidDocument) as caught:
        parse_options(wrong)
    assert {problem.field for problem in caught.value.problems} == {f"serve.{name}" for name in wrong}


@pytest.mark.parametrize("value", ["5000", "0x0", "0x123", "0xffffffffffff000", 4096, ""])
def test_an_address_is_a_whole_page_in_hexadecimal(value: object) -> None:
    with pytest.raises(InvalidDocument):
        parse_options({"arena_base": value})


@pytest.mark.parametrize(
    "arguments", [["--port", "1"], ["--model", "m", "--tp", "2"], ["--model", "m", "--port", "x"], ["--mod", "m"]]
)
def test_a_command_of_another_shape_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="command of the transformers engine"):
        parse_command(arguments)


def test_a_graph_needs_places_that_do_not_move() -> None:
    with pytest.raises(InvalidDocument, match="cuda_graph needs kv_cache_tokens above 0"):
        parse_options({"device": "cuda", "kv_cache_tokens": 0})
    assert not parse_options({"device": "cuda", "kv_cache_tokens": 0, "cuda_graph": False}).static_cache
    assert parse_options({"device": "cuda", "cuda_graph": False}).static_cache
    assert not parse_options({"kv_cache_tokens": 64}).static_cache


def test_a_truth_is_written_as_in_json() -> None:
    with pytest.raises(UsageError, match="neither true nor false"):
        parse_command(["--model", "m", "--cuda-graph", "True"])
    assert parse_command(["--model", "m", "--cuda-graph", "false"]).options.cuda_graph is False
