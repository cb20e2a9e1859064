"""Making a lane: the reference from a cold process, one capture, one prepare, and that kept as the base."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from coldsnap.ops.coldstart import cold_engine
from coldsnap.ops.devices import VISIBLE_DEVICES
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.faults.lane import HOST, PORT, PROMPTS, Lane
from coldsnap.testing.faults.verbs import do_capture, do_prepare

__all__ = ["make_base"]

TENSORS: Mapping[str, int] = {"embed": 160_000, "layers.0": 9_001, "layers.1": 9_001, "norm": 300, "empty": 0}
_COLD_S = 120.0


def make_base(lane: Lane, model: Path | None) -> None:
    """Set the lane up; with the checkpoint ``model``, or a made one for the fake engine."""
    lane.mount()
    os.environ["TMPDIR"] = str(lane.temporary)
    if model is None:
        write_checkpoint(lane.model, tensors=TENSORS)
    else:
        shutil.copytree(model, lane.model)
    lane.make_cache()
    (lane.cache / "lost").write_bytes(b"l" * 5000)
    planned = lane.plan(lane.artifact)
    devices = {VISIBLE_DEVICES: lane.gpus.inventory.gpus[0].uuid} if lane.gpus is not None else None
    with cold_engine(
        planned.request,
        lane.plugin,
        planned.model,
        host=HOST,
        port=PORT,
        first_prompt="x",
        deadline_s=_COLD_S,
        devices=devices,
    ) as engine:
        lane.reference = engine.client.complete(PROMPTS, timeout_s=_COLD_S)
    lane.must(do_capture)
    lane.must(do_prepare)
    lane.state.rename(lane.base)
    shutil.copy2(lane.artifact, lane.base / lane.artifact.name)
    lane.reset()
    lane.committed = lane.digests()
    lane.mounts = frozenset(Path("/proc/self/mountinfo").read_text().splitlines())
