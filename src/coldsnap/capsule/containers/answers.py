"""What docker and podman say when something is wrong, as errors that name who must act. Pure.

Their words are no contract, so what is not recognised is a HostError with the words themselves.
"""

from __future__ import annotations

import re

from coldsnap.core.launch import Runtime
from coldsnap.errors import ColdsnapError, HostError, MissingCapability, OutOfSpace, ResourceBusy, UserError

__all__ = ["is_absent", "missing_program", "runtime_error"]

_TOLD = 400
_ABSENT = re.compile(r"no such (container|object)|no container with name or id|container not known", re.IGNORECASE)
_NO_DAEMON = re.compile(
    r"cannot connect to the docker daemon|is the docker daemon running|failed to connect to the docker api"
    r"|unable to connect to podman|cannot connect to podman",
    re.IGNORECASE,
)
_DENIED = re.compile(r"permission denied.*(docker|podman|\.sock)|got permission denied", re.IGNORECASE | re.DOTALL)
_NO_IMAGE = re.compile(
    r"no such image|image not known|unable to find image|manifest unknown|manifest for .* not found", re.IGNORECASE
)
_TAKEN = re.compile(r"name .* is already in use|is already in use by|name is in use", re.IGNORECASE)
_SPACE = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_LOGIN = re.compile(r"unauthorized|authentication required|access to the resource is denied", re.IGNORECASE)
_NO_PROGRAM = re.compile(r"exec:? .*(no such file|not found)|executable file .*not found", re.IGNORECASE | re.DOTALL)
_OFFLINE = re.compile(
    r"connection refused|no such host|network is unreachable|i/o timeout|dial tcp|deadline exceeded", re.IGNORECASE
)


def missing_program(runtime: Runtime) -> MissingCapability:
    """The program itself is not here."""
    cure = f"install {runtime}, or write `runtime: native` and capture again"
    return MissingCapability(f"{runtime} is not on this machine", cure=cure, facts={"runtime": runtime.value})


def is_absent(said: str) -> bool:
    """Whether the complaint is that there is no such container."""
    return _ABSENT.search(said) is not None


def runtime_error(runtime: Runtime, doing: str, said: str) -> ColdsnapError:
    """The error for a command that failed. ``doing`` reads as in "docker cannot <doing>"."""
    words = " ".join(said.split())[-_TOLD:] or "it said nothing"
    message = f"{runtime} cannot {doing}: {words}"
    facts = {"runtime": runtime.value, "said": words}
    if _DENIED.search(said):
        return MissingCapability(message, cure=f"run as root, or as a user whom {runtime} obeys", facts=facts)
    if _NO_DAEMON.search(said):
        cure = "start its daemon (`systemctl start docker`), or point DOCKER_HOST at it"
        return MissingCapability(message, cure=cure, facts=facts)
    if _SPACE.search(said):
        return OutOfSpace(message, cure=f"free some space where {runtime} keeps its images", facts=facts)
    if _TAKEN.search(said):
        cure = f"see whose it is with `{runtime} ps --all`, and remove it"
        return ResourceBusy(message, cure=cure, facts=facts)
    if _LOGIN.search(said):
        return UserError(message, cure=f"log in with `{runtime} login`, or check the image's name", facts=facts)
    if _NO_IMAGE.search(said):
        cure = "`coldsnap prepare` brings it from its registry; check its name and digest"
        return UserError(message, cure=cure, facts=facts)
    if _NO_PROGRAM.search(said):
        cure = "say with `python` in the recipe where the image has its Python, 3.11 or newer"
        return UserError(message, cure=cure, facts=facts)
    if _OFFLINE.search(said):
        return HostError(message, cure="see whether the registry can be reached from here", facts=facts)
    return HostError(message, cure=f"see what it says, and `{runtime} info`", facts=facts)
