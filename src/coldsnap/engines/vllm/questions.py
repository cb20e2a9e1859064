"""What modules ask a device when they are imported, answered without touching one.

A template has touched no device (docs/vllm-design.md, 8), and some modules ask one while they are imported and have no
switch that keeps them from it. vLLM 0.26.0 brings, with flashinfer-python 0.6.14 and nvidia-cutlass-dsl 4.6.0:

- ``flashinfer.compilation_context``: the compute capability of each device, from torch, for the name of the folder of
  compiled kernels among others. FLASHINFER_CUDA_ARCH_LIST would be a switch, but the next two have none.
- ``flashinfer.gdn_kernels.gdn_decode_bf16_state``: how many multiprocessors device 0 has, from torch. Where that fails
  the package goes on without these kernels.
- ``cutlass.base_dsl.env_manager``, for each of its two languages: the capability of device 0, from cuda-bindings; also
  where CUTE_DSL_ARCH says it, for what it would be otherwise is found out first.

So a process of its own asks the driver and ends (`find_gpus`), and while such modules are imported the functions that
they call say what it was told (`answering`). They find what they would have found, variables count as ever, and none is
set. A template knows not yet on which GPU it will be placed: there are answers where all GPUs of a host are alike.

torch keeps tables of its functions by identity, and would keep a stand-in for one in them for ever: `torch._dynamo`,
which has them, is imported before, and only what must be is imported meanwhile. What nobody has an answer for goes to
the device, and the template is refused as it would have been.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from coldsnap.hydrate.cuda import Driver, DriverFailure, import_bindings, open_driver

__all__ = ["Gpus", "answering", "find_gpus", "import_askers", "tell_gpus"]

_log = logging.getLogger(__name__)
_PATIENCE_S = 120.0
_NO_SUCH_DEVICE = "CUDA_ERROR_INVALID_DEVICE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The GPUs of a host, all of one model."""

    num_gpus: int
    name: str
    major: int
    minor: int
    num_multiprocessors: int


def import_askers(modules: Iterable[str]) -> None:
    """Import those that are there, and that ask when they are imported; without an answer, none of them."""
    there = [name for name in modules if find_spec(name) is not None]
    gpus = find_gpus() if there else None
    if gpus is None:
        return
    import_module("torch._dynamo")
    with answering(gpus, torch_cuda=import_module("torch.cuda"), driver=import_bindings()):
        for name in there:
            with suppress(ImportError):  # vLLM goes on without it then
                import_module(name)


def find_gpus(command: Sequence[str] = (sys.executable, "-m", __name__)) -> Gpus | None:
    """What a process of its own says of the devices that this one would see.

    None, and a line in the log, where it cannot say, or they are not alike.
    """
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        if asked.returncode == 0:
            return Gpus(**json.loads(asked.stdout))
        why = f"{asked.stderr.strip().rpartition(chr(10))[2]} (status {asked.returncode})"
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        why = str(error)
    _log.warning("modules that ask a GPU when they are imported will touch it: %s", why)
    return None


def tell_gpus(driver: Driver) -> Gpus:
    """What the driver says. Raises ValueError when there is none, or not all are alike; DriverFailure."""
    found: list[Gpus] = []
    try:
        while True:
            facts = driver.device_facts(len(found))
            major, minor = facts.compute_capability
            found.append(
                Gpus(
                    num_gpus=1,
                    name=facts.name,
                    major=major,
                    minor=minor,
                    num_multiprocessors=facts.num_multiprocessors,
                )
            )
    except DriverFailure as failure:
        if failure.code != _NO_SUCH_DEVICE:
            raise
    if len(set(found)) != 1:
        raise ValueError(f"{len(found)} GPUs, not all alike: {', '.join(sorted({one.name for one in found}))}")
    return replace(found[0], num_gpus=len(found))


@contextmanager
def answering(gpus: Gpus, *, torch_cuda: Any, driver: Any) -> Iterator[None]:
    """While it is open, the modules `torch.cuda` and `cuda.bindings.driver` answer from `gpus` what they can.

    Who keeps one of their functions from that time asks the device with it afterwards.
    """
    with ExitStack() as after:
        for module, answers in (
            (torch_cuda, _torch_answers(gpus, torch_cuda)),
            (driver, _driver_answers(gpus, driver)),
        ):
            for name, answer in answers.items():
                after.enter_context(_standing_in(module, name, answer))
        yield


class _StandIn:
    """Calls `answer`; and `real`, where that gives None or was taken away."""

    def __init__(self, real: Callable[..., Any], answer: Callable[..., Any]) -> None:
        self.real = real
        self.answer: Callable[..., Any] | None = answer

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        found = self.answer(*arguments, **named) if self.answer is not None else None
        return self.real(*arguments, **named) if found is None else found


@contextmanager
def _standing_in(module: Any, name: str, answer: Callable[..., Any]) -> Iterator[None]:
    stand_in = _StandIn(getattr(module, name), answer)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        stand_in.answer = None
        setattr(module, name, stand_in.real)


class _Properties:
    """As torch's; what of those it lacks is asked of the device."""

    def __init__(self, gpus: Gpus, real: Callable[[], Any]) -> None:
        self.name = gpus.name
        self.major = gpus.major
        self.minor = gpus.minor
        self.multi_processor_count = gpus.num_multiprocessors
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


def _torch_answers(gpus: Gpus, torch_cuda: Any) -> Mapping[str, Callable[..., Any]]:
    real = torch_cuda.get_device_properties

    def properties(device: Any = None) -> Any:
        if isinstance(device, int) and not 0 <= device < gpus.num_gpus:
            return None
        return _Properties(gpus, lambda: real(device))

    return {"get_device_properties": properties}  # get_device_capability and get_device_name call it


def _driver_answers(gpus: Gpus, driver: Any) -> Mapping[str, Callable[..., Any]]:
    success, names = driver.CUresult.CUDA_SUCCESS, driver.CUdevice_attribute
    attributes = {
        names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: gpus.major,
        names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: gpus.minor,
        names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: gpus.num_multiprocessors,
    }
    return {
        "cuInit": lambda Flags: (success,),  # noqa: N803 - its name. Other calls say that nothing is initialised
        "cuDeviceGet": lambda ordinal: (success, driver.CUdevice(ordinal)) if 0 <= ordinal < gpus.num_gpus else None,
        "cuDeviceGetAttribute": lambda attrib, dev: (success, attributes[attrib]) if attrib in attributes else None,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(tell_gpus(open_driver()))))
