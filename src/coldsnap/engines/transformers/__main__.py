"""`python -m coldsnap.engines.transformers`: the engine process.

The command line is the one source of truth for the model's folder and every engine option. The settings record,
whose path is in COLDSNAP_SETTINGS, says who this worker is, where its control socket lies, which pinned model it
must find in the folder, and on which port to serve at once; `--port` is what people read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.process import leave, run_engine
from coldsnap.engines.settings import model_source_from, read_settings
from coldsnap.engines.transformers.engine import TransformersEngine
from coldsnap.engines.transformers.options import Device, parse_command
from coldsnap.errors import ColdsnapError
from coldsnap.hydrate.cuda import CudaMemory, open_driver
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import StableMemory

# OpenMP threads wait for each other in a loop that burns the core. On a machine that does anything else, each
# wait then lasts until the other thread is scheduled again: 16 tokens of a 135M model took 14 to 25 s on two
# busy cores, and 1.0 s with a short loop (0.8 s on two idle cores either way, within noise). Read by libgomp
# when torch loads it; a recipe's own environment wins.
_SPIN_VARIABLE, _SPIN_COUNT = "GOMP_SPINCOUNT", "1000"
# cuBLAS picks workspaces, and with them ways to add up, by stream and call; with one fixed size it computes the same in
# every process. Read when its first handle is made.
_WORKSPACE_VARIABLE, _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def _device_memory() -> StableMemory:
    return CudaMemory(open_driver())


def main() -> int:
    """Run until told to end; 2 when the command or the settings are wrong."""
    os.environ.setdefault(_SPIN_VARIABLE, _SPIN_COUNT)

    def build(settings: WorkerSettings) -> TransformersEngine:
        return TransformersEngine(Path(command.model), model_source_from(settings.options), command.options)

    try:
        command = parse_command(sys.argv[1:])
        on_gpu = command.options.device is Device.CUDA
        if on_gpu:
            os.environ.setdefault(_WORKSPACE_VARIABLE, _WORKSPACE)
        return run_engine(read_settings(os.environ), build, make_memory=_device_memory if on_gpu else HostMemory)
    except ColdsnapError as error:
        sys.stdout.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    leave(main())
