"""`python -m coldsnap.testing.gpu_companion RACK AGENTS`: a process with CUDA state of its own beside an engine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from coldsnap.testing.gpu_device import FakeGpu


def main() -> None:
    """Hold it until ended."""
    rack, agents = map(Path, sys.argv[1:])
    gpu = FakeGpu(rack, agents, visible=os.environ["CUDA_VISIBLE_DEVICES"])
    gpu.write(b"companion")
    signal.pause()


if __name__ == "__main__":
    main()
