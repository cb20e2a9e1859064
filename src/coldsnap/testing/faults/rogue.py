"""Replies that are late, doubled, out of order, damaged or never come: a proxy between a controller and a real worker.

``RogueUnits`` are the machine's own units but for the control socket that they name, which is the proxy's. It passes a
request on, gathers the worker's whole answer, and sends on what the mutation makes of it, for one verb; other verbs go
through untouched.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldsnap.capsule.driver import RunningUnit, UnitRecord, UnitSpec
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.core.messages import MAX_FRAME_BYTES
from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.lane import IMPATIENT_S, Lane
from coldsnap.testing.faults.operations import Operation

__all__ = ["MUTATIONS", "mangled"]

_NEVER_S = 3 * IMPATIENT_S
_TIMEOUT_S = 60.0

Frames = list[bytes]
Mutation = Callable[[Frames, random.Random], Frames]


def mangled(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``verb`` of the control protocol, and ``mutation``."""
    note = ("mangled", f"{chance.getrandbits(48):x}")
    mutation = MUTATIONS[case.params["mutation"]]

    def units() -> LinuxUnits:
        def mutate(frames: Frames) -> Frames:
            lane.notes.add(*note)
            return mutation(frames, chance)

        return RogueUnits(lane.desk, case.params["verb"], mutate)

    names = ("answer_s", "export_s", "sleep_s", "wake_s", "serve_s")
    changes: dict[str, Any] = dict.fromkeys(names, IMPATIENT_S)
    deadlines = replace(lane.deadlines, **changes)
    outcome = lane.run(operation.verb, units=units, deadlines=deadlines)
    return Struck(
        outcome=outcome,
        happened=list(note) in lane.notes.lines(),
        restored=operation.restored or "unit.criu" in lane.points(),
    )


# -- mutations of an answer: frames in, frames out; an empty list closes without a word ---------------


def _late(frames: Frames, chance: random.Random) -> Frames:
    time.sleep(chance.uniform(0.1, 0.5))
    return frames


def _never(frames: Frames, chance: random.Random) -> Frames:
    time.sleep(_NEVER_S)
    return []


def _lost(frames: Frames, chance: random.Random) -> Frames:
    return []


def _half(frames: Frames, chance: random.Random) -> Frames:
    last = frames[-1]
    return [*frames[:-1], last[: chance.randrange(1, len(last) - 1)]]


def _garbled(frames: Frames, chance: random.Random) -> Frames:
    last = bytearray(frames[-1])
    at = chance.randrange(max(1, len(last) - 9))
    last[at : at + 8] = chance.randbytes(8)
    return [*frames[:-1], bytes(last)]


def _doubled(frames: Frames, chance: random.Random) -> Frames:
    return [*frames, frames[-1]]


def _reversed(frames: Frames, chance: random.Random) -> Frames:
    progress = {**json.loads(frames[-1]), "progress": {"phase": "x", "done_bytes": 0, "total_bytes": 1}}
    progress.pop("result", None)
    return [frames[-1], _frame(progress), *frames[:-1]]


def _oversized(frames: Frames, chance: random.Random) -> Frames:
    return [b'{"id":1,"result":{"x":"' + b"x" * (MAX_FRAME_BYTES + 10), b'"}}\n']


def _endless(frames: Frames, chance: random.Random) -> Frames:
    return [b"x" * (1 << 20)] * 20


def _other_id(frames: Frames, chance: random.Random) -> Frames:
    return [_frame({**json.loads(frames[-1]), "id": 999_999})]


def _other_verb(frames: Frames, chance: random.Random) -> Frames:
    """The answer to something else, in a valid frame."""
    return [
        json.dumps({"id": json.loads(frames[-1])["id"], "result": {"host": None, "port": None, "odd": 1}}).encode()
        + b"\n"
    ]


def _both(frames: Frames, chance: random.Random) -> Frames:
    error = {"kind": "EngineError", "message": "and yet it failed", "cure": None, "facts": dict[str, Any]()}
    return [_frame({**json.loads(frames[-1]), "error": error})]


def _neither(frames: Frames, chance: random.Random) -> Frames:
    return [_frame({"id": json.loads(frames[-1])["id"]})]


def _no_object(frames: Frames, chance: random.Random) -> Frames:
    return [chance.choice([b"[]\n", b"null\n", b"1\n", b"\n", b'"x"\n', b"NaN\n", b'{"id":1e999}\n'])]


def _strange_error(frames: Frames, chance: random.Random) -> Frames:
    kind = chance.choice(["SystemExit", "ColdsnapError", "Problem", "__import__", "", "Refused", "PayloadRejected"])
    error = {"kind": kind, "message": "m", "cure": None, "facts": {"problems": [{"field": 3}], "reason": []}}
    return [_frame({"id": json.loads(frames[-1])["id"], "error": error})]


def _frame(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _dribbled(frames: Frames, chance: random.Random) -> Frames:
    return [bytes([byte]) for frame in frames for byte in frame]


MUTATIONS: Mapping[str, Mutation] = {
    "late": _late,
    "never": _never,
    "lost": _lost,
    "half": _half,
    "garbled": _garbled,
    "doubled": _doubled,
    "reversed": _reversed,
    "oversized": _oversized,
    "endless": _endless,
    "other-id": _other_id,
    "other-verb": _other_verb,
    "both": _both,
    "neither": _neither,
    "no-object": _no_object,
    "strange-error": _strange_error,
    "dribbled": _dribbled,
}
"""What can become of an answer."""


class RogueUnits(LinuxUnits):
    """See the module's head. Lives in the controller's process, whose threads are the proxies."""

    def __init__(self, folder: Path, verb: str, mutate: Callable[[Frames], Frames]) -> None:
        super().__init__()
        self._folder = folder
        self._verb = verb
        self._mutate = mutate

    def launch(self, spec: UnitSpec, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """See ``UnitDriver.launch``."""
        return self._rogue(super().launch(spec, deadline_s=deadline_s, tied=tied))

    def restore(self, spec: UnitSpec, images_dir: Path, *, deadline_s: float, tied: bool = False) -> RunningUnit:
        """See ``UnitDriver.restore``."""
        return self._rogue(super().restore(spec, images_dir, deadline_s=deadline_s, tied=tied))

    def attach(self, record: UnitRecord) -> RunningUnit | None:
        """See ``UnitDriver.attach``."""
        unit = super().attach(record)
        return self._rogue(unit) if unit is not None else None

    def _rogue(self, unit: RunningUnit) -> RunningUnit:
        return _RogueUnit(unit, self._folder, self._verb, self._mutate)


class _RogueUnit:
    """A unit whose sockets are proxies; everything else is the unit's own."""

    def __init__(self, unit: RunningUnit, folder: Path, verb: str, mutate: Callable[[Frames], Frames]) -> None:
        self._unit = unit
        self._folder = folder
        self._verb = verb
        self._mutate = mutate
        self._proxies: dict[str, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    def socket_path(self, name: str) -> Path:
        """The proxy's."""
        if name not in self._proxies:
            path = self._folder / f"p{time.monotonic_ns()}.sock"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen(8)
            self._proxies[name] = path
            threading.Thread(target=self._accept, args=(listener, self._unit.socket_path(name)), daemon=True).start()
        return self._proxies[name]

    def _accept(self, listener: socket.socket, real: Path) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._pass_on, args=(connection, real), daemon=True).start()

    def _pass_on(self, client: socket.socket, real: Path) -> None:
        with client, suppress(OSError):
            client.settimeout(_TIMEOUT_S)
            request = _read_line(client)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
                worker.settimeout(_TIMEOUT_S)
                try:
                    worker.connect(str(real))
                except OSError:
                    return
                worker.sendall(request)
                answer = b"".join(iter(lambda: worker.recv(65536), b""))
            frames = [line + b"\n" for line in answer.split(b"\n") if line]
            if frames and json.loads(request).get("verb") == self._verb:
                frames = self._mutate(frames)
            for frame in frames:
                client.sendall(frame)


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and (piece := connection.recv(65536)):
        data += piece
    return data
