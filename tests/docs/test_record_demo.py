"""The picture of the README: what a command printed, and nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/record-demo"


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("record_demo", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def rows(svg: str) -> list[str]:
    tree = ElementTree.fromstring(svg)  # noqa: S314 - written a moment ago, or part of this repository
    return ["".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text")]


def test_lines_lose_control_sequences_and_trailing_blanks_and_are_wrapped() -> None:
    lines = load().shown_lines("\x1b[1mbold\x1b[0m  \n\nabcdefghij klm\n\n", width=12)
    assert lines == ["bold", "", "abcdefghij ", "    klm"]


def test_the_drawing_holds_the_command_and_every_line_as_it_was() -> None:
    svg = load().drawing("tool --flag '<x>'", ["a  < b & c", "", "  done"], width=20)
    assert rows(svg) == ["$ tool --flag '<x>'", "a  < b & c", "  done"]


def run(out: Path, *command: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), "--out", str(out), "--", *command]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_what_a_command_prints_is_drawn_in_its_order(tmp_path: Path) -> None:
    out = tmp_path / "demo.svg"
    assert run(out, "sh", "-c", "echo first; echo second >&2; echo third").returncode == 0
    assert rows(out.read_text())[1:] == ["first", "second", "third"]


def test_a_command_that_fails_leaves_the_picture_alone(tmp_path: Path) -> None:
    out = tmp_path / "demo.svg"
    out.write_text("old")
    assert run(out, "sh", "-c", "echo no; exit 7").returncode == 7
    assert run(out, str(tmp_path / "nothing")).returncode == 1
    assert out.read_text() == "old"


def test_the_picture_in_the_repository_is_of_a_demo_that_passed() -> None:
    drawn = rows((ROOT / "docs/demo.svg").read_text())
    assert "demo" in drawn[0]
    assert drawn[-1] == "passed"
