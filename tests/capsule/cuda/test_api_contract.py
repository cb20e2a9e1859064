"""The checkpoint calls, from a fake table and from real processes with fake GPUs behind the real helper process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from coldsnap.capsule.cuda.api import CheckpointApi, ProcessState
from coldsnap.capsule.cuda.remote import HelperApi, _Helper
from coldsnap.capsule.identity import start_ticks
from coldsnap.errors import CudaError, DeadlineExceeded, HelperLost, MissingCapability
from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, FakeCudaProcess, fake_inventory
from coldsnap.testing.cuda_checkpoint_suite import CheckpointApiContract, Ground
from coldsnap.testing.gpu import GpuRack


class TableGround:
    """The fake."""

    def __init__(self) -> None:
        self.fake = FakeCheckpoints()
        self.api: CheckpointApi = self.fake
        self._next = 100

    def cuda_process(self) -> int:
        self._next += 1
        self.fake.processes[self._next] = FakeCudaProcess(device=fake_inventory().gpus[0].uuid)
        return self._next

    def plain_process(self) -> int:
        return 1

    def bytes_of(self, pid: int) -> bytes | None:
        process = self.fake.processes[pid]
        return None if process.state is ProcessState.CHECKPOINTED else str(pid).encode()

    def device_of(self, pid: int) -> str:
        return self.fake.processes[pid].device

    def other_device(self) -> str:
        return fake_inventory(2).gpus[1].uuid

    def fail_next(self, call: str, pid: int, how: str) -> None:
        if how == "fail":
            self.fake.refuse_next(call, pid)
        elif how == "busy":
            self.fake.fail_next(call, pid, DeadlineExceeded("busy", facts={"phase": call}))
        else:
            lost = HelperLost("lost", facts={"call": call, "pid": pid})
            self.fake.fail_next(call, pid, lost, carried_out=how == "die-after")


class ProcessGround:
    """Real processes, real helpers, fake GPUs."""

    def __init__(self, rack: GpuRack, stack: ExitStack) -> None:
        self.rack = rack
        self.helper = HelperApi(rack.environment())
        self.api: CheckpointApi = self.helper
        self._stack = stack
        self._subjects: dict[int, HelperApi] = {}
        stack.callback(self.helper.close)

    def cuda_process(self) -> int:
        subject = HelperApi(self.rack.environment())
        self._stack.callback(subject.close)
        subject.ask("plant", 0, 4096)
        assert subject.helper_pid is not None
        self._subjects[subject.helper_pid] = subject
        return subject.helper_pid

    def plain_process(self) -> int:
        return os.getpid()

    def bytes_of(self, pid: int) -> bytes | None:
        if pid not in self.rack.users():
            return None
        return str(self._subjects[pid].ask("harvest")).encode()

    def device_of(self, pid: int) -> str:
        found = [gpu.uuid for gpu in self.rack.inventory.gpus if pid in self.rack.users_of(gpu)]
        return found[0] if found else self.rack.inventory.gpus[0].uuid

    def other_device(self) -> str:
        return self.rack.inventory.gpus[1].uuid

    def fail_next(self, call: str, pid: int, how: str) -> None:
        self.rack.fail_next(call, how)


class TestTable(CheckpointApiContract):
    @pytest.fixture
    def ground(self) -> Ground:
        return TableGround()


@pytest.fixture
def process_ground() -> Iterator[ProcessGround]:
    with tempfile.TemporaryDirectory(prefix="cs-") as folder, ExitStack() as stack:
        yield ProcessGround(GpuRack.make(Path(folder), 2), stack)


class TestHelper(CheckpointApiContract):
    @pytest.fixture
    def ground(self, process_ground: ProcessGround) -> Ground:
        return process_ground


# -- the helper process itself -----------------------------------------------------------------------------


def test_the_helper_ends_with_its_api(process_ground: ProcessGround) -> None:
    helper = process_ground.helper
    assert helper.ask("version") == 13000
    pid = helper.helper_pid
    assert pid is not None
    helper.close()
    assert start_ticks(pid) is None
    assert helper.helper_pid is None


def test_a_helper_that_is_killed_between_calls_is_replaced(process_ground: ProcessGround) -> None:
    helper = process_ground.helper
    helper.ask("version")
    first = helper.helper_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with suppress(HelperLost):  # when the call was faster than the news
        helper.ask("version")
    assert helper.ask("version") == 13000
    assert helper.helper_pid != first


def test_a_helper_that_is_killed_is_waited_for_when_another_takes_its_place(process_ground: ProcessGround) -> None:
    helper = process_ground.helper
    helper.ask("version")
    first = helper.helper_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with suppress(HelperLost):
        helper.ask("version")
    helper.ask("version")
    assert first not in children_of(os.getpid())


def test_a_helper_that_is_lost_before_anybody_listens_is_an_error_of_ours() -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["/bin/true"]) as process:
        helper = _Helper(ours, process)
        theirs.close()
        deadline = time.monotonic() + 60
        while not helper.is_lost and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(ConnectionError):
            helper.hello(10.0)
        helper.end()


def test_a_helper_ends_when_its_controller_is_killed(process_ground: ProcessGround) -> None:
    program = (
        "import sys; from coldsnap.capsule.cuda.remote import HelperApi\n"
        f"api = HelperApi({process_ground.rack.environment()!r}); api.ask('version')\n"
        "print(api.helper_pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        pidfd = os.pidfd_open(pid)
        controller.kill()
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(60_000), "the helper outlived its controller"
    finally:
        os.close(pidfd)


def test_without_a_driver_the_first_call_says_what_is_missing() -> None:
    api = HelperApi()
    api.start()
    with pytest.raises(MissingCapability, match=r"libcuda\.so\.1"):
        api.state(os.getpid())
    api.close()


def test_a_call_that_does_not_exist_is_an_answer_and_loses_no_helper(process_ground: ProcessGround) -> None:
    process_ground.helper.ask("version")
    pid = process_ground.helper.helper_pid
    with pytest.raises(CudaError, match="no_such_call failed"):
        process_ground.helper.ask("no_such_call")
    assert process_ground.helper.helper_pid == pid


def test_two_threads_start_one_helper(process_ground: ProcessGround) -> None:
    helper = process_ground.helper
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: helper.ask("version"), range(8)))
    running = [pid for pid in children_of(os.getpid()) if b"cuda.helper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert running == [helper.helper_pid]


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
