"""What the tests' own yard holds a test to answer for."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.testing import yard as yards
from coldsnap.testing.yard import Yard


def test_what_others_left_before_is_not_this_tests_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(yards, "_RUN", run)
    (run / "theirs.sock").touch()

    yard = Yard(folder=tmp_path)
    yard.sweep()

    (run / "ours.sock").touch()
    with pytest.raises(AssertionError, match=r"ours\.sock'\]$"):
        yard.sweep()


def test_a_machine_where_nothing_ever_ran_has_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yards, "_RUN", tmp_path / "absent")
    Yard(folder=tmp_path).sweep()
