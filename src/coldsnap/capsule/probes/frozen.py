"""Probes of GPU and CRIU together: CUDA state that was frozen comes back, and a frozen process can begin with CUDA."""

from __future__ import annotations

from contextlib import closing

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.holders import device_users
from coldsnap.capsule.dump import dump
from coldsnap.capsule.probes.bench import STEP_DEADLINE_S, Bench, Subject, subject_unit
from coldsnap.capsule.probes.devices import PLANTED_BYTES, device_name, expect, same
from coldsnap.capsule.restore import restore
from coldsnap.capsule.running import launch
from coldsnap.capsule.tree import read_tree
from coldsnap.errors import CudaError

__all__ = ["prove_fresh_state", "prove_initialised_state"]


def prove_initialised_state(bench: Bench) -> str:
    """A process with a context is checkpointed, frozen, killed and brought back: its device memory is the same."""
    criu = bench.find()
    with subject_unit(bench) as (spec, images), closing(bench.open_helper()) as api:
        subject = Subject(unit=launch(spec, deadline_s=STEP_DEADLINE_S, tied=True))
        try:
            digest = subject.ask("plant", 0, PLANTED_BYTES)
            api.lock(subject.pid, deadline_s=STEP_DEADLINE_S)
            api.checkpoint(subject.pid, deadline_s=STEP_DEADLINE_S)
            dump(subject.unit, images, criu=criu, deadline_s=STEP_DEADLINE_S)
        finally:
            subject.unit.kill()
        back = Subject(unit=restore(spec, images, criu=criu, deadline_s=STEP_DEADLINE_S, tied=True))
        try:
            expect(api, back.pid, ProcessState.CHECKPOINTED)
            api.restore(back.pid, devices={}, deadline_s=STEP_DEADLINE_S)
            api.unlock(back.pid, deadline_s=STEP_DEADLINE_S)
            same(digest, back.ask("harvest"))
        finally:
            back.unit.kill()
    return f"a process with {PLANTED_BYTES >> 20} MiB of {device_name(bench)} was frozen, killed and restored unchanged"


def prove_fresh_state(bench: Bench) -> str:
    """A process that was frozen before it knew of any device initialises CUDA once it is restored, and computes."""
    criu = bench.find()
    with subject_unit(bench) as (spec, images):
        subject = Subject(unit=launch(spec, deadline_s=STEP_DEADLINE_S, tied=True))
        try:
            subject.ask("ping")
            held = device_users(read_tree(subject.unit.pids()), bench.device_paths)
            if held:
                raise CudaError(
                    f"a process that was asked nothing of CUDA holds {held}",
                    cure="report this",
                    facts={"call": "ping", "code": "device open", "pid": subject.pid},
                )
            dump(subject.unit, images, criu=criu, deadline_s=STEP_DEADLINE_S)
        finally:
            subject.unit.kill()
        back = Subject(unit=restore(spec, images, criu=criu, deadline_s=STEP_DEADLINE_S, tied=True))
        try:
            same(back.ask("plant", 0, PLANTED_BYTES), back.ask("harvest"))
        finally:
            back.unit.kill()
    return f"a process that was frozen before it used CUDA began with {device_name(bench)} after its restore"
