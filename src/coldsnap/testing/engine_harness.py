"""One worker in this process, driven as a controller drives it: over its control socket and over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from coldsnap.core.messages import (
    Answer,
    AnswerBody,
    Answers,
    ExportBody,
    Exported,
    Materialization,
    MaterializeBody,
    Materialized,
    PackSource,
    PlaceBody,
    Placed,
    Prompt,
    ServeBody,
    Serving,
    SleepReport,
    Verb,
    WakeBody,
    WakeReport,
    WorkerSettings,
)
from coldsnap.engines.control import ControlClient, ControlServer
from coldsnap.engines.protocol import EngineWorker
from coldsnap.engines.template import make_worker
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.hydrate.host import HostMemory
from coldsnap.hydrate.memory import DeviceMemory, StableMemory, host_addressable
from coldsnap.hydrate.scan import read_chunks
from coldsnap.store.admission import record_path

__all__ = ["Driven", "driven", "free_port", "post"]

R = TypeVar("R", bound=BaseModel)
_DEADLINE_S = 60.0


def free_port() -> int:
    """A loopback port that nobody listens on now, and that nobody gets by chance before it is used.

    The kernel gives no such port to a connection or to a server that asks for any, and this process gives none twice
    in a long time. Where the kernel gives all away, it is one of those.
    """
    while True:
        with _PORTS_LOCK:
            port = next(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])


def _ports() -> Iterator[int]:
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(_FIRST_PORT, given_from)) or [0]
    start = random.randrange(len(ports))  # noqa: S311 - another run of the tests may go on beside this one
    return itertools.cycle(ports[start:] + ports[:start])


_FIRST_PORT = 10_000
_PORTS = _ports()
_PORTS_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Driven:
    """A loaded worker, its memory, and the verbs with the bodies that a controller would send."""

    client: ControlClient
    memory: StableMemory
    engine: EngineWorker
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def call(self, verb: Verb, body: BaseModel | None, reply: type[R]) -> R:
        """One verb over the socket."""
        return self.client.call(verb, body, reply=reply, deadline_s=_DEADLINE_S)

    def answers(self, prompts: tuple[Prompt, ...]) -> tuple[Answer, ...]:
        """`answer`."""
        return self.call(Verb.ANSWER, AnswerBody(prompts=prompts), Answers).answers

    def export(self, name: str = "out") -> Exported:
        """`export` into a fresh folder of this worker's, the state root being shared by all of the same parent."""
        out = self.folder / name
        out.mkdir(mode=0o700)
        body = ExportBody(state_root=str(self.state_root), out_dir=str(out), capture_id=name)
        return self.call(Verb.EXPORT, body, Exported)

    @property
    def state_root(self) -> Path:
        """Where packs go."""
        return self.folder.parent / "state"

    def sleep(self) -> SleepReport:
        """`sleep`."""
        return self.call(Verb.SLEEP, None, SleepReport)

    def wake(self, exported: Exported, source: PackSource = PackSource.NATIVE, **changes: object) -> WakeReport:
        """`wake` from an export, with parts of the body changed."""
        return self.call(Verb.WAKE, self.wake_body(exported, source, **changes), WakeReport)

    def place(
        self, exported: Exported | None = None, source: PackSource = PackSource.NATIVE, **changes: object
    ) -> Placed:
        """`place` a template: filled from an export, with parts of the body changed, or loaded without one."""
        wake = None if exported is None else self.wake_body(exported, source, **changes)
        return self.call(Verb.PLACE, PlaceBody(environment={"COLDSNAP_PLACED": "here"}, wake=wake), Placed)

    def wake_body(self, exported: Exported, source: PackSource, **changes: object) -> WakeBody:
        """The body of `wake` from an export, with parts of it changed."""
        body: dict[str, object] = {
            "source": source,
            "native_manifest": exported.native_manifest.path,
            "recovery_manifest": exported.recovery_manifest.path,
            "pack": exported.pack.path if exported.pack is not None else None,
            "pack_sha256": exported.pack.sha256 if exported.pack is not None else None,
            "pack_bytes": exported.pack.bytes if exported.pack is not None else None,
            "residual": exported.residual.path if exported.residual is not None else None,
            "residual_sha256": exported.residual.sha256 if exported.residual is not None else None,
            "model_path": str(self.engine.model_path),
            "state_root": str(self.state_root),
        }
        return WakeBody.model_validate({**body, **changes})

    def materialize(self, exported: Exported) -> Materialized:
        """`materialize` the pack of an export."""
        assert exported.pack is not None, "the export has no pack"
        body = MaterializeBody(
            state_root=str(self.state_root),
            native_manifest=exported.native_manifest.path,
            pack_sha256=exported.pack.sha256,
            pack_bytes=exported.pack.bytes,
        )
        return self.call(Verb.MATERIALIZE, body, Materialized)

    def lose_pack(self, exported: Exported) -> bytes:
        """Take the pack of an export, and its record, out of the store; its bytes."""
        assert exported.pack is not None, "the export has no pack"
        path = Path(exported.pack.path)
        content = path.read_bytes()
        path.unlink()
        record_path(path).unlink(missing_ok=True)
        return content

    @property
    def materialization(self) -> Materialization:
        """What `status` says of it."""
        found = self.client.status().materialization
        assert found is not None, "the status says nothing of it"
        return found

    def files(self) -> list[str]:
        """Packs and unfinished files in the store, without records and locks."""
        folders = (self.state_root / "model-payloads" / "sha256", self.state_root / "staging")
        return sorted(one.name for folder in folders for one in folder.iterdir() if not one.name.endswith(".json"))

    def serve(self, port: int) -> Serving:
        """`serve` on loopback."""
        return self.call(Verb.SERVE, ServeBody(port=port), Serving)

    def contents(self) -> dict[int, bytes]:
        """Every preserved byte, by allocation."""
        return {one.ptr: b"".join(read_chunks(self.memory, one.ptr, one.size)) for one in self.memory.allocations}

    def flip_bit(self, ptr: int) -> None:
        """Change the byte at `ptr`; a second time changes it back."""
        byte = bytearray(b"".join(read_chunks(self.memory, ptr, 1)))
        byte[0] ^= 1
        if isinstance(self.memory, DeviceMemory):
            self.memory.copy_in(ptr, memoryview(byte))
        else:
            host_addressable(self.memory).view(ptr, 1)[:] = byte


@contextmanager
def driven(
    engine: EngineWorker,
    folder: Path,
    *,
    base: int,
    port: int | None = None,
    template: bool = False,
    make_memory: Callable[[int], HostMemory | CudaMemory] = lambda base: HostMemory(base=base),
) -> Iterator[Driven]:
    """Load `engine` in memory that begins at `base`, with its control socket in `folder`; raises when it fails.

    With `port` it serves as soon as it is loaded. A `template` waits for `place`; what that sets in the environment is
    in the `environment` of what is yielded, and not in this process's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = WorkerSettings(
        worker="w0", unit="u0", rank=0, socket=str(folder / "w.sock"), port=port, template=template
    )
    environment: dict[str, str] = {}
    with make_memory(base) as memory:
        worker = make_worker(settings, engine, lambda: memory, set_environment=environment.update)
        with ControlServer(Path(settings.socket), worker):
            client = ControlClient(Path(settings.socket))
            worker.load()
            client.wait_loaded(deadline_s=_DEADLINE_S)
            try:
                yield Driven(client=client, memory=memory, engine=engine, folder=folder, environment=environment)
            finally:
                worker.close()


def post(port: int, path: str, body: object) -> tuple[int, Any]:
    """One POST on loopback, on a connection of its own; status and decoded JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()
