"""What the steps of the proof of shipping share: two homes, a hub, and a relay that counts before a registry."""

from __future__ import annotations

import argparse
import contextlib
import select
import shutil
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coldsnap.cli.wiring import installed_engines
from coldsnap.core.messages import Answer
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.demo_parts import UNSEEN
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.publish import publish, publish_capsules_request
from coldsnap.ops.publish_native import publish_native, publish_packs_request
from coldsnap.ship.names import RegistryName, parse_hub, parse_registry
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.hub import HubServer
from coldsnap.testing.stand import Stand

__all__ = ["MIB", "TOKEN", "Homes", "Relay", "made"]

MIB = 1 << 20
TOKEN = "hf_PlantedTokenOfTheShipProof"  # noqa: S105 - for a server that this program starts
_TENSORS = {f"layers.{number}.weight": 2_000_000 + 4096 * number for number in range(8)}


def made(path: Path) -> Path:
    """A new private folder."""
    path.mkdir(parents=True, mode=0o700)
    return path


class Relay:
    """A loopback port before a server that cannot be asked what it saw; counts the bytes of both ways.

    ``received_bytes`` went to the server, ``sent_bytes`` came from it, headers included.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.received_bytes = self.sent_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def host(self) -> str:
        """Address and port."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self.received_bytes = self.sent_bytes = 0

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    with self._lock:
                        if source is client:
                            self.received_bytes += len(data)
                        else:
                            self.sent_bytes += len(data)
                    (server if source is client else client).sendall(data)


@dataclass(kw_only=True)
class Homes:
    """Servers, and where is captured and where to."""

    options: argparse.Namespace
    folder: Path
    hub: HubServer
    relay: Relay
    stack: ExitStack

    @cached_property
    def home(self) -> Stand:
        """Where the capture is made."""
        if self.options.engine == PLUGIN.name:
            model = write_checkpoint(self.folder / "model", tensors=_TENSORS)
            one = Stand(folder=made(self.folder / "home"), model=model)
        else:
            plugin = choose_engine(installed_engines(), self.options.engine)
            one = Stand(folder=made(self.folder / "home"), model=self.options.model.absolute(), plugin=plugin)
        one.capture()
        self.stack.callback(one.tools.host.close)
        return one

    @cached_property
    def expected(self) -> tuple[Answer, ...]:
        """What a separate cold process answers."""
        return self.home.cold(UNSEEN)

    @cached_property
    def shipped(self) -> LoadedArtifact:
        """The descriptor with a commit and references, published through ``publish_native`` and ``publish``."""
        home = self.home
        native, both = home.folder / "native.json", home.folder / "shipped.json"
        packs = publish_packs_request(
            home.loaded, operation_id="publish-native-1", to=parse_hub("hf://org/packs"), output=native
        )
        self.sent = {"packs": publish_native(home.tools, home.loaded, packs).document()}
        loaded = load_artifact(native)
        capsules = publish_capsules_request(loaded, operation_id="publish-1", to=self.capsules_go_to(), output=both)
        self.sent["capsules"] = publish(home.tools, loaded, capsules).document()
        return load_artifact(both)

    @cached_property
    def away(self) -> Stand:
        """Another folder, another state root, another port; it has the descriptor and nothing else."""
        folder = made(self.folder / "elsewhere" / "of" / "another" / "user")
        one = Stand(folder=folder, model=self.home.model, plugin=self.home.plugin, port=free_port())
        shutil.copyfile(self.shipped.path, folder / "copied.json")
        one.loaded, one.planned = load_artifact(folder / "copied.json"), self.home.planned
        self.stack.callback(one.tools.host.close)
        self.stack.callback(one.stop_all)
        return one

    def capsules_go_to(self) -> RegistryName:
        """The repository of capsules, behind the relay."""
        return parse_registry(f"oci://{self.relay.host}/org/capsules")
