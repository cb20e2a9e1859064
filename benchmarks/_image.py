"""The image of the proof of shipping: made and pushed by `./run image`, judged by programs of others."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

from coldsnap.testing.mapped import foreign_files
from coldsnap.testing.stand import children

_PATIENCE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image layout and what `./run image --json` says of it."""

    layout: Path
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """For tools that read layouts."""
        return f"{self.layout}:{self.facts['tag']}"


def make_image(layout: Path, engine: str, place: str) -> Image:
    """Made, and pushed to ``HOST/PATH``; layers of before cost nothing. ``engine`` is an extra, or ``none``."""
    words: list[str | Path] = [
        sys.executable,
        ROOT / "run",
        "image",
        layout,
        "--engine",
        engine,
        "--push",
        place,
        "--json",
    ]
    said = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_S).stdout
    return Image(layout=layout, facts=json.loads(said))


def judged(image: Image, ours: Path, folder: Path) -> dict[str, Any]:
    """What skopeo and umoci make of it, beside the root ``ours`` that coldsnap unpacked; and whether it starts.

    It is started as umoci's runtime config says, in a changed root: the image's own entry point and environment.
    """
    facts = json.loads(_output("skopeo", "inspect", f"oci:{image.name}"))
    bundle = folder / "bundle"
    _output("umoci", "unpack", "--image", image.name, str(bundle))
    root = bundle / "rootfs"
    theirs, mine = dict(_files(root)), dict(_files(ours))
    process = json.loads((bundle / "config.json").read_text())["process"]
    environment = dict(entry.split("=", 1) for entry in process["env"])
    started = subprocess.run(
        [*process["args"]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
        preexec_fn=lambda: os.chroot(root),
        cwd="/",
    )
    return {
        "skopeo_digest_equal": facts["Digest"] == image.facts["digest"],
        "umoci_files": len(theirs),
        "umoci_differs": sorted(path for path in theirs.keys() | mine.keys() if theirs.get(path) != mine.get(path))[
            :20
        ],
        "starts": started.returncode == 0 and "Usage: coldsnap" in started.stdout,
    }


def foreign(init_pid: int, *, image: Path, given: list[Path]) -> list[str]:
    """Mapped files of the tree below a unit's init that are neither the image's nor of a folder it was given."""
    return sorted({path for pid in children(init_pid) for path in foreign_files(pid, image=image, given=given)})


def _files(root: Path) -> Iterator[tuple[str, tuple[int, int, int, str]]]:
    """Path, mode, owner and content or target of everything below a root but the root itself."""
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder, name)
            status = path.lstat()
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = str(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            yield str(path.relative_to(root)), (status.st_mode, status.st_uid, status.st_gid, content)


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=_PATIENCE_S).stdout
