"""The way back: what a host lacks is fetched, proved, once, from the nearest place, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldsnap.capsule.image import open_capsule
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.ladder import Blame, Rung, blame
from coldsnap.errors import ColdsnapError, OutOfSpace, PayloadRejected, Refused, RemoteError, UnsafePath
from coldsnap.ops import fetching, origins
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.explain import explain
from coldsnap.ops.report import Silent
from coldsnap.ops.tools import Tools
from coldsnap.ship.base import Item, Kind, Source, Stored
from coldsnap.ship.faults import remote_error
from coldsnap.ship.peer import Peer
from coldsnap.ship.pull import partial_path
from coldsnap.ship.remotes import Remotes
from coldsnap.store import locks
from coldsnap.testing import disks
from coldsnap.testing.desk import desk, plan
from coldsnap.testing.web import Lie, Reply, Request

from .conftest import LIMITS, Harbour  # isort: skip

DEADLINE_S = 60.0


@pytest.fixture
def published(harbour: Harbour) -> LoadedArtifact:
    loaded = harbour.publish_both()
    for server in harbour.servers:
        server.reset()
    return loaded


def pack_path(tools: Tools, loaded: LoadedArtifact) -> Path:
    return tools.store.path(next(iter(loaded.packs().values())).sha256)


def capsule_path(tools: Tools, loaded: LoadedArtifact) -> Path:
    return tools.state.capsules / loaded.capsule_digest("u0").hex


def tidy(tools: Tools) -> list[Path]:
    return [path for path in tools.state.path.rglob("*") if "partial" in path.name]


def test_an_empty_host_gets_everything_and_the_second_time_nothing(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    result = harbour.prepare(tools, published)
    assert result.source == "native"
    assert "org/packs" in result.reason
    assert pack_path(tools, published).read_bytes() == pack_path(harbour.tools, published).read_bytes()
    here, there = (capsule_path(one, published) for one in (tools, harbour.tools))
    assert {p.relative_to(here): p.read_bytes() for p in here.rglob("*") if p.is_file()} == {
        p.relative_to(there): p.read_bytes() for p in there.rglob("*") if p.is_file()
    }
    assert tidy(tools) == []
    receipt = json.loads((tools.state.receipts / f"prepare-{harbour.counter[0]}.json").read_text())
    assert [one["kind"] for one in receipt["result"]["fetched"]] == ["pack", "manifest"]
    moved = [server.sent_bytes for server in harbour.servers]
    again = harbour.prepare(tools, published)
    assert again.from_record
    assert [server.sent_bytes for server in harbour.servers] == moved


def test_two_prepares_at_once_fetch_once(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: harbour.prepare(tools, published), range(2)))
    pack = next(iter(published.packs().values()))
    assert pack.bytes <= harbour.hub.sent_bytes < 2 * pack.bytes


def test_two_capsules_that_share_a_blob_are_fetched_at_once(
    harbour: Harbour, published: LoadedArtifact, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two captures of one engine have layers in common; who comes second waits, and does not give up."""
    planned = plan(model, harbour.folder / "other.json", operation_id="other")
    other = load_artifact(capture(harbour.home.tools, planned.request, planned.model).artifact_path)
    harbour.publish("other-there.json", other)
    there = load_artifact(harbour.folder / "other-there.json")
    blobs = [{d for d, _ in open_capsule(capsule_path(harbour.tools, one), one.capsule_digest("u0")).blobs}
             for one in (published, there)]  # fmt: skip
    shared = blobs[0] & blobs[1]
    assert shared
    assert blobs[0] != blobs[1]
    tools = harbour.elsewhere()
    held, waiting = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waiting.set()  # the second waits for a lock: let the first go on
        time.sleep(seconds)

    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    honest = harbour.registry.handle

    def slow(request: Request) -> Reply:
        if request.method == "GET" and any(str(digest) in request.path for digest in shared):
            held.set()
            waiting.wait(DEADLINE_S)
        return honest(request)

    harbour.registry.handle = slow  # type: ignore[method-assign]
    patient = replace(harbour.remotes, limits=replace(LIMITS, idle_s=DEADLINE_S, answer_s=DEADLINE_S))
    tools = replace(tools, remotes=patient)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: list(fetching._fetch_capsule(tools, published, "u0")))
        assert held.wait(DEADLINE_S)
        try:
            assert len(list(fetching._fetch_capsule(tools, there, "u0"))) == 1
        finally:
            waiting.set()
        assert len(first.result(DEADLINE_S)) == 1
    patient.http.close()
    for loaded in (published, there):
        open_capsule(capsule_path(tools, loaded), loaded.capsule_digest("u0"))


@pytest.mark.parametrize("what", ["pipe", "folder", "link"])
def test_what_is_no_file_in_the_place_of_a_partial_one(harbour: Harbour, published: LoadedArtifact, what: str) -> None:
    tools = harbour.elsewhere()
    pack = next(iter(published.packs().values()))
    digest = published.capsule_digest("u0")
    aside = tools.state.capsules / f".{digest.hex}.fetch.partial" / "blobs" / "sha256" / digest.hex
    aside.parent.mkdir(parents=True)
    for path in (partial_path(tools.state.staging, Item(Kind.PACK, pack.sha256)), aside):
        if what == "pipe":
            os.mkfifo(path, 0o600)
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to(harbour.loaded.path)
    with pytest.raises(UnsafePath, match=r"fetch-pack"):
        harbour.prepare(tools, published)
    path = partial_path(tools.state.staging, Item(Kind.PACK, pack.sha256))
    path.rmdir() if what == "folder" else path.unlink()
    if what == "folder":
        with pytest.raises(UnsafePath):
            harbour.prepare(tools, published)
        aside.rmdir()
    assert harbour.prepare(tools, published).source == "native"


def test_recovery_fetches_no_pack(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    assert harbour.prepare(tools, published, weights="recovery").source == "recovery"
    assert harbour.hub.asked == []
    assert not pack_path(tools, published).exists()


def test_cache_only_auto_never_fetches_a_pack(harbour: Harbour, published: LoadedArtifact) -> None:
    result = harbour.prepare(harbour.elsewhere(), published, weights="cache-only-auto")
    assert (result.source, harbour.hub.asked) == ("recovery", [])


def test_only_what_is_missing_is_fetched(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    harbour.prepare(tools, published)
    for server in harbour.servers:
        server.reset()
    pack_path(tools, published).unlink()
    harbour.prepare(tools, published)
    assert harbour.registry.asked == []
    assert harbour.hub.sent_bytes > 0
    harbour.hub.reset()
    shutil.rmtree(capsule_path(tools, published))  # it is prepared, so nobody needs it
    harbour.prepare(tools, published)
    assert harbour.registry.asked == harbour.hub.asked == []


def test_a_near_copy_wins(harbour: Harbour, published: LoadedArtifact) -> None:
    """Another state root, on a shared disk, has packs and capsules; no server is needed then."""
    peer = str(harbour.tools.state.path)
    result = harbour.prepare(harbour.elsewhere(peers=(peer,)), published)
    assert peer in result.reason
    fetched = json.loads((harbour.folder / f"state-b/receipts/prepare-{harbour.counter[0]}.json").read_text())
    assert [one["from"].partition(",")[0] for one in fetched["result"]["fetched"]] == [peer, peer]
    assert harbour.hub.asked == harbour.registry.asked == []
    offline = harbour.elsewhere("c", peers=(peer,), offline="--offline was given")
    assert harbour.prepare(offline, published).source == "native"
    for path in (pack_path, capsule_path):
        assert_same(path(offline, published), path(harbour.tools, published))
    assert harbour.hub.asked == harbour.registry.asked == []


def assert_same(one: Path, other: Path) -> None:
    for path in [other, *other.rglob("*")]:
        if path.is_file():
            assert (one / path.relative_to(other)).read_bytes() == path.read_bytes()


def harm_capsule(harbour: Harbour, loaded: LoadedArtifact, harm: str) -> Path:
    """A copy of the home state root whose capsule is not what it seems."""
    root = harbour.folder / "peer"
    shutil.copytree(harbour.tools.state.path, root)
    capsule = root / "capsules" / loaded.capsule_digest("u0").hex
    blobs = capsule / "blobs" / "sha256"
    largest = max((one for one in blobs.iterdir() if one.name != capsule.name), key=lambda one: one.stat().st_size)
    secret = harbour.folder / "secret"
    secret.write_bytes(b"s" * largest.stat().st_size)
    if harm == "other bytes":
        largest.chmod(0o600)
        largest.write_bytes(secret.read_bytes())
    elif harm == "short":
        os.truncate(largest, 1)
    elif harm == "link":
        largest.unlink()
        largest.symlink_to(secret)
    elif harm == "pipe":
        largest.unlink()
        os.mkfifo(largest)
    elif harm == "manifest":
        (blobs / capsule.name).write_bytes(b"{}")
    elif harm == "folder link":
        capsule.rename(harbour.folder / "moved")
        capsule.symlink_to(harbour.folder / "moved")
    return root


@pytest.mark.parametrize("harm", ["other bytes", "short", "link", "pipe", "manifest", "folder link"])
def test_a_state_root_that_lies_is_passed_by_and_alone_it_is_refused(
    harbour: Harbour, published: LoadedArtifact, harm: str
) -> None:
    peer = str(harm_capsule(harbour, published, harm))
    offline = harbour.elsewhere("c", peers=(peer,), offline="--offline was given")
    with pytest.raises(ColdsnapError):
        harbour.prepare(offline, published)
    assert not capsule_path(offline, published).exists()
    assert not harbour.registry.asked
    tools = harbour.elsewhere(peers=(peer,))
    assert harbour.prepare(tools, published).source == "native"
    assert_same(capsule_path(tools, published), capsule_path(harbour.tools, published))
    assert tidy(tools) == []


@pytest.mark.parametrize("wrong", ["short", "other bytes"])
def test_a_peer_that_lies_is_passed_by_for_the_next_source(
    harbour: Harbour, published: LoadedArtifact, wrong: str
) -> None:
    peer = harbour.folder / "peer" / "model-payloads" / "sha256"
    peer.mkdir(parents=True)
    pack = next(iter(published.packs().values()))
    (peer / f"{pack.sha256.hex}.pack").write_bytes(b"x" * (5 if wrong == "short" else pack.bytes))
    tools = harbour.elsewhere(peers=(str(harbour.folder / "peer"), str(harbour.folder / "none")))
    assert harbour.prepare(tools, published).source == "native"
    assert harbour.hub.sent_bytes >= pack.bytes
    assert pack_path(tools, published).read_bytes() == pack_path(harbour.tools, published).read_bytes()


def test_a_peer_that_does_not_answer_is_asked_and_named_once(harbour: Harbour, published: LoadedArtifact) -> None:
    asked: list[Item] = []

    class Deaf(Peer):
        def stat(self, item: Item) -> Stored | None:
            asked.append(item)
            raise remote_error("unreachable", "nobody answers at s3://typo", place=self.name)

    class WithDeaf(Remotes):
        def near(self) -> tuple[Source, ...]:
            return (Deaf(harbour.folder / "typo"), *super().near())

    warnings: list[str] = []

    class Listening(Silent):
        def warn(self, text: str) -> None:
            warnings.append(text)

    tools = harbour.elsewhere()
    remotes = WithDeaf(**{one.name: getattr(tools.remotes, one.name) for one in fields(tools.remotes)})
    harbour.stack.callback(remotes.http.close)
    assert harbour.prepare(replace(tools, remotes=remotes, reporter=Listening()), published).source == "native"
    assert warnings == [f"--peer {harbour.folder / 'typo'} is passed by: nobody answers at s3://typo"]
    assert len(asked) == 1


@pytest.mark.parametrize("harm", ["other bytes", "short", "manifest"])
def test_after_a_peer_that_lies_the_next_peer_is_asked(harbour: Harbour, published: LoadedArtifact, harm: str) -> None:
    root = harm_capsule(harbour, published, harm)
    tools = harbour.elsewhere(peers=(str(root), str(harbour.tools.state.path)), offline="--offline was given")
    assert harbour.prepare(tools, published).source == "native"
    assert_same(capsule_path(tools, published), capsule_path(harbour.tools, published))


def test_a_manifest_of_any_size_is_not_fetched(
    harbour: Harbour, published: LoadedArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "DOCUMENT_LIMIT_BYTES", 100)
    with pytest.raises(PayloadRejected) as caught:
        harbour.prepare(harbour.elsewhere(), published)
    assert caught.value.reason == "size_mismatch"
    assert "the limit is 100" in str(caught.value)


def test_offline_says_what_is_missing_and_what_would_fetch_it(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere(offline="--offline was given")
    request = activation_request(published, operation_id="explain-1", weights="native")
    found = explain(tools, published, request)
    assert found.rung is None
    said = "\n".join(str(problem) for gate in found.gates for problem in gate.problems)
    assert published.artifact.capsule.images[0].reference in said
    assert "--offline was given" in said
    with pytest.raises(Refused) as caught:
        harbour.prepare(tools, published, weights="native")
    assert "is not on this machine" in str(caught.value)
    assert harbour.hub.asked == harbour.registry.asked == []


def test_explain_decides_before_any_download(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    found = explain(tools, published, activation_request(published, operation_id="explain-1"))
    assert found.rung is not None
    assert found.rung.rung is Rung.NATIVE
    assert harbour.hub.asked == harbour.registry.asked == []
    assert not any(tools.state.capsules.iterdir())


def test_a_branch_instead_of_a_commit_is_never_fetched(harbour: Harbour, published: LoadedArtifact) -> None:
    document = artifact_document(published.artifact)
    document["weights"]["model_payloads"]["revision"] = "main"
    path = harbour.folder / "branch.json"
    path.write_bytes(artifact_bytes(artifact_from(document)))
    tools = harbour.elsewhere()
    assert harbour.prepare(tools, load_artifact(path)).source == "recovery"
    with pytest.raises(Refused):
        harbour.prepare(harbour.elsewhere("c"), load_artifact(path), weights="native")
    assert harbour.hub.asked == []


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        (Lie(what="wrong-bytes", to="GET /cdn/"), PayloadRejected),
        (Lie(what="wrong-bytes", to="GET .*/manifests/"), PayloadRejected),
        (Lie(what="wrong-bytes", to="GET .*/blobs/"), PayloadRejected),
        (Lie(what="status", to="GET /cdn/", status=500), RemoteError),
        (Lie(what="redirect-loop", to="GET /org/packs"), RemoteError),
        (Lie(what="status", to="GET .*/blobs/", status=404), RemoteError),
        (Lie(what="truncate", to="GET .*/blobs/"), RemoteError),
    ],
    ids=lambda one: f"{one.what} {one.to}" if isinstance(one, Lie) else "",
)
def test_a_store_that_lies_leaves_nothing_eligible(
    harbour: Harbour, published: LoadedArtifact, lie: Lie, kind: type[ColdsnapError]
) -> None:
    tools = harbour.elsewhere()
    servers = {"cdn": harbour.hub, "org/packs": harbour.hub}
    server = next((one for word, one in servers.items() if word in lie.to), harbour.registry)
    server.lies.append(lie)
    with pytest.raises(kind):
        harbour.prepare(tools, published)
    assert not [path for path in (pack_path(tools, published), capsule_path(tools, published)) if path.exists()] or (
        server is harbour.registry and not capsule_path(tools, published).exists()
    )
    server.reset()
    assert harbour.prepare(tools, published).source == "native"
    assert tidy(tools) == []


def test_an_interrupted_pack_goes_on_where_it_was(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    pack = next(iter(published.packs().values()))
    harbour.hub.lies.append(Lie(what="status", to="GET /cdn/", status=404))
    harbour.hub.lies.insert(0, Lie(what="drip-head", to="never"))
    original, left = harbour.hub.lie_for, [2]

    def after_two(line: str) -> Lie | None:
        if "/cdn/" in line:
            left[0] -= 1
            return None if left[0] >= 0 else harbour.hub.lies[1]
        return None

    harbour.hub.lie_for = after_two  # type: ignore[method-assign]
    with pytest.raises(RemoteError):
        harbour.prepare(tools, published)
    kept = partial_path(tools.state.staging, Item(Kind.PACK, pack.sha256))
    assert kept.exists()
    harbour.hub.lie_for = original  # type: ignore[method-assign]
    harbour.hub.reset()
    harbour.prepare(tools, published)
    assert harbour.hub.sent_bytes < pack.bytes


def test_too_little_space_is_said_before_a_byte_moves(
    harbour: Harbour, published: LoadedArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = harbour.elsewhere()
    usage = shutil.disk_usage(harbour.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(Refused) as caught:
        harbour.prepare(tools, published)
    assert "fetching and unpacking needs" in str(caught.value)
    with pytest.raises(OutOfSpace):
        list(fetching._fetch_capsule(tools, published, "u0"))
    assert harbour.hub.sent_bytes == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system a little larger than what a fetch wants to be left. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with disks.small_disk(tmp_path / "small", 80 << 20) as folder:
        yield folder


@pytest.mark.parametrize("left", [0, 20_000])
@pytest.mark.parametrize("when", ["GET /cdn/", "HEAD .*/manifests/", "GET .*/manifests/", "GET .*/blobs/"])
def test_a_disk_that_fills_up_during_a_fetch(
    harbour: Harbour, published: LoadedArtifact, small_disk: Path, when: str, left: int
) -> None:
    """Somebody else takes the space after it was looked at."""
    filler = small_disk / "filler"
    for server in harbour.servers:

        def fill(request: Request, honest: Callable[[Request], Reply] = server.handle) -> Reply:
            if re.match(when, f"{request.method} {request.path}") and not filler.exists():
                with filler.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - left)
            return honest(request)

        server.handle = fill  # type: ignore[method-assign]
    with desk(small_disk / "state") as one:
        tools = replace(one.tools, remotes=harbour.remotes)
        with pytest.raises(OutOfSpace):
            harbour.prepare(tools, published)
        assert not capsule_path(tools, published).exists()
        filler.unlink()
        filler.touch()  # so that it does not fill up again
        assert harbour.prepare(tools, published).source == "native"
        assert tidy(tools) == []
        assert_same(capsule_path(tools, published), capsule_path(harbour.tools, published))


def test_what_a_failed_fetch_is_blamed_on() -> None:
    gone = RemoteError("server_error", "x", place="y")
    wrong = PayloadRejected("digest_mismatch", "x")
    assert blame(gone, rung=Rung.NATIVE, phase="fetch-packs") is Blame.PACK_MISSING
    assert blame(wrong, rung=Rung.NATIVE, phase="fetch-packs") is Blame.PACK_WRONG
    assert blame(gone, rung=Rung.NATIVE, phase="fetch-capsules") is Blame.REMOTE


def test_units_of_other_hosts_are_not_fetched_here(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere()
    request = activation_request(published, operation_id="x")
    away = request.launch.units[0].model_copy(update={"host": "another"})
    request = request.model_copy(update={"launch": request.launch.model_copy(update={"units": (away,)})})
    assert fetching.missing_bytes(tools, published, request, packs=True) == 0
    assert fetching.missing_bytes(
        replace(tools), published, activation_request(published, operation_id="y"), packs=True
    )
