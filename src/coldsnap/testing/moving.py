"""One object to a store and back, in a process with little memory."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

from coldsnap.ship.access import HubAccess
from coldsnap.ship.base import Item, Kind, Outgoing, Sink, Source
from coldsnap.ship.http import Http
from coldsnap.ship.hub import Hub
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import HubName, RegistryName
from coldsnap.ship.pull import pulled
from coldsnap.ship.registry import Registry

__all__ = ["move_both_ways"]


def move_both_ways(hub_url: str, registry: str, one: Outgoing, folder: Path, more_bytes: int) -> int:
    """Write ``one`` to a hub or a registry, pull it back to ``folder/back``; the peak of resident memory in bytes.

    From the start on this process may take ``more_bytes`` for data, and fails with MemoryError beyond.
    """
    import huggingface_hub.hf_api  # noqa: F401 - so that its size is not counted

    folder.mkdir()
    now = 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes, now + more_bytes))
    limits = Limits()
    with Http(limits) as http:
        if hub_url:
            hub = Hub(HubName(repository="org/large"), http, HubAccess(endpoint=hub_url))
            source: Source = hub.at(hub.write([one]).revision)
        else:
            one = replace(one, item=Item(Kind.BLOB, one.item.digest))
            sink: Sink = Registry(RegistryName(host=registry, path="large"), http)
            sink.write([one])
            source = sink
        with pulled(source, one.item, one.bytes, folder, limits=limits) as staged:
            staged.path.rename(folder / "back")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
