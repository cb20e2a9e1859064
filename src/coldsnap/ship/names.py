"""Addresses of stores, parsed once.

hf://org/repo[@branch]             a model repository of a hub; reading needs a commit of 40 hex digits instead
oci://host[:port]/path             a repository of a registry: https, or http on this machine's own addresses
oci+http://host[:port]/path        the same without TLS, when somebody decided so
host[:port]/path@sha256:<hex>      a capsule there, as an artifact names it (oci+http:// in front is kept)
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from coldsnap.core.digest import Digest
from coldsnap.errors import UsageError
from coldsnap.ship.addresses import is_host

__all__ = [
    "HubName",
    "ImageReference",
    "RegistryName",
    "hub_repository",
    "is_commit",
    "parse_hub",
    "parse_reference",
    "parse_registry",
]

_WORD = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_REPOSITORY = re.compile(rf"(?!.*(?:\.\.|--|\.git\Z)){_WORD}/{_WORD}", re.ASCII)  # as a hub names them
_BRANCH = re.compile(
    r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|\Z)))[A-Za-z0-9](?:[\w./-]{0,126}[\w-])?", re.ASCII
)  # as git does
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::(?P<port>[0-9]{1,5}))?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_INSECURE = "oci+http://"
_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_LOGIN = re.compile(r"[a-z+]+://(?:[^@]*:[^@]*@(?!sha256:)|[^/@]*@[^/@]*/)")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """A repository of a hub, and the branch that is written to."""

    repository: str
    branch: str = "main"

    @property
    def place(self) -> str:
        """Equal for all names that may mean this repository: a hub tells no two apart by the case of letters."""
        return f"hf://{self.repository.lower()}"

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (f"@{self.branch}" if self.branch != "main" else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryName:
    """A repository of a registry. ``host`` has its port, if any."""

    host: str
    path: str
    insecure: bool = False

    @property
    def url(self) -> str:
        """Scheme and host."""
        scheme = "http" if self.insecure or _is_loopback(self.host) else "https"
        return f"{scheme}://{'registry-1.docker.io' if self.host == 'docker.io' else self.host}"

    @property
    def place(self) -> str:
        """Equal for all names that may mean this repository.

        With or without TLS and the port that goes with it, any case of letters, any address of this machine.
        """
        found = _HOST.fullmatch(self.host)
        name, port = _without_port(self.host).lower(), int(found["port"] or 0) if found is not None else 0
        if _is_loopback(self.host):
            name = "localhost"
        elif name in _DOCKER_HUB:
            name = "docker.io"
        return f"{name}:{0 if port in (80, 443) else port}/{self.path}"

    def __str__(self) -> str:
        return f"{_INSECURE if self.insecure else 'oci://'}{self.host}/{self.path}"

    def reference(self, digest: Digest) -> str:
        """How an artifact names a capsule of this repository."""
        return f"{_INSECURE if self.insecure else ''}{self.host}/{self.path}@{digest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageReference:
    """A capsule in a registry."""

    repository: RegistryName
    digest: Digest


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit, which cannot move."""
    return _COMMIT.fullmatch(revision) is not None


def hub_repository(text: str) -> HubName | None:
    """A repository as a document names it, ``org/repo``, perhaps with ``hf://`` in front; None for anything else.

    Whoever wrote the document may not choose what else is asked of the hub with our token: no ``..``, query or branch.
    """
    name = text.removeprefix("hf://")
    return HubName(repository=name) if _REPOSITORY.fullmatch(name) is not None else None


def parse_hub(text: str, *, field: str = "--to") -> HubName:
    """``hf://org/repo[@branch]``. Raises UsageError."""
    _no_login(text, field)
    rest = text.removeprefix("hf://")
    repository, at_sign, branch = rest.partition("@")
    if not text.startswith("hf://") or repository.startswith("hf://") or hub_repository(repository) is None:
        raise UsageError(f"{field}: {text!r} is no repository of a hub", cure="write hf://ORG/REPO or hf://ORG/REPO@BRANCH")  # fmt: skip # noqa: E501
    if at_sign and _BRANCH.fullmatch(branch) is None:
        raise UsageError(f"{field}: {branch!r} is no branch", cure="write letters, digits, '.', '_', '-' or '/'")
    if is_commit(branch):
        raise UsageError(f"{field}: {branch} is a commit, and commits never change", cure="name a branch, such as main")
    return HubName(repository=repository, branch=branch or "main")


def parse_registry(text: str, *, field: str = "--to") -> RegistryName:
    """``oci://host[:port]/path``. Raises UsageError."""
    _no_login(text, field)
    insecure = text.startswith(_INSECURE)
    rest = text.removeprefix(_INSECURE).removeprefix("oci://")
    host, slash, path = rest.partition("/")
    if rest == text or not slash or not _is_host(host) or _PATH.fullmatch(path) is None or len(path) > 200:
        cure = "write oci://HOST[:PORT]/PATH in lower-case letters and digits, without tag or digest"
        raise UsageError(f"{field}: {text!r} is no repository of a registry", cure=cure)
    return RegistryName(host=host, path=path, insecure=insecure)


def parse_reference(text: str) -> ImageReference | None:
    """A capsule's reference when it names a registry, None when it is only a local name such as ``main@sha256:...``."""
    name, at_sign, digest = text.rpartition("@")
    insecure = name.startswith(_INSECURE)
    host, slash, path = name.removeprefix(_INSECURE).partition("/")
    if not at_sign or not slash or not _is_host(host) or _PATH.fullmatch(path) is None:
        return None
    if "." not in host and ":" not in host and host != "localhost":
        return None
    try:
        found = Digest.parse(digest)
    except ValueError:
        return None
    return ImageReference(repository=RegistryName(host=host, path=path, insecure=insecure), digest=found)


def _no_login(text: str, field: str) -> None:
    """Raise UsageError, without the text itself, for one that seems to hold a user or a password."""
    if _LOGIN.match(text) is not None:
        cure = "leave it out: a hub takes HF_TOKEN, a registry what `docker login` wrote"
        raise UsageError(f"{field}: the address has a part before '@', as for a user or a password", cure=cure)


def _is_host(text: str) -> bool:
    found = _HOST.fullmatch(text)
    if found is None or not (found["port"] is None or 0 < int(found["port"]) <= 65535):
        return False
    return is_host(_without_port(text))


def _is_loopback(host: str) -> bool:
    name = _without_port(host)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _without_port(host: str) -> str:
    """The name or address alone, brackets taken off."""
    return re.sub(r"(?<=[^:]):[0-9]+\Z", "", host).strip("[]")
