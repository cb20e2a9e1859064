"""The contract of ``capsule/driver.py`` as tests that every unit driver runs.

A test module subclasses ``UnitDriverContract`` and says, in a fixture ``ground``, how to start a process that counts
how often it is asked, and how to ask it. A driver whose processes have memory of their own also has a subclass of
``ProcessMemoryContract``, whose ground starts a tree with every kind of it (``memory_tree.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from coldsnap.capsule.driver import RunningUnit, UnitDriver, UnitRecord, UnitSpec
from coldsnap.errors import ColdsnapError, IntegrityError, InvalidDocument, PeerError, ResourceBusy

__all__ = ["Ground", "MemoryGround", "ProcessMemoryContract", "UnitDriverContract"]

_DEADLINE_S = 60.0


class Ground(Protocol):
    """What the contract's tests stand on."""

    @property
    def driver(self) -> UnitDriver:
        """The driver under test."""

    def spec(self, name: str) -> UnitSpec:
        """A spec whose log file is in this test's folder, with the file ``settings.json``."""

    def launch(self, name: str, *, tied: bool = False) -> RunningUnit:
        """A counting process that is ready to be asked."""

    def ask(self, unit: RunningUnit) -> int:
        """How often this process, or those it was restored from, was asked; this time included."""

    def keep(self, unit: RunningUnit) -> RunningUnit:
        """End the unit with the test."""


class UnitDriverContract:
    """The promises of ``driver.py``, one test each."""

    @pytest.fixture
    def ground(self) -> Ground:
        """Provided by the subclass."""
        raise NotImplementedError

    def _restore(self, ground: Ground, images: Path, name: str) -> RunningUnit:
        return ground.keep(ground.driver.restore(ground.spec(name), images, deadline_s=_DEADLINE_S))

    def test_a_launched_unit_runs_and_has_its_files(self, ground: Ground) -> None:
        unit = ground.launch("a")
        assert unit.alive()
        assert len(unit.pids()) >= 1
        assert list(unit.pids()) == sorted(unit.pids())
        assert unit.unit == ground.spec("a").unit
        assert unit.socket_path("settings.json").read_bytes() == ground.spec("a").files["settings.json"]
        assert ground.ask(unit) == 1

    def test_killing_is_final_and_may_be_repeated(self, ground: Ground) -> None:
        unit = ground.launch("a")
        for _ in range(3):
            unit.kill()
            assert not unit.alive()
            assert unit.pids() == ()

    def test_a_record_finds_the_unit_and_only_that(self, ground: Ground) -> None:
        unit = ground.launch("a")
        record = UnitRecord.model_validate_json(unit.record().model_dump_json())
        found = ground.driver.attach(record)
        assert found is not None
        assert found.pids() == unit.pids()
        assert ground.ask(found) == 1
        for other in ({"init_start_ticks": record.init_start_ticks + 1}, {"boot_id": "another"}):
            assert ground.driver.attach(record.model_copy(update=other)) is None
        found.kill()
        assert not unit.alive()
        assert ground.driver.attach(record) is None

    def test_a_dump_ends_the_unit_and_a_restore_continues_it(self, ground: Ground, tmp_path: Path) -> None:
        unit = ground.launch("a")
        assert [ground.ask(unit), ground.ask(unit)] == [1, 2]
        report = ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S)
        assert not unit.alive()
        assert {file.name: file.bytes for file in report.files} == {
            path.name: path.stat().st_size for path in (tmp_path / "images").iterdir()
        }
        assert report.bytes == sum(file.bytes for file in report.files) > 0
        assert (tmp_path / "images").stat().st_mode & 0o777 == 0o700
        assert ground.ask(self._restore(ground, tmp_path / "images", "b")) == 3

    def test_one_image_restores_any_number_of_times_side_by_side(self, ground: Ground, tmp_path: Path) -> None:
        ground.driver.dump(ground.launch("a"), tmp_path / "images", deadline_s=_DEADLINE_S)
        one, two = (self._restore(ground, tmp_path / "images", name) for name in ("one", "two"))
        assert [ground.ask(one), ground.ask(one), ground.ask(two)] == [1, 2, 1]
        one.kill()
        assert ground.ask(two) == 2
        assert ground.ask(self._restore(ground, tmp_path / "images", "three")) == 1

    def test_a_dump_can_leave_the_unit_running(self, ground: Ground, tmp_path: Path) -> None:
        unit = ground.launch("a")
        ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S, leave_running=True)
        assert ground.ask(unit) == 1

    def test_a_dump_refuses_a_folder_that_exists(self, ground: Ground, tmp_path: Path) -> None:
        unit = ground.launch("a")
        (tmp_path / "images").mkdir()
        with pytest.raises(ResourceBusy):
            ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S)
        assert list((tmp_path / "images").iterdir()) == []
        assert ground.ask(unit) == 1

    def test_a_unit_that_is_gone_cannot_be_dumped(self, ground: Ground, tmp_path: Path) -> None:
        unit = ground.launch("a")
        unit.kill()
        with pytest.raises(PeerError):
            ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S)
        assert not (tmp_path / "images").exists()

    def test_a_restore_wants_a_finished_dump(self, ground: Ground, tmp_path: Path) -> None:
        ground.driver.dump(ground.launch("a"), tmp_path / "images", deadline_s=_DEADLINE_S)
        (tmp_path / "images" / "unit.json").unlink()
        with pytest.raises(IntegrityError):
            ground.driver.restore(ground.spec("b"), tmp_path / "images", deadline_s=_DEADLINE_S)

    def test_a_damaged_image_is_an_error(self, ground: Ground, tmp_path: Path) -> None:
        report = ground.driver.dump(ground.launch("a"), tmp_path / "images", deadline_s=_DEADLINE_S)
        for file in report.files:
            path = tmp_path / "images" / file.name
            path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ColdsnapError):
            ground.driver.restore(ground.spec("b"), tmp_path / "images", deadline_s=_DEADLINE_S)

    def test_a_spec_is_checked_first(self, ground: Ground) -> None:
        spec = ground.spec("a")
        broken = UnitSpec(unit=spec.unit, log_path=spec.log_path, command=(), files={"a/b": b""})
        with pytest.raises(InvalidDocument) as caught:
            ground.driver.launch(broken, deadline_s=_DEADLINE_S)
        assert [problem.field for problem in caught.value.problems] == ["command", "files[a/b]"]

    def test_a_tied_unit_can_be_released_while_it_lives(self, ground: Ground) -> None:
        unit = ground.launch("a", tied=True)
        unit.release()
        assert ground.ask(unit) == 1
        unit.kill()
        gone = ground.launch("b", tied=True)
        gone.kill()
        assert not gone.alive()

    def test_a_unit_without_a_log_file_has_no_last_lines(self, ground: Ground) -> None:
        unit = ground.launch("a")
        Path(unit.record().log_path).unlink()
        assert unit.log_tail(5) == ()


class MemoryGround(Protocol):
    """What the memory's tests stand on."""

    @property
    def driver(self) -> UnitDriver:
        """The driver under test."""

    def spec(self, name: str) -> UnitSpec:
        """A spec whose log file is in this test's folder."""

    def launch_memory(self, name: str) -> RunningUnit:
        """A tree of three processes with every kind of memory, ready to be asked."""

    def contents(self, unit: RunningUnit) -> Mapping[str, Mapping[str, str]]:
        """The digests of what it holds, by process and area."""

    def keep(self, unit: RunningUnit) -> RunningUnit:
        """End the unit with the test."""

    def left_over(self) -> Iterable[int]:
        """Processes that this test started and that still exist."""


class ProcessMemoryContract:
    """Every byte comes back, to whoever had it, or nobody comes back."""

    @pytest.fixture
    def ground(self) -> MemoryGround:
        """Provided by the subclass."""
        raise NotImplementedError

    def _restore(self, ground: MemoryGround, images: Path, name: str) -> RunningUnit:
        return ground.keep(ground.driver.restore(ground.spec(name), images, deadline_s=_DEADLINE_S))

    def test_every_byte_of_every_process_comes_back(self, ground: MemoryGround, tmp_path: Path) -> None:
        unit = ground.launch_memory("a")
        before = ground.contents(unit)
        areas = {"large", "zeros", "mixed", "holes", "file", "read-only", "closed", "quiet-file", "shared"}
        assert {process: set(found) for process, found in before.items()} == {
            "root": areas,
            "child": areas | {"own"},
            "grandchild": areas | {"own"},
        }
        different = {name for name in areas if before["root"][name] != before["child"][name]}
        assert different == {"large"}
        ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S)
        assert ground.contents(self._restore(ground, tmp_path / "images", "b")) == before

    def test_two_trees_of_one_image_have_it_all(self, ground: MemoryGround, tmp_path: Path) -> None:
        unit = ground.launch_memory("a")
        before = ground.contents(unit)
        ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S)
        one, two = (self._restore(ground, tmp_path / "images", name) for name in ("one", "two"))
        assert ground.contents(one) == before
        one.kill()
        assert ground.contents(two) == before

    def test_a_tree_that_came_back_can_be_frozen_again(self, ground: MemoryGround, tmp_path: Path) -> None:
        unit = ground.launch_memory("a")
        before = ground.contents(unit)
        ground.driver.dump(unit, tmp_path / "first", deadline_s=_DEADLINE_S)
        again = self._restore(ground, tmp_path / "first", "again")
        ground.driver.dump(again, tmp_path / "second", deadline_s=_DEADLINE_S)
        assert ground.contents(self._restore(ground, tmp_path / "second", "last")) == before

    def test_the_source_has_it_all_still_when_it_runs_on(self, ground: MemoryGround, tmp_path: Path) -> None:
        unit = ground.launch_memory("a")
        before = ground.contents(unit)
        ground.driver.dump(unit, tmp_path / "images", deadline_s=_DEADLINE_S, leave_running=True)
        assert ground.contents(unit) == before

    def test_one_changed_bit_of_memory_is_refused_by_name(self, ground: MemoryGround, tmp_path: Path) -> None:
        report = ground.driver.dump(ground.launch_memory("a"), tmp_path / "images", deadline_s=_DEADLINE_S)
        moved = [file for file in report.files if file.name.startswith("runs-")]
        assert len(moved) == 3
        for file in moved:
            path = tmp_path / "images" / file.name
            data = bytearray(path.read_bytes())
            data[file.bytes // 2] ^= 1
            path.write_bytes(data)
            with pytest.raises(IntegrityError, match=file.name):
                ground.driver.restore(ground.spec("b"), tmp_path / "images", deadline_s=_DEADLINE_S)
            assert list(ground.left_over()) == []
            data[file.bytes // 2] ^= 1
            path.write_bytes(data)
