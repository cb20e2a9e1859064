"""Uploads to a registry go on where a killed process left them, and believe no record that is not that of this blob."""

from __future__ import annotations

import json
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import RemoteError
from coldsnap.ship.base import Item, Kind, Outgoing, Written
from coldsnap.ship.http import Http
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_registry
from coldsnap.ship.registry import Registry
from coldsnap.testing.registry import RegistryServer, real_registry
from coldsnap.testing.relay import Relay
from coldsnap.testing.shipping import start_sending
from coldsnap.testing.web import Lie, Web

from .conftest import PASSWORD, TOKEN, Harbour  # isort: skip

MIB = 1 << 20
SIZE = 8 * MIB + 17
PATIENT = Limits(attempts=3, first_pause_s=0.01, longest_pause_s=0.02, chunk_bytes=MIB)
DEADLINE_S = 60.0


def make_blob(path: Path, size: int) -> Outgoing:
    data = random.Random(5).randbytes(size)
    path.write_bytes(data)
    return Outgoing(item=Item(Kind.BLOB, Digest.of(data)), bytes=size, path=path)


@pytest.fixture
def blob(tmp_path: Path) -> Outgoing:
    return make_blob(tmp_path / "blob", SIZE)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "records"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[RegistryServer]:
    with RegistryServer(tmp_path / "fake") as server:
        yield server


def name_at(server: Web) -> str:
    return f"oci://{server.host}/a/b"


def write(server: Web, blob: Outgoing, records: Path | None, *, progress: list[int] | None = None) -> Written:
    told = progress if progress is not None else []
    with Http(PATIENT) as http:
        return Registry(parse_registry(name_at(server)), http, records=records).write([blob], progress=told.append)


def kill_when(server: Web, blob: Outgoing, records: Path, num_bytes: int, chunk_bytes: int = MIB) -> None:
    """A process that sends the blob, killed when the server has received so many bytes; its connections are done."""
    process = start_sending(name_at(server), blob.path, records, replace(PATIENT, chunk_bytes=chunk_bytes))

    killed = threading.Event()

    def kill() -> None:
        if server.received_bytes >= num_bytes and not killed.is_set():
            killed.set()
            process.kill()

    server.tripwire = kill
    process.join(DEADLINE_S)
    assert process.exitcode == -9
    server.tripwire = lambda: None
    ends = time.monotonic() + DEADLINE_S
    while server.busy and time.monotonic() < ends:
        time.sleep(0.01)
    assert server.busy == 0


def read_back(server: Web, blob: Outgoing) -> bytes:
    with Http(PATIENT) as http:
        store = Registry(parse_registry(name_at(server)), http)
        return b"".join(bytes(piece) for piece in store.read(blob.item, 0, blob.bytes))


def test_a_killed_upload_goes_on_where_the_registry_is(fake: RegistryServer, blob: Outgoing, records: Path) -> None:
    kill_when(fake, blob, records, SIZE * 6 // 10)
    (record,) = records.glob("upload-*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    (session,) = [one for one in fake.folder.iterdir() if len(one.name) == 16]
    has = session.stat().st_size
    fake.reset()
    told: list[int] = []
    write(fake, blob, records, progress=told)
    assert fake.received_bytes == SIZE - has < SIZE * 6 // 10
    assert sum(told) == SIZE
    assert read_back(fake, blob) == blob.path.read_bytes()
    assert list(records.iterdir()) == []


def test_an_upload_that_is_killed_again_and_again_moves_each_byte_once(
    fake: RegistryServer, blob: Outgoing, records: Path
) -> None:
    draw, moved = random.Random(7), 0
    for _ in range(4):
        kill_when(fake, blob, records, draw.randint(1, MIB))
        moved += fake.received_bytes
        fake.reset()
    write(fake, blob, records)
    assert moved + fake.received_bytes == SIZE
    assert read_back(fake, blob) == blob.path.read_bytes()
    assert list(records.iterdir()) == []


def test_a_real_registry_goes_on_between_chunks(records: Path, tmp_path: Path) -> None:
    """Behind a proxy that passes on whole requests a killed client never cuts off a chunk.

    A chunk must be larger than what both kernels hold of it, or they hand over the rest of it for the dead.
    """
    chunk = 32 * MIB
    blob = make_blob(tmp_path / "large", 2 * chunk + 17)
    with real_registry(tmp_path / "real") as real, Relay(real.host, whole=True) as relay:
        kill_when(relay, blob, records, blob.bytes * 6 // 10, chunk)
        relay.reset()
        write(relay, blob, records)
        assert relay.received_bytes == blob.bytes - chunk < blob.bytes * 6 // 10
        assert [line for line in relay.asked if line.startswith("POST")] == []
        assert read_back(relay, blob) == blob.path.read_bytes()
    assert list(records.iterdir()) == []


def test_a_real_registry_that_was_cut_off_in_a_chunk_gets_the_blob_anew(
    blob: Outgoing, records: Path, tmp_path: Path
) -> None:
    """docker-registry 2.8 answers 404 then: the address is signed for an offset that is none any more."""
    with real_registry(tmp_path / "real") as real, Relay(real.host) as relay:
        kill_when(relay, blob, records, 4 * MIB + 1)
        relay.reset()
        write(relay, blob, records)
        assert [line.split()[0] for line in relay.asked[:4]] == ["HEAD", "GET", "DELETE", "POST"]
        assert relay.received_bytes == SIZE
        assert read_back(relay, blob) == blob.path.read_bytes()
    assert list(records.iterdir()) == []


# -- records that are not to be believed ------------------------------------------------------------------------------


@pytest.fixture
def left(fake: RegistryServer, blob: Outgoing, records: Path) -> Path:
    """The record of an upload that broke off, of which the registry has three chunks."""
    fake.lies.append(Lie(what="close", to="PATCH"))
    original, count = fake.lie_for, [3]

    def after_three(line: str) -> Lie | None:
        if line.startswith("PATCH"):
            count[0] -= 1
            return fake.lies[0] if count[0] < 0 else None
        return None

    fake.lie_for = after_three  # type: ignore[method-assign]
    with pytest.raises(RemoteError):
        write(fake, blob, records)
    fake.lie_for = original  # type: ignore[method-assign]
    fake.reset()
    (record,) = records.iterdir()
    return record


def test_a_failed_upload_goes_on_too(fake: RegistryServer, blob: Outgoing, records: Path, left: Path) -> None:
    write(fake, blob, records)
    assert fake.received_bytes == SIZE - 3 * MIB
    assert not left.exists()


def edit(**changes: object) -> Callable[[Path], None]:
    def work(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return work


def as_link(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\0" * 100),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.chmod(0o644),
        as_link,
        as_pipe,
        edit(format=2),
        edit(bytes=SIZE - 1),
        edit(digest="sha256:" + "0" * 64),
        edit(registry="http://127.0.0.1:1"),
        edit(repository="a/c"),
        edit(extra=1),
        edit(location="http://203.0.113.9/v2/a/b/blobs/uploads/1"),
        edit(location="file:///etc/passwd"),
        edit(location=""),
    ],
    ids=[
        "empty", "zeros", "deep", "open to others", "link", "pipe", "format", "size", "digest", "registry",
        "repository", "extra", "other host", "no web address", "no address",
    ],
)  # fmt: skip
def test_a_record_that_is_odd_counts_as_none(
    fake: RegistryServer, blob: Outgoing, records: Path, left: Path, harm: Callable[[Path], None]
) -> None:
    harm(left)
    write(fake, blob, records)
    assert [line.split()[0] for line in fake.asked[:2]] == ["HEAD", "POST"]
    assert fake.received_bytes == SIZE
    assert read_back(fake, blob) == blob.path.read_bytes()
    assert not left.exists()


@pytest.mark.parametrize(
    "path", ["/v2/a/c/blobs/uploads/", "/v2/a/b/blobs/uploads/../../../c/blobs/uploads/", "//v2/x/"]
)
def test_no_record_leads_into_another_repository(
    fake: RegistryServer, blob: Outgoing, records: Path, left: Path, path: str
) -> None:
    session = json.loads(left.read_text())["location"].rpartition("/")[2]
    edit(location=f"{fake.url}{path}{session}")(left)
    write(fake, blob, records)
    assert not [line for line in fake.asked if "/a/b/" not in line or ".." in line]
    assert sorted(fake.blobs) == ["a/b"]


def sessions(fake: RegistryServer) -> list[Path]:
    return [one for one in fake.folder.iterdir() if len(one.name) == 16]


def test_a_session_that_the_registry_forgot_begins_anew(
    fake: RegistryServer, blob: Outgoing, records: Path, left: Path
) -> None:
    for one in sessions(fake):
        one.unlink()
    write(fake, blob, records)
    assert fake.received_bytes == SIZE
    assert read_back(fake, blob) == blob.path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, SIZE + 1], ids=["empty", "one byte", "longer"])
def test_a_session_of_another_length_begins_anew(
    fake: RegistryServer, blob: Outgoing, records: Path, left: Path, size: int
) -> None:
    (one,) = sessions(fake)
    one.write_bytes(b"x" * size)
    write(fake, blob, records)
    assert fake.received_bytes == SIZE
    assert read_back(fake, blob) == blob.path.read_bytes()


@pytest.mark.parametrize("size", [3 * MIB, SIZE], ids=["part", "whole"])
def test_a_session_with_other_bytes_is_refused_and_the_blob_sent_again(
    fake: RegistryServer, blob: Outgoing, records: Path, left: Path, size: int
) -> None:
    (one,) = sessions(fake)
    one.write_bytes(b"x" * size)
    told: list[int] = []
    write(fake, blob, records, progress=told)
    assert fake.received_bytes == SIZE - size + SIZE
    assert sum(told) == SIZE
    assert read_back(fake, blob) == blob.path.read_bytes()
    assert not left.exists()


def test_a_registry_that_is_down_costs_nothing(fake: RegistryServer, blob: Outgoing, records: Path, left: Path) -> None:
    fake.lies.append(Lie(what="status", to="GET .*/uploads/", status=503))
    with pytest.raises(RemoteError) as caught:
        write(fake, blob, records)
    assert caught.value.reason == "server_error"
    fake.reset()
    write(fake, blob, records)
    assert fake.received_bytes == SIZE - 3 * MIB


def test_a_record_that_cannot_be_written_costs_nothing_but_itself(
    fake: RegistryServer, blob: Outgoing, tmp_path: Path
) -> None:
    write(fake, blob, tmp_path / "missing")
    assert read_back(fake, blob) == blob.path.read_bytes()


@pytest.mark.parametrize("where", ["/v2/org/others/blobs/uploads/1", "/v2/org/capsules/blobs/uploads/%2e%2e/x"])
def test_a_registry_cannot_lead_an_upload_into_another_repository(
    fake: RegistryServer, blob: Outgoing, where: str
) -> None:
    fake.lies.append(Lie(what="status", to="POST", status=202, headers={"Location": where}))
    with pytest.raises(RemoteError) as caught:
        write(fake, blob, None)
    assert caught.value.reason == "unsafe_redirect"
    assert not [line for line in fake.asked if line.split()[0] in ("PATCH", "PUT")]


def test_a_registry_that_takes_a_blob_and_has_it_not_is_named(fake: RegistryServer, blob: Outgoing) -> None:
    fake.lies.append(Lie(what="status", to="PUT", status=201))
    with pytest.raises(RemoteError) as caught:
        write(fake, blob, None)
    assert caught.value.reason == "bad_answer"


# -- through the verb -------------------------------------------------------------------------------------------------


def test_publish_keeps_a_record_without_credentials_and_takes_it_away(harbour: Harbour) -> None:
    harbour.registry.lies.append(Lie(what="close", to="PATCH"))
    with pytest.raises(RemoteError):
        harbour.publish()
    (record,) = harbour.tools.state.staging.glob("upload-*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert not [text for text in (TOKEN, PASSWORD, "sold-", "Bearer", "Basic") if text in record.read_text()]
    harbour.registry.reset()
    harbour.publish()
    assert list(harbour.tools.state.staging.iterdir()) == []
