"""Publishing packs and capsules: once, whole, by digest, into a new descriptor; and nothing secret anywhere."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.errors import ColdsnapError, OutOfSpace, PayloadRejected, Refused, RemoteError, ResourceBusy
from coldsnap.ops import publishing
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.leases import leases
from coldsnap.ops.publish import plan_publish, publish_capsules_request
from coldsnap.ops.publish_native import plan_publish_native, publish_packs_request
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.ship.names import parse_hub, parse_registry
from coldsnap.testing.web import Lie, Reply, Request

from .conftest import PASSWORD, TOKEN, Harbour  # isort: skip


def pack_of(loaded: LoadedArtifact) -> tuple[str, int]:
    pack = next(iter(loaded.packs().values()))
    return pack.sha256.hex, pack.bytes


def test_a_pack_goes_to_the_path_of_its_digest_at_a_pinned_commit(harbour: Harbour) -> None:
    before = harbour.loaded.path.read_bytes()
    result = harbour.publish_native()
    digest, size = pack_of(harbour.loaded)
    head = harbour.hub.repositories["org/packs"].branches["main"]
    assert result.at.revision == head
    assert harbour.hub.repositories["org/packs"].commits[head] == {
        f"model-payloads/sha256/{digest}.pack": (digest, size)
    }
    assert result.sent_bytes == size
    assert harbour.loaded.path.read_bytes() == before
    new = artifact_document(load_artifact(result.artifact_path).artifact)
    payloads = new["weights"]["model_payloads"]
    assert (payloads.pop("repository"), payloads.pop("revision")) == ("org/packs", head)
    old = artifact_document(harbour.loaded.artifact)
    for one in (new, old):
        one["weights"]["model_payloads"].pop("repository", None)
        one["weights"]["model_payloads"].pop("revision", None)
    assert new == old


def test_a_capsule_goes_to_the_registry_by_its_digest(harbour: Harbour) -> None:
    before = harbour.loaded.path.read_bytes()
    result = harbour.publish()
    digest = harbour.loaded.capsule_digest("u0")
    assert result.at.references == {"u0": f"{harbour.registry.host}/org/capsules@{digest}"}
    assert str(digest) in harbour.registry.manifests["org/capsules"]
    assert harbour.loaded.path.read_bytes() == before
    new = load_artifact(result.artifact_path)
    assert new.capsule_digest("u0") == digest
    assert new.artifact.capsule.images[0].reference == result.at.references["u0"]


def test_a_second_publication_moves_no_bytes_and_makes_no_commit(harbour: Harbour) -> None:
    first, capsules = harbour.publish_native(), harbour.publish()
    for server in harbour.servers:
        server.reset()
    again, capsules_again = harbour.publish_native("again.json"), harbour.publish("capsules.json")
    assert (again.sent_bytes, capsules_again.sent_bytes) == (0, 0)
    assert harbour.hub.received_bytes < 4096
    assert harbour.registry.received_bytes == 0
    assert not [line for line in harbour.hub.asked if "commit" in line or line.startswith("PUT")]
    assert again.at.revision == first.at.revision
    assert harbour.hub.num_commits("org/packs") == 1
    assert again.artifact_digest == first.artifact_digest
    assert capsules_again.at.references == capsules.at.references


def test_the_same_output_twice_is_content_and_another_is_refused(harbour: Harbour) -> None:
    first = harbour.publish_native("out.json")
    assert harbour.publish_native("out.json").artifact_digest == first.artifact_digest
    with pytest.raises(ResourceBusy):
        harbour.publish_native("out.json", to="hf://org/others")
    (harbour.folder / "note.json").write_text("{}")
    with pytest.raises(Refused) as caught:
        harbour.publish_native("note.json")
    assert [problem.field for problem in caught.value.problems] == ["output"]
    with pytest.raises(Refused):
        harbour.publish_native(harbour.loaded.path.name)


def test_workers_with_one_pack_upload_it_once(harbour: Harbour) -> None:
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda number: harbour.publish_native(f"{number}.json"), range(3)))
    assert len({one.at.revision for one in results}) == 1
    assert sorted(one.sent_bytes for one in results) == [0, 0, pack_of(harbour.loaded)[1]]
    assert harbour.hub.num_commits("org/packs") == 1


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("part_bytes", [1 << 14, 1 << 30], ids=["multipart", "basic"])
def test_of_a_pack_that_is_damaged_here_the_hub_never_has_an_object(
    harbour: Harbour, place: int, part_bytes: int
) -> None:
    harbour.hub.part_bytes = part_bytes
    pack = next(iter(harbour.loaded.packs().values()))
    path = harbour.tools.store.path(pack.sha256)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(PayloadRejected) as caught:
        harbour.publish_native()
    assert caught.value.reason == "digest_mismatch"
    assert not (harbour.folder / "native.json").exists()
    assert "org/packs" not in harbour.hub.repositories or harbour.hub.num_commits("org/packs") == 0
    assert not any("complete" in line or "verify" in line for line in harbour.hub.asked)
    assert not harbour.hub.objects.path(pack.sha256.hex).exists()


def test_what_is_not_here_is_refused_with_the_way_out(harbour: Harbour) -> None:
    tools = harbour.elsewhere()
    request = publish_packs_request(
        harbour.loaded, operation_id="x", to=parse_hub("hf://a/b"), output=harbour.folder / "o.json"
    )
    with pytest.raises(Refused) as caught:
        plan_publish_native(tools, harbour.loaded, request)
    assert "is not on this machine" in str(caught.value)


def with_secrets(harbour: Harbour) -> LoadedArtifact:
    document = artifact_document(harbour.loaded.artifact)
    for binding in document["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-hygiene":
            binding |= {"allowed_secrets": ["API_KEY"], "publishable": False}
    path = harbour.folder / "secret.json"
    path.write_bytes(artifact_bytes(artifact_from(document)))
    return load_artifact(path)


@pytest.mark.parametrize("verb", ["publish", "publish_native"])
def test_allowed_secrets_are_published_only_when_somebody_says_so(harbour: Harbour, verb: str) -> None:
    loaded = with_secrets(harbour)
    with pytest.raises(Refused) as caught:
        getattr(harbour, verb)("out.json", loaded)
    assert "API_KEY" in str(caught.value)
    assert "--publish-with-secrets" in str(caught.value)
    assert harbour.hub.asked == harbour.registry.asked == []
    assert getattr(harbour, verb)("out.json", loaded, with_secrets=True).sent_bytes > 0


def test_a_plan_asks_and_changes_nothing(harbour: Harbour) -> None:
    packs = publish_packs_request(
        harbour.loaded, operation_id="p", to=parse_hub("hf://org/packs"), output=harbour.folder / "o.json"
    )
    capsules = publish_capsules_request(
        harbour.loaded,
        operation_id="c",
        to=parse_registry(f"oci://{harbour.registry.host}/org/capsules"),
        output=harbour.folder / "o.json",
    )
    size = pack_of(harbour.loaded)[1]
    plan = plan_publish_native(harbour.tools, harbour.loaded, packs)
    assert (plan.to_send_bytes, [one.outcome for one in plan.objects]) == (size, ["to be sent"])
    assert {one.outcome for one in plan_publish(harbour.tools, harbour.loaded, capsules).objects} == {"to be sent"}
    assert harbour.hub.repositories == {}
    assert harbour.registry.blobs == {}
    assert not [line for line in harbour.registry.asked if line.split()[0] not in ("HEAD", "GET")]
    harbour.publish_both()
    assert plan_publish_native(harbour.tools, harbour.loaded, packs).to_send_bytes == 0
    assert plan_publish(harbour.tools, harbour.loaded, capsules).to_send_bytes == 0
    offline = replace(harbour.tools, remotes=replace(harbour.remotes, offline="HF_HUB_OFFLINE is set"))
    assert plan_publish_native(offline, harbour.loaded, packs).unknown == "HF_HUB_OFFLINE is set"


def test_offline_nothing_is_published(harbour: Harbour) -> None:
    harbour.remotes = replace(harbour.remotes, offline="HF_HUB_OFFLINE is set")
    for verb in (harbour.publish, harbour.publish_native):
        with pytest.raises(Refused) as caught:
            verb()
        assert "HF_HUB_OFFLINE is set" in str(caught.value)
    assert harbour.hub.asked == harbour.registry.asked == []


def test_capsules_move_between_repositories_of_one_registry_without_their_bytes(harbour: Harbour) -> None:
    first = harbour.publish()
    harbour.registry.reset()
    moved = harbour.publish(
        "moved.json", load_artifact(first.artifact_path), to=f"oci://{harbour.registry.host}/other/place"
    )
    assert {one.outcome for one in moved.objects} == {"mounted", "sent"}
    assert [one.item.kind for one in moved.objects if one.outcome == "sent"] == ["manifest"]
    assert harbour.registry.received_bytes <= 2 * moved.sent_bytes  # once more with a token


def test_receipts_say_what_was_done(harbour: Harbour) -> None:
    result = harbour.publish_native()
    receipt = json.loads((harbour.tools.state.receipts / "publish-native-1.json").read_text())
    assert (receipt["operation"], receipt["state"]) == ("publish-native", "succeeded")
    assert receipt["result"]["revision"] == result.at.revision
    assert receipt["result"]["sent_bytes"] == result.sent_bytes
    assert {span["name"] for span in receipt["timing"]["spans"]} >= {"gates", "upload", "commit"}


def test_the_new_descriptor_is_leased(harbour: Harbour) -> None:
    result = harbour.publish_native()
    assert (harbour.tools.state.artifacts / f"{result.artifact_digest.hex}.json").exists()


def test_a_descriptor_that_cannot_be_written_takes_no_lease_from_its_twin(
    harbour: Harbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same publication again, to a disk that is full: what the first one's descriptor needs is still kept."""
    first = harbour.publish_native("first.json")
    path = harbour.tools.state.artifacts / f"{first.artifact_digest.hex}.json"
    kept = path.read_bytes()

    def full(path: Path, data: bytes) -> None:
        raise OutOfSpace("the disk is full")

    monkeypatch.setattr(publishing, "write_new", full)
    with pytest.raises(OutOfSpace):
        harbour.publish_native("second.json")
    assert path.read_bytes() == kept
    with pytest.raises(OutOfSpace):
        harbour.publish_native("third.json", to="hf://org/others")
    known = {Path(one.path).name for one in leases(harbour.tools)}
    assert known == {"artifact.json", "first.json"}


def test_many_publications_at_once_into_one_descriptor_agree(harbour: Harbour) -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: harbour.publish("one.json"), range(4)))
    (digest,) = {one.artifact_digest for one in results}
    assert load_artifact(harbour.folder / "one.json").digest == digest
    assert digest in {one.artifact for one in leases(harbour.tools)}


def test_gc_does_not_run_beside_a_publication(harbour: Harbour) -> None:
    honest, seen = harbour.hub.handle, []

    def handle(request: Request) -> Reply:
        if "/commit/" in request.path:
            with pytest.raises(ResourceBusy):
                run_tidy(harbour.tools, plan_tidy(harbour.tools, forget_missing=True))
            with pytest.raises(ResourceBusy):
                run_delete(harbour.tools, plan_delete(harbour.tools, harbour.loaded.path))
            seen.append(request.path)
        return honest(request)

    harbour.hub.handle = handle  # type: ignore[method-assign]
    harbour.publish_native()
    assert len(seen) == 1
    assert harbour.loaded.path.exists()
    assert harbour.tools.store.exists(next(iter(harbour.loaded.packs().values())).sha256)


PLANTED = (TOKEN, PASSWORD, "planted-signature", "planted-state", "sold-")


def holders(folder: Path, texts: tuple[str, ...]) -> list[str]:
    return [
        f"{text} in {path}"
        for path in folder.rglob("*")
        if path.is_file()
        for text in texts
        if text.encode() in path.read_bytes() and not (text == "planted-state" and path.match("staging/upload-*.json"))
    ]


def everything_said(error: BaseException | None) -> str:
    said = []
    while error is not None:
        said += [str(error), repr(error), *getattr(error, "__notes__", ())]
        if isinstance(error, ColdsnapError):
            said.append(repr(error.facts))
        error = error.__cause__
    return "\n".join(said)


@pytest.mark.parametrize(
    "lie",
    [
        Lie(what="status", to="/lfs/put|/lfs/part", status=400),
        Lie(what="status", to="preupload", status=403, headers={"X-Error-Message": f"no such token {TOKEN}"}),
        Lie(what="close", to="/commit/"),
        Lie(what="close", to="PATCH"),
        Lie(what="status", to="PUT .*/uploads/", status=400),
        Lie(what="status", to="/token", status=401),
        Lie(what="redirect-loop", to="POST"),
        None,
    ],
    ids=lambda lie: f"{lie.what} {lie.to}" if lie is not None else "honest",
)
def test_no_credential_is_written_said_or_logged(
    harbour: Harbour, lie: Lie | None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    for server in harbour.servers:
        if lie is not None:
            server.lies.append(lie)
    said = []
    for verb in (harbour.publish_native, harbour.publish):
        try:
            verb()
        except (RemoteError, ColdsnapError) as error:
            said.append(everything_said(error))
    for server in harbour.servers:
        server.reset()
    loaded = harbour.publish_both() if lie is None else harbour.loaded
    tools = harbour.elsewhere()
    try:
        harbour.prepare(tools, loaded)
    except ColdsnapError as error:
        said.append(everything_said(error))
    sent = {value for server in harbour.servers for _, name, value in server.seen_headers if name == "authorization"}
    assert any(TOKEN in value for value in sent)
    out, err = capfd.readouterr()
    for text in PLANTED:
        assert not [one for one in (*said, out, err, caplog.text) if text in one]
    (harbour.folder / "config.json").unlink()
    assert holders(harbour.folder / "state", PLANTED) == []
    assert holders(harbour.folder / "state-b", PLANTED) == []
    assert [one for one in holders(harbour.folder, PLANTED) if ".json" in one] == []
