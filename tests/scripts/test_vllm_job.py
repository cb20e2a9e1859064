"""`./run test-vllm`: when its environment is made, and what is said when it cannot be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
setup: ModuleType = importlib.import_module("house.setup")
vllm: ModuleType = importlib.import_module("house.vllm")
Trouble = importlib.import_module("house.say").Trouble


class Usage(NamedTuple):
    """As `shutil.disk_usage` says it."""

    total: int
    used: int
    free: int


class Machine:
    """Takes the commands that the job would run. One with a word of `failing` fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[list[str]] = []
        self.failing: set[str] = set()

    def call(self, command: Sequence[str | Path], **_options: Any) -> int:
        words = [str(word) for word in command]
        self.commands.append(words)
        if "venv" in words:
            (self.folder / "venv/bin").mkdir(parents=True)
            (self.folder / "venv/bin/python").touch()
        return 1 if self.failing & set(words) else 0

    def named(self, word: str) -> int:
        return sum(word in command for command in self.commands)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(setup, "_STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(vllm, "VENV_VLLM", tmp_path / "venv")
    monkeypatch.setattr(vllm, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(vllm, "call", made.call)
    monkeypatch.setattr(vllm, "take_cpu_torch", lambda command: made.call(command))
    monkeypatch.setattr(vllm.shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, 1 << 40))
    return made


def test_the_environment_is_made_once_and_the_tests_run_in_it(machine: Machine) -> None:
    assert vllm.test(["-q"]) == 0
    assert vllm.test([]) == 0
    assert machine.named("venv") == 1
    assert machine.named(vllm.VLLM) == 1
    assert machine.named("uninstall") == 1
    runs = [command for command in machine.commands if "pytest" in command]
    assert [run[0] for run in runs] == [str(machine.folder / "venv/bin/python")] * 2
    assert all("tests/vllm" in run for run in runs)
    assert runs[0][-1] == "-q"


def test_a_path_takes_the_place_of_all_of_it(machine: Machine) -> None:
    assert vllm.test(["tests/vllm/test_life.py::test_x", "-q"]) == 0
    (run,) = (command for command in machine.commands if "pytest" in command)
    assert "tests/vllm" not in run
    assert run[-2:] == ["tests/vllm/test_life.py::test_x", "-q"]


def runs_of(machine: Machine) -> list[list[str]]:
    return [
        [word for word in run if word.startswith(("tests/", "--last"))] for run in machine.commands if "pytest" in run
    ]


def test_the_suite_s_own_part_needs_no_server_and_all_its_files_are_there(machine: Machine) -> None:
    assert vllm.test_in_process(again=True) == 0
    assert runs_of(machine) == [list(vllm.IN_PROCESS)]
    for path in vllm.IN_PROCESS:
        assert "started(" not in (ROOT / path).read_text(encoding="utf-8"), "it starts a tree of vLLM"


@pytest.mark.parametrize("failing", [vllm.VLLM, "import vllm._C, vllm.entrypoints.llm"])
def test_the_suite_s_part_is_left_out_aloud_where_there_is_no_vllm(
    machine: Machine, failing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.failing.add(failing)
    assert vllm.test_in_process(again=False) == 0
    assert runs_of(machine) == []
    assert "NOT TESTED against a real vLLM" in capsys.readouterr().err


@pytest.mark.parametrize(("again", "steady", "status"), [(False, True, 1), (True, False, 1), (True, True, 0)])
def test_the_suite_s_part_fails_it_unless_it_passes_the_second_time(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    again: bool,
    steady: bool,
    status: int,
) -> None:
    def call(command: Sequence[str | Path], **options: Any) -> int:
        machine.call(command, **options)
        return int("pytest" in command and not (steady and "--last-failed" in command))

    monkeypatch.setattr(vllm, "call", call)
    assert vllm.test_in_process(again=again) == status
    assert runs_of(machine) == [list(vllm.IN_PROCESS), *([["--last-failed", *vllm.IN_PROCESS]] if again else [])]
    assert ("UNSTEADY" in capsys.readouterr().err) is (status == 0)


def test_torch_comes_first_so_that_its_processor_build_is_taken(machine: Machine) -> None:
    vllm.test([])
    order = [command[-1] for command in machine.commands if "install" in command]
    assert order == [setup.cpu_torch(), str(setup.ROOT)]


@pytest.mark.parametrize(("failing", "said"), [(vllm.VLLM, "nothing was tested"), ("uninstall", "could not remove")])
def test_what_cannot_be_installed_is_said_and_tried_again(machine: Machine, failing: str, said: str) -> None:
    machine.failing.add(failing)
    with pytest.raises(Trouble, match=said):
        vllm.test([])
    assert machine.named("pytest") == 0
    machine.failing.clear()
    (machine.folder / "venv/bin/python").unlink()
    (machine.folder / "venv/bin").rmdir()
    assert vllm.test([]) == 0


def test_a_disk_that_is_too_full_is_said_before_anything_is_made(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, 1 << 30))
    with pytest.raises(Trouble, match="needs 6 GiB of disk"):
        vllm.test([])
    assert machine.commands == []


def test_a_python_that_vllm_has_no_build_for_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_PYTHONS", ((3, 1), (3, 2)))
    with pytest.raises(Trouble, match=r"no build for Python 3\.\d+"):
        vllm.test([])


@pytest.mark.parametrize(("skips", "status"), [(0, 0), (1, 1)])
def test_a_skipped_test_fails_the_job(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, skips: int, status: int
) -> None:
    def call(command: Sequence[str | Path], **options: Any) -> int:
        for word in map(str, command):
            if word.startswith("--junitxml="):
                skip = '<testcase classname="c" name="t"><skipped message="why"/></testcase>' * skips
                Path(word.removeprefix("--junitxml=")).write_text(f"<testsuite>{skip}</testsuite>", encoding="utf-8")
        return machine.call(command, **options)

    monkeypatch.setattr(vllm, "call", call)
    assert vllm.test([]) == status
