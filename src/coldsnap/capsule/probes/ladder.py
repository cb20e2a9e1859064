"""The features as data: what each means, which others it stands on, and how it is proved.

A feature is only tried when those it needs have passed, so that the first thing that is wrong is what is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coldsnap.capsule.probes.bench import Bench
from coldsnap.capsule.probes.devices import prove_checkpoint_api, prove_exact_address, prove_round_trip
from coldsnap.capsule.probes.frozen import prove_fresh_state, prove_initialised_state
from coldsnap.capsule.probes.trees import prove_process_tree, prove_template

__all__ = ["FEATURES", "PROCESS_TREE", "Feature"]

PROCESS_TREE = "criu-process-tree"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """``prove`` returns why it passed, or raises an error of ours: MissingCapability when the machine lacks something,
    any other when it is there and does not work. Without one, ``unproved`` says why there is none.
    """

    name: str
    meaning: str
    needs: tuple[str, ...] = ()
    needs_gpu: bool = True
    prove: Callable[[Bench], str] | None = None
    unproved: str = ""


def _features() -> Mapping[str, Feature]:
    features = (
        Feature(
            name=PROCESS_TREE,
            meaning="a process tree can be frozen and restored",
            needs_gpu=False,
            prove=prove_process_tree,
        ),
        Feature(
            name="criu-process-template",
            meaning="a process can be frozen while it goes on, and restored beside itself",
            needs=(PROCESS_TREE,),
            needs_gpu=False,
            prove=prove_template,
        ),
        Feature(
            name="cuda-checkpoint-api",
            meaning="the driver can be asked to checkpoint processes",
            prove=prove_checkpoint_api,
        ),
        Feature(
            name="cuda-checkpoint-roundtrip",
            meaning="device memory survives lock, checkpoint, restore and unlock",
            needs=("cuda-checkpoint-api",),
            prove=prove_round_trip,
        ),
        Feature(
            name="cuda-initialized-state",
            meaning="device memory survives that with a freeze and a restore of the process in between",
            needs=(PROCESS_TREE, "cuda-checkpoint-roundtrip"),
            prove=prove_initialised_state,
        ),
        Feature(
            name="cuda-vmm-exact-address",
            meaning="device memory can be mapped again at the addresses it had",
            prove=prove_exact_address,
        ),
        Feature(
            name="cuda-fresh-state",
            meaning="a process that was frozen before CUDA can use it once restored",
            needs=("criu-process-template",),
            prove=prove_fresh_state,
        ),
        Feature(
            name="cuda-classic-ipc",
            meaning="memory that processes share through CUDA IPC survives a checkpoint of all of them",
            needs=("cuda-initialized-state",),
            unproved="no probe of this version shares memory between processes through CUDA IPC and freezes both",
        ),
        Feature(
            name="nccl-communicator-roundtrip",
            meaning="NCCL communicators between ranks survive a checkpoint of all of them",
            needs=("cuda-initialized-state",),
            unproved="no probe of this version makes an NCCL communicator between two GPUs and freezes both ranks",
        ),
    )
    return MappingProxyType({feature.name: feature for feature in features})


FEATURES: Mapping[str, Feature] = _features()
