"""Steps of the proof of shipping: a unit on an image, and what programs of others say of what was published."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import zstandard
from benchmarks._image import foreign, make_image
from benchmarks._image import judged as judged_image
from benchmarks._proof import Found
from benchmarks._ship_homes import MIB, Homes, made
from benchmarks.harness import ROOT

from coldsnap.core.digest import Digest
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.demo_parts import UNSEEN
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.stand import Stand

__all__ = ["ask_judges", "run_on_image"]


def run_on_image(homes: Homes) -> Found:
    """The unit on the root of an OCI image from the registry: captured, killed, restored; no daemon."""
    folder = made(homes.folder / "image")
    fake = homes.options.engine == PLUGIN.name
    one = make_image(folder / "layout", "none" if fake else homes.options.engine, f"{homes.relay.host}/org/root")
    reference = one.facts["reference"]
    packed_bytes = one.facts["bytes"]
    models = homes.home.model.parent
    captured = Stand(folder=made(folder / "stand"), model=homes.home.model, plugin=homes.home.plugin)
    homes.stack.callback(captured.tools.host.close)
    homes.stack.callback(captured.stop_all)
    homes.relay.reset()
    captured.capture(
        image=reference,
        python=one.facts["python"],
        model=f"/models/{homes.home.model.name}",
        mounts=[{"source": str(models), "target": "/models"}],
    )
    pulled_bytes = homes.relay.sent_bytes
    result = captured.restore("image-1")
    answers = captured.ask(UNSEEN)
    (unit,) = captured.tools.services.must_load("svc").units
    inside = Path(f"/proc/{unit.record['init_pid']}/root")
    hidden = not (inside / str(ROOT).lstrip("/")).exists()
    (root,) = captured.tools.state.roots.iterdir()
    given = [Path("/models"), captured.tools.state.path, Path("/run/coldsnap"), Path("/dev")]
    leaked = foreign(unit.record["init_pid"], image=root, given=given)
    captured.stop_all()
    judgement = judged_image(one, root, made(folder / "judged"))
    facts = {key: one.facts[key] for key in ("suite", "architecture", "python_version", "unpacked_bytes")}
    return Found(
        document={
            "image": reference,
            "packed_bytes": packed_bytes,
            **facts,
            "num_packages": len(one.facts["packages"]),
            "num_wheels": len(one.facts["wheels"]),
            "foreign_files": leaked,
            "judged": judgement,
            "restore_seconds": dict(result.seconds),
        },
        rows=[
            ("image", f"Debian {facts['suite']}, Python {facts['python_version']}, {packed_bytes / MIB:.0f} MiB"),
            ("pulled", f"{pulled_bytes / MIB:.0f} MiB"),
            ("restore", f"{result.seconds['total']:.2f} s"),
        ],
        aims={
            "tokens equal those of a cold process without an image": answers == homes.expected,
            "restored from the pack": result.source == "native",
            "pulled once": packed_bytes <= pulled_bytes < packed_bytes * 1.05 + MIB,
            "the host's files are out of sight": hidden,
            "every mapped file is the image's, or of a folder it was given": leaked == [],
            "skopeo and umoci agree": judgement["skopeo_digest_equal"] and judgement["umoci_differs"] == [],
            "the image starts by its own entry point": judgement["starts"],
            "nothing left": captured.leftovers() == [],
        },
    )


def ask_judges(homes: Homes) -> Found:
    """Programs of others read the published capsule."""
    homes.away.prepare("prepare-2")
    found = _judged(homes.shipped, "u0", made(homes.folder / "judged"))
    return Found(
        document=found,
        rows=[("files of the capsule", str(found["umoci_files"]))],
        aims={
            "skopeo inspect sees the artifact's digest": found["skopeo_digest_equal"],
            "umoci unpack gives every promised file": found["umoci_files"] > 0 and found["umoci_wrong"] == [],
        },
    )


def _judged(loaded: LoadedArtifact, unit: str, folder: Path) -> dict[str, Any]:
    """What ``skopeo`` and ``umoci`` say of a unit's capsule in its registry, beside what the artifact promises."""
    reference = next(one.reference for one in loaded.artifact.capsule.images if one.unit == unit)
    facts = json.loads(_output("skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"))
    copy, bundle = folder / "copy", folder / "bundle"
    _output(
        "skopeo", "copy", "--preserve-digests", "--src-tls-verify=false", f"docker://{reference}", f"oci:{copy}:{unit}"
    )
    _output("umoci", "unpack", "--rootless", "--image", f"{copy}:{unit}", str(bundle))
    promised = loaded.expected_files(unit)
    wrong = [
        path
        for path, (size, digest) in promised.items()
        if _unpacked(bundle / "rootfs" / "coldsnap" / path) != (size, digest)
    ]
    return {
        "skopeo_digest_equal": facts["Digest"] == str(loaded.capsule_digest(unit)),
        "skopeo_layers": len(facts["Layers"]),
        "umoci_files": len(promised),
        "umoci_wrong": wrong,
    }


def _unpacked(path: Path) -> tuple[int, Digest]:
    """Size and digest of a file as umoci left it: plain, or in parts that are each compressed."""
    state, size = hashlib.sha256(), 0
    parts = [path] if path.exists() else sorted(path.parent.glob(f"{path.name}.zst*"))
    for part in parts:
        with part.open("rb") as file:
            reader: Any = file
            if part != path:
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            while data := reader.read(MIB):
                state.update(data)
                size += len(data)
    return size, Digest.from_hex(state.hexdigest())


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=600).stdout
