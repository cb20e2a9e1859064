"""What a GPU proof works on: the Transformers engine on this machine's GPU, or the fake engine on fake ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import engine_option

from coldsnap.cli.wiring import installed_engines, make_tools
from coldsnap.core.drivers import DriverId
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.ops.copies import drop_copies, unused_copies
from coldsnap.ops.live import stop_service
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.tools import Tools
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.stand import Stand

FAKE_TENSORS = {f"layers.{number}.weight": 300_000 + 4096 * number for number in range(8)}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Engine, tools and models. Models are made when they are asked for first."""

    tools: Tools
    plugin: EnginePlugin
    serve: Mapping[str, Any]
    model: Callable[[], Path]
    small_model: Callable[[], Path]

    def close(self) -> None:
        """End what a failed step left running, and take its packs out of memory."""
        for name in self.tools.services.names():
            stop_service(self.tools, name)
        drop_copies(self.tools, unused_copies(self.tools))
        self.tools.host.close()


def real_subject(work: Path, models: Path, *, size: str, serve: Sequence[str]) -> Subject:
    """The Transformers engine on the first GPU, with a CUDA graph."""
    tools = make_tools(work / "state")
    plugin = choose_engine(installed_engines(), "transformers")
    options = {"device": "cuda", "cuda_graph": True, **dict(map(engine_option, serve))}
    return Subject(
        tools=tools,
        plugin=plugin,
        serve=options,
        model=lambda: _checkpoint(models, size),
        small_model=lambda: _checkpoint(models, "tiny"),
    )


def fake_subject(work: Path, models: Path, *, size: str, serve: Sequence[str]) -> Subject:
    """The fake engine in real processes on fake GPUs; ``size`` is all the same to it."""
    rack = GpuRack.make(work / "gpus")
    model = write_checkpoint(models / "fake", tensors=FAKE_TENSORS)
    stand = Stand(folder=work, model=model, driver=DriverId.N610, gpus=rack)
    options = {"gpu": str(rack.folder), **dict(map(engine_option, serve))}
    tools = replace(stand.tools, engines={PLUGIN.name: PLUGIN})
    return Subject(tools=tools, plugin=PLUGIN, serve=options, model=lambda: model, small_model=lambda: model)


def _checkpoint(models: Path, size: str) -> Path:
    """A random checkpoint, made by a process of its own, so that this one never imports torch.

    In files of 1 GiB, so that many threads hash it when it is pinned.
    """
    out = models / size
    command = [sys.executable, "-m", "coldsnap.engines.transformers.checkpoints", "random", str(out), "--size", size]
    command += ["--shard-bytes", str(1 << 30)]
    subprocess.run(command, check=True, timeout=540)
    return out
