"""The root file systems of units with an image: is one here, can it be had, bring it, and what its units see.

    <state root>/roots/<hex of the manifest>/     an unpacked image, shared by every unit that names its digest

``prepare`` and ``capture`` bring what is missing from the registry that the image's own reference names, each blob
proved on its way. Beside its image a unit sees its mounts, the state root, where packs are, and CRIU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldsnap.capsule.aside import remove_asides
from coldsnap.capsule.criu import criu_prefix
from coldsnap.capsule.driver import ContainerRoot, UnitRoot
from coldsnap.capsule.rootimage import RootLayer, RootManifest, parse_root_manifest, unpack_root
from coldsnap.core.digest import Digest
from coldsnap.core.launch import HOST_IMAGE, Launch, Runtime, Unit
from coldsnap.errors import Problem, Refused
from coldsnap.ops.containers import bring_images, container_problems, container_roots
from coldsnap.ops.operation import Operation
from coldsnap.ops.origins import Sources
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind
from coldsnap.ship.names import parse_reference
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold

__all__ = ["bring_roots", "root_problems", "unit_roots"]

FETCH_IMAGES = "fetch-images"
_LOCK_S = 24 * 3600.0


def root_problems(tools: Tools, launch: Launch, runtime: Runtime | None = None) -> Iterator[Problem]:
    """Images that are neither here nor to be had, and what keeps a runtime from using them. Asks no server."""
    if runtime is not None:
        yield from container_problems(tools, launch, runtime)
        return
    for index, unit in enumerate(launch.units):
        digest = _image(tools, unit)
        if digest is None or _folder(tools, digest).is_dir():
            continue
        why = ""
        if parse_reference(unit.image) is None:
            why = "its reference names no registry"
        elif tools.remotes.offline:
            why = tools.remotes.offline
        if why:
            yield Problem(
                field=f"launch.units[{index}].image",
                message=f"is not on this machine, and {why}",
                value=unit.image,
                cure="name it HOST/PATH@sha256:... and run it without offline mode once, or write host",
            )


def bring_roots(tools: Tools, op: Operation, launch: Launch, runtime: Runtime | None = None) -> None:
    """Have the image of every unit of this host here, unpacked. Idempotent; two that want one fetch it once.

    Raises Refused when one cannot be had, RemoteError, PayloadRejected, InvalidDocument for what is no OCI image,
    OutOfSpace, HostError.
    """
    if runtime is not None:
        bring_images(tools, op, launch, runtime)
        return
    missing = {
        digest: unit
        for unit in launch.units
        if (digest := _image(tools, unit)) is not None and not _folder(tools, digest).is_dir()
    }
    if not missing:
        return
    if problems := tuple(root_problems(tools, launch)):
        raise Refused("the images of the units", problems)
    with op.span(FETCH_IMAGES):
        for digest, unit in missing.items():
            _bring(tools, digest, unit)


def unit_roots(
    tools: Tools, launch: Launch, runtime: Runtime | None = None, *, service: str = ""
) -> dict[str, UnitRoot | ContainerRoot]:
    """The root of each unit that has an image. ``bring_roots`` was there before. ``service`` is what it will be of.

    Raises MissingCapability when the only CRIU is one of the system's: it would not be seen inside.
    """
    if runtime is not None:
        return dict(container_roots(tools, launch, runtime, service=service))
    found: dict[str, UnitRoot | ContainerRoot] = {}
    for unit in launch.units:
        if (digest := _image(tools, unit)) is not None:
            found[unit.id] = UnitRoot(lower=_folder(tools, digest), visible=(criu_prefix(), tools.state.path))
    return found


def _image(tools: Tools, unit: Unit) -> Digest | None:
    """The image of a unit that is placed here."""
    return unit.image_digest if unit.image != HOST_IMAGE and unit.host == tools.host.id else None


def _folder(tools: Tools, digest: Digest) -> Path:
    return tools.state.roots / digest.hex


def _bring(tools: Tools, digest: Digest, unit: Unit) -> None:
    reference = parse_reference(unit.image)
    assert reference is not None  # noqa: S101 - `root_problems` refused others
    sources = Sources(tools=tools, near=(), far=tools.remotes.registry(reference.repository))
    tools.state.make_roots()
    folder = _folder(tools, digest)
    with hold(tools.state.locks / f"root-{digest.hex}.lock", deadline_s=_LOCK_S, purpose=f"unpacking image {digest}"):
        if folder.is_dir():
            return
        remove_asides(folder)
        manifest = _manifest(tools, sources, digest)
        total = sum(layer.bytes for layer in manifest.layers)
        with tools.reporter.phase(f"fetch image of {unit.id}", total_bytes=total) as advance:

            @contextmanager
            def opened(layer: RootLayer) -> Iterator[Any]:
                item = Item(Kind.BLOB, layer.digest)
                with sources.pulled(item, layer.bytes, tools.state.staging, progress=advance) as staged:
                    os.lseek(staged.fd, 0, os.SEEK_SET)
                    with open(staged.fd, "rb", closefd=False) as file:
                        yield file

            unpack_root(folder, manifest.layers, opened)


def _manifest(tools: Tools, sources: Sources, digest: Digest) -> RootManifest:
    item = Item(Kind.MANIFEST, digest)
    with (
        sources.pulled(item, None, tools.state.staging, progress=lambda num_bytes: None) as staged,
        translated("read", staged.path),
    ):
        return parse_root_manifest(os.pread(staged.fd, staged.expected_bytes, 0), digest)
