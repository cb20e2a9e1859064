"""`python -m coldsnap.engines.vllm serve MODEL ...`: the front process, the root of a unit.

The command is vLLM's own. The settings records, of which COLDSNAP_SETTINGS names the first, say who the workers are,
where their control sockets lie, and which pinned model must be found. The sockets answer before vLLM is imported,
and go on to answer when it failed: the process ends on SIGTERM or SIGINT, never because something went wrong.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from coldsnap.core.messages import WorkerSettings
from coldsnap.engines.control import ControlServer
from coldsnap.engines.kernel import close_nvml, trim_heap
from coldsnap.engines.local_model import pinned_files
from coldsnap.engines.process import leave
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.vllm.arguments import ENVIRONMENT, check_environment, parse_arguments, serve_arguments
from coldsnap.engines.vllm.compat import resolve, versions
from coldsnap.engines.vllm.forks import guard_forks
from coldsnap.engines.vllm.front import FrontWorker
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontServer, inner_socket_name
from coldsnap.engines.vllm.loading import remember_files
from coldsnap.engines.vllm.logfiles import close_log_files
from coldsnap.engines.vllm.prepare import import_engine
from coldsnap.engines.vllm.records import read_all_settings, run_folder
from coldsnap.engines.vllm.server import VllmService, import_server
from coldsnap.errors import ColdsnapError, EngineError

_log = logging.getLogger(__name__)
EXIT_S = 30.0


class _ToldToEnd(SystemExit):
    """Raised wherever vLLM's start is. Not KeyboardInterrupt: while vLLM waits for its engine process it swallows that
    (`zmq_socket_ctx`), and waits on."""


class _Ending:
    """What SIGTERM and SIGINT do: interrupt what vLLM does at start, and later let the service end in order."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None

    def instead(self, act: Callable[[], None] | None) -> None:
        """From now on call `act`; None: interrupt."""
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback_later(EXIT_S, exit=True, file=sys.__stdout__ or sys.stdout)
        if self._act is None:
            raise _ToldToEnd
        self._act()


class Front:
    """The workers' front ends and the service behind them, from the first socket to the end."""

    def __init__(self, settings: tuple[WorkerSettings, ...], arguments: list[str], folder: Path) -> None:
        self._settings = settings
        self._arguments = arguments
        self._folder = folder
        self._placed = threading.Event()
        self._ending = _Ending()
        self._template = settings[0].template
        self._service = VllmService(self._fail_workers)
        self._workers = [
            FrontWorker(one, folder / inner_socket_name(one.worker), start=self._place, template=one.template)
            for one in settings
        ]

    def run(self) -> None:
        """Until a signal says so. Raises ColdsnapError when a socket cannot be had."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ending)
        inner = [self._folder / inner_socket_name(one.worker) for one in self._settings]
        guard_forks({self._folder / FRONT_SOCKET, *inner, *(Path(one.socket) for one in self._settings)})
        with ExitStack() as sockets:
            for path in inner:  # an engine process is ended without a word, and cannot tidy up
                sockets.callback(path.unlink, missing_ok=True)
            for settings, worker in zip(self._settings, self._workers, strict=True):
                sockets.enter_context(ControlServer(Path(settings.socket), worker))
            front = FrontServer(self._folder / FRONT_SOCKET, self._service)
            front.start()
            sockets.callback(front.close)
            try:
                self._serve()
            except _ToldToEnd:
                _log.info("told to end")

    def _serve(self) -> None:
        try:
            self._bring_up()
            return
        except ColdsnapError as error:
            self._service.fail(error)
        except Exception as error:  # noqa: BLE001 - the controller is told, whatever it was
            _log.exception("vLLM failed")
            self._service.fail(EngineError(f"vLLM failed: {type(error).__name__}: {error}"))
        self._ending.instead(None)
        threading.Event().wait()  # stays, to tell why

    def _bring_up(self) -> None:
        import_server()
        resolve("decorate_logs")("Front")
        resolve("set_ulimit")()
        args = parse_arguments(self._arguments)
        remember_files(pinned_files(Path(args.model), model_source_from(self._settings[0].options)))
        found = versions()
        if self._template:
            import_engine(Path(args.model))
            close_log_files()
            close_nvml()  # torch counts devices with it; a template holds none
            gc.collect()
            trim_heap()  # what imports left behind would lie in every copy
        for worker in self._workers:
            worker.imported(found)
        if self._template:
            self._placed.wait()
        asyncio.run(self._service.run(args, lambda: self._ending.instead(self._service.end)))

    def _place(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._placed.set()

    def _fail_workers(self, error: ColdsnapError) -> None:
        for worker in self._workers:
            worker.fail(error)


def main() -> int:
    """Run until told to end; 2 when the command, the environment or the settings are wrong."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        arguments = serve_arguments(sys.argv[1:])
        check_environment(os.environ)
        settings = read_all_settings(os.environ)
        folder = run_folder(os.environ)
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))  # sockets of ZMQ: private, as the unit's folder is
        Front(settings, arguments, folder).run()
    except ColdsnapError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    finally:
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
    return 0


if __name__ == "__main__":
    leave(main())
