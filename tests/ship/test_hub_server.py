"""The shipped hub is one that the stock client is content with, asked in the client's own words."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from coldsnap.core.digest import Digest
from coldsnap.testing.hub import HubServer
from coldsnap.testing.hub_objects import Objects

TOKEN = "hf_planted"
DATA = bytes(range(256)) * 300


@pytest.fixture(params=[1 << 30, 1 << 14], ids=["basic", "multipart"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", token=TOKEN, part_bytes=request.param) as one:
        yield one
    huggingface_hub.close_session()


@pytest.fixture
def client(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> huggingface_hub.HfApi:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return huggingface_hub.HfApi(endpoint=server.url, token=TOKEN)


def test_the_client_uploads_lists_and_downloads(
    server: HubServer, client: huggingface_hub.HfApi, tmp_path: Path
) -> None:
    client.create_repo("org/model", private=True)
    client.create_repo("org/model", exist_ok=True)
    info = client.upload_file(path_or_fileobj=DATA, path_in_repo="a/b.bin", repo_id="org/model")
    assert client.model_info("org/model").sha == info.oid
    (found,) = client.get_paths_info("org/model", ["a/b.bin", "none"], revision=info.oid)
    assert (found.path, found.size, found.lfs.sha256) == ("a/b.bin", len(DATA), Digest.of(DATA).hex)
    assert [entry.path for entry in client.list_repo_tree("org/model", "a")] == ["a/b.bin"]
    assert client.file_exists("org/model", "a/b.bin")
    path = client.hf_hub_download("org/model", "a/b.bin", revision=info.oid, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == DATA
    assert server.received_bytes >= len(DATA)


def test_the_same_file_again_is_neither_uploaded_nor_committed(
    server: HubServer, client: huggingface_hub.HfApi
) -> None:
    client.create_repo("org/model")
    first = client.upload_file(path_or_fileobj=DATA, path_in_repo="a.bin", repo_id="org/model")
    server.reset()
    again = client.upload_file(path_or_fileobj=DATA, path_in_repo="a.bin", repo_id="org/model")
    assert again.oid == first.oid
    assert server.received_bytes < 4096


def test_refusals_are_those_the_client_knows(server: HubServer, client: huggingface_hub.HfApi, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        client.model_info("org/none")
    client.create_repo("org/model")
    info = client.upload_file(path_or_fileobj=DATA, path_in_repo="a.bin", repo_id="org/model")
    with pytest.raises(EntryNotFoundError):
        client.hf_hub_download("org/model", "none.bin", cache_dir=tmp_path / "cache")
    with pytest.raises(HfHubHTTPError) as caught:
        client.create_commit(
            "org/model",
            [huggingface_hub.CommitOperationAdd("b.bin", DATA[1:])],
            commit_message="x",
            parent_commit="0" * 40,
        )
    assert caught.value.response.status_code == 412
    server.repositories["org/model"].gated = True
    with pytest.raises(GatedRepoError):
        client.hf_hub_download("org/model", "a.bin", revision=info.oid, cache_dir=tmp_path / "other")
    with pytest.raises(HfHubHTTPError):
        huggingface_hub.HfApi(endpoint=server.url, token="hf_wrong").model_info("org/model")


class TestObjects:
    """LFS objects in parts: named when they are proved, however they came."""

    OID = Digest.of(DATA).hex
    HALF = len(DATA) // 2

    @pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)])
    def test_parts_in_any_order_and_again(self, tmp_path: Path, order: tuple[int, ...]) -> None:
        objects = Objects(tmp_path)
        halves = (DATA[: self.HALF], DATA[self.HALF :])
        for number in order:
            objects.put_part(self.OID, number * self.HALF, iter([halves[number][:5], halves[number][5:]]))
        assert objects.complete(self.OID)
        assert objects.path(self.OID).read_bytes() == DATA
        assert [path.name for path in tmp_path.iterdir()] == [self.OID]

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_part_that_is_exchanged_after_it_was_hashed_is_noticed(self, tmp_path: Path, number: int) -> None:
        objects = Objects(tmp_path)
        objects.put_part(self.OID, 0, [DATA[: self.HALF]])
        objects.put_part(self.OID, self.HALF, [DATA[self.HALF :]])
        objects.put_part(self.OID, number * self.HALF, [b"x"])
        assert not objects.complete(self.OID)
        assert list(tmp_path.iterdir()) == []

    def test_two_writers_at_once(self, tmp_path: Path) -> None:
        """The second comes while the first is in the middle, and writes other bytes behind it."""
        objects = Objects(tmp_path)

        def pieces(second: bytes) -> Iterator[bytes]:
            yield DATA[: self.HALF]
            objects.put_part(self.OID, 0, [second])
            yield DATA[self.HALF :]

        objects.put_part(self.OID, 0, pieces(b"other"))
        assert not objects.complete(self.OID)
        objects.put_part(self.OID, 0, pieces(DATA[:9]))
        assert objects.complete(self.OID)
        assert not objects.complete("0" * 64)

    def test_a_writer_that_is_late_does_not_touch_the_object(self, tmp_path: Path) -> None:
        objects = Objects(tmp_path)

        def late() -> Iterator[bytes]:
            objects.put_part(self.OID, 0, [DATA])
            assert objects.complete(self.OID)
            yield b"other"

        objects.put_part(self.OID, 0, late())
        assert objects.path(self.OID).read_bytes() == DATA
        assert objects.complete(self.OID)
        assert [path.name for path in tmp_path.iterdir()] == [self.OID]

    def test_a_whole_object_with_other_bytes_is_not_kept(self, tmp_path: Path) -> None:
        assert not Objects(tmp_path).put(self.OID, [DATA[1:]])
        assert list(tmp_path.iterdir()) == []


def test_who_completes_an_object_while_another_writer_names_it_agrees(tmp_path: Path) -> None:
    parts = [b"a" * 9, b"b" * 9]
    results: list[bool] = []
    second: list[threading.Thread] = []
    oid = hashlib.sha256(b"".join(parts)).hexdigest()

    class Watched(Objects):
        def _name(self, aside: Path, oid: str, found: str) -> bool:
            if not second:  # the first writer's file has no name yet; the second one's last part comes
                self.put_part(oid, 9, [parts[1]])
                second.append(threading.Thread(target=lambda: results.append(self.complete(oid))))
                second[0].start()
                second[0].join(0.2)  # long enough to be wrong
            return super()._name(aside, oid, found)

    objects = Watched(tmp_path)
    for number, part in enumerate(parts):
        objects.put_part(oid, 9 * number, [part])
    assert objects.complete(oid)
    second[0].join(60)
    assert results == [True]
    assert [path.name for path in tmp_path.iterdir()] == [oid]
