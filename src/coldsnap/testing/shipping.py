"""Verbs of shipping as functions of a process of its own, so that a test can kill it; and a wire that kills it.

A child gets an ``Errand`` and runs one verb on a state root. ``Tripwire`` counts what a server sees, requests and
pieces of bodies, and kills a child at a chosen count: a random point of the work, however fast the machine is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.points import install
from coldsnap.errors import ResourceBusy
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.preparing import prepare
from coldsnap.ops.publish import publish, publish_capsules_request
from coldsnap.ops.publish_native import publish_native, publish_packs_request
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.ops.tools import Tools
from coldsnap.ops.unpublishing import plan_unpublish, run_unpublish
from coldsnap.ship.access import HubAccess
from coldsnap.ship.base import Item, Kind, Outgoing
from coldsnap.ship.http import Http
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_hub, parse_registry
from coldsnap.ship.registry import Registry
from coldsnap.ship.remotes import Remotes
from coldsnap.ship.secret import Secret
from coldsnap.testing.desk import desk
from coldsnap.testing.web import Web

__all__ = ["Errand", "Tripwire", "run_errand", "send_blob", "start_errand", "start_sending"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, "huggingface_hub.hf_api", "httpx2"])


@dataclass(frozen=True, kw_only=True)
class Errand:
    """One verb: ``publish``, ``publish-native``, ``prepare``, ``delete`` with what ``--scope`` says in ``to``, or
    ``gc``, which is content when another operation runs.

    ``to`` is else the target, ``output`` the new descriptor. ``stops_at``: the point at which it kills itself.
    ``limit_bytes`` is how much more memory than it has at the start the child may take for data.
    """

    verb: str
    operation_id: str
    state_root: Path
    artifact: Path
    limits: Limits
    hub_url: str = ""
    token: str = ""
    login_files: tuple[Path, ...] = ()
    to: str = ""
    output: Path = Path()
    limit_bytes: int | None = None
    stops_at: str = ""


def run_errand(errand: Errand) -> None:
    """Run it here. Raises what the verb raises."""
    if errand.limit_bytes is not None:
        status = Path("/proc/self/status").read_text()
        now = 1024 * int(status.split("VmData:")[1].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (now + errand.limit_bytes, now + errand.limit_bytes))
    access = HubAccess(endpoint=errand.hub_url, token=Secret(errand.token) if errand.token else None)
    remotes = Remotes(limits=errand.limits, hub_access=access, login_files=errand.login_files)
    with desk(errand.state_root) as one, contextlib.closing(remotes.http):
        tools = replace(one.tools, remotes=remotes)
        loaded = load_artifact(errand.artifact)
        if errand.stops_at:
            install(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == errand.stops_at else None)
        if errand.verb == "delete":
            _delete(tools, loaded, errand.to)
        elif errand.verb == "gc":
            with contextlib.suppress(ResourceBusy):
                run_tidy(tools, plan_tidy(tools))
        elif errand.verb == "prepare":
            prepare(tools, loaded, activation_request(loaded, operation_id=errand.operation_id))
        elif errand.verb == "publish":
            capsules = publish_capsules_request(
                loaded, operation_id=errand.operation_id, to=parse_registry(errand.to), output=errand.output
            )
            publish(tools, loaded, capsules)
        else:
            packs = publish_packs_request(
                loaded, operation_id=errand.operation_id, to=parse_hub(errand.to), output=errand.output
            )
            publish_native(tools, loaded, packs)


def _delete(tools: Tools, loaded: LoadedArtifact, scope: str) -> None:
    """As the command does it."""
    local = plan_delete(tools, loaded.path) if scope != "published" else None
    if scope != "local":
        run_unpublish(tools, plan_unpublish(tools, loaded))
    if local is not None:
        run_delete(tools, local)


def start_errand(errand: Errand) -> ForkServerProcess:
    """Run it in a process of its own, which is already started; its exit code is 0 when the verb succeeded."""
    process = _CONTEXT.Process(target=run_errand, args=(errand,))
    process.start()
    return process


def send_blob(to: str, path: Path, records: Path, limits: Limits) -> None:
    """Write one file as a blob to the registry's repository ``to``, remembering the upload below ``records``."""
    data = path.read_bytes()
    one = Outgoing(item=Item(Kind.BLOB, Digest.of(data)), bytes=len(data), path=path)
    with Http(limits) as http:
        Registry(parse_registry(to), http, records=records).write([one])


def start_sending(to: str, path: Path, records: Path, limits: Limits) -> ForkServerProcess:
    """``send_blob`` in a process of its own."""
    process = _CONTEXT.Process(target=send_blob, args=(to, path, records, limits))
    process.start()
    return process


class Tripwire:
    """Counts what ``servers`` see; at the count ``kills_at`` it kills ``victim``. Without one it only counts."""

    def __init__(self, servers: Sequence[Web]) -> None:
        self.count = 0
        self.kills_at = 0
        self.victim: ForkServerProcess | None = None
        for server in servers:
            server.tripwire = self.touch

    def arm(self, victim: ForkServerProcess | None, kills_at: int) -> None:
        """Count from zero."""
        self.count, self.victim, self.kills_at = 0, victim, kills_at

    def touch(self) -> None:
        """Something happened at a server."""
        self.count += 1
        if self.victim is not None and self.count == self.kills_at:
            self.victim.kill()  # who waits for it is the test alone
