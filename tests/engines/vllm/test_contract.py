"""The contract with vLLM's sources, over tiny trees: what is there is found, what is gone is listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.engines.vllm.contract import lookup_in, main
from coldsnap.engines.vllm.symbols import SYMBOLS, Found, Symbol, missing
from coldsnap.errors import UserError

WriteTree = Callable[[Path, dict[str, str]], Path]
EverySymbol = Callable[..., dict[str, str]]


@pytest.mark.parametrize("place", [0, -1])
def test_a_tree_that_has_every_symbol_passes(
    place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], write_tree: WriteTree, every_symbol: EverySymbol
) -> None:
    write_tree(tmp_path, every_symbol(place=place))
    assert main([str(tmp_path)]) == 0
    assert f"all {len(SYMBOLS)} symbols" in capsys.readouterr().out


@pytest.mark.parametrize("gone", SYMBOLS, ids=lambda symbol: symbol.name)
def test_each_symbol_that_is_gone_is_the_one_that_is_listed(
    gone: Symbol, tmp_path: Path, capsys: pytest.CaptureFixture[str], write_tree: WriteTree, every_symbol: EverySymbol
) -> None:
    write_tree(tmp_path, every_symbol(without=gone))
    assert main([str(tmp_path)]) == 1
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"1 of {len(SYMBOLS)} symbols of vLLM that coldsnap relies on are gone:"
    assert lines == [f"  {' or '.join(gone.places)}: {gone.name} is gone ({gone.use})"]


def test_a_parameter_that_is_gone_is_named(tmp_path: Path, write_tree: WriteTree) -> None:
    symbol = Symbol(name="C.f", places=("vllm.a",), parameters=("x", "y"), use="this test")
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": "class C:\n    def f(self, x, *, z): pass\n"}))
    assert lookup("vllm.a", "C.f") == Found(parameters=("self", "x", "z"))
    assert [str(one) for one in missing(lookup, [symbol])] == ["vllm.a: C.f does not accept y (this test)"]


def test_a_function_that_takes_any_name_accepts_ours(tmp_path: Path, write_tree: WriteTree) -> None:
    symbol = Symbol(name="f", places=("vllm.a",), parameters=("x",), use="this test")
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": "def f(**more): pass\n"}))
    assert missing(lookup, [symbol]) == ()


def test_a_second_place_makes_good_what_the_first_does_not_accept(tmp_path: Path, write_tree: WriteTree) -> None:
    symbol = Symbol(name="f", places=("vllm.a", "vllm.b"), parameters=("x",), use="this test")
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": "def f(): pass\n", "vllm.b": "def f(x): pass\n"}))
    assert missing(lookup, [symbol]) == ()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("try:\n    import fast\nexcept ImportError:\n    def f(): pass\n", "f"),
        ("if True:\n    limit: int = 4\n", "limit"),
        ("from vllm.other import g as f\n", "f"),
        ("from vllm.other import Base\nclass C(Base): pass\n", "C.inherited"),
        ("class C:\n    def __init__(self):\n        self.table: dict = {}\n", "C.table"),
        ("class C:\n    def later(self):\n        self.late = 1\n", "C.late"),
    ],
)
def test_what_python_would_find_is_found(source: str, name: str, tmp_path: Path, write_tree: WriteTree) -> None:
    others = {"vllm.other": "def g(): pass\nclass Base:\n    inherited = 1\n"}
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": source, **others}))
    assert lookup("vllm.a", name) is not None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    g = 1\n", "g"),
        ("from vllm.other import gone as f\n", "f"),
        ("class C:\n    def f(self, other):\n        other.table = 1\n", "C.table"),
        ("C = 1\n", "C.member"),
    ],
)
def test_what_python_would_not_find_is_gone(source: str, name: str, tmp_path: Path, write_tree: WriteTree) -> None:
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": source, "vllm.other": ""}))
    assert lookup("vllm.a", name) is None
    assert lookup("vllm.not_there", name) is None


def test_a_circle_of_imports_ends(tmp_path: Path, write_tree: WriteTree) -> None:
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": "from vllm.b import f\n", "vllm.b": "from vllm.a import f\n"}))
    assert lookup("vllm.a", "f") is not None  # Python decides that one; here it only has to end


def test_wrong_words_and_folders_are_told_from_a_broken_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    assert main([str(tmp_path)]) == 2
    assert f"there is no package vllm in {tmp_path}" in capsys.readouterr().err


def test_a_file_that_is_no_python_is_named(tmp_path: Path, write_tree: WriteTree) -> None:
    lookup = lookup_in(write_tree(tmp_path, {"vllm.a": "def (\n"}))
    with pytest.raises(UserError, match=r"cannot read .*vllm/a\.py"):
        lookup("vllm.a", "f")
