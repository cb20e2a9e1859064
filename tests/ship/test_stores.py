"""Every store keeps the contract, on the real thing and on the shipped fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from coldsnap.ship.anyurl import AnyUrl
from coldsnap.ship.base import Kind, Outgoing, Sink, Source
from coldsnap.ship.directory import Directory
from coldsnap.ship.http import Http
from coldsnap.ship.hub import Hub, HubAccess
from coldsnap.ship.layout import Layout
from coldsnap.ship.limits import Limits
from coldsnap.ship.logins import Login
from coldsnap.ship.names import HubName, RegistryName
from coldsnap.ship.peer import Peer
from coldsnap.ship.registry import Registry
from coldsnap.ship.secret import Secret
from coldsnap.ship.wrappers import Caching, FallOver
from coldsnap.testing.hub import HubServer
from coldsnap.testing.registry import RegistryServer, real_registry
from coldsnap.testing.ship_suite import SinkContract, SourceContract
from coldsnap.testing.web import Web

QUICK = Limits(
    attempts=3, first_pause_s=0.01, longest_pause_s=0.05, chunk_bytes=1 << 20, range_bytes=1 << 20,
    request_bytes=1 << 20,
)  # fmt: skip


@dataclass
class Place:
    """A store, and how to read what was put into it."""

    store: Sink
    reading: Callable[[str], Source] | None = None
    web: Web | None = None

    def put(self, objects: Sequence[Outgoing]) -> Source:
        revision = self.store.write(objects).revision
        return self.reading(revision) if self.reading is not None else self.store

    def moved_bytes(self) -> int | None:
        return self.web.received_bytes if self.web is not None else None


class TestDirectory(SinkContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> Place:
        return Place(Directory(tmp_path / "store"))


class TestPeer(SinkContract):
    """As a plain directory, which it reads."""

    @pytest.fixture
    def ground(self, tmp_path: Path) -> Place:
        return Place(Peer(tmp_path / "store"))


@dataclass
class OtherRoot:
    """A state root of somebody else, with one capsule and the packs that are put there."""

    folder: Path

    @property
    def store(self) -> Sink:
        return Peer(self.folder)

    def put(self, objects: Sequence[Outgoing]) -> Source:
        (manifest,) = [one for one in objects if one.item.kind is Kind.MANIFEST]
        Layout(self.folder / "capsules" / manifest.item.digest.hex).write(objects)
        return Peer(self.folder)

    def moved_bytes(self) -> int | None:
        return None


class TestStateRootOfAnother(SourceContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> OtherRoot:
        return OtherRoot(tmp_path / "root")


class TestLayout(SinkContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> Place:
        return Place(Layout(tmp_path / "layout"))


class TestAnyUrl(SinkContract):
    @pytest.fixture
    def ground(self) -> Iterator[Place]:
        yield Place(AnyUrl("memory://coldsnap-test"))
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


class TestHub(SinkContract):
    @pytest.fixture(params=[1 << 30, 1 << 20], ids=["basic", "multipart"])
    def ground(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
        with HubServer(tmp_path / "hub", token="hf_planted", part_bytes=request.param) as server:
            access = HubAccess(endpoint=server.url, token=Secret("hf_planted"))
            with Http(QUICK) as http:
                hub = Hub(HubName(repository="org/model"), http, access)
                yield Place(hub, hub.at, server)


class TestFakeRegistry(SinkContract):
    @pytest.fixture(params=["open", "basic", "bearer"])
    def ground(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
        login = None if request.param == "open" else ("me", "planted-password")
        with RegistryServer(tmp_path / "registry", login=login, bearer=request.param == "bearer") as server:
            known = Login(user="me", password=Secret("planted-password")) if login is not None else None
            with Http(QUICK) as http:
                yield Place(Registry(RegistryName(host=server.host, path="a/b"), http, known), web=server)


class TestRealRegistry(SinkContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> Iterator[Place]:
        with real_registry(tmp_path / "registry") as server, Http(QUICK) as http:
            yield Place(Registry(RegistryName(host=server.host, path="a/b"), http))


class TestFallOver(SourceContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> Place:
        far = Directory(tmp_path / "far")
        return Place(far, lambda _: FallOver([Directory(tmp_path / "near"), far]))


class TestCaching(SourceContract):
    @pytest.fixture
    def ground(self, tmp_path: Path) -> Place:
        far = Directory(tmp_path / "far")
        (tmp_path / "scratch").mkdir()
        return Place(far, lambda _: Caching(far, Directory(tmp_path / "near"), tmp_path / "scratch", limits=QUICK))
