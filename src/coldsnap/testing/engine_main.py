"""`python -m coldsnap.testing.engine_main`: the fake engine as a real process, started as coldsnap starts any."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.process import leave, run_engine
from coldsnap.engines.settings import model_source_from, read_settings
from coldsnap.errors import ColdsnapError
from coldsnap.testing.engine import FakeEngine
from coldsnap.testing.gpu_device import FakeGpu, agent_name, open_device


def main() -> int:
    """Run until told to end; 2 when the command or the settings are wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--shuffle", type=int)
    parser.add_argument("--arena-base", type=int)
    parser.add_argument("--gpu", type=Path)
    parser.add_argument("--companion", choices=["spawn", "fork", "nvml", "early"])
    arguments = parser.parse_args()

    def build(settings: WorkerSettings) -> FakeEngine:
        source = model_source_from(settings.options)
        agents = Path(settings.socket).parent
        return FakeEngine(
            arguments.model,
            source,
            shuffle=arguments.shuffle,
            arena_base=arguments.arena_base,
            open_gpu=partial(_open_gpu, arguments.gpu, agents, arguments.companion) if arguments.gpu else None,
        )

    if arguments.gpu and arguments.companion == "early":
        open_device(arguments.gpu / next(path.name for path in arguments.gpu.iterdir() if path.is_dir()))
    try:
        return run_engine(read_settings(os.environ), build)
    except ColdsnapError as error:
        sys.stdout.write(f"{error}\n")
        return 2


def _open_gpu(rack: Path, agents: Path, companion: str | None) -> FakeGpu:
    """CUDA state for this process, and whatever else is to hold the device."""
    gpu = FakeGpu(rack, agents, visible=os.environ["CUDA_VISIBLE_DEVICES"])
    if companion == "nvml":
        open_device(rack / gpu.uuid)
    elif companion == "fork":
        if os.fork() == 0:
            signal.pause()
    elif companion == "spawn":
        command = [sys.executable, "-m", "coldsnap.testing.gpu_companion", str(rack), str(agents)]
        child = subprocess.Popen(command)
        while not (agents / agent_name(child.pid)).exists():
            time.sleep(0.02)
    return gpu


if __name__ == "__main__":
    leave(main())
