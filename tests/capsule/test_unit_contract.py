"""The unit driver's contract, for the real driver and the shipped fake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import RunningUnit, UnitDriver, UnitSpec
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.errors import CriuError, UsageError
from coldsnap.testing.processes import CountingProcess, FakeUnit, FakeUnits
from coldsnap.testing.processes_suite import Ground, MemoryGround, ProcessMemoryContract, UnitDriverContract
from coldsnap.testing.yard import Yard


@dataclass
class _RealGround:
    yard: Yard
    driver: UnitDriver

    def spec(self, name: str) -> UnitSpec:
        return self.yard.spec(name, files={"settings.json": b"{}"})

    def launch(self, name: str, *, tied: bool = False) -> RunningUnit:
        return self.yard.launch(name, tied=tied)

    def ask(self, unit: RunningUnit) -> int:
        return int(self.yard.ask(unit)["questions"])

    def launch_memory(self, name: str) -> RunningUnit:
        return self.yard.launch_memory(name)

    def contents(self, unit: RunningUnit) -> Mapping[str, Mapping[str, str]]:
        return cast("Mapping[str, Mapping[str, str]]", self.yard.ask(unit))

    def keep(self, unit: RunningUnit) -> RunningUnit:
        return self.yard.keep(unit)

    def left_over(self) -> list[int]:
        return self.yard.processes()


@dataclass
class _FakeGround:
    folder: Path
    driver: FakeUnits = field(default_factory=FakeUnits)

    def spec(self, name: str) -> UnitSpec:
        files = {"settings.json": b"{}"}
        return UnitSpec(unit=name, log_path=self.folder / f"{name}.log", command=("count",), files=files)

    def launch(self, name: str, *, tied: bool = False) -> RunningUnit:
        return self.driver.launch(self.spec(name), deadline_s=60.0, tied=tied)

    def ask(self, unit: RunningUnit) -> int:
        assert isinstance(unit, FakeUnit)
        assert isinstance(unit.process, CountingProcess)
        return unit.process.ask()

    def keep(self, unit: RunningUnit) -> RunningUnit:
        return unit


@pytest.mark.criu
class TestLinuxUnits(UnitDriverContract):
    @pytest.fixture
    def ground(self, yard: Yard, criu: Criu) -> Ground:
        return _RealGround(yard=yard, driver=LinuxUnits(criu))


@pytest.mark.criu
class TestLinuxMemory(ProcessMemoryContract):
    @pytest.fixture
    def ground(self, yard: Yard, criu: Criu) -> MemoryGround:
        return _RealGround(yard=yard, driver=LinuxUnits(criu))


class TestFakeUnits(UnitDriverContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> Iterator[Ground]:
        ground = _FakeGround(folder=tmp_path)
        yield ground
        ground.driver.end_all()
        assert ground.driver.running() == ()


def test_a_fake_can_be_told_to_fail_once(tmp_path: Path) -> None:
    ground = _FakeGround(folder=tmp_path)
    unit = ground.launch("a")
    ground.driver.fail_next("dump", CriuError("no"))
    with pytest.raises(CriuError, match="no"):
        ground.driver.dump(unit, tmp_path / "images", deadline_s=60.0)
    assert unit.alive()
    assert not (tmp_path / "images").exists()
    ground.driver.dump(unit, tmp_path / "images", deadline_s=60.0)
    assert ground.driver.calls == [("launch", "a"), ("dump", "a"), ("dump", "a")]
    assert ground.driver.running() == ()
    with pytest.raises(UsageError):
        ground.driver.fail_next("kill", CriuError("no"))


def test_when_the_controller_dies_a_fake_ends_tied_units_only(tmp_path: Path) -> None:
    ground = _FakeGround(folder=tmp_path)
    free, tied, released = ground.launch("a"), ground.launch("b", tied=True), ground.launch("c", tied=True)
    released.release()
    ground.driver.controller_dies()
    assert [unit.alive() for unit in (free, tied, released)] == [True, False, True]
    ground.driver.crash(free)
    released.kill()
    assert not free.alive()
    assert ground.driver.running() == ()
