"""What flashinfer and cutlass ask when they are imported, and who answers. torch is real, its devices are not."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from coldsnap.engines.vllm import questions
from coldsnap.engines.vllm.questions import Gpus, answering, find_gpus, import_askers, tell_gpus
from coldsnap.hydrate.cuda import DeviceFacts, DriverFailure
from coldsnap.testing.cuda import FakeDriver

H200 = Gpus(num_gpus=1, name="NVIDIA H200", major=9, minor=0, num_multiprocessors=132)


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3


class Attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class Bindings(ModuleType):
    """`cuda.bindings.driver` as far as it is asked; `touched` counts initialisations."""

    CUresult = Result
    CUdevice_attribute = Attribute
    CUdevice = int

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.touched = 0

        def initialise(Flags: int) -> tuple[Result]:  # noqa: N803 - its name
            self.touched += 1
            return (Result.CUDA_SUCCESS,)

        def not_initialised(*arguments: object) -> tuple[Result, None]:
            return Result.CUDA_ERROR_NOT_INITIALIZED, None

        self.cuInit: Any = initialise
        self.cuDeviceGet: Any = not_initialised
        self.cuDeviceGetAttribute: Any = not_initialised


class Touched(Exception):
    """A device was asked by torch."""


@pytest.fixture(autouse=True)
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's function, which stands below its others, as it is before and after."""

    def touch(device: object = None) -> object:
        raise Touched

    monkeypatch.setattr(torch.cuda, "get_device_properties", touch)
    return touch


class Rack(FakeDriver):
    """A driver with several devices. `failure`: what it says after the last."""

    def __init__(self, devices: Sequence[DeviceFacts], failure: str = "CUDA_ERROR_INVALID_DEVICE") -> None:
        super().__init__()
        self.devices = devices
        self.failure = failure

    def device_facts(self, ordinal: int) -> DeviceFacts:
        if ordinal == len(self.devices):
            raise DriverFailure("cuDeviceGet", self.failure)
        return self.devices[ordinal]


def saying(told: str, *, status: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; print({told!r}); print('no GPU', file=sys.stderr); sys.exit({status})")


def architecture(driver: Any) -> str:
    """As cutlass finds it (nvidia-cutlass-dsl 4.6.0, base_dsl/env_manager.py), and throws it away where it is said."""

    def value(result: Any, found: Any = None) -> Any:
        if result != Result.CUDA_SUCCESS:
            raise RuntimeError(result.name)
        return found

    value(*driver.cuInit(0))
    device = value(*driver.cuDeviceGet(0))
    names = driver.CUdevice_attribute
    major = value(*driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = value(*driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def test_a_device_is_described_as_the_driver_describes_it() -> None:
    wanted = Gpus(num_gpus=1, name="Fake GPU", major=9, minor=0, num_multiprocessors=132)
    assert tell_gpus(FakeDriver()) == wanted


def test_devices_that_are_alike_are_one_answer_and_others_are_none() -> None:
    one = FakeDriver().facts
    twin = replace(one, uuid="GPU-00000000-0000-0000-0000-000000000001", total_bytes=1 << 39)
    assert tell_gpus(Rack([one, twin])).num_gpus == 2
    with pytest.raises(ValueError, match=r"2 GPUs, not all alike: Fake GPU, Other GPU"):
        tell_gpus(Rack([one, replace(one, name="Other GPU")]))
    with pytest.raises(ValueError, match=r"2 GPUs, not all alike: Fake GPU$"):
        tell_gpus(Rack([one, replace(one, num_multiprocessors=114)]))
    with pytest.raises(ValueError, match="0 GPUs"):
        tell_gpus(Rack([]))
    with pytest.raises(DriverFailure, match="CUDA_ERROR_ECC_UNCORRECTABLE"):
        tell_gpus(Rack([one], "CUDA_ERROR_ECC_UNCORRECTABLE"))


def test_a_process_of_its_own_is_believed_when_it_answered() -> None:
    assert find_gpus(saying(json.dumps(asdict(H200)))) == H200


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (saying(json.dumps(asdict(H200)), status=1), "no GPU (status 1)"),
        (saying("hello"), "Expecting value"),
        (saying('{"name": "NVIDIA H200"}'), "missing"),
        (("/nowhere/python",), "/nowhere/python"),
    ],
)
def test_without_an_answer_there_is_none_and_a_line_says_why(
    command: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_gpus(command) is None
    assert why in caplog.text


def test_the_process_itself_says_why_it_has_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() is None
    assert "MissingCapability" in caplog.text


def test_torch_and_the_driver_answer_while_it_is_open(real: Any) -> None:
    driver, before = Bindings(), dict(os.environ)
    initialise = driver.cuInit
    with answering(replace(H200, num_gpus=2), torch_cuda=torch.cuda, driver=driver):
        assert [torch.cuda.get_device_capability(device) for device in (None, 0, 1, "cuda:0")] == [(9, 0)] * 4
        assert torch.cuda.get_device_properties(device=0).multi_processor_count == 132
        assert torch.cuda.get_device_name(0) == "NVIDIA H200"
        assert architecture(driver) == "sm_90a"
    assert driver.touched == 0
    assert torch.cuda.get_device_properties is real
    assert driver.cuInit is initialise
    assert dict(os.environ) == before


def test_the_answers_are_those_of_the_model() -> None:
    older = Gpus(num_gpus=1, name="NVIDIA L4", major=8, minor=9, num_multiprocessors=58)
    driver = Bindings()
    with answering(older, torch_cuda=torch.cuda, driver=driver):
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 58
        assert architecture(driver) == "sm_89"


def test_what_has_no_answer_is_asked_of_the_device() -> None:
    driver = Bindings()
    with answering(H200, torch_cuda=torch.cuda, driver=driver):
        with pytest.raises(Touched):
            torch.cuda.get_device_properties(1)
        with pytest.raises(Touched):
            _ = torch.cuda.get_device_properties(0).total_memory
        refused = (Result.CUDA_ERROR_NOT_INITIALIZED, None)
        assert driver.cuDeviceGet(1) == refused
        assert driver.cuDeviceGetAttribute(Attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 0) == refused


def test_a_function_that_was_kept_asks_the_device_afterwards() -> None:
    driver = Bindings()
    with answering(H200, torch_cuda=torch.cuda, driver=driver):
        kept, initialise = torch.cuda.get_device_properties, driver.cuInit
        assert kept(0).major == 9
    with pytest.raises(Touched):
        kept(0)
    assert initialise(0) == (Result.CUDA_SUCCESS,)
    assert driver.touched == 1


def test_the_functions_come_back_when_an_import_fails(real: Any) -> None:
    with pytest.raises(RuntimeError, match="mismatch"), answering(H200, torch_cuda=torch.cuda, driver=Bindings()):
        raise RuntimeError("mismatch")
    assert torch.cuda.get_device_properties is real


@pytest.fixture
def asker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that asks torch when it is imported, and one that cannot be imported, `NAME_broken`."""
    name = "coldsnap_test_asker"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nFOUND = torch.cuda.get_device_properties(0).multi_processor_count\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("raise ImportError('no libtvm')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_packages_that_ask_are_imported_with_answers(asker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Bindings()
    monkeypatch.setattr(questions, "find_gpus", lambda: H200)
    monkeypatch.setattr(questions, "import_bindings", lambda: driver)
    import_askers(["coldsnap_test_absent", f"{asker}_broken", asker])
    assert sys.modules[asker].FOUND == 132
    assert "torch._dynamo" in sys.modules


def test_nobody_is_asked_for_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> Gpus:
        raise AssertionError("a process was started for nothing")

    monkeypatch.setattr(questions, "find_gpus", asked)
    import_askers(["coldsnap_test_absent"])


def test_packages_that_ask_are_left_to_vllm_without_an_answer(asker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "find_gpus", lambda: None)
    import_askers([asker])
    assert asker not in sys.modules
