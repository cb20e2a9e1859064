"""Prepared folders: believed while untouched, made again otherwise, whole or absent at every moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coldsnap.capsule.image import CACHE_SEED, PROCESS_IMAGE, RESIDUAL, CapsuleFile, CapsuleImage, write_capsule
from coldsnap.capsule.prepared import RECORD_NAME, Prepared, ensure_prepared, is_prepared
from coldsnap.core.digest import Digest
from coldsnap.core.owners import Owner
from coldsnap.errors import OperationInterrupted, PayloadRejected, Refused, ResourceBusy
from coldsnap.store.admission import admit_file, is_proved, record_path
from coldsnap.store.locks import hold
from coldsnap.store.staging import HOLE_BYTES
from coldsnap.store.stateroot import StateRoot

CONTENTS = {
    ("process/pages-1.img", PROCESS_IMAGE): random.Random(1).randbytes(1_000_000),
    ("process/inventory.img", PROCESS_IMAGE): b"inventory",
    ("workers/w0/native-manifest.json", "native-manifest"): b"{}",
    ("workers/w0/weights.blob", RESIDUAL): random.Random(2).randbytes(500_000),
    ("cache/a/b/seed.py", CACHE_SEED): b"print(1)\n",
}
PAGES = "process/pages-1.img"
BLOB = "workers/w0/weights.blob"


class Kit:
    """A capsule, a state root, and what the artifact says about the capsule."""

    def __init__(self, folder: Path, contents: dict[tuple[str, str], bytes] = CONTENTS) -> None:
        files = []
        for number, ((path, role), data) in enumerate(contents.items()):
            (folder / f"source{number}").write_bytes(data)
            source = folder / f"source{number}"
            files.append(CapsuleFile(role=role, owner=Owner.unit("u0"), path=path, source=source))
        self.layout = folder / "layout"
        self.image: CapsuleImage = write_capsule(self.layout, unit="u0", files=files, annotations={})
        self.contents = {path: data for (path, _), data in contents.items()}
        self.expected = {path: (len(data), Digest.of(data)) for path, data in self.contents.items()}
        self.state = StateRoot.open(folder / "state")
        self.folder = self.state.prepared / self.image.digest.hex

    def ensure(self) -> Prepared:
        return ensure_prepared(self.state, self.layout, self.image.digest, self.expected)

    def check_whole(self) -> None:
        found = {
            str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()
        }
        found.pop(RECORD_NAME)
        found.pop(str(record_path(Path(BLOB))), None)
        assert found == self.contents
        assert [path.name for path in self.state.prepared.iterdir()] == [self.folder.name]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def test_the_first_time_unpacks_and_the_second_believes(kit: Kit) -> None:
    assert not is_prepared(kit.state, kit.image.digest, kit.expected)
    first = kit.ensure()
    assert (first.path, first.from_record) == (kit.folder, False)
    assert first.images_dir == kit.folder / "process"
    kit.check_whole()
    before = os.lstat(kit.folder / PAGES)
    second = kit.ensure()
    assert (second.path, second.from_record, second.files) == (first.path, True, first.files)
    assert os.lstat(kit.folder / PAGES) == before
    assert is_prepared(kit.state, kit.image.digest, kit.expected)
    assert (kit.folder.stat().st_mode & 0o777, (kit.folder / PAGES).stat().st_mode & 0o777) == (0o700, 0o600)


def test_the_capsule_is_not_needed_while_the_folder_is_untouched(kit: Kit) -> None:
    kit.ensure()
    (kit.layout / "blobs" / "sha256" / kit.image.digest.hex).unlink()
    assert kit.ensure().from_record


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def same_size_and_time(path: Path) -> None:
    status = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(bytes(status.st_size))
    os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    copy.rename(path)


def to_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def cut(path: Path) -> None:
    status = path.stat()
    os.truncate(path, status.st_size - 1)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def touch_later(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def change_record(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tree = json.loads(path.read_bytes())
        change(tree)
        path.write_text(json.dumps(tree))

    return apply


def blob_is_proved(kit: Kit) -> bool:
    size, digest = kit.expected[BLOB]
    return is_proved(kit.folder / BLOB, digest, size)


def test_a_residual_has_a_record_that_an_engine_can_believe(kit: Kit) -> None:
    kit.ensure()
    size, digest = kit.expected[BLOB]
    with admit_file(kit.folder / BLOB, digest, size) as admitted:
        assert admitted.from_record
    records = [path for path in kit.folder.rglob("*") if path.name.endswith(record_path(Path(BLOB)).name)]
    assert records == [record_path(kit.folder / BLOB)]


@pytest.mark.parametrize("spoil", [rewrite, same_size_and_time, to_link, cut, touch_later])
def test_a_residual_that_was_touched_has_no_record_until_it_is_unpacked_again(
    kit: Kit, spoil: Callable[[Path], object]
) -> None:
    kit.ensure()
    spoil(kit.folder / BLOB)
    assert not blob_is_proved(kit)
    kit.ensure()
    assert blob_is_proved(kit)


def test_a_folder_whose_record_is_not_believed_loses_that_of_its_residual(kit: Kit) -> None:
    """What distrusts a capsule removes `prepared.json` alone."""
    kit.ensure()
    before = os.lstat(record_path(kit.folder / BLOB)).st_ino
    os.link(record_path(kit.folder / BLOB), kit.state.path / "kept")  # so that its number is not used again
    (kit.folder / RECORD_NAME).unlink()
    kit.ensure()
    assert os.lstat(record_path(kit.folder / BLOB)).st_ino != before
    assert blob_is_proved(kit)


def test_a_residual_without_its_record_does_not_unpack_the_capsule_again(kit: Kit) -> None:
    """The engine proves it then, once."""
    kit.ensure()
    record_path(kit.folder / BLOB).unlink()
    assert kit.ensure().from_record


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (PAGES, rewrite),
        (PAGES, same_size_and_time),
        (PAGES, to_link),
        (PAGES, cut),
        (PAGES, touch_later),
        (PAGES, Path.unlink),
        ("cache/a/b/seed.py", touch_later),
        (RECORD_NAME, Path.unlink),
        (RECORD_NAME, to_link),
        (RECORD_NAME, lambda path: path.chmod(0o644)),
        (RECORD_NAME, lambda path: path.write_text("{}")),
        (RECORD_NAME, lambda path: path.write_bytes(path.read_bytes()[:-20])),
        (RECORD_NAME, change_record(lambda tree: tree.update(format=2))),
        (RECORD_NAME, change_record(lambda tree: tree.update(capsule=str(Digest.of(b"other"))))),
        (RECORD_NAME, change_record(lambda tree: tree.update(files=[]))),
        ("process", lambda path: path.chmod(0o777)),
        ("process", to_link),
        ("", lambda path: path.chmod(0o770)),
    ],
)
def test_whatever_was_touched_is_unpacked_again(kit: Kit, name: str, spoil: Callable[[Path], object]) -> None:
    kit.ensure()
    spoil(kit.folder / name)
    assert not is_prepared(kit.state, kit.image.digest, kit.expected)
    again = kit.ensure()
    assert not again.from_record
    kit.check_whole()
    assert kit.ensure().from_record


def test_a_folder_that_is_a_link_or_a_file_is_replaced(kit: Kit, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    kit.ensure()
    kit.folder.rename(elsewhere)
    kit.folder.symlink_to(elsewhere)
    kit.ensure()
    assert not kit.folder.is_symlink()
    assert (elsewhere / PAGES).exists()  # what the link led to is not ours to remove
    kit.check_whole()


def test_a_damaged_capsule_names_the_file_and_leaves_nothing(kit: Kit) -> None:
    manifest = json.loads((kit.layout / "blobs/sha256" / kit.image.digest.hex).read_bytes())
    blob = kit.layout / "blobs/sha256" / manifest["layers"][1]["digest"].removeprefix("sha256:")
    data = bytearray(blob.read_bytes())
    data[data.index(b"pages-1.img") + 2000] ^= 1
    blob.write_bytes(data)
    with pytest.raises(PayloadRejected) as caught:
        kit.ensure()
    assert PAGES in str(caught.value)
    assert caught.value.cure
    assert list(kit.state.prepared.iterdir()) == []


def test_another_artifact_than_the_capsules_is_refused(kit: Kit) -> None:
    kit.ensure()
    kit.expected[PAGES] = (1, Digest.of(b"x"))
    with pytest.raises(Refused, match=r"pages-1\.img"):
        kit.ensure()
    assert kit.folder.exists()  # another artifact's mistake does not cost a good folder


def test_cancelling_leaves_nothing(kit: Kit) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(OperationInterrupted):
        ensure_prepared(kit.state, kit.layout, kit.image.digest, kit.expected, cancel=stop)
    assert list(kit.state.prepared.iterdir()) == []


def test_only_one_process_prepares_at_a_time(kit: Kit) -> None:
    lock = kit.state.locks / f"prepared-{kit.image.digest.hex}.lock"
    with hold(lock, deadline_s=0, purpose="this test"), pytest.raises(ResourceBusy, match="preparing capsule"):
        ensure_prepared(kit.state, kit.layout, kit.image.digest, kit.expected, deadline_s=0)
    kit.ensure()
    with hold(lock, deadline_s=0, purpose="this test"):  # a believed folder needs no lock
        assert ensure_prepared(kit.state, kit.layout, kit.image.digest, kit.expected, deadline_s=0).from_record


def test_threads_converge_on_one_unpacking(kit: Kit) -> None:
    results: list[Prepared] = []
    threads = [threading.Thread(target=lambda: results.append(kit.ensure())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.from_record for result in results) == [False, True, True, True]
    kit.check_whole()


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize("path", ["process/pages-1.img", "workers/w0/native-manifest.json", "cache/a/b/seed.py"])
def test_a_file_that_the_artifact_does_not_name_is_refused(kit: Kit, path: str, already: bool) -> None:
    if already:
        kit.ensure()
    less = {name: promised for name, promised in kit.expected.items() if name != path}
    assert not is_prepared(kit.state, kit.image.digest, less)
    with pytest.raises(Refused) as caught:
        ensure_prepared(kit.state, kit.layout, kit.image.digest, less)
    assert [problem.field for problem in caught.value.problems] == [path]
    assert is_prepared(kit.state, kit.image.digest, kit.expected) is already, "what runs from it keeps it"


PREPARE_AND_DIE = """
import json, os, signal, sys
from pathlib import Path
from coldsnap.capsule.prepared import ensure_prepared
from coldsnap.core.digest import Digest
from coldsnap.store.stateroot import StateRoot

state, layout, digest, expected = sys.argv[1:]
expected = {path: (size, Digest.parse(sha256)) for path, (size, sha256) in json.loads(expected).items()}
die = lambda count: os.kill(os.getpid(), signal.SIGKILL)
ensure_prepared(StateRoot.open(Path(state)), Path(layout), Digest.parse(digest), expected, progress=die)
"""


def test_a_killed_process_leaves_nothing_that_counts_and_the_next_clears_it(kit: Kit) -> None:
    expected = {path: (size, str(sha256)) for path, (size, sha256) in kit.expected.items()}
    arguments = [str(kit.state.path), str(kit.layout), str(kit.image.digest), json.dumps(expected)]
    child = subprocess.run([sys.executable, "-c", PREPARE_AND_DIE, *arguments], timeout=60, check=False)
    assert child.returncode == -signal.SIGKILL
    left = list(kit.state.prepared.iterdir())
    assert [path.name.endswith(".partial") for path in left] == [True]
    assert not is_prepared(kit.state, kit.image.digest, kit.expected)
    kit.ensure()
    kit.check_whole()


@pytest.mark.parametrize("role", [PROCESS_IMAGE, RESIDUAL])
def test_blocks_of_zeros_take_no_disk(tmp_path: Path, role: str) -> None:
    """A chunk is 8 MiB: zeros inside of one, over the end of one, all of one, and at the end of the file."""
    drawn = random.Random(3)
    parts = [
        (drawn.randbytes(100_000), 3 << 20),
        (drawn.randbytes(1 << 20), 7 << 20),
        (b"x", (20 << 20) + 11),
    ]
    data = b"".join(part + bytes(zeros) for part, zeros in parts)
    kit = Kit(tmp_path, {("workers/w0/weights.blob", role): data})
    kit.ensure()
    kit.check_whole()
    found = (kit.folder / BLOB).stat()
    at_most = sum(len(part) + 2 * HOLE_BYTES for part, _ in parts)
    assert found.st_size == len(data)
    assert found.st_blocks * 512 <= at_most
    assert kit.ensure().from_record


def test_believing_fifty_files_takes_no_time(tmp_path: Path) -> None:
    kit = Kit(tmp_path, {(f"process/file-{number:02}.img", PROCESS_IMAGE): b"x" * number for number in range(50)})
    kit.ensure()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        assert kit.ensure().from_record
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1  # milliseconds, on a machine that does nothing else
