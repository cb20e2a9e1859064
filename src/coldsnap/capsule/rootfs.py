"""A unit's own root: an unpacked image below an overlay, entered by the init before it makes the rest of the world.

    pin what stays of the host -> overlay(image, a tmpfs for what is written) -> /dev, /sys, what stays -> pivot_root

Runs inside the init, so the standard library only, and nothing may be imported after ``enter``: the host's Python is
then out of sight. What the tree writes into the root is lost with the unit; a restore begins with the image again, so a
tree that is to be frozen keeps its files in the unit's private tmpfs or in a mount.
"""

from __future__ import annotations

import contextlib
import encodings.ascii
import encodings.latin_1
import os
from typing import Any

from coldsnap.capsule import inside, linux

__all__ = ["enter", "pin"]

_STAGE = "/run/coldsnap"
_HOST_TREES = ("/dev", "/sys")

LOOKED_UP_LATER = (encodings.ascii, encodings.latin_1)
Pinned = list[tuple[int, str]]


def pin(root: dict[str, Any]) -> Pinned:
    """Detached copies of everything of the host that stays visible, each with its place."""
    return [(linux.clone_tree(path), path) for path in (*_HOST_TREES, *root["visible"])]


def enter(root: dict[str, Any], pinned: Pinned) -> None:
    """Make the image of ``root`` this mount namespace's root, with ``pinned`` where they were."""
    os.makedirs(_STAGE, mode=0o755, exist_ok=True)
    linux.mount_tmpfs(_STAGE, size_bytes=root["upper_bytes"], mode=0o700)
    for name in ("upper", "work", "root"):
        os.mkdir(f"{_STAGE}/{name}", 0o755)
    new = f"{_STAGE}/root"
    linux.mount_overlay(new, lower=root["lower"], upper=f"{_STAGE}/upper", work=f"{_STAGE}/work")
    for tree, path in pinned:
        inside.make_target(tree, new + path)
        linux.attach_tree(tree, new + path)
        os.close(tree)
    for name in ("proc", "tmp", "run"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{new}/{name}", 0o1777 if name == "tmp" else 0o755)
    linux.pivot_into(new)
    os.chdir("/")
