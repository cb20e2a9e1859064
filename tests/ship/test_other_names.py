"""No server can lead a publication into another repository than the one that was named."""

from __future__ import annotations

import pytest

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.digest import Digest
from coldsnap.errors import IntegrityError, Refused, RemoteError, UserError
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.unpublishing import plan_unpublish, run_unpublish
from coldsnap.testing.web import Lie, Reply, Request, Web

from .conftest import Harbour  # isort: skip

ALL = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def send_on(server: Web, named: str, other: str, methods: tuple[str, ...], *, status: int = 307) -> None:
    """The server sends everything that is asked of the repository ``named`` on to ``other``, as after a renaming."""
    honest = server.handle

    def handle(request: Request) -> Reply:
        if named not in request.target or request.method not in methods:
            return honest(request)
        for _ in request.read():
            pass
        return Reply(status=status, headers={"Location": request.target.replace(named, other)})

    server.handle = handle  # type: ignore[method-assign]


def packs_at(harbour: Harbour, name: str) -> list[int]:
    repository = harbour.hub.repositories.get(name)
    return [len(files) for files in repository.commits.values()] if repository is not None else []


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("methods", [ALL, ("POST",), ("GET", "HEAD")], ids=["all", "writing", "asking"])
def test_a_hub_that_renamed_the_repository(harbour: Harbour, methods: tuple[str, ...], status: int) -> None:
    harbour.publish_native("theirs.json", to="hf://org/theirs")  # it has the very pack
    before = packs_at(harbour, "org/theirs")
    send_on(harbour.hub, "org/packs", "org/theirs", methods, status=status)
    with pytest.raises(RemoteError) as caught:
        harbour.publish_native()
    assert caught.value.reason == "unsafe_redirect"
    assert "org/theirs" in str(caught.value)
    assert packs_at(harbour, "org/theirs") == before
    assert not (harbour.folder / "native.json").exists()


def test_a_hub_that_renamed_the_repository_deletes_nothing_there(harbour: Harbour) -> None:
    harbour.publish_native("theirs.json", to="hf://org/theirs")
    harbour.publish_native()
    before = packs_at(harbour, "org/theirs")
    send_on(harbour.hub, "org/packs", "org/theirs", ALL)
    with pytest.raises(RemoteError) as caught:
        run_unpublish(harbour.tools, plan_unpublish(harbour.tools, load_artifact(harbour.folder / "native.json")))
    assert caught.value.reason == "unsafe_redirect"
    assert packs_at(harbour, "org/theirs") == before


def test_a_reader_is_content_with_a_renamed_repository(harbour: Harbour) -> None:
    """What comes is proved, and the commit says which state: a renaming breaks no artifact."""
    loaded = harbour.publish_both()
    harbour.hub.repositories["org/renamed"] = harbour.hub.repositories.pop("org/packs")
    send_on(harbour.hub, "org/packs", "org/renamed", ALL)
    assert harbour.prepare(harbour.elsewhere(), loaded).source == "native"


@pytest.mark.parametrize("oid", ["0" * 40, "main", "", "../../x", "g" * 40])
def test_a_hub_that_answers_another_commit(harbour: Harbour, oid: str) -> None:
    honest = harbour.hub.handle

    def handle(request: Request) -> Reply:
        reply = honest(request)
        if "/commit/" in request.path:
            return Reply.of({"commitUrl": f"{harbour.hub.url}/org/packs/commit/{oid}", "commitOid": oid})
        return reply

    harbour.hub.handle = handle  # type: ignore[method-assign]
    with pytest.raises((RemoteError, IntegrityError)):
        harbour.publish_native()
    assert not (harbour.folder / "native.json").exists()


def test_a_hub_that_answers_about_another_path(harbour: Harbour) -> None:
    """It says that a file with the right object id is there, at a path nobody asked about."""
    honest = harbour.hub.handle
    pack = next(iter(harbour.loaded.packs().values()))

    def handle(request: Request) -> Reply:
        if "/paths-info/" not in request.path:
            return honest(request)
        lfs = {"oid": pack.sha256.hex, "size": pack.bytes, "pointerSize": 1}
        entry = {"type": "file", "path": "elsewhere.pack", "size": pack.bytes, "oid": "0" * 40, "lfs": lfs}
        return Reply.of([entry])

    harbour.hub.handle = handle  # type: ignore[method-assign]
    with pytest.raises(RemoteError) as caught:
        harbour.publish_native()
    assert caught.value.reason == "bad_answer"  # committed, it says, and still not at its path
    assert not (harbour.folder / "native.json").exists()


@pytest.mark.parametrize("methods", [ALL, ("HEAD",), ("POST",), ("PATCH",), ("PUT",)], ids="-".join)
def test_a_registry_that_sends_on_to_another_repository(harbour: Harbour, methods: tuple[str, ...]) -> None:
    harbour.registry.bearer = False
    harbour.registry.login = None
    harbour.publish("theirs.json", to=f"oci://{harbour.registry.host}/org/theirs")
    before = {name: set(found) for name, found in harbour.registry.manifests.items()}
    blobs = {name: set(found) for name, found in harbour.registry.blobs.items()}
    send_on(harbour.registry, "/v2/org/capsules/", "/v2/org/theirs/", methods)
    with pytest.raises(RemoteError) as caught:
        harbour.publish()
    assert caught.value.reason in ("unsafe_redirect", "refused")
    assert {name: set(found) for name, found in harbour.registry.manifests.items()} == before
    assert {name: found for name, found in harbour.registry.blobs.items() if name != "org/capsules"} == blobs
    assert not (harbour.folder / "published.json").exists()


def test_a_registry_that_takes_the_manifest_as_another(harbour: Harbour) -> None:
    other = {"Docker-Content-Digest": str(Digest.of(b"other"))}
    harbour.registry.lies.append(Lie(what="status", to="PUT .*/manifests/", status=201, headers=other))
    with pytest.raises(RemoteError) as caught:
        harbour.publish()
    assert caught.value.reason == "wrong_bytes"
    assert not (harbour.folder / "published.json").exists()


@pytest.mark.parametrize(
    "repository",
    [
        "org/../../api/models/org/packs",
        "org/packs/../theirs",
        "http://203.0.113.9/x",
        "org/packs?x=",
        "org/packs@main",
        "packs",
        "hf://hf://org/packs",
    ],
)  # fmt: skip
def test_a_descriptor_cannot_ask_the_hub_for_anything_else(harbour: Harbour, repository: str) -> None:
    loaded = harbour.publish_both()
    document = artifact_document(loaded.artifact)
    document["weights"]["model_payloads"]["repository"] = repository
    path = harbour.folder / "edited.json"
    path.write_bytes(artifact_bytes(artifact_from(document)))
    edited = load_artifact(path)
    for server in harbour.servers:
        server.reset()
    with pytest.raises(Refused) as caught:
        harbour.prepare(harbour.elsewhere(), edited, weights="native")
    assert "is no repository of a hub" in str(caught.value)
    with pytest.raises(UserError, match="is no repository of a hub"):
        run_unpublish(harbour.tools, plan_unpublish(harbour.tools, edited))
    assert harbour.hub.asked == []
    assert not [line for line in harbour.registry.asked if line.startswith("DELETE")]
