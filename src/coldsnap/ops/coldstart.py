"""A cold start as a user would make it: the engine's own command as a plain process, no coldsnap around it.

Used as the thing to compare with, and as the separate process that expected answers come from. It runs
outside any namespace of ours, so nothing we do can slow it down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.canonical import canonical_json
from coldsnap.core.execution import worker_identity
from coldsnap.core.messages import WorkerSettings, worker_socket_name
from coldsnap.core.request import OperationRequest
from coldsnap.engines.protocol import EnginePlugin, ResolvedModel
from coldsnap.errors import EngineError
from coldsnap.ops.outside import OutsideClient, StartupTimeline
from coldsnap.ops.starting import SETTINGS_VARIABLE

__all__ = ["ColdEngine", "cold_engine"]

_STOP_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdEngine:
    """A plain engine process that serves, and when an outside client first saw what."""

    client: OutsideClient
    timeline: StartupTimeline
    pid: int


@contextmanager
def cold_engine(
    request: OperationRequest,
    plugin: EnginePlugin,
    model: ResolvedModel,
    *,
    host: str,
    port: int,
    first_prompt: str,
    deadline_s: float,
    devices: Mapping[str, str] | None = None,
) -> Iterator[ColdEngine]:
    """Start the request's first unit cold, wait for its first token, and end it on the way out.

    ``devices``: the variables that tell a process which devices the unit has.
    Raises EngineError with the end of its log when it does not come up.
    """
    unit = request.launch.units[0]
    worker = next(one for one in request.launch.execution.workers if one.unit == unit.id)
    client = OutsideClient(host=host, port=port, health_path=request.validation.health_path)
    with tempfile.TemporaryDirectory(prefix="coldsnap-cold-") as folder:
        settings = Path(folder, "settings.json")
        record = WorkerSettings(
            worker=worker.id,
            unit=unit.id,
            rank=worker_identity(request.launch.execution, worker.id).rank,
            socket=str(Path(folder, worker_socket_name(worker.id))),
            host=host,
            port=port,
            options=plugin.settings_options(model, {}),
        )
        settings.write_bytes(canonical_json(record.model_dump(mode="json")))
        log = Path(folder, "engine.log")
        environment = {**unit.environment, **(devices or {}), "HOME": folder, SETTINGS_VARIABLE: str(settings)}
        with log.open("wb") as output:
            origin = time.monotonic()
            process = subprocess.Popen(
                unit.command,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            timeline = client.observe_startup(
                origin=origin,
                prompt=first_prompt,
                deadline_s=deadline_s,
                alive=lambda: process.poll() is None,
            )
            yield ColdEngine(client=client, timeline=timeline, pid=process.pid)
        except EngineError as error:
            error.facts.setdefault("log", log.read_text(errors="replace").splitlines()[-20:])
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its session; it is a leader of its own."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(_STOP_S)
            break
        except ProcessLookupError:
            process.wait(_STOP_S)
            break
        except subprocess.TimeoutExpired:
            continue
