"""Servers that fail, lie, drip and run in circles: refused or retried with bounds, and told apart by name."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import _registry

from coldsnap.core.digest import Digest
from coldsnap.errors import ColdsnapError, PayloadRejected, RemoteError, UsageError
from coldsnap.ship.anyurl import AnyUrl
from coldsnap.ship.base import Item, Kind, Outgoing, Source
from coldsnap.ship.http import Http
from coldsnap.ship.hub import Hub, HubAccess
from coldsnap.ship.limits import Limits, asked_to_wait_s
from coldsnap.ship.names import HubName, RegistryName
from coldsnap.ship.pull import partial_path, pulled
from coldsnap.ship.registry import Registry
from coldsnap.ship.secret import Secret
from coldsnap.testing.hub import HubServer
from coldsnap.testing.registry import RegistryServer
from coldsnap.testing.ship_suite import MIB, objects_for, outgoing
from coldsnap.testing.web import Lie, Web

LATE = "Fri, 31 Dec 9999 23:59:59 GMT"
LIMITS = Limits(
    attempts=3, first_pause_s=0.01, longest_pause_s=0.02, retry_after_s=1.0, range_bytes=MIB, request_bytes=MIB,
    chunk_bytes=MIB, num_streams=2,
)  # fmt: skip
HASTY = replace(LIMITS, idle_s=0.25, answer_s=1.0, slow_s=0.2, slow_bytes=4096)
"""For servers that stay silent or drip. An honest one that gets no processor for a moment is given up as well."""
MANY = 100
SLOW = ("silent", "drip", "drip-head")


class Scene:
    """A hub or a registry with some objects in it, and where their bytes are read."""

    def __init__(
        self, web: Web, reading: Callable[[Http], Source], http: Http, objects: list[Outgoing], bytes_at: str
    ) -> None:
        self.web, self.reading, self.bytes_at = web, reading, bytes_at
        self.source = reading(http)
        self.big = max(objects, key=lambda one: one.bytes)
        web.reset()

    def pull(self, folder: Path, limits: Limits = LIMITS) -> None:
        with (
            Http(limits) as http,
            pulled(self.reading(http), self.big.item, self.big.bytes, folder, limits=limits) as staged,
        ):
            assert staged.path.read_bytes() == self.big.path.read_bytes()


@pytest.fixture(params=["hub", "registry"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    with Http(LIMITS) as http:
        if request.param == "hub":
            with HubServer(tmp_path / "hub", token="hf_planted") as server:
                access = HubAccess(endpoint=server.url, token=Secret("hf_planted"))
                hub = Hub(HubName(repository="org/model"), http, access)
                objects = objects_for(hub.kinds, tmp_path / "files")
                revision = hub.write(objects).revision

                def hub_at(http: Http) -> Source:
                    return Hub(HubName(repository="org/model"), http, access, revision=revision)

                yield Scene(server, hub_at, http, objects, r"GET /cdn/")
        else:
            with RegistryServer(tmp_path / "registry") as registry:
                name = RegistryName(host=registry.host, path="a/b")
                store = Registry(name, http)
                objects = objects_for(store.kinds, tmp_path / "files")
                store.write(objects)
                yield Scene(registry, lambda http: Registry(name, http), http, objects, r"GET .*/blobs/")


PASSING = ["close", "status", "truncate", "drip", "silent"]


@pytest.mark.parametrize("what", PASSING)
def test_a_fault_that_passes_costs_a_retry(scene: Scene, tmp_path: Path, what: str) -> None:
    scene.web.lies.append(Lie(what=what, to=scene.bytes_at, times=2, status=503))
    scene.pull(tmp_path, replace(HASTY, attempts=MANY) if what in SLOW else LIMITS)
    assert len(scene.web.asked) > 4


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("close", "broken"), ("status", "server_error"), ("silent", "too_slow"), ("drip-head", "too_slow"),
        ("redirect-loop", "redirect_loop"), ("wrong-length", "wrong_length"),
    ],
)  # fmt: skip
def test_a_fault_that_stays_is_named_after_a_bounded_number_of_attempts(
    scene: Scene, tmp_path: Path, what: str, reason: str
) -> None:
    scene.web.lies.append(Lie(what=what, to=scene.bytes_at))
    with pytest.raises(RemoteError) as caught:
        scene.pull(tmp_path, replace(HASTY if what in SLOW else LIMITS, num_streams=1))
    assert caught.value.reason == reason
    tries = [line for line in scene.web.asked if line.startswith("GET")]
    assert len(tries) <= 2 * LIMITS.attempts + LIMITS.redirects + 2


def test_a_server_that_always_cuts_short_ends(scene: Scene, tmp_path: Path) -> None:
    scene.web.lies.append(Lie(what="truncate", to=scene.bytes_at))
    with pytest.raises(RemoteError) as caught:
        scene.pull(
            tmp_path, replace(LIMITS, num_streams=1)
        )  # half of what is left each time is progress, until one byte is left
    assert caught.value.reason == "truncated"


def test_a_drip_that_stays_is_too_slow(scene: Scene, tmp_path: Path) -> None:
    scene.web.lies.append(Lie(what="drip", to=scene.bytes_at))
    with pytest.raises(RemoteError) as caught:
        scene.pull(tmp_path, replace(HASTY, num_streams=1, slow_bytes=1 << 20, attempts=1))
    assert caught.value.reason == "too_slow"


def test_wrong_bytes_are_thrown_away_and_named(scene: Scene, tmp_path: Path) -> None:
    scene.web.lies.append(Lie(what="wrong-bytes", to=scene.bytes_at, times=1))
    with pytest.raises(PayloadRejected) as caught:
        scene.pull(tmp_path)
    assert caught.value.reason == "digest_mismatch"
    assert scene.source.name in str(caught.value)
    assert list(tmp_path.glob("*.partial")) == []


def test_another_length_than_was_published_is_named(scene: Scene, tmp_path: Path) -> None:
    with (
        pytest.raises(PayloadRejected) as caught,
        pulled(scene.source, scene.big.item, scene.big.bytes + 1, tmp_path, limits=LIMITS),
    ):
        pass
    assert caught.value.reason == "size_mismatch"


@pytest.mark.parametrize(
    ("seconds", "waits"), [("0", True), ("1", True), ("3600", False), ("9" * 400, False), (LATE, False)]
)
def test_retry_after_is_kept_within_bounds(scene: Scene, tmp_path: Path, seconds: str, waits: bool) -> None:
    scene.web.lies.append(Lie(what="status", to=scene.bytes_at, times=2, status=429, headers={"Retry-After": seconds}))
    began = time.monotonic()
    if waits:
        scene.pull(tmp_path, replace(LIMITS, num_streams=1))
        assert time.monotonic() - began >= 2 * float(seconds)
        return
    with pytest.raises(RemoteError) as caught:
        scene.pull(tmp_path, replace(LIMITS, num_streams=1))
    assert caught.value.reason == "rate_limited"
    assert caught.value.facts["retry_after_s"] == asked_to_wait_s(seconds)
    assert time.monotonic() - began < 600


def test_finished_ranges_are_not_fetched_again(scene: Scene, tmp_path: Path) -> None:
    scene.web.lies.append(Lie(what="status", to=scene.bytes_at, status=503))
    cut = [1]

    def honest_once(line: str) -> Lie | None:
        if "GET /cdn/" in line or ("/blobs/" in line and line.startswith("GET")):
            cut[0] -= 1
            return None if cut[0] >= 0 else scene.web.lies[0]
        return None

    scene.web.lie_for = honest_once  # type: ignore[method-assign]
    with pytest.raises(RemoteError):
        scene.pull(tmp_path, replace(LIMITS, num_streams=1))
    assert partial_path(tmp_path, scene.big.item).exists()
    scene.web.reset()
    del scene.web.lie_for
    told: list[int] = []
    with pulled(scene.source, scene.big.item, scene.big.bytes, tmp_path, limits=LIMITS, progress=told.append) as staged:
        assert staged.path.read_bytes() == scene.big.path.read_bytes()
    assert sum(told) == scene.big.bytes
    assert scene.web.sent_bytes < scene.big.bytes - MIB + 65536


def test_one_request_asks_for_missing_ranges_in_a_row(scene: Scene, tmp_path: Path) -> None:
    ranges = -(-scene.big.bytes // (MIB // 4))
    assert ranges > 8
    scene.pull(tmp_path, replace(LIMITS, num_streams=1, range_bytes=MIB // 4))
    asked = [line for line in scene.web.asked if re.match(scene.bytes_at, line)]
    assert len(asked) == -(-scene.big.bytes // MIB)


def test_a_cut_within_a_request_costs_no_finished_range(scene: Scene, tmp_path: Path) -> None:
    """Half of the object in one request, then nothing more: what lay before the cut is not asked for again."""
    scene.web.lies.append(Lie(what="truncate", to=scene.bytes_at, times=1))
    scene.web.lies.append(Lie(what="status", to=scene.bytes_at, status=404))
    limits = replace(LIMITS, num_streams=1, range_bytes=MIB // 4, request_bytes=64 * MIB)
    with pytest.raises(RemoteError):
        scene.pull(tmp_path, limits)
    scene.web.reset()
    scene.pull(tmp_path, limits)
    assert scene.web.sent_bytes <= scene.big.bytes - scene.big.bytes // 2 + MIB // 4 + 65536


def test_a_damaged_leftover_is_begun_anew(scene: Scene, tmp_path: Path) -> None:
    path = partial_path(tmp_path, scene.big.item)
    count = -(-scene.big.bytes // MIB)
    path.write_bytes(b"x" * scene.big.bytes + MIB.to_bytes(8, "big") + b"\1" * count)
    path.chmod(0o600)
    scene.pull(tmp_path)
    for junk in (b"", b"short", b"x" * (scene.big.bytes + 8), b"y" * (scene.big.bytes + 8 + count)):
        path.write_bytes(junk)
        path.chmod(0o600)
        scene.pull(tmp_path)


class TestUploads:
    """Publishing against faults."""

    @pytest.fixture
    def registry(self, tmp_path: Path) -> Iterator[tuple[RegistryServer, Registry]]:
        with RegistryServer(tmp_path / "registry") as server, Http(LIMITS) as http:
            yield server, Registry(RegistryName(host=server.host, path="a/b"), http)

    @pytest.mark.parametrize("what", ["close", "close-after", "status", "silent"])
    @pytest.mark.parametrize("to", ["POST .*uploads", "PATCH", "PUT .*uploads", "PUT .*manifests", "HEAD"])
    def test_a_registry_that_stumbles(
        self, registry: tuple[RegistryServer, Registry], tmp_path: Path, what: str, to: str
    ) -> None:
        server, store = registry
        objects = objects_for(store.kinds, tmp_path / "files")
        server.lies.append(Lie(what=what, to=to, times=2, status=503))
        told: list[int] = []
        with Http(replace(HASTY, attempts=MANY) if what in SLOW else LIMITS) as http:
            Registry(RegistryName(host=server.host, path="a/b"), http).write(objects, progress=told.append)
        assert sum(told) == sum(one.bytes for one in objects)
        for one in objects:
            assert b"".join(bytes(piece) for piece in store.read(one.item, 0, one.bytes)) == one.path.read_bytes()

    def test_a_chunk_that_arrived_is_not_sent_again(
        self, registry: tuple[RegistryServer, Registry], tmp_path: Path
    ) -> None:
        server, store = registry
        one = outgoing(tmp_path, Kind.BLOB, bytes(range(256)) * (MIB // 64))  # four chunks
        server.lies.append(Lie(what="close-after", to="PATCH", times=1))
        store.write([one])
        assert one.bytes <= server.received_bytes < one.bytes + MIB

    def test_a_forgotten_session_is_begun_anew(self, registry: tuple[RegistryServer, Registry], tmp_path: Path) -> None:
        server, store = registry
        one = outgoing(tmp_path, Kind.BLOB, bytes(range(256)) * (MIB // 64))
        server.lies.append(Lie(what="status", to="PATCH", times=1, status=404))
        store.write([one])
        assert len([line for line in server.asked if line.startswith("POST")]) == 2

    def test_a_neighbours_blob_is_mounted(self, registry: tuple[RegistryServer, Registry], tmp_path: Path) -> None:
        server, store = registry
        objects = objects_for(store.kinds, tmp_path / "files")
        store.write(objects)
        before = server.received_bytes
        with Http(LIMITS) as http:
            beside = Registry(RegistryName(host=server.host, path="c"), http, neighbours=("gone/x", "a/b"))
            written = beside.write(objects)
        assert written.mounted == tuple(one.item for one in objects[:-1])
        assert written.sent == (objects[-1].item,)
        assert server.received_bytes - before == objects[-1].bytes

    def test_a_registry_that_names_another_digest_is_refused(
        self, registry: tuple[RegistryServer, Registry], tmp_path: Path
    ) -> None:
        server, store = registry
        wrong = {"Docker-Content-Digest": str(Digest.of(b"x")), "X-Size": "4"}
        server.lies.append(Lie(what="status", to="HEAD", status=200, headers=wrong))
        with pytest.raises(RemoteError) as caught:
            store.stat(Item(Kind.BLOB, Digest.of(b"y")))
        assert caught.value.reason == "wrong_bytes"

    def test_an_upload_elsewhere_is_refused(self, registry: tuple[RegistryServer, Registry], tmp_path: Path) -> None:
        server, store = registry
        away = {"Location": "http://203.0.113.9/upload"}
        server.lies.append(Lie(what="status", to="POST", status=202, headers=away))
        with pytest.raises(RemoteError) as caught:
            store.write([outgoing(tmp_path, Kind.BLOB, b"data")])
        assert caught.value.reason == "unsafe_redirect"


class TestHubUploads:
    """Publishing packs against faults."""

    @pytest.fixture
    def hub(self, tmp_path: Path) -> Iterator[tuple[HubServer, Hub]]:
        with HubServer(tmp_path / "hub", part_bytes=MIB) as server, Http(LIMITS) as http:
            yield server, Hub(HubName(repository="org/model", branch="packs"), http, HubAccess(endpoint=server.url))

    def test_a_commit_whose_answer_is_lost_is_not_made_twice(self, hub: tuple[HubServer, Hub], tmp_path: Path) -> None:
        server, store = hub
        objects = objects_for(store.kinds, tmp_path / "files")
        server.lies.append(Lie(what="close-after", to="/commit/", times=1))
        with pytest.raises(RemoteError) as caught:
            store.write(objects)
        assert caught.value.reason == "broken"
        written = store.write(objects)
        assert written.sent == ()
        assert server.num_commits("org/model") == 1
        assert written.revision == server.repositories["org/model"].branches["packs"]

    def test_a_head_that_moved_is_asked_again(self, hub: tuple[HubServer, Hub], tmp_path: Path) -> None:
        server, store = hub
        objects = objects_for(store.kinds, tmp_path / "files")
        server.lies.append(Lie(what="status", to="/commit/", times=1, status=412))
        written = store.write(objects)
        assert server.num_commits("org/model") == 1
        assert len(written.revision) == 40

    def test_a_path_with_other_bytes_is_refused_for_reading_and_mended_by_publishing(
        self, hub: tuple[HubServer, Hub], tmp_path: Path
    ) -> None:
        server, store = hub
        objects = objects_for(store.kinds, tmp_path / "files")
        store.write(objects)
        repository = server.repositories["org/model"]
        files = dict(repository.commits[repository.branches["packs"]])
        first = f"model-payloads/sha256/{objects[0].item.digest.hex}.pack"
        files[first] = (objects[1].item.digest.hex, objects[1].bytes)
        wrong = store.at(repository.commit("packs", files))
        with pytest.raises(RemoteError) as caught:
            wrong.stat(objects[0].item)
        assert caught.value.reason == "wrong_bytes"
        mended = store.write(objects)
        assert mended.sent == (objects[0].item,)
        assert store.at(mended.revision).stat(objects[0].item) is not None

    @pytest.mark.parametrize(
        ("lie", "reason"),
        [
            (Lie(what="status", to="preupload", status=403), "forbidden"),
            (Lie(what="status", to="preupload", status=401), "unauthorized"),
            (Lie(what="status", to="preupload", status=403, headers={"X-Error-Code": "GatedRepo"}), "gated"),
            (Lie(what="status", to="preupload", status=429, headers={"Retry-After": "9999"}), "rate_limited"),
            (Lie(what="status", to="preupload", status=429, headers={"Retry-After": "9" * 400}), "rate_limited"),
            (Lie(what="status", to="preupload", status=503, headers={"Retry-After": LATE}), "rate_limited"),
            (Lie(what="drip", to="preupload"), "too_slow"),
            (Lie(what="status", to="PUT /lfs", status=400), "refused"),
        ],
    )
    def test_refusals_are_told_apart(self, hub: tuple[HubServer, Hub], tmp_path: Path, lie: Lie, reason: str) -> None:
        server, store = hub
        objects = objects_for(store.kinds, tmp_path / "files")
        server.lies.append(lie)
        with Http(HASTY if lie.what in SLOW else LIMITS) as http, pytest.raises(RemoteError) as caught:
            Hub(HubName(repository="org/model", branch="packs"), http, HubAccess(endpoint=server.url)).write(objects)
        assert caught.value.reason == reason
        assert caught.value.cure

    def test_a_pack_too_large_for_the_hub_is_named(self, hub: tuple[HubServer, Hub], tmp_path: Path) -> None:
        server, store = hub
        server.max_bytes = MIB
        with pytest.raises(RemoteError) as caught:
            store.write(objects_for(store.kinds, tmp_path / "files"))
        assert caught.value.reason == "too_large"

    def test_an_uploaded_part_that_failed_is_sent_again(self, hub: tuple[HubServer, Hub], tmp_path: Path) -> None:
        server, store = hub
        server.lies.append(
            Lie(what="status", to="PUT /lfs/part/.*/2", times=1, status=503, headers={"Retry-After": "0"})
        )
        assert len(store.write(objects_for(store.kinds, tmp_path / "files")).sent) == 3


def test_gated_and_private_repositories_are_told_apart_when_read(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub", token="hf_planted") as server, Http(LIMITS) as http:
        access = HubAccess(endpoint=server.url, token=Secret("hf_planted"))
        hub = Hub(HubName(repository="org/model"), http, access)
        objects = objects_for(hub.kinds, tmp_path / "files")
        hub = hub.at(hub.write(objects).revision)
        one = objects[0]
        stranger = Hub(HubName(repository="org/model"), http, HubAccess(endpoint=server.url), revision=hub.revision)
        wrong = HubAccess(endpoint=server.url, token=Secret("hf_other"))
        impostor = Hub(HubName(repository="org/model"), http, wrong, revision=hub.revision)
        for reader in (stranger, impostor):
            with pytest.raises(RemoteError) as caught:
                list(reader.read(one.item, 0, one.bytes))
            assert caught.value.reason == "unauthorized"
            assert "HF_TOKEN" in str(caught.value)
        server.repositories["org/model"].gated = True
        with pytest.raises(RemoteError) as caught:
            list(hub.read(one.item, 0, one.bytes))
        assert caught.value.reason == "gated"


def test_credentials_stay_with_their_origin(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub", token="hf_planted") as server, Web() as other, Http(LIMITS) as http:
        access = HubAccess(endpoint=server.url, token=Secret("hf_planted"))
        hub = Hub(HubName(repository="org/model"), http, access)
        hub = hub.at(hub.write(objects_for(hub.kinds, tmp_path / "files")).revision)
        away = {"Location": f"{other.url}/elsewhere"}
        server.lies.append(Lie(what="status", to="/resolve/", status=302, headers=away))
        other.lies.append(Lie(what="status", status=404))
        with pytest.raises(ColdsnapError):
            list(hub.read(next(hub.list()).item, 0, 4))
        assert other.asked == ["GET /elsewhere"]
        assert "authorization" not in {name for _, name, _ in other.seen_headers}


def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    with Web() as web:
        url = web.url
    with Http(LIMITS) as http:
        hub = Hub(HubName(repository="org/model"), http, HubAccess(endpoint=url))
        with pytest.raises(RemoteError) as caught:
            hub.head()
        assert caught.value.reason == "unreachable"
        assert caught.value.facts["attempts"] == LIMITS.attempts


class Answered(Exception):
    """What aiohttp raises for an answer that says no."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, url='http://user:planted@peer/'")
        self.status = status


class PretendWeb(AsyncFileSystem):  # type: ignore[misc] # fsspec has no types
    """fsspec's own for the web, as far as it matters: each failure of a look-up is told as a missing file."""

    protocol = ("http", "pretend")
    cachable = False
    failure: Exception | None = None

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if self.failure is None:
            await asyncio.Event().wait()
        raise FileNotFoundError(path) from self.failure

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        await asyncio.Event().wait()
        return b""


@pytest.fixture
def pretend_web(monkeypatch: pytest.MonkeyPatch) -> type[PretendWeb]:
    for scheme in PretendWeb.protocol:
        monkeypatch.setitem(_registry, scheme, PretendWeb)
    return PretendWeb


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ConnectionRefusedError(111, "planted"), "unreachable"),
        (RuntimeError("ServerDisconnectedError planted"), "unreachable"),
        (Answered(503), "server_error"),
        (Answered(403), "forbidden"),
    ],
)
def test_a_web_server_that_does_not_answer_is_no_missing_file(
    pretend_web: type[PretendWeb], monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    monkeypatch.setattr(pretend_web, "failure", failure)
    with pytest.raises(RemoteError) as caught:
        AnyUrl("http://peer/x").stat(Item(Kind.PACK, Digest.of(b"x")))
    assert caught.value.reason == reason
    assert "planted" not in caught.value.message


@pytest.mark.parametrize("failure", [FileNotFoundError("404"), Answered(404), Answered(410)])
def test_a_missing_file_of_a_web_server_is_one(
    pretend_web: type[PretendWeb], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(pretend_web, "failure", failure)
    assert AnyUrl("http://peer/x").stat(Item(Kind.PACK, Digest.of(b"x"))) is None


def test_other_schemes_say_missing_with_whatever_cause(
    pretend_web: type[PretendWeb], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As s3fs does: the store's own error of a missing key."""
    monkeypatch.setattr(pretend_web, "failure", RuntimeError("NoSuchKey"))
    assert AnyUrl("pretend://bucket/x").stat(Item(Kind.PACK, Digest.of(b"x"))) is None


@pytest.mark.parametrize("url", ["http://peer/x", "pretend://bucket/x"])
def test_a_silent_place_behind_fsspec_is_given_up(pretend_web: type[PretendWeb], url: str) -> None:
    store = AnyUrl(url, replace(HASTY, connect_s=0.25))
    item = Item(Kind.PACK, Digest.of(b"x"))
    for ask in (lambda: store.stat(item), lambda: list(store.read(item, 0, 4))):
        with pytest.raises(RemoteError) as caught:
            ask()
        assert caught.value.reason == "too_slow"


def test_a_package_that_a_scheme_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    with pytest.raises(UsageError, match="Install s3fs"):
        AnyUrl("s3://bucket/x")


@pytest.mark.parametrize("failure", [RuntimeError("NoCredentialsError"), TypeError("size is None"), OSError("x")])
def test_whatever_a_package_behind_fsspec_raises_is_a_remote_error(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Packages have errors of their own, which may hold addresses with credentials."""
    store = AnyUrl("memory://breaks")

    def info(path: str) -> None:
        raise failure

    monkeypatch.setattr(store._system, "info", info)
    with pytest.raises(RemoteError) as caught:
        store.stat(Item(Kind.PACK, Digest.of(b"x")))
    assert caught.value.reason == "unreachable"
    assert type(failure).__name__ in caught.value.message
    assert str(failure) not in caught.value.message.replace(type(failure).__name__, "")
