"""The fake of vLLM's allocator has the names and parameters that vLLM's has."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from coldsnap.testing import cumem as fake
from coldsnap.testing.cuda import FakeDriver

_SOURCE = """
cumem_available = False
def create_and_map(allocation_handle): ...
def unmap_and_release(allocation_handle): ...
class CuMemAllocator:
    default_tag: str = "default"
    def __init__(self):
        self.pointer_to_data: dict = {}
        self.current_tag = "default"
        self.allocator_and_pools = {}
    def _python_malloc_callback(self, allocation_handle): ...
    def _python_free_callback(self, ptr): ...
    def sleep(self, offload_tags=None): ...
    def wake_up(self, tags=None): ...
    def use_memory_pool(self, tag=None): ...
    def get_current_usage(self): ...
"""
_DATA = """
class AllocationData:
    handle: int
    tag: str
    cpu_backup_tensor: object = None
    is_asleep: bool = False
"""


@pytest.fixture(scope="module")
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cumem_names", Path(__file__).with_name("cumem_names.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(folder: Path, cumem: str) -> Path:
    place = folder / "vllm" / "device_allocator"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(_DATA)
    (place / "cumem.py").write_text(cumem)
    return folder


@pytest.mark.parametrize("form", get_args(fake.Form))
def test_the_fake_has_what_is_expected_of_the_real_one(names: ModuleType, form: fake.Form) -> None:
    module = fake.FakeCuMem(FakeDriver(), form=form)
    found: dict[str, tuple[str, ...]] = {
        "AllocationData": tuple(one.name for one in dataclasses.fields(fake.AllocationData)),
        "CuMemAllocator.self": tuple(sorted(vars(module.allocator))),
        "cumem_available": (),
    }
    owners: list[tuple[str, Any]] = [("CuMemAllocator.", module.allocator), ("", module)]
    for prefix, owner in owners:
        for name, member in inspect.getmembers(owner, lambda one: not inspect.isbuiltin(one)):
            found[prefix + name] = tuple(inspect.signature(member).parameters) if callable(member) else ()
    assert names.differences(names.EXPECTED[form], found) == []


def test_names_are_read_from_a_source_and_a_change_is_told(names: ModuleType, tmp_path: Path) -> None:
    assert names.differences(names.EXPECTED["0.26"], names.names_in(unpacked(tmp_path / "same", _SOURCE))) == []
    changed = _SOURCE.replace("def sleep(self, offload_tags=None)", "def sleep(self, level, *, tags)")
    changed = changed.replace("def wake_up", "def wake").replace("self.pointer_to_data", "self.rows")
    assert names.differences(names.EXPECTED["0.26"], names.names_in(unpacked(tmp_path / "other", changed))) == [
        "CuMemAllocator.sleep takes ('level', 'tags'), not ('offload_tags',)",
        "CuMemAllocator.wake_up is gone",
        "CuMemAllocator.self lacks ['pointer_to_data']",
    ]


def test_the_older_form_lacks_what_the_newer_one_has(names: ModuleType, tmp_path: Path) -> None:
    found = names.names_in(unpacked(tmp_path, _SOURCE))
    assert names.differences(names.EXPECTED["0.33"], found) == [
        "CuMemAllocator.discard is gone",
        "CuMemAllocator._trim is gone",
    ]
