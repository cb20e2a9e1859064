"""What a probe may work with, and the process that it freezes (``cuda/subject.py``)."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.capsule.criu import Criu, find_criu
from coldsnap.capsule.cuda.inventory import Gpu
from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.capsule.cuda.subject import SOCKET_NAME
from coldsnap.capsule.driver import RunningUnit, UnitSpec
from coldsnap.capsule.programs import program_command
from coldsnap.errors import CudaError, DeadlineExceeded, PeerError

__all__ = ["STEP_DEADLINE_S", "Bench", "Subject", "subject_unit"]

STEP_DEADLINE_S = 60.0
_LIMIT_BYTES = 65536
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """``environment``: what a process needs to find the driver. ``gpu``: the device that is tried."""

    find: Callable[[], Criu] = find_criu
    environment: Mapping[str, str] = field(default_factory=dict)
    device_paths: tuple[str, ...] = ()
    gpu: Gpu | None = None

    def open_helper(self) -> HelperApi:
        """A helper process of its own. The caller closes it."""
        return HelperApi(self.environment)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A small process in a unit that makes CUDA calls when it is told to."""

    unit: RunningUnit

    def ask(self, call: str, *arguments: Any, deadline_s: float = STEP_DEADLINE_S) -> Any:
        """One call, as ``libcuda.LibCuda`` has it. Raises CudaError, DeadlineExceeded, PeerError."""
        ends = time.monotonic() + deadline_s
        while True:
            try:
                return self._ask(call, arguments, max(0.1, ends - time.monotonic()))
            except (ConnectionRefusedError, FileNotFoundError) as error:
                if not self.unit.alive():
                    raise PeerError(
                        "the probing process ended before it answered", cure="see the kernel log"
                    ) from error
            except TimeoutError:
                pass
            if time.monotonic() > ends:
                raise DeadlineExceeded(
                    f"the probing process did not answer {call} within {deadline_s:g} s",
                    cure="look for Xid lines in the kernel log",
                    facts={"phase": call, "deadline_s": deadline_s},
                )
            time.sleep(_POLL_S)

    @property
    def pid(self) -> int:
        """Its host PID."""
        return self.unit.pids()[0]

    def _ask(self, call: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(self.unit.socket_path(SOCKET_NAME)))
            sock.sendall(json.dumps({"call": call, "arguments": arguments}).encode() + b"\n")
            data = sock.makefile("rb").readline(_LIMIT_BYTES)
        if not data:
            raise PeerError(f"the probing process ended during {call}", cure="see the kernel log")
        reply = json.loads(data)
        if "code" in reply:
            raise CudaError(
                f"{reply['call']} failed in the probing process: {reply['code']}",
                cure="check the device with nvidia-smi",
                facts={"call": reply["call"], "code": reply["code"], "pid": None},
            )
        return reply["value"]


@contextmanager
def subject_unit(bench: Bench) -> Iterator[tuple[UnitSpec, Path]]:
    """The spec of a unit with a subject in it, and a folder for its images; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="coldsnap-probe-") as folder:
        yield (
            UnitSpec(
                unit="probe",
                log_path=Path(folder) / "log",
                command=tuple(program_command("cuda.subject", "probe")),
                environment=bench.environment,
            ),
            Path(folder) / "images",
        )
