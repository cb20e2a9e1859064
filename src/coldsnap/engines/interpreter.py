"""What another Python has, asked without importing any of it: its version, packages, and what plugs into them.

An engine may live in an environment of its own. The question is asked of that very interpreter, with the variables
that the engine process will have, by a small script of the standard library: coldsnap need not be there to answer.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from coldsnap.errors import MissingCapability

__all__ = ["Interpreter", "Package", "look_at"]

_PATIENCE_S = 120.0
_SCRIPT = """
import json, sys
from importlib import metadata
from importlib.util import find_spec
modules, group = json.loads(sys.argv[1]), sys.argv[2]
found = {}
for module, names in modules.items():
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        continue
    version = name = None
    for one in names:
        try:
            version, name = metadata.version(one), one
            break
        except metadata.PackageNotFoundError:
            pass
    found[module] = {"origin": spec.origin, "version": version, "distribution": name}
plugins = [one.name for one in metadata.entry_points().select(group=group)] if sys.version_info >= (3, 10) else []
sys.stdout.write("\\n" + json.dumps({"version": sys.version_info[:3], "packages": found, "plugins": plugins}) + "\\n")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An importable package: the folder that holds it, and the distribution that brought it, if one did."""

    folder: Path
    version: str | None
    distribution: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """What was found. ``packages``: by import name, those that are there; ``plugins``: names in the group asked for."""

    python: str
    version: tuple[int, int, int]
    packages: Mapping[str, Package] = field(default_factory=dict)
    plugins: frozenset[str] = frozenset()


def look_at(
    python: str,
    modules: Mapping[str, Sequence[str]],
    *,
    group: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Interpreter:
    """Ask ``python`` for ``modules`` (top-level import name -> names of distributions), and for entry points ``group``.

    ``environment`` is all that it is started with. Raises MissingCapability when it cannot be run, or gives no answer.
    """
    command = [python, "-B", "-c", _SCRIPT, json.dumps({name: list(names) for name, names in modules.items()}), group]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except OSError as error:
        raise _no_answer(python, f"cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _no_answer(python, f"said nothing within {_PATIENCE_S:g} s") from error
    said = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        found = json.loads(said[-1])  # whatever an environment prints at start comes before
        return Interpreter(
            python=python,
            version=tuple(found["version"]),
            packages={
                name: Package(
                    folder=Path(one["origin"]).parent.parent, version=one["version"], distribution=one["distribution"]
                )
                for name, one in found["packages"].items()
            },
            plugins=frozenset(found["plugins"]),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or said or ["nothing"])[-1]
        raise _no_answer(python, f"is no Python that answers (status {done.returncode}): {last[:200]}") from error


def _no_answer(python: str, why: str) -> MissingCapability:
    return MissingCapability(
        f"the interpreter {python} {why}",
        cure="name a Python from 3.11 on that has the engine and coldsnap (in a recipe: python: /path/to/bin/python)",
        facts={"python": python},
    )
