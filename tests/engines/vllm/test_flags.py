"""Options read out of vLLM's sources: a slip is told with what it may have meant, and doubt says nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.engines.vllm.flags import options_in, unknown_flags
from coldsnap.engines.vllm.installed import look_for_vllm

WriteTree = Callable[[Path, dict[str, str]], Path]
RECORDS = """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        group = parser.add_argument_group(title="ModelConfig")
        group.add_argument("--max-model-len", **kwargs["max_model_len"])
        group.add_argument("--tensor-parallel-size", "-tp", **kwargs["tensor_parallel_size"])
        group.add_argument("--enable_odd", action="store_true")
        group.add_argument("positional")
"""
MANY = "\n".join(f'        group.add_argument("--filler-{number}")' for number in range(60))
SERVER = """
class FrontendArgs:
    ssl_keyfile: str | None = None
    uvicorn_log_level: str = "info"
    not_an_option = 3

def make_arg_parser(parser):
    parser.add_argument("--headless", action="store_true")
"""


@pytest.fixture(params=["openai", "launchers", "common"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, write_tree: WriteTree) -> Path:
    """A vLLM that has its server's arguments where one of the known versions has them."""
    place = f"vllm.entrypoints.{request.param}.cli_args"
    return write_tree(tmp_path / "site", {"vllm.engine.arg_utils": RECORDS + MANY, place: SERVER})


def test_options_of_records_and_of_the_server_are_found(folder: Path) -> None:
    found = options_in(folder)
    ours = {"max_model_len", "tensor_parallel_size", "enable_odd", "ssl_keyfile", "uvicorn_log_level", "headless"}
    assert found == ours | {f"filler_{number}" for number in range(60)}


def test_a_slip_is_told_with_what_is_spelled_alike(folder: Path) -> None:
    assert list(unknown_flags(folder, ["max_model_length", "headless"])) == [("max_model_length", ("max_model_len",))]
    assert list(unknown_flags(folder, ["quux"])) == [("quux", ())]


def test_parts_and_denials_of_an_option_are_that_option(folder: Path) -> None:
    assert list(unknown_flags(folder, ["ssl_keyfile.x", "no_headless"])) == []


def test_where_too_few_are_found_nothing_is_said(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path, {"vllm.engine.arg_utils": RECORDS})
    assert options_in(tmp_path) == frozenset()
    assert list(unknown_flags(tmp_path, ["max_model_length"])) == []
    write_tree(tmp_path, {"vllm.engine.arg_utils": "def ("})
    assert list(unknown_flags(tmp_path, ["max_model_length"])) == []


def test_the_folder_is_that_of_the_interpreter(make_vllm: Callable[..., dict[str, str]]) -> None:
    variables = make_vllm(**{"engine.arg_utils": RECORDS + MANY})
    found = look_for_vllm(sys.executable, variables)
    assert found.vllm is not None
    assert "max_model_len" in options_in(found.vllm.folder)
