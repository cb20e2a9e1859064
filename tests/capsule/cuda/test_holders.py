"""Who has CUDA state, who only seems to, and what must not be left when a tree is frozen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.holders import (
    device_users,
    driver_libraries,
    find_holders,
    holder_problems,
    leftover_problems,
    template_problems,
)
from coldsnap.capsule.tree import FdFacts, FdKind, MapFacts, ProcessFacts, TreeFacts

LIBCUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"
NVML = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"
RUNNING = ProcessState.RUNNING


def process(pid: int, fds: Sequence[str] = (), maps: Sequence[str] = (), *command: str) -> ProcessFacts:
    return ProcessFacts(
        pid=pid,
        ppid=1,
        cmdline=command or ("/usr/bin/python3", "-m", "engine"),
        environ={},
        fds=tuple(
            FdFacts(number=number, target=target, kind=FdKind.CHARACTER, flags=2) for number, target in enumerate(fds)
        ),
        maps=tuple(MapFacts(start=0, end=4096, perms="rw-s", offset=0, inode=1, path=path) for path in maps),
        num_threads=1,
        inside_pid=pid - 1000,
    )


TREE = TreeFacts(
    processes=(
        process(1009, ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia0", "/dev/null"], ["/dev/nvidia-uvm", LIBCUDA]),
        process(1002, ["/dev/nvidia1"], [], "/usr/bin/python3", "serve", "--key", "a", "b", "c", "secret"),
        process(1003, ["/dev/null"], [LIBCUDA]),
    )
)


def test_whoever_has_a_device_open_or_mapped_uses_it() -> None:
    assert device_users(TREE) == {
        1009: ("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"),
        1002: ("/dev/nvidia1",),
    }
    assert device_users(TREE, ("/dev/nul",)) == {1009: ("/dev/null",), 1003: ("/dev/null",)}


def test_holders_use_a_device_and_are_known_to_the_driver() -> None:
    found = find_holders("u0", TREE, {1009: RUNNING, 1002: RUNNING, 1003: RUNNING})
    assert [(one.unit, one.pid, one.inside_pid) for one in found] == [("u0", 1002, 2), ("u0", 1009, 9)]
    assert found[0].command == "python3 serve --key a b c", "no more of it than people need"
    assert list(holder_problems("u0", TREE, {1009: RUNNING, 1002: RUNNING, 1003: None})) == []


def test_a_fork_that_inherited_a_device_is_named_with_its_command() -> None:
    (problem,) = holder_problems("u0", TREE, {1009: RUNNING, 1002: None, 1003: None})
    assert (problem.field, problem.value) == ("u0: process 1002", "python3 serve --key a b c")
    assert "/dev/nvidia1" in problem.message
    assert "forked" in problem.message
    assert "spawn" in str(problem.cure)


def test_a_device_that_is_open_through_nvml_alone_is_told_from_a_fork() -> None:
    tree = TreeFacts(processes=(process(1004, ["/dev/nvidiactl"], [NVML]),))
    (problem,) = holder_problems("u0", tree, {1004: None})
    assert "through NVML" in problem.message
    assert "nvmlShutdown" in str(problem.cure)


@pytest.mark.parametrize("state", [ProcessState.LOCKED, ProcessState.CHECKPOINTED, ProcessState.FAILED])
def test_a_process_in_the_middle_of_something_is_left_alone(state: ProcessState) -> None:
    (problem,) = holder_problems("u0", TREE, {1009: RUNNING, 1002: RUNNING, 1003: state})
    assert problem.field == "u0: process 1003"
    assert f"is {state} already" in problem.message


def test_what_is_left_after_a_checkpoint_is_refused() -> None:
    tree = TreeFacts(processes=(process(1001, [], [LIBCUDA]), process(1002, ["/dev/nvidiactl"])))
    (problem,) = leftover_problems("u0", tree)
    assert (problem.field, problem.value) == ("u0: process 1002", "python3 -m engine")
    assert "still holds /dev/nvidiactl after its CUDA state was taken off" in problem.message
    assert "nvmlShutdown" in str(problem.cure)


def test_a_template_holds_no_device_open_or_mapped() -> None:
    tree = TreeFacts(
        processes=(
            process(1001, ["/dev/nvidiactl"], [LIBCUDA, NVML]),
            process(1002, [], [LIBCUDA, NVML]),
            process(1003, ["/dev/nvidia0"], [NVML]),
            process(1004, [], ["/dev/nvidia-uvm"]),
        )
    )
    cuda, nvml, mapped = template_problems("u0", tree)
    assert [one.field for one in (cuda, nvml, mapped)] == [f"u0: process {pid}" for pid in (1001, 1003, 1004)]
    assert cuda.message == "holds /dev/nvidiactl before it was placed, so it is no template"
    assert nvml.message.endswith("it has not loaded CUDA, so NVML opened them")
    assert "/dev/nvidia-uvm" in mapped.message


def test_a_library_of_the_driver_is_a_fact_and_no_state() -> None:
    tree = TreeFacts(
        processes=(process(1001, [], [LIBCUDA]), process(1002, [], [LIBCUDA, NVML, "/usr/lib/libcudart.so.13"]))
    )
    found = driver_libraries(tree)
    assert {path: [one.pid for one in processes] for path, processes in found.items()} == {
        LIBCUDA: [1001, 1002],
        NVML: [1002],
    }
    assert list(template_problems("u0", tree)) == []
    assert list(leftover_problems("u0", tree)) == []
