"""What is wrong with a spec, found before anything is started, all of it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from coldsnap.capsule.driver import RUN_DIR, UnitSpec
from coldsnap.errors import InvalidDocument, MissingCapability, Problem

__all__ = ["check_root", "check_spec", "spec_problems"]

_SHM = Path("/dev/shm")  # noqa: S108  (a tmpfs of the unit's own)
_OURS = (Path("/"), Path("/proc"), RUN_DIR, _SHM)
_OURS_BELOW = (Path("/proc"), RUN_DIR)


def check_root() -> None:
    """Raises MissingCapability when this process may not make namespaces."""
    if os.geteuid() != 0:
        raise MissingCapability(
            f"units need root, and this process runs as user {os.geteuid()}", cure="run as root, for example with sudo"
        )


def check_spec(spec: UnitSpec, *, needs_command: bool) -> None:
    """Raises MissingCapability without root, InvalidDocument with every problem of the spec."""
    check_root()
    if problems := tuple(spec_problems(spec, needs_command=needs_command)):
        raise InvalidDocument(f"unit {spec.unit}", problems)


def spec_problems(spec: UnitSpec, *, needs_command: bool) -> Iterator[Problem]:
    """Every problem that can be seen without root: command, file names, mounts."""
    if needs_command and not spec.command:
        yield Problem(field="command", message="is empty", cure="say what to run")
    words = {
        **{f"command[{number}]": word for number, word in enumerate(spec.command)},
        **{f"environment.{name}": f"{name}{value}" for name, value in spec.environment.items()},
    }
    for place, word in words.items():
        if "\0" in word:
            yield Problem(field=place, message="holds a NUL byte", value=repr(word), cure="remove it")
    for name in spec.environment:
        if not name or "=" in name:
            yield Problem(
                field=f"environment.{name}", message="is no variable name", value=repr(name), cure="rename it"
            )
    if not spec.cwd.is_absolute():
        yield Problem(field="cwd", message="is relative", value=str(spec.cwd), cure="name an absolute folder")
    for name in spec.files:
        if not name or "/" in name or name.startswith("."):
            yield Problem(
                field=f"files[{name}]",
                message="is not a plain name",
                value=repr(name),
                cure="no folders, no leading dot",
            )
    yield from _mount_problems(spec)


def _mount_problems(spec: UnitSpec) -> Iterator[Problem]:
    seen: set[Path] = set()
    for number, mount in enumerate(spec.mounts):
        place = f"mounts[{number}]"
        for end, path in (("source", mount.source), ("target", mount.target)):
            if not path.is_absolute() or ".." in PurePosixPath(path).parts:
                cure = "name an absolute path without '..'"
                yield Problem(field=f"{place}.{end}", message="is not absolute and clean", value=str(path), cure=cure)
            elif not path.exists() and not (end == "target" and (spec.root is not None or _SHM in path.parents)):
                yield Problem(field=f"{place}.{end}", message="does not exist", value=str(path), cure="make it first")
        if any(mount.target == ours for ours in _OURS) or any(ours in mount.target.parents for ours in _OURS_BELOW):
            cure = "choose another target; this one is the unit's own"
            yield Problem(field=f"{place}.target", message="is reserved", value=str(mount.target), cure=cure)
        if mount.target in seen:
            cure = "name each target once"
            yield Problem(field=f"{place}.target", message="is used twice", value=str(mount.target), cure=cure)
        seen.add(mount.target)
