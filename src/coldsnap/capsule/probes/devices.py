"""Probes of a GPU without CRIU: the checkpoint calls, one round trip through them, and exact addresses.

Each works on child processes that can be killed, and on a few MiB of one device.
"""

from __future__ import annotations

from contextlib import closing

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.holders import device_users
from coldsnap.capsule.cuda.remote import HelperApi
from coldsnap.capsule.probes.bench import STEP_DEADLINE_S, Bench
from coldsnap.capsule.tree import read_tree
from coldsnap.errors import CudaError, InternalError, MissingCapability

__all__ = ["prove_checkpoint_api", "prove_exact_address", "prove_round_trip"]

PLANTED_BYTES = 8 << 20


def prove_checkpoint_api(bench: Bench) -> str:
    """The driver has every call, and knows a process with a context as running."""
    with closing(bench.open_helper()) as api, closing(bench.open_helper()) as subject:
        missing = api.ask("checkpoint_calls")
        if missing:
            raise MissingCapability(
                f"the driver lacks {', '.join(missing)}",
                cure="use a driver that can checkpoint processes (570 or newer)",
            )
        plant(bench, subject)
        expect(api, subject_pid(subject), ProcessState.RUNNING)
        version = int(api.ask("version"))
    return (
        f"the driver (CUDA {version // 1000}.{version % 1000 // 10}) has the checkpoint calls and knows a CUDA process"
    )


def prove_round_trip(bench: Bench) -> str:
    """Lock, checkpoint, restore, unlock a process: its device memory is the same, and meanwhile it holds no device."""
    with closing(bench.open_helper()) as api, closing(bench.open_helper()) as subject:
        digest = plant(bench, subject)
        pid = subject_pid(subject)
        api.lock(pid, deadline_s=STEP_DEADLINE_S)
        api.checkpoint(pid, deadline_s=STEP_DEADLINE_S)
        expect(api, pid, ProcessState.CHECKPOINTED)
        held = device_users(read_tree([pid]), bench.device_paths).get(pid)
        if held:
            raise CudaError(
                f"a checkpointed process still holds {', '.join(held)}",
                cure="use another driver; this one leaves devices open",
                facts={"call": "checkpoint", "code": "device open", "pid": pid},
            )
        api.restore(pid, devices={}, deadline_s=STEP_DEADLINE_S)
        api.unlock(pid, deadline_s=STEP_DEADLINE_S)
        same(digest, subject.ask("harvest", deadline_s=STEP_DEADLINE_S))
    return (
        f"{PLANTED_BYTES >> 20} MiB of {device_name(bench)} went through lock, checkpoint, restore and unlock unchanged"
    )


def prove_exact_address(bench: Bench) -> str:
    """An address that one process got is given to the next one that asks for it, with usable memory behind it."""
    with closing(bench.open_helper()) as first:
        address = int(first.ask("map_at", 0, 0, deadline_s=STEP_DEADLINE_S))
    with closing(bench.open_helper()) as second:
        again = int(second.ask("map_at", 0, address, deadline_s=STEP_DEADLINE_S))
    if again != address:
        raise CudaError(
            f"another process asked for device addresses at {address:#x} and got {again:#x}",
            cure="use another driver; stable allocations cannot come back here",
            facts={"call": "cuMemAddressReserve", "code": "moved", "pid": None},
        )
    return f"device memory of {device_name(bench)} was mapped at {address:#x} by two processes in turn"


def plant(bench: Bench, subject: HelperApi) -> str:
    """Give a helper CUDA state of its own; the digest of its device memory."""
    return str(subject.ask("plant", 0, PLANTED_BYTES, deadline_s=STEP_DEADLINE_S))


def subject_pid(subject: HelperApi) -> int:
    """The PID of a helper that has answered."""
    if subject.helper_pid is None:
        raise InternalError("a helper that has answered has no PID", cure="report this")
    return subject.helper_pid


def expect(api: HelperApi, pid: int, state: ProcessState) -> None:
    """Raises CudaError when the driver says anything else of the process."""
    found = api.state(pid)
    if found is not state:
        raise CudaError(
            f"the driver says of a process that should be {state} that it is {found or 'no CUDA process'}",
            cure="use another driver",
            facts={"call": "state", "code": str(found), "pid": pid},
        )


def same(planted: str, harvested: object) -> None:
    """Raises CudaError when device memory came back with other bytes."""
    if planted != harvested:
        raise CudaError(
            "device memory came back with other bytes than it had",
            cure="use another driver; do not trust this one with checkpoints",
            facts={"call": "restore", "code": "other bytes", "pid": None},
        )


def device_name(bench: Bench) -> str:
    """The device for people."""
    return bench.gpu.name if bench.gpu is not None else "the GPU"
