"""An engine process from its settings record to its end; what every engine's entry point calls.

The process opens its control socket first and loads the engine after, so that the controller can ask how the
loading goes. It ends on SIGTERM or SIGINT, never because something failed: a failed worker stays, to tell why.

The end is bounded and skips the interpreter's own. An accelerator's library takes itself apart when the interpreter
does, in an order that nobody chose, and may wait there for ever for memory that is unmapped; the kernel gives all of
it back at once. What takes longer than ``EXIT_S`` before that is told with the stack of every thread, and ended.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.control import ControlServer
from coldsnap.engines.protocol import EngineWorker
from coldsnap.engines.template import make_worker
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import StableMemory

__all__ = ["leave", "run_engine"]

EXIT_S = 10.0


def run_engine(
    settings: WorkerSettings,
    build: Callable[[WorkerSettings], EngineWorker],
    *,
    make_memory: Callable[[], StableMemory] = HostMemory,
) -> int:
    """Run the worker until it is told to end; returns the exit status, for `leave`. Called from the main thread.

    ``make_memory`` makes what the engine's weights live in; a template calls it when it is placed, and not before. Logs
    plainly to standard output. Raises ColdsnapError when the memory, or the control socket, cannot be had.
    """
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback_later(EXIT_S, exit=True, file=sys.__stdout__ or sys.stdout)
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    worker = make_worker(settings, build(settings), make_memory)
    with ControlServer(Path(settings.socket), worker):
        worker.load()
        stop.wait()
        worker.close()
    return 0


def leave(status: int) -> NoReturn:
    """End this process now, with everything written that was said."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
