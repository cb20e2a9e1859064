"""The root file system of an image, unpacked once: layers in order, each in a process whose root is the folder.

The folder is made aside and named as a whole, by the digest of the image's manifest. Nothing may write below it: what
a unit writes goes to an overlay. It is trusted from then on, as any program that is installed here is.
"""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from coldsnap.capsule import linux
from coldsnap.capsule.aside import folder_aside
from coldsnap.capsule.layout import MANIFEST_TYPE
from coldsnap.capsule.programs import program_command
from coldsnap.core.digest import Digest
from coldsnap.errors import HostError, InvalidDocument, OutOfSpace, PayloadRejected, Problem

__all__ = ["RootLayer", "RootManifest", "parse_root_manifest", "unpack_root"]

_PIECE_BYTES = 1 << 20
_MAX_LAYERS = 512
_PLAIN = "application/vnd.oci.image.layer.v1.tar"
_PACKED = (_PLAIN, f"{_PLAIN}+gzip", f"{_PLAIN}+zstd")


@dataclass(frozen=True, kw_only=True, slots=True)
class RootLayer:
    """One layer: a tar, plain or packed as its media type says."""

    digest: Digest
    bytes: int
    media_type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RootManifest:
    """What an image's manifest says that a root needs: its layers, the lowest first."""

    layers: tuple[RootLayer, ...]


def parse_root_manifest(data: bytes, digest: Digest) -> RootManifest:
    """Read the manifest with this digest. Raises PayloadRejected for other bytes, InvalidDocument for no OCI image."""
    if Digest.of(data) != digest:
        message = f"the manifest of image {digest} has the digest {Digest.of(data)}"
        raise PayloadRejected("digest_mismatch", message, cure="fetch it again")
    try:
        found = json.loads(data)
        kind, listed = found.get("mediaType", MANIFEST_TYPE), found.get("layers")
        layers = tuple(
            RootLayer(digest=Digest.parse(one["digest"]), bytes=_size(one["size"]), media_type=str(one["mediaType"]))
            for one in listed or ()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _no_image("", "is no manifest of an image", repr(error)[:120]) from error
    if kind != MANIFEST_TYPE or not layers:
        raise _no_image("mediaType", "is no OCI image of one machine", str(kind)[:120])
    for number, layer in enumerate(layers[: _MAX_LAYERS + 1]):
        if layer.media_type not in _PACKED or number == _MAX_LAYERS:
            raise _no_image(f"layers[{number}]", "is a layer that cannot be unpacked", layer.media_type[:120])
    return RootManifest(layers=layers)


def unpack_root(folder: Path, layers: tuple[RootLayer, ...], open_layer: Callable[[RootLayer], Any]) -> None:
    """Make ``folder``, which must not exist, from layers; ``open_layer`` gives each proved file in a ``with``.

    Raises ResourceBusy, OutOfSpace, HostError with what the unpacking program said.
    """
    with folder_aside(folder) as aside:
        aside.chmod(0o755)
        for layer in layers:
            with open_layer(layer) as file:
                _unpack(aside, layer, file)
        _sync(aside)


def _sync(folder: Path) -> None:
    """A name promises that all of it is there, also after a power cut; a call a file would take minutes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        linux.sync_file_system(descriptor)
    finally:
        os.close(descriptor)


def _unpack(aside: Path, layer: RootLayer, file: BinaryIO) -> None:
    root_fd = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            program_command("rootlayers", f"layer {layer.digest.hex[:12]}", (root_fd,)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=(root_fd,),
            start_new_session=True,
        )
    finally:
        os.close(root_fd)
    assert process.stdin is not None  # noqa: S101 - asked for above
    wrong = ""
    with process:
        try:
            for piece in _plain(layer, file):
                process.stdin.write(piece)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has said why
        except (zlib.error, ValueError) as error:
            wrong = str(error)
            process.kill()
        said = process.stderr.read().decode(errors="replace").strip() if process.stderr is not None else ""
    if process.returncode == 3:
        cure = "free some space, or use another --state-root"
        raise OutOfSpace(f"layer {layer.digest} does not fit below {aside.parent}: {said}", cure=cure)
    if process.returncode or wrong:
        message = f"layer {layer.digest} cannot be unpacked: {wrong or said or process.returncode}"
        raise HostError(
            message, cure="use an image that other tools unpack, as root", facts={"layer": str(layer.digest)}
        )


def _plain(layer: RootLayer, file: BinaryIO) -> Iterator[bytes]:
    """The bytes of the tar itself."""
    if layer.media_type.endswith("+zstd"):
        import zstandard

        try:
            with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader:
                while piece := reader.read(_PIECE_BYTES):
                    yield piece
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        return
    gzip = layer.media_type.endswith("+gzip")
    unpacker = zlib.decompressobj(wbits=31)
    while piece := file.read(_PIECE_BYTES):
        while gzip and piece:
            yield unpacker.decompress(piece, _PIECE_BYTES)
            piece = unpacker.unconsumed_tail
            if unpacker.eof:  # members of a file may follow each other
                piece, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)
        if not gzip:
            yield piece


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a size of {value!r}")
    return value


def _no_image(field: str, message: str, value: str) -> InvalidDocument:
    cure = "name the digest of an OCI image manifest for this machine (`skopeo copy --format oci` makes one)"
    return InvalidDocument(
        "image manifest", [Problem(field=field or "(document)", message=message, value=value, cure=cure)]
    )
