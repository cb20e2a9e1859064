"""flashinfer's log file, which a frozen process must not hold."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from coldsnap.engines.vllm.logfiles import close_log_files


def holders_of(path: Path) -> list[str]:
    """This process's descriptors of the file."""
    return [one.name for one in Path("/proc/self/fd").iterdir() if one.exists() and one.samefile(path)]


def test_the_file_is_given_up_and_the_stream_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flashinfer_jit.log"
    module, logger = ModuleType("flashinfer.jit.core"), logging.Logger("flashinfer.jit")  # as flashinfer makes it
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.addHandler(logging.FileHandler(path))
    vars(module)["logger"] = logger
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", module)
    assert len(holders_of(path)) == 1
    assert close_log_files() == 1
    assert holders_of(path) == []
    logger.warning("compiled")
    assert "compiled" in capsys.readouterr().err
    assert path.read_text() == ""
    assert close_log_files() == 0


def test_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer.jit.core", raising=False)
    assert close_log_files() == 0
    assert "flashinfer.jit.core" not in sys.modules


def test_a_version_without_that_logger_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", ModuleType("flashinfer.jit.core"))
    assert close_log_files() == 0
