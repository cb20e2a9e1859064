"""``coldsnap`` with the fake engine on fake GPUs, as a program: ``python -m benchmarks._vllm_fake FOLDER WORDS...``.

Everything of the command is the real one but the machine's GPUs, whose folder is the first word, and the engines.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldsnap.cli import wiring
from coldsnap.cli.main import run
from coldsnap.ops.tools import Tools
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.stand import with_gpus

_make_tools = wiring.make_tools


def fake_tools(folder: Path, state: Path, **options: Any) -> Tools:
    """The real tools, with the fake engine alone and the GPUs of ``folder``."""
    tools = replace(_make_tools(state, **options), engines={PLUGIN.name: PLUGIN})
    return with_gpus(tools, GpuRack.make(folder))


def main() -> None:
    """Run the command."""
    folder = Path(sys.argv.pop(1))
    wiring.make_tools = lambda state, **options: fake_tools(folder, state, **options)
    wiring.installed_engines = lambda: {PLUGIN.name: PLUGIN}
    run()


if __name__ == "__main__":
    main()
