"""The contract of those who make root and namespaces, and that of whole units, natively and under every runtime."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

import coldsnap.testing
from coldsnap.capsule.containers.commands import OWNER_LABEL
from coldsnap.capsule.containers.maker import ContainerMaker
from coldsnap.capsule.criu import Criu, criu_prefix
from coldsnap.capsule.driver import BindMount, ContainerRoot, RunningUnit, UnitDriver, UnitSpec
from coldsnap.capsule.makers import UnitMaker
from coldsnap.capsule.native import NativeMaker
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.testing.containers import runtime_names
from coldsnap.testing.makers_suite import MakerGround, UnitMakerContract
from coldsnap.testing.processes_suite import Ground, MemoryGround, ProcessMemoryContract, UnitDriverContract
from coldsnap.testing.yard import Yard

if TYPE_CHECKING:
    from tests.capsule.containers.conftest import Shop

pytestmark = pytest.mark.criu
PROGRAMS = Path(coldsnap.testing.__file__).parent


@dataclass
class _Native:
    folder: Path
    maker: UnitMaker = field(default_factory=NativeMaker)
    python: Path = Path(sys.executable)

    def spec(self, name: str, *, mounts: tuple[BindMount, ...] = ()) -> UnitSpec:
        return UnitSpec(unit=name, log_path=self.folder / f"{name}.log", mounts=mounts)

    def broken(self, name: str) -> UnitSpec | None:
        return None

    def left_over(self) -> list[str]:
        return []


@dataclass
class _Contained:
    folder: Path
    shop: Shop
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def maker(self) -> UnitMaker:
        return ContainerMaker({self.shop.runtime.runtime: self.shop.runtime})

    @property
    def python(self) -> Path:
        return self.shop.image.python

    @property
    def root(self) -> ContainerRoot:
        return ContainerRoot(
            runtime=self.shop.runtime.runtime,
            image=self.shop.image.reference,
            python=str(self.shop.image.python),
            visible=((criu_prefix(), True), (self.folder, False), (PROGRAMS, True)),
            labels={OWNER_LABEL: self.token},
        )

    def spec(self, name: str, *, mounts: tuple[BindMount, ...] = ()) -> UnitSpec:
        return UnitSpec(unit=name, log_path=self.folder / f"{name}.log", mounts=mounts, root=self.root)

    def broken(self, name: str) -> UnitSpec | None:
        return replace(self.spec(name), root=replace(self.root, python="/no/python"))

    def left_over(self) -> list[str]:
        return [found.name for found in self.shop.runtime.find({OWNER_LABEL: self.token})]


class TestNative(UnitMakerContract):
    @pytest.fixture
    def ground(self, tmp_path: Path, criu: Criu) -> MakerGround:
        return _Native(folder=tmp_path)


class TestContainers(UnitMakerContract):
    @pytest.fixture
    def ground(self, tmp_path: Path, shop: Shop) -> MakerGround:
        return _Contained(folder=tmp_path, shop=shop)


@dataclass
class _Units:
    """What the contract of ``driver.py`` stands on, in containers."""

    yard: Yard
    contained: _Contained
    driver: UnitDriver

    def spec(self, name: str) -> UnitSpec:
        return self.yard.spec(name, files={"settings.json": b"{}"}, root=self.contained.root)

    def launch(self, name: str, *, tied: bool = False) -> RunningUnit:
        return self.yard.launch(
            name, tied=tied, root=self.contained.root, maker=self.contained.maker, python=self.contained.python
        )

    def ask(self, unit: RunningUnit) -> int:
        return int(self.yard.ask(unit)["questions"])

    def launch_memory(self, name: str) -> RunningUnit:
        return self.yard.launch_memory(
            name, root=self.contained.root, maker=self.contained.maker, python=self.contained.python
        )

    def contents(self, unit: RunningUnit) -> Mapping[str, Mapping[str, str]]:
        return cast("Mapping[str, Mapping[str, str]]", self.yard.ask(unit))

    def keep(self, unit: RunningUnit) -> RunningUnit:
        return self.yard.keep(unit)

    def left_over(self) -> list[int]:
        return self.yard.processes()


@pytest.fixture
def units(yard: Yard, shop: Shop, criu: Criu) -> Iterator[_Units]:
    contained = _Contained(folder=yard.folder, shop=shop)
    runtimes = {shop.runtime.runtime: shop.runtime}
    yield _Units(yard=yard, contained=contained, driver=LinuxUnits(criu, runtimes))
    yard.sweep()
    assert contained.left_over() == []


ONE_OF_EACH = [name for name in runtime_names() if name != "fake-podman"]
"""Both stand-ins make the same container: one of them is enough for what happens inside."""


@pytest.mark.parametrize("shop", ONE_OF_EACH, indirect=True)
class TestUnitsInContainers(UnitDriverContract):
    @pytest.fixture
    def ground(self, units: _Units) -> Ground:
        return units


@pytest.mark.parametrize("shop", ONE_OF_EACH, indirect=True)
class TestMemoryInContainers(ProcessMemoryContract):
    @pytest.fixture
    def ground(self, units: _Units) -> MemoryGround:
        return units
