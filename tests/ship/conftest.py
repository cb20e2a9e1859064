"""A captured artifact of the fake engine, a hub and a registry, and desks with empty state roots to bring it to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.preparing import PrepareResult, prepare
from coldsnap.ops.publication import Published
from coldsnap.ops.publish import AtRegistry, publish, publish_capsules_request
from coldsnap.ops.publish_native import AtHub, publish_native, publish_packs_request
from coldsnap.ops.tools import Tools
from coldsnap.ship.access import HubAccess
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_hub, parse_registry
from coldsnap.ship.remotes import Remotes
from coldsnap.ship.secret import Secret
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk, desk, plan
from coldsnap.testing.hub import HubServer
from coldsnap.testing.registry import RegistryServer
from coldsnap.testing.web import Web

TOKEN = "hf_PlantedTokenOfTheHub0123456789"
PASSWORD = "PlantedPasswordOfTheRegistry"
LIMITS = Limits(
    attempts=3, first_pause_s=0.01, longest_pause_s=0.02, retry_after_s=1.0, range_bytes=1 << 14,
    request_bytes=1 << 14, chunk_bytes=1 << 14,
    num_streams=2,
)  # fmt: skip


@dataclass
class Harbour:
    """An artifact here, servers, and as many other hosts as a test wants."""

    folder: Path
    home: Desk
    loaded: LoadedArtifact
    hub: HubServer
    registry: RegistryServer
    remotes: Remotes
    stack: ExitStack
    counter: list[int] = field(default_factory=lambda: [0])

    @property
    def tools(self) -> Tools:
        return replace(self.home.tools, remotes=self.remotes)

    def next_id(self, word: str) -> str:
        self.counter[0] += 1
        return f"{word}-{self.counter[0]}"

    def publish(
        self, output: str = "published.json", loaded: LoadedArtifact | None = None, **more: Any
    ) -> Published[AtRegistry]:
        loaded = loaded or self.loaded
        to = parse_registry(more.pop("to", f"oci://{self.registry.host}/org/capsules"))
        request = publish_capsules_request(
            loaded, operation_id=self.next_id("publish"), to=to, output=self.folder / output, **more
        )
        return publish(self.tools, loaded, request)

    def publish_native(
        self, output: str = "native.json", loaded: LoadedArtifact | None = None, **more: Any
    ) -> Published[AtHub]:
        loaded = loaded or self.loaded
        to = parse_hub(more.pop("to", "hf://org/packs"))
        request = publish_packs_request(
            loaded, operation_id=self.next_id("publish-native"), to=to, output=self.folder / output, **more
        )
        return publish_native(self.tools, loaded, request)

    def publish_both(self) -> LoadedArtifact:
        self.publish_native("native.json")
        self.publish("both.json", load_artifact(self.folder / "native.json"))
        return load_artifact(self.folder / "both.json")

    def elsewhere(self, name: str = "b", **changes: Any) -> Tools:
        """The tools of a host with an empty state root."""
        tools = self.stack.enter_context(desk(self.folder / f"state-{name}")).tools
        remotes = replace(self.remotes, **changes)
        self.stack.callback(remotes.http.close)
        return replace(tools, remotes=remotes)

    def prepare(self, tools: Tools, loaded: LoadedArtifact, **changes: Any) -> PrepareResult:
        return prepare(tools, loaded, activation_request(loaded, operation_id=self.next_id("prepare"), **changes))

    @property
    def servers(self) -> tuple[Web, ...]:
        return self.hub, self.registry


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nobody changes."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def harbour(tmp_path: Path, model: Path) -> Iterator[Harbour]:
    """See ``Harbour``."""
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    with ExitStack() as stack:
        home = stack.enter_context(desk(tmp_path / "state"))
        planned = plan(model, tmp_path / "artifact.json")
        result = capture(home.tools, planned.request, planned.model)
        hub = stack.enter_context(HubServer(tmp_path / "hub", token=TOKEN, part_bytes=1 << 14))
        registry = stack.enter_context(RegistryServer(tmp_path / "registry", login=("me", PASSWORD), bearer=True))
        login = tmp_path / "config.json"
        login.write_text(
            f'{{"auths": {{"{registry.host}": {{"username": "me", "password": "{PASSWORD}"}}}}}}', encoding="utf-8"
        )
        remotes = Remotes(
            limits=LIMITS, hub_access=HubAccess(endpoint=hub.url, token=Secret(TOKEN)), login_files=(login,)
        )
        yield Harbour(
            folder=tmp_path,
            home=home,
            loaded=load_artifact(result.artifact_path),
            hub=hub,
            registry=registry,
            remotes=remotes,
            stack=stack,
        )
        remotes.http.close()
