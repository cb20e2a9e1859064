"""Every parser with a valid input, and mutations of that: each ends in a value or in an error of coldsnap's own.

The inputs are what a capture wrote, so they are as large and as deep as real ones. Used by the campaign with chance of
its own, and by the tests with hypothesis, which finds the smallest input that breaks one.
"""

from __future__ import annotations

import json
import random
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.capsule.dumped import UNIT_FILE, DumpedUnit, read_dumped_unit
from coldsnap.capsule.image import read_capsule
from coldsnap.capsule.index import CapsuleIndex
from coldsnap.capsule.layout import DOCUMENT_LIMIT_BYTES, ImageConfig, ImageManifest
from coldsnap.capsule.prepared import PreparedRecord
from coldsnap.core.artifact import parse_artifact
from coldsnap.core.digest import Digest
from coldsnap.core.manifest import parse_native_manifest, parse_recovery_manifest
from coldsnap.core.overlay import parse_overlay
from coldsnap.core.parsing import Record, parse_document
from coldsnap.core.quarantine import parse_failures
from coldsnap.core.receipt import parse_receipt
from coldsnap.core.request import parse_request, request_bytes, request_from
from coldsnap.core.spans import parse_timing
from coldsnap.core.validation import parse_validation_record
from coldsnap.engines.frames import encode_frame, read_frames
from coldsnap.engines.safetensors import read_header
from coldsnap.engines.settings import SETTINGS_VARIABLE, read_settings
from coldsnap.errors import ColdsnapError
from coldsnap.ops.leases import Lease
from coldsnap.ops.recipe import parse_recipe
from coldsnap.ops.services import ServiceRecord
from coldsnap.testing import documents
from coldsnap.testing.checkpoint import write_safetensors

__all__ = ["Parser", "Tally", "fuzz", "mutate", "parsers"]

_LIMIT_BYTES = 16 << 20
_TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"9" * 5000,
    b"null",
    b"true",
    b'""',
    b"{}",
    b"[]",
    b"[" * 5000,
    b'{"a":' * 3000,
    b"\\u0000",
    b"\\ud800",
    b"\xff\xfe",
    b"\x00",
    b"../../../etc/passwd",
    b"sha256:" + b"0" * 64,
    b"\n",
    b"&a [*a]",
    b"!!python/object:os.system",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parser:
    """``parse`` takes bytes; ``valid`` is what it accepts."""

    name: str
    parse: Callable[[bytes], object]
    valid: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What became of the inputs of one parser. ``wrong``: exceptions that are not coldsnap's, as text."""

    inputs: int
    accepted: int
    refused: int
    wrong: tuple[str, ...]


def parsers(state: Path, artifact: Path) -> dict[str, Parser]:
    """Every parser, with inputs from a state root that holds one captured and prepared ``artifact``."""
    prepared = next(path.parent for path in state.glob("prepared/*/prepared.json"))
    capsule = next((state / "capsules").iterdir())
    blobs = capsule / "blobs" / "sha256"
    manifest = blobs / capsule.name
    config = blobs / str(json.loads(manifest.read_bytes())["config"]["digest"]).removeprefix("sha256:")
    found: dict[str, tuple[Callable[[bytes], object], bytes]] = {
        "request": (parse_request, request_bytes(request_from(documents.request_example()))),
        "artifact": (parse_artifact, artifact.read_bytes()),
        "receipt": (parse_receipt, next(state.glob("receipts/*.json")).read_bytes()),
        "timing": (parse_timing, json.dumps(documents.timing_example()).encode()),
        "overlay": (parse_overlay, json.dumps(documents.overlay_example()).encode()),
        "failures": (parse_failures, _failures()),
        "native-manifest": (parse_native_manifest, next(prepared.glob("workers/*/native-manifest.json")).read_bytes()),
        "recovery-manifest": (parse_recovery_manifest, next(prepared.glob("workers/*/manifest.json")).read_bytes()),
        "validation-record": (
            parse_validation_record,
            next(state.glob("model-payloads/sha256/*.json")).read_bytes(),
        ),
        "lease": (_document(Lease), next(state.glob("artifacts/*.json")).read_bytes()),
        "service-record": (_document(ServiceRecord), _service()),
        "prepared-record": (_document(PreparedRecord), (prepared / "prepared.json").read_bytes()),
        "capsule-manifest": (_document(ImageManifest), manifest.read_bytes()),
        "capsule-config": (_document(ImageConfig), config.read_bytes()),
        "capsule-index": (_document(CapsuleIndex), _index(capsule)),
        "unit-file": (_in_folder(UNIT_FILE, lambda path: read_dumped_unit(path.parent)), _unit()),
        "safetensors": (_in_folder("x.safetensors", read_header), _safetensors()),
        "settings": (_in_folder("s.json", lambda path: read_settings({SETTINGS_VARIABLE: str(path)})), _settings()),
        "recipe": (lambda data: parse_recipe(data, subject="r.yaml", folder=Path("/")), _RECIPE),
        "frames": (_frames, encode_frame({"id": 1, "result": {"answers": [{"text": "x", "token_ids": [1, 2, 3]}]}})),
    }
    return {name: Parser(name=name, parse=parse, valid=valid) for name, (parse, valid) in found.items()}


def mutate(data: bytes, chance: random.Random) -> bytes:
    """The data with one to four small or large changes."""
    for _ in range(chance.randint(1, 4)):
        at, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
        end = min(end, at + chance.choice((1, 4, 40, 4000)))
        match chance.randrange(7):
            case 0:
                data = data[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + data[at:end] * 2 + data[end:]
            case 3:
                data = data[:at] + chance.choice(_TOKENS) + data[end:]
            case 4:
                data = data[:at] + chance.randbytes(end - at) + data[end:]
            case 5:
                data = data[:at]
            case _:
                data = data[:at] + chance.choice(_TOKENS) + data[at:]
    return data


def fuzz(parser: Parser, *, num_inputs: int, seed: int) -> Tally:
    """Give the parser that many mutations. What it accepts is not judged; what it raises must be coldsnap's."""
    chance = random.Random(f"{seed} {parser.name}")  # noqa: S311 - repeatable, not secret
    parser.parse(parser.valid)
    accepted = refused = 0
    wrong: list[str] = []
    for _ in range(num_inputs):
        data = mutate(parser.valid, chance)
        try:
            parser.parse(data)
            accepted += 1
        except ColdsnapError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            wrong.append(f"{type(error).__name__}: {error}"[:200])
    return Tally(inputs=num_inputs, accepted=accepted, refused=refused, wrong=tuple(wrong))


# -- inputs that a capture does not leave as a file, and parsers that want one ------------------------

_RECIPE = b"""\
name: svc
engine: fake
model: /models/m
serve: {port: 8000, shuffle: 3}
weights: {mode: auto, materialize: async}
validation:
  prompts: ["The capital of France is", {text: "x", max_tokens: 4}]
environment: {A: "1"}
mounts: [{source: /data, target: /data}]
cold_start: true
"""


def _document(model: type[Record]) -> Callable[[bytes], object]:
    limit = min(_LIMIT_BYTES, DOCUMENT_LIMIT_BYTES)
    return lambda data: parse_document(model, data, subject=model.__name__, limit_bytes=limit)


def _in_folder(name: str, parse: Callable[[Path], object]) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_bytes(data)
            return parse(path)

    return run


def _frames(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(data[: 1 << 17])
        theirs.shutdown(socket.SHUT_WR)
        return list(read_frames(ours, time.monotonic() + 60.0))


def _index(capsule: Path) -> bytes:
    return read_capsule(capsule, Digest.from_hex(capsule.name)).model_dump_json().encode()


def _safetensors() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        write_safetensors(path, {"embed": b"e" * 100, "norm": b"n" * 7, "empty": b""})
        return path.read_bytes()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _failures() -> bytes:
    failure = {
        "operation_id": "restore-1",
        "at": "2026-01-01T00:00:00.000000Z",
        "rung": "native",
        "error": "AcceptanceFailed",
        "reason": "prompt 0 was answered differently",
    }
    head = {"format": 1, "kind": "coldsnap-artifact-failures", "path": "/a.json"}
    names = {"artifact": documents.digest_of("a"), "host": documents.digest_of("h")}
    return _json({**head, **names, "failures": [failure]})


def _service() -> bytes:
    unit = {"init_pid": 5, "init_start_ticks": 7, "boot_id": "b", "root_pid": 1001, "log_pipe": 9, "log_path": "/l"}
    record = ServiceRecord(
        name="svc",
        engine="fake",
        state="ready",
        operation_id="restore-1",
        artifact_path="/a.json",
        port=8000,
    )
    value = record.model_dump(mode="json")
    value["units"] = [{"unit": "u0", "record": {"format": 1, "unit": "u0", **unit}}]
    value["workers"] = [{"worker": "w0", "unit": "u0", "socket": "w.sock"}]
    return _json(value)


def _unit() -> bytes:
    unit = DumpedUnit(unit="u0", root_pid=1001, log_pipe=9, criu_version="4.2.1", files=(), private=())
    return unit.model_dump_json().encode()


def _settings() -> bytes:
    names = {"worker": "w0", "unit": "u0", "rank": 0, "socket": "/run/coldsnap/w.sock", "options": {"model_id": "m"}}
    return _json({"format": 1, "kind": "coldsnap-worker-settings", **names})
