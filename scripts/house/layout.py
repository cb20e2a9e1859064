"""An OCI image layout of finished layers: its documents, which are a function of the layers and the config."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from house.layers import Layer

TAG = "coldsnap"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer's file, and in a few words what it is."""

    what: str
    layer: Layer
    path: Path


def write_layout(out: Path, parts: Sequence[Part], *, architecture: str, config: Mapping[str, Any]) -> str:
    """Fill the folder `out`, which must not exist; the manifest's digest. Layers are linked, else copied."""
    blobs = out / "blobs/sha256"
    blobs.mkdir(parents=True)
    for part in parts:
        place = blobs / part.layer.digest.removeprefix("sha256:")
        try:
            os.link(part.path, place)
        except OSError:  # another disk
            shutil.copyfile(part.path, place)
    described = _blob(
        blobs,
        _CONFIG,
        {
            "architecture": architecture,
            "os": "linux",
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [part.layer.diff_id for part in parts]},
            "history": [{"created_by": f"coldsnap: {part.what}"} for part in parts],
        },
    )
    layers = [{"mediaType": _LAYER, "digest": part.layer.digest, "size": part.layer.bytes} for part in parts]
    manifest = _blob(
        blobs, _MANIFEST, {"schemaVersion": 2, "mediaType": _MANIFEST, "config": described, "layers": layers}
    )
    entry = {
        **manifest,
        "annotations": {"org.opencontainers.image.ref.name": TAG},
        "platform": {"architecture": architecture, "os": "linux"},
    }
    (out / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    (out / "index.json").write_bytes(_json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}))
    return str(manifest["digest"])


def _blob(blobs: Path, media_type: str, document: Mapping[str, Any]) -> dict[str, Any]:
    data = _json(document)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
