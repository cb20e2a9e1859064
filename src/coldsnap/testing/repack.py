"""A pack that is whole, proved and wrong: one tensor changed, everything hashed again.

It is what an acceptance check exists for, because no digest can notice it.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.extents import ModelExtent, file_layout, pack_order, padded
from coldsnap.core.manifest import native_manifest_bytes, parse_native_manifest
from coldsnap.core.messages import Exported
from coldsnap.errors import UsageError

__all__ = ["ChangedPack", "repack_with_change"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedPack:
    """The changed pack and the manifest that fits it."""

    pack: Path
    sha256: Digest
    bytes: int
    native_manifest: Path


def repack_with_change(exported: Exported, folder: Path) -> ChangedPack:
    """Swap the two halves of the largest tensor of an exported pack, and write it with its manifest into `folder`."""
    if exported.pack is None:
        raise UsageError("the export has no pack to change")
    folder.mkdir(mode=0o700)
    manifest = parse_native_manifest(Path(exported.native_manifest.path).read_bytes())
    packed = Path(exported.pack.path).read_bytes()
    largest = max(manifest.model_weight_extents, key=lambda one: one.size)
    contents: dict[int, bytes] = {}
    changed: list[ModelExtent] = []
    for one in manifest.model_weight_extents:
        data = packed[one.offset : one.offset + one.size]
        if one is largest:
            half = one.size // 4 * 2
            data = data[half:] + data[:half]
        contents[one.ptr] = data
        changed.append(replace(one, sha256=Digest.of(data), crc32=zlib.crc32(data)))
    ordered = pack_order(changed)
    layout = file_layout(one.size for one in ordered)
    extents = tuple(replace(one, offset=offset) for one, offset in zip(ordered, layout.offsets, strict=True))
    content = b"".join(contents[one.ptr].ljust(padded(one.size), b"\0") for one in extents)
    digest = Digest.from_hash(hashlib.sha256(content))
    if manifest.model_weights is None:
        raise UsageError("the manifest names no pack")
    blob = replace(manifest.model_weights, sha256=digest)
    result = ChangedPack(
        pack=folder / "model-weights.pack",
        sha256=digest,
        bytes=len(content),
        native_manifest=folder / "native-manifest.json",
    )
    document = native_manifest_bytes(replace(manifest, model_weight_extents=extents, model_weights=blob))
    for path, data in ((result.pack, content), (result.native_manifest, document)):
        path.write_bytes(data)
        path.chmod(0o600)
    return result
