"""What it takes to reach stores elsewhere, chosen once by ``cli``: limits, credentials, peers, or nothing at all.

What speaks HTTP is imported when a store is opened: most verbs never open one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.ship.access import HubAccess
from coldsnap.ship.limits import Limits

if TYPE_CHECKING:
    from coldsnap.ship.base import Source
    from coldsnap.ship.http import Http
    from coldsnap.ship.hub import Hub
    from coldsnap.ship.names import HubName, RegistryName
    from coldsnap.ship.registry import Registry

__all__ = ["OFFLINE", "Remotes"]


@dataclass(frozen=True, kw_only=True)
class Remotes:
    """Opens stores. ``offline`` is why nothing may be asked, in a few words; empty when everything may.

    ``peers`` are directories (state roots too) or URLs that may hold packs and capsules, nearest first; a directory is
    asked even offline. ``told`` are the names of those that did not answer and of which that was said. ``login_files``
    are docker's or podman's credential files. ``proxy`` gives the proxy for a URL, or None.
    """

    limits: Limits = field(default_factory=Limits)
    proxy: Callable[[str], str | None] | None = None
    hub_access: HubAccess = field(default_factory=HubAccess)
    login_files: Sequence[Path] = ()
    offline: str = ""
    peers: Sequence[str] = ()
    told: set[str] = field(default_factory=set, compare=False)

    @cached_property
    def http(self) -> Http:
        """The connections, kept as long as this record."""
        from coldsnap.ship.http import Http

        return Http(self.limits, proxy=self.proxy)

    def hub(self, name: HubName, *, revision: str = "") -> Hub:
        """A repository of the hub. Raises UsageError for an endpoint that is no web address."""
        from coldsnap.ship.hub import Hub

        self.hub_access.check()
        return Hub(name, self.http, self.hub_access, revision=revision)

    def registry(self, name: RegistryName, *, neighbours: Sequence[str] = (), records: Path | None = None) -> Registry:
        """A repository of a registry, with the login for it. Raises HostError for a damaged credential file."""
        from coldsnap.ship.logins import find_login
        from coldsnap.ship.registry import Registry

        login = find_login(name.host, self.login_files)
        return Registry(name, self.http, login, neighbours=neighbours, records=records)

    def near(self) -> tuple[Source, ...]:
        """The peers that may be asked. Raises UsageError, MissingCapability for URLs that cannot be opened."""
        from coldsnap.ship.anyurl import AnyUrl
        from coldsnap.ship.peer import Peer

        return tuple(
            AnyUrl(peer, self.limits) if "://" in peer else Peer(Path(peer))
            for peer in self.peers
            if not self.offline or "://" not in peer
        )


OFFLINE = Remotes(offline="no store elsewhere was set up")
"""Reaches nothing: what the verbs have unless somebody chooses otherwise."""
