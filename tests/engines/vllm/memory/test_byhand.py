"""Sleeps and wakes of a vLLM that nobody controls: what is written at the first, and what comes back after each."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES, parse_native_manifest, parse_recovery_manifest
from coldsnap.engines.local_model import resolve_local
from coldsnap.engines.safetensors import read_header
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.vllm import loading, plugin
from coldsnap.engines.vllm.byhand import ByHand
from coldsnap.engines.vllm.cumem import CuMemMemory
from coldsnap.engines.vllm.handmodel import HandModel
from coldsnap.engines.vllm.handsettings import EXPORT_VARIABLE, HandSettings, read_hand_settings
from coldsnap.errors import (
    IntegrityError,
    InvalidDocument,
    PayloadRejected,
    Refused,
    ResourceBusy,
    UnsafePath,
    UsageError,
    UserError,
)
from coldsnap.store import admission
from coldsnap.store.admission import record_path
from coldsnap.store.documents import read_private
from coldsnap.testing.checkpoint import seeded_bytes, write_checkpoint
from coldsnap.testing.cuda import GARBAGE, FakeDriver
from coldsnap.testing.cumem import FakeBackup, FakeCuMem

from .conftest import MIB, LoadedVllm  # isort: skip

MODEL = {"embed": 300_000, "qkv": 90_000, "norm": 3000}
COMPUTED = ("rotary", 5000)
FILES = {
    "model-weights.pack",
    "weights.blob",
    "weights.blob.coldsnap-validation.json",
    "native-manifest.json",
    "manifest.json",
}


@dataclass
class Server:
    """A vLLM with a model in it: `tensors` of the checkpoint, a computed one, keys and values."""

    vllm: LoadedVllm
    memory: CuMemMemory
    hand: ByHand
    expected: dict[str, bytes]
    settings: HandSettings
    checkpoint: Path

    @property
    def out(self) -> Path:
        return Path(self.settings.folder) / "w0"

    def bytes_of(self, name: str) -> bytes:
        return self.vllm.driver.peek(*self.vllm.tensors[name])

    def is_whole(self) -> bool:
        """Every weight is what it was, and keys and values are zero."""
        weights = all(self.bytes_of(name) == data for name, data in self.expected.items())
        return weights and self.bytes_of("kv") == bytes(MIB)

    def is_asleep(self) -> bool:
        return all(all(flags) for tag, flags in self.vllm.asleep().items() if tag in ("weights", "kv_cache"))

    def capture_id(self) -> str:
        return str(json.loads((self.out / "native-manifest.json").read_bytes())["capture_id"])


Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(seed=0, rank=0, form="0.33", name="model")`: a process that has loaded; each a world of its own."""
    servers: list[Server] = []

    def make(*, seed: int = 0, rank: int = 0, form: str = "0.33", name: str = "model", room: int = 0) -> Server:
        checkpoint = tmp_path / f"checkpoints-{seed}" / name
        if not checkpoint.exists():
            write_checkpoint(checkpoint, seed=seed, tensors=MODEL)
        driver = FakeDriver()
        vllm = LoadedVllm(driver, FakeCuMem(driver, form="0.26" if form == "0.26" else "0.33"))
        memory = CuMemMemory(driver, ordinal=0, cumem=vllm.lent())
        settings = HandSettings(
            format=1, kind="coldsnap-vllm-by-hand", folder=str(tmp_path / "out"), state_root=str(tmp_path / "state")
        )
        hand = ByHand(settings, rank=rank, model=HandModel(name, checkpoint), memory=memory)
        load = hand.load()
        if room:
            with vllm.allocator.use_memory_pool("runtime"):
                vllm.allocate("other", room)  # so that this process has other addresses
        expected = {name: seeded_bytes(seed, name, size) for name, size in MODEL.items()}
        expected[COMPUTED[0]] = seeded_bytes(99, *COMPUTED)
        with vllm.allocator.use_memory_pool("weights"):
            for tensor, data in expected.items():
                vllm.allocate(tensor, len(data))
        memory.adopt_weights()
        for tensor, data in expected.items():
            memory.copy_in(vllm.tensors[tensor][0], memoryview(data))
        for file in load.files:
            for stored in read_header(checkpoint / file.name).tensors:
                ptr, size = vllm.tensors[stored.name]
                load.observer.wrote(ptr, size, tensor=stored.name, file=file.name, file_offset=stored.offset)
        with vllm.allocator.use_memory_pool("kv_cache"):
            vllm.allocate("kv", MIB)
        servers.append(Server(vllm, memory, hand, expected, settings, checkpoint))
        return servers[-1]

    yield make
    for server in servers:
        server.hand.close()
        assert server.vllm.driver.violations == []
        assert server.vllm.books_are_true()


@pytest.mark.parametrize("form", ["0.26", "0.33"])
def test_the_first_sleep_writes_and_a_wake_brings_it_back(serve: Serve, form: str) -> None:
    server = serve(form=form)
    assert server.bytes_of("kv") == bytes([GARBAGE]) * MIB
    server.hand.suspend(1)
    assert server.is_asleep()
    assert all(row.cpu_backup_tensor is None for row in server.vllm.allocator.pointer_to_data.values())
    assert {one.name for one in server.out.iterdir()} == FILES
    assert server.out.stat().st_mode & 0o077 == 0
    native = parse_native_manifest(read_private(server.out / "native-manifest.json", MANIFEST_LIMIT_BYTES))
    assert sum(one.size for one in native.model_weight_extents) == sum(MODEL.values())
    assert (native.worker, native.rank) == ("w0", 0)
    recovery = parse_recovery_manifest(read_private(server.out / "manifest.json", MANIFEST_LIMIT_BYTES))
    pinned = resolve_local(server.checkpoint)
    assert recovery.model_source.revision == pinned.revision
    assert recovery.model_source.model_id == "model"
    assert native.model_weights is not None
    stored = Path(server.settings.state_root) / f"model-payloads/sha256/{native.model_weights.sha256.hex}.pack"
    assert stored.samefile(server.out / "model-weights.pack")
    server.hand.suspend(1)
    server.hand.resume(None)
    assert server.is_whole()
    server.hand.resume(None)
    assert server.is_whole()


def test_blocks_of_no_tensor_do_not_make_another_export(serve: Serve) -> None:
    """Free memory is zero in the residual, whatever was there. A block ends with up to 511 bytes of no tensor."""
    server = serve()
    assert bytes([GARBAGE]) * 512 in server.vllm.driver.peek(server.memory.allocations[0].ptr, 2 * MIB)
    server.hand.suspend(1)
    assert bytes([GARBAGE]) * 512 not in (server.out / "weights.blob").read_bytes()


def test_what_came_to_the_weights_after_the_loader_is_kept(serve: Serve) -> None:
    server = serve()
    late = os.urandom(4096)
    with server.vllm.allocator.use_memory_pool("weights"):
        ptr = server.vllm.allocate("late", len(late))
    server.vllm.driver.use_context(server.vllm.driver.retain_context(0))
    known = {one.ptr for one in server.memory.allocations}
    assert ptr not in known
    server.memory.adopt_weights()
    server.memory.copy_in(ptr, memoryview(late))
    server.expected["late"] = late
    server.hand.suspend(1)
    server.hand.resume(None)
    assert server.is_whole()


def test_tags_bring_back_one_thing_at_a_time(serve: Serve) -> None:
    server = serve()
    server.hand.suspend(1)
    server.hand.resume(["weights"])
    assert server.vllm.asleep()["kv_cache"] == [True]
    assert server.bytes_of("embed") == server.expected["embed"]
    server.hand.resume(["kv_cache"])
    assert server.is_whole()
    server.hand.suspend(1)
    server.hand.resume(["kv_cache"])
    assert server.vllm.asleep()["weights"] == [True]
    assert server.bytes_of("kv") == bytes(MIB)
    server.hand.resume(["weights"])
    assert server.vllm.asleep()["weights"] == [False]
    server.hand.resume(None)
    assert server.is_whole()


def test_a_later_sleep_writes_nothing_unless_weights_were_loaded_again(serve: Serve) -> None:
    server = serve()
    server.hand.suspend(1)
    first = server.capture_id()
    server.hand.resume(None)
    server.hand.suspend(1)
    assert server.capture_id() == first
    server.hand.resume(None)
    ptr, _ = server.vllm.tensors["qkv"]
    server.memory.copy_in(ptr, memoryview(b"another byte"))
    server.expected["qkv"] = b"another byte" + server.expected["qkv"][12:]
    server.hand.reloaded()
    server.hand.suspend(1)
    assert server.capture_id() != first
    assert sorted(one.name for one in server.out.parent.iterdir()) == ["w0", "w0.lock"]
    server.hand.resume(None)
    assert server.is_whole(), "what differs from the checkpoint came back as well"


def test_level_two_writes_nothing_and_wakes_as_level_one(serve: Serve) -> None:
    server = serve()
    with pytest.raises(UsageError, match="never written") as caught:
        server.hand.suspend(2)
    assert caught.value.cure is not None
    assert "level 1" in caught.value.cure
    assert not server.is_asleep()
    server.hand.suspend(1)
    first = server.capture_id()
    server.hand.resume(None)
    server.hand.suspend(2)
    assert server.is_asleep()
    assert server.capture_id() == first
    server.hand.resume(None)
    assert server.is_whole()


def remove_packs(server: Server) -> None:
    for pack in (server.out / "model-weights.pack", *Path(server.settings.state_root).rglob("*.pack")):
        pack.unlink()


def test_without_its_pack_a_wake_reads_the_checkpoint_and_the_next_sleep_writes_again(serve: Serve) -> None:
    server = serve()
    server.hand.suspend(1)
    first = server.capture_id()
    (server.out / "model-weights.pack").unlink()
    for shard in server.checkpoint.glob("*.safetensors"):
        os.utime(shard)
    server.hand.resume(None)
    assert server.is_whole()
    server.hand.suspend(1)
    assert server.capture_id() != first
    assert {one.name for one in server.out.iterdir()} == FILES
    remove_packs(server)
    server.hand.resume(None)
    assert server.is_whole()


def test_without_its_pack_a_wake_from_another_checkpoint_is_refused(serve: Serve) -> None:
    server = serve()
    server.hand.suspend(1)
    remove_packs(server)
    shard = min(server.checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    kept = bytes(content)
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(IntegrityError, match="norm"):
        server.hand.resume(None)
    assert server.is_asleep()
    shard.write_bytes(kept)
    server.hand.resume(None)
    assert server.is_whole()


@pytest.mark.parametrize("own", [True, False])
def test_a_damaged_pack_is_refused_and_can_be_done_without(serve: Serve, own: bool) -> None:
    """`own`: the file in the folder is no longer the store's."""
    server = serve()
    server.hand.suspend(1)
    pack = server.out / "model-weights.pack"
    content = bytearray(pack.read_bytes())
    content[5000] ^= 1
    if own:
        pack.unlink()
    else:
        pack.chmod(0o600)
    pack.write_bytes(content)
    with pytest.raises(PayloadRejected) as caught:
        server.hand.resume(None)
    assert caught.value.reason == "digest_mismatch"
    assert caught.value.cure is not None
    assert f"remove {pack}" in caught.value.cure
    assert server.is_asleep()
    assert not server.memory.mapped
    pack.unlink()
    server.hand.resume(None)
    assert server.is_whole()


@pytest.mark.parametrize("name", ["weights.blob", "native-manifest.json", "manifest.json"])
def test_another_damaged_file_is_refused_by_its_name(serve: Serve, name: str) -> None:
    server = serve()
    server.hand.suspend(1)
    path = server.out / name
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=name):
        server.hand.resume(None)
    assert server.is_asleep()
    path.write_bytes(content)
    server.hand.resume(None)
    assert server.is_whole()


def test_a_backup_of_somebody_else_s_sleep_is_refused_before_anything_is_written(serve: Serve) -> None:
    server = serve()
    row = server.vllm.allocator.pointer_to_data[server.vllm.tensors["kv"][0]]
    row.cpu_backup_tensor = FakeBackup(bytes(4096))
    with pytest.raises(Refused, match="level-1 backup"):
        server.hand.suspend(1)
    assert not server.out.exists()
    assert not server.is_asleep()
    row.cpu_backup_tensor = None
    server.hand.suspend(1)
    server.hand.resume(None)
    assert server.is_whole()


def test_a_sleep_that_cannot_write_leaves_the_engine_awake_and_what_was_there(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    server.hand.suspend(1)
    first = server.capture_id()
    server.hand.resume(None)
    server.hand.reloaded()
    shard = min(server.checkpoint.glob("*.safetensors"))
    away = shard.rename(shard.with_suffix(".away"))
    with pytest.raises(UserError, match=shard.name):
        server.hand.suspend(1)
    assert server.is_whole()
    assert server.capture_id() == first
    assert sorted(one.name for one in server.out.parent.iterdir()) == ["w0", "w0.lock"]
    away.rename(shard)
    server.hand.suspend(1)
    assert server.capture_id() != first


def test_a_wake_believes_what_was_counted_while_the_residual_was_written(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    server.hand.suspend(1)
    monkeypatch.setattr(admission, "digest_of_file", lambda *_: pytest.fail("it was proved again"))
    server.hand.resume(None)
    assert server.is_whole()


def test_a_folder_that_takes_no_link_gets_a_copy_that_is_proved_at_the_first_wake(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    link = os.link

    def refuse(source: Path, target: Path, **keywords: object) -> None:
        if Path(target).name == "model-weights.pack":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", refuse)
    server.hand.suspend(1)
    pack = server.out / "model-weights.pack"
    (stored,) = Path(server.settings.state_root).rglob("*.pack")
    assert pack.read_bytes() == stored.read_bytes()
    assert not pack.samefile(stored)
    assert not record_path(pack).exists()
    server.hand.resume(None)
    assert server.is_whole()
    assert record_path(pack).exists()
    server.hand.suspend(1)
    pack.chmod(0o600)
    pack.write_bytes(bytes([pack.read_bytes()[0] ^ 1]) + pack.read_bytes()[1:])
    with pytest.raises(PayloadRejected, match=re.escape(str(pack))):
        server.hand.resume(None)
    shutil.copyfile(stored, pack)
    server.hand.resume(None)
    assert server.is_whole()


def test_only_keys_and_values_are_discarded_alone(serve: Serve) -> None:
    server = serve()
    with pytest.raises(UsageError, match="weights"):
        server.hand.discard(("weights", "kv_cache"))
    assert not any(server.vllm.asleep()["kv_cache"])
    server.hand.discard(("kv_cache",))
    assert server.vllm.asleep() == {"weights": [False], "kv_cache": [True]}
    server.hand.resume(["kv_cache"])
    assert server.is_whole()


def test_a_process_that_comes_later_takes_the_place_of_its_own_model_s_export(serve: Serve) -> None:
    first = serve()
    first.hand.suspend(1)
    pack = (first.out / "model-weights.pack").read_bytes()
    old = first.capture_id()
    first.hand.close()
    second = serve(room=64 * MIB)
    assert second.memory.allocations[0].ptr != first.memory.allocations[0].ptr
    assert second.capture_id() == old, "until it has something to put there"
    second.hand.suspend(1)
    assert second.capture_id() != old
    assert (second.out / "model-weights.pack").read_bytes() == pack
    second.hand.resume(None)
    assert second.is_whole()


@pytest.mark.parametrize(
    ("other", "field"),
    [({"seed": 1}, "model_source.revision"), ({"name": "elsewhere"}, "model_source.model_id")],
)
def test_another_model_s_export_is_refused_when_the_model_is_loaded(
    serve: Serve, other: dict[str, object], field: str
) -> None:
    first = serve()
    first.hand.suspend(1)
    first.hand.close()
    before = {one.name: one.read_bytes() for one in first.out.iterdir()}
    with pytest.raises(Refused) as caught:
        serve(**other)
    assert [one.field for one in caught.value.problems] == [field]
    assert all(one.cure and str(first.out) in one.cure for one in caught.value.problems)
    assert {one.name: one.read_bytes() for one in first.out.iterdir()} == before
    serve().hand.suspend(1)


def test_each_worker_has_a_folder_of_its_own(serve: Serve) -> None:
    workers = [serve(rank=rank) for rank in (0, 1)]
    for worker in workers:
        worker.hand.suspend(1)
    root = Path(workers[0].settings.folder)
    assert sorted(one.name for one in root.iterdir()) == ["w0", "w0.lock", "w1", "w1.lock"]
    recovery = parse_recovery_manifest(read_private(root / "w1/manifest.json", MANIFEST_LIMIT_BYTES))
    assert (recovery.worker, recovery.rank) == ("w1", 1)
    for worker in workers:
        worker.hand.resume(None)
        assert worker.is_whole()


def test_a_place_that_another_process_holds_is_refused(serve: Serve) -> None:
    serve()
    with pytest.raises(ResourceBusy, match="w0"):
        serve()


def test_something_that_is_no_export_is_left_alone(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "out/w0").mkdir(parents=True, mode=0o700)
    serve().hand.close()
    (tmp_path / "out/w0/notes").write_text("mine")
    with pytest.raises(Refused, match="no export"):
        serve()
    assert (tmp_path / "out/w0/notes").read_text() == "mine"


def test_a_folder_that_others_can_write_to_is_refused(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    with pytest.raises(UnsafePath, match="changed by other users"):
        serve()


def test_what_a_crash_left_in_the_middle_is_removed(serve: Serve, tmp_path: Path) -> None:
    left = tmp_path / "out/.w0-abc"
    left.mkdir(parents=True, mode=0o700)
    (left / "weights.blob").write_bytes(b"half")
    (tmp_path / "out").chmod(0o700)
    serve()
    assert not left.exists()


def test_a_snapshot_of_the_hub_is_pinned_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = write_checkpoint(tmp_path / "snapshots" / commit)
    model = HandModel.find("org/name", revision="main", cache=None, snapshot=lambda *_: str(folder))
    assert model.pinned().revision == commit
    assert model.pinned().model_id == "org/name"
    local = HandModel.find(str(folder), revision=None, cache=None)
    assert (local.id, local.pinned().revision) == (commit, resolve_local(folder).revision)


def test_a_model_that_is_nowhere_is_the_user_s_error(tmp_path: Path) -> None:
    def nowhere(repository: str, revision: str | None, cache: str | None) -> str:
        raise FileNotFoundError("not in the cache")

    with pytest.raises(UserError, match="'org/name' is neither"):
        HandModel.find("org/name", revision=None, cache=None, snapshot=nowhere)
    with pytest.raises(UserError, match="no snapshot"):
        HandModel.find("org/name", revision=None, cache=None, snapshot=lambda *_: str(tmp_path))


def test_a_checkpoint_that_changed_after_it_was_loaded_is_told(tmp_path: Path) -> None:
    model = HandModel("model", write_checkpoint(tmp_path / "model"))
    write_checkpoint(tmp_path / "model", tensors={"embed": 10, "norm": 7})
    with pytest.raises(IntegrityError, match="not the one that was loaded"):
        model.pinned()


GOOD = {"format": 1, "kind": "coldsnap-vllm-by-hand", "folder": "/f", "state_root": "/s"}


def asked(path: Path, record: object, switch: str = "1") -> HandSettings | None:
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return read_hand_settings({EXPORT_VARIABLE: switch, SETTINGS_VARIABLE: str(path)})


def test_settings_are_read_when_an_export_is_asked_for(tmp_path: Path) -> None:
    found = asked(tmp_path / "settings.json", GOOD)
    assert found is not None
    assert (found.folder, found.state_root) == ("/f", "/s")
    for switch in ("", "0"):
        assert asked(tmp_path / "settings.json", "nonsense", switch) is None
    assert read_hand_settings({}) is None


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({**GOOD, "folder": "f"}, "folder.*absolute"),
        ({**GOOD, "state_root": ""}, "state_root.*absolute"),
        ({**GOOD, "more": 1}, "more"),
        ({**GOOD, "kind": "coldsnap-worker-settings"}, "kind"),
        ({**GOOD, "format": 2}, "format"),
        ({name: value for name, value in GOOD.items() if name != "folder"}, "folder"),
        ("{", "JSON"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, record: object, words: str) -> None:
    with pytest.raises(InvalidDocument, match=words) as caught:
        asked(tmp_path / "settings.json", record)
    assert caught.value.problems[0].value == str(tmp_path / "settings.json")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({EXPORT_VARIABLE: "yes"}, "'yes'"),
        ({EXPORT_VARIABLE: "1"}, SETTINGS_VARIABLE),
        ({EXPORT_VARIABLE: "1", SETTINGS_VARIABLE: "/nowhere/s.json"}, "/nowhere/s.json"),
    ],
)
def test_a_switch_without_settings_is_told(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_hand_settings(environment)


def test_the_plugin_ends_a_start_with_wrong_settings_before_vllm_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(EXPORT_VARIABLE, "1")
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=SETTINGS_VARIABLE):
        plugin.register()


def test_whoever_watches_is_told_of_each_reading_of_a_loaded_model() -> None:
    told: list[int] = []
    loading.watch_reloads(lambda: told.append(1))
    try:
        loading.reloaded()
        loading.reloaded()
    finally:
        loading.watch_reloads(None)
    loading.reloaded()
    assert told == [1, 1]
