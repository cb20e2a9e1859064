"""Which checkpoint is not the captured one, told by the file and the tensor that are others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.manifest import ModelSource, RecoveryManifest, parse_recovery_manifest
from coldsnap.core.messages import PackSource, Prompt, WorkerState
from coldsnap.core.policy import Materialize
from coldsnap.core.replay import ReplayEntry, ReplayPiece
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.observer import PARTLY, UNOBSERVED, Observer
from coldsnap.engines.recovery import check_checkpoint, check_identity
from coldsnap.engines.safetensors import SafetensorsFile, metadata_sha256
from coldsnap.engines.settings import model_source_from
from coldsnap.errors import IntegrityError, InvalidDocument, Refused, UserError
from coldsnap.hydrate.memory import StableMemory, host_addressable
from coldsnap.testing.checkpoint import DEFAULT_TENSORS, seeded_bytes, write_checkpoint, write_safetensors
from coldsnap.testing.engine import PLUGIN, FakeEngine
from coldsnap.testing.engine_harness import Driven, driven

BASE = 0x5100_0000_0000
PROMPTS = (Prompt(text="hello", max_tokens=3),)
MakeFake = Callable[..., FakeEngine]
Header = dict[str, dict[str, object]]


def write(path: Path, header: Mapping[str, object], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADER: Header = {"a": entry("F16", [4, 8], 0, 64), "b": entry("F16", [16], 64, 96), "c": entry("U8", [32], 96, 128)}
OTHER: Header = {"z": entry("U8", [8], 0, 8)}


class Pinned:
    """A checkpoint of two files, its plan (which uses all of `a` and the second half of `b`), and what is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        write(folder / "one.safetensors", HEADER, bytes(range(128)))
        write(folder / "two.safetensors", OTHER, bytes(8))
        self.known = checkpoint_files(folder)
        one = next(file for file in self.known if file.name == "one.safetensors")
        offsets = {tensor.name: tensor.offset for tensor in one.tensors}
        pieces = [("a", 0, 64), ("b", 16, 16)]
        self.manifest = RecoveryManifest(
            capture_id="c",
            worker="w0",
            rank=0,
            model_source=ModelSource(model_id="org/model", revision="r1", metadata_sha256=metadata_sha256(self.known)),
            entries=(),
            replay_plan=tuple(
                ReplayEntry(
                    semantic_id="",
                    sha256=Digest.of(b""),
                    ptr=0x1000 * index,
                    size=size,
                    pieces=(
                        ReplayPiece(
                            file="one.safetensors",
                            tensor=name,
                            file_offset=offsets[name] + skip,
                            tensor_offset=skip,
                            extent_offset=0,
                            size=size,
                        ),
                    ),
                )
                for index, (name, skip, size) in enumerate(pieces)
            ),
            residual_extents=(),
            residual=None,
        )

    def problems(self, *, known: bool) -> list[tuple[str, str, str | None]]:
        found: list[SafetensorsFile] = self.known if known else []
        with pytest.raises(IntegrityError, match="not the captured one") as caught:
            check_checkpoint(self.manifest, self.folder, known=found)
        assert caught.value.cure == "fetch org/model at r1"
        assert str(self.folder) in caught.value.message
        told = caught.value.facts["problems"]
        assert isinstance(told, list)
        assert all(f"{one['field']} {one['message']}" in caught.value.message for one in told[:8])
        assert all(one["cure"] and (one["value"] or one["message"] == "is missing") for one in told)
        return [(one["field"], one["message"], one["value"]) for one in told]


@pytest.fixture
def pinned(tmp_path: Path) -> Pinned:
    return Pinned(tmp_path / "checkpoint")


@pytest.mark.parametrize("known", [True, False])
def test_the_captured_one_passes(pinned: Pinned, known: bool) -> None:
    check_checkpoint(pinned.manifest, pinned.folder, known=pinned.known if known else ())


@pytest.mark.parametrize("known", [True, False])
def test_a_missing_file_is_named(pinned: Pinned, known: bool) -> None:
    (pinned.folder / "one.safetensors").unlink()
    assert pinned.problems(known=known) == [("one.safetensors", "is missing", None)]


def test_a_file_that_the_plan_does_not_use_counts_too(pinned: Pinned) -> None:
    (pinned.folder / "two.safetensors").unlink()
    write(pinned.folder / "three.safetensors", OTHER, bytes(8))
    size = (pinned.folder / "three.safetensors").stat().st_size
    assert pinned.problems(known=True) == [
        ("three.safetensors", "was not there at capture", f"{size} bytes"),
        ("two.safetensors", "is missing", None),
    ]
    ((field, message, _),) = pinned.problems(known=False)
    assert (field, "every tensor of the plan is in its place" in message) == ("headers", True)


def test_a_missing_folder_is_the_users(pinned: Pinned, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        check_checkpoint(pinned.manifest, tmp_path / "nowhere", known=pinned.known)


@pytest.mark.parametrize(
    ("change", "with_headers", "with_plan"),
    [
        pytest.param(
            {"a": entry("BF16", [4, 8], 0, 64)},
            [("one.safetensors: a", "had dtype F16 at capture", "BF16")],
            None,
            id="dtype",
        ),
        pytest.param(
            {"b": entry("F16", [4, 4], 64, 96)},
            [("one.safetensors: b", "had shape [16] at capture", "[4, 4]")],
            None,
            id="shape",
        ),
        pytest.param(
            {"a": entry("U8", [32], 96, 128), "c": entry("F16", [4, 8], 0, 64)},
            [
                ("one.safetensors: a", "had dtype F16 at capture", "U8"),
                ("one.safetensors: a", "had shape [4, 8] at capture", "[32]"),
                ("one.safetensors: c", "had dtype U8 at capture", "F16"),
                ("one.safetensors: c", "had shape [32] at capture", "[4, 8]"),
            ],
            [("one.safetensors: a", "held at least 64 bytes at capture", "32")],
            id="swapped",
        ),
    ],
)
def test_a_changed_header_names_its_tensor(
    pinned: Pinned,
    change: Header,
    with_headers: list[tuple[str, str, str]],
    with_plan: list[tuple[str, str, str]] | None,
) -> None:
    write(pinned.folder / "one.safetensors", {**HEADER, **change}, bytes(range(128)))
    assert pinned.problems(known=True) == with_headers
    found = pinned.problems(known=False)
    if with_plan is None:
        assert [field for field, _, _ in found] == ["headers"]
    else:
        assert found == with_plan


@pytest.mark.parametrize("known", [True, False])
def test_a_renamed_tensor_is_missing(pinned: Pinned, known: bool) -> None:
    header = {{"a": "x"}.get(name, name): value for name, value in HEADER.items()}
    write(pinned.folder / "one.safetensors", header, bytes(range(128)))
    missing = ("one.safetensors: a", "is missing", None)
    new = ("one.safetensors: x", "was not there at capture", "F16 [4, 8]")
    assert pinned.problems(known=known) == ([missing, new] if known else [missing])


@pytest.mark.parametrize("known", [True, False])
def test_tensors_that_only_moved_are_named(pinned: Pinned, known: bool) -> None:
    swapped = {**HEADER, "b": entry("F16", [16], 96, 128), "c": entry("U8", [32], 64, 96)}
    write(pinned.folder / "one.safetensors", swapped, bytes(range(128)))
    before = {tensor.name: tensor.offset for file in pinned.known for tensor in file.tensors}
    expected = [("one.safetensors: b", f"was at byte {before['b']} at capture", str(before["b"] + 32))]
    if known:  # a plan knows nothing of c, which no extent uses
        expected.append(("one.safetensors: c", f"was at byte {before['c']} at capture", str(before["c"] - 32)))
    assert pinned.problems(known=known) == expected


def test_another_metadata_block_is_told(pinned: Pinned) -> None:
    write(pinned.folder / "one.safetensors", {"__metadata__": {}, **HEADER}, bytes(range(128)))
    found = pinned.problems(known=True)
    assert all("was at byte" in message or "metadata block" in message for _, message, _ in found)
    text = json.dumps(HEADER).replace(" ", "")
    assert len(text) < len(json.dumps(HEADER))
    padded = text + " " * (-(-len(json.dumps(HEADER)) // 8) * 8 - len(text))
    (pinned.folder / "one.safetensors").write_bytes(
        len(padded).to_bytes(8, "little") + padded.encode() + bytes(range(128))
    )
    message = "has another header with the same tensors: its metadata block differs"
    now = next(file for file in checkpoint_files(pinned.folder) if file.name == "one.safetensors")
    assert pinned.problems(known=True) == [("one.safetensors", message, str(now.header_sha256))]


def test_a_damaged_header_is_no_document(pinned: Pinned) -> None:
    (pinned.folder / "one.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidDocument, match=r"one\.safetensors"):
        check_checkpoint(pinned.manifest, pinned.folder, known=pinned.known)


def test_headers_that_are_not_the_captured_ones_are_not_believed(pinned: Pinned) -> None:
    """What a process remembers counts only when it is what the manifest pins."""
    write(pinned.folder / "one.safetensors", {**HEADER, "a": entry("BF16", [4, 8], 0, 64)}, bytes(range(128)))
    with pytest.raises(IntegrityError, match="every tensor of the plan is in its place"):
        check_checkpoint(pinned.manifest, pinned.folder, known=checkpoint_files(pinned.folder))


@pytest.mark.parametrize("field", ["model_id", "revision", "metadata_sha256"])
def test_each_part_of_the_identity_is_compared(pinned: Pinned, field: str) -> None:
    started = pinned.manifest.model_source
    other = Digest.of(b"other") if field == "metadata_sha256" else "other"
    check_identity(started, started)
    with pytest.raises(Refused) as caught:
        check_identity(replace(started, **{field: other}), started)  # type: ignore[arg-type]
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == (f"model_source.{field}", str(other))
    assert problem.cure is not None
    assert str(getattr(started, field)) in problem.cure


class TestTwin:
    """Checkpoints with the very same headers, and a few other bytes."""

    @settings(max_examples=12, deadline=None)
    @given(
        seed=st.integers(0, 1 << 30),
        names=st.sets(st.sampled_from([n for n, s in DEFAULT_TENSORS.items() if s]), min_size=1),
    )
    def test_every_changed_tensor_is_named_and_no_other(
        self, woken: tuple[Driven, object], seed: int, names: set[str]
    ) -> None:
        live, exported = woken
        order = random.Random(seed)
        twin = write_checkpoint(live.folder / f"twin-{order.randrange(1 << 60)}")
        wanted = set()
        for file in checkpoint_files(twin):
            data = bytearray(file.path.read_bytes())
            for tensor in file.tensors:
                if tensor.name in names:
                    wanted.add(f"{file.name}: {tensor.name}")
                    data[tensor.offset + order.randrange(tensor.size)] ^= 1 << order.randrange(8)
            file.path.write_bytes(data)
        with pytest.raises(IntegrityError, match=f"other bytes in {len(wanted)} tensor") as caught:
            live.wake(exported, PackSource.RECOVERY, model_path=str(twin))  # type: ignore[arg-type]
        assert set(caught.value.facts["tensors"]) == wanted  # type: ignore[call-overload]
        assert all(name in caught.value.message for name in names)
        status = live.client.status()
        assert (status.state, status.mapped_bytes) == (WorkerState.ASLEEP, 0)

    @pytest.fixture
    def woken(self, make_fake: MakeFake, tmp_path: Path) -> object:
        with driven(make_fake(), tmp_path / "a", base=BASE) as live:
            exported, answers = live.export(), live.answers(PROMPTS)
            live.sleep()
            yield live, exported
            live.wake(exported, PackSource.RECOVERY)
            assert live.answers(PROMPTS) == answers


@pytest.mark.parametrize("dtype", ["I8"])
def test_a_process_knows_its_headers_still_and_names_the_tensor(
    make_fake: MakeFake, tmp_path: Path, dtype: str
) -> None:
    """The very same bytes under another number type: only the remembered headers can tell which tensor it is."""
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        exported = live.export()
        live.sleep()
        path = live.engine.model_path / "model-00001-of-00002.safetensors"
        original = path.read_bytes()
        path.write_bytes(original.replace(b'"U8"', b'"I8"', 1))
        with pytest.raises(IntegrityError, match=r"embed had dtype U8 at capture \(got I8\)"):
            live.wake(exported, PackSource.RECOVERY)
        assert live.client.status().mapped_bytes == 0
        path.write_bytes(original)
        live.wake(exported, PackSource.RECOVERY)


def test_a_truncated_file_is_refused_before_anything_is_mapped(make_fake: MakeFake, tmp_path: Path) -> None:
    with driven(make_fake(), tmp_path / "a", base=BASE) as live:
        exported = live.export()
        live.sleep()
        path = live.engine.model_path / "model-00001-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(InvalidDocument, match=r"layers\.1.*ends at byte"):
            live.wake(exported, PackSource.RECOVERY)
        assert live.client.status().mapped_bytes == 0


class SlicingEngine(FakeEngine):
    """Loads as a tensor-parallel rank does: slices of rows, a tensor of two files, tied, aliased and padded ones."""

    ROWS, FULL, ROW, SKIP = 200, 100, 40, 30

    def load(self, memory: StableMemory, observer: Observer) -> None:
        host = host_addressable(memory)
        files = {file.name: file for file in checkpoint_files(self.model_path)}
        stored = {(file.name, tensor.name): tensor.offset for file in files.values() for tensor in file.tensors}
        contents = {name: file.path.read_bytes() for name, file in files.items()}
        arena = memory.reserve(49_152, tag="weights")

        def copy(at: int, size: int, file: str, tensor: str, skip: int, within: tuple[int, int] | None) -> None:
            begin = stored[file, tensor] + skip
            host.view(arena.ptr + at, size)[:] = contents[file][begin : begin + size]
            observer.wrote(
                arena.ptr + at, size, tensor=tensor, file=file, file_offset=begin, tensor_offset=skip, within=within
            )

        one, two = "one.safetensors", "two.safetensors"
        place = (arena.ptr, self.ROWS * self.ROW)
        for row in range(self.ROWS):
            copy(row * self.ROW, self.ROW, one, "sliced", row * self.FULL + self.SKIP, place)
        place = (arena.ptr + 8192, 3000)
        copy(8192, 1000, one, "halved", 0, place)
        copy(9192, 2000, two, "halved", 0, place)
        copy(12_288, 5000, two, "tied", 0, None)
        copy(12_288, 5000, two, "tied", 0, None)  # the second parameter that is tied to it
        copy(12_288 + 64, 100, two, "tied", 64, None)  # and one that looks at a part of it
        copy(20_480, 7000, one, "padded", 0, (arena.ptr + 20_480, 9000))
        copy(36_864, 900, one, "rounded", 0, None)
        host.view(arena.ptr + 36_864 + 17, 1)[0] = 99
        observer.unreplayable(arena.ptr + 36_864 + 17, 1, "rounded in place")
        host.view(arena.ptr + 40_960, 1000)[:] = bytes(i % 7 for i in range(1000))
        observer.unreplayable(arena.ptr + 40_960, 1000, "computed when the model was built")
        self._memory = host
        self._ranges = [(arena.ptr, arena.size)]


def test_slices_ties_aliases_and_partly_written_tensors_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    made = {
        name: seeded_bytes(3, name, size) for name, size in {"sliced": 20_000, "padded": 7000, "rounded": 900}.items()
    }
    write_safetensors(folder / "one.safetensors", {**made, "halved": seeded_bytes(3, "first", 1000)})
    write_safetensors(
        folder / "two.safetensors", {"halved": seeded_bytes(3, "second", 2000), "tied": seeded_bytes(3, "tied", 5000)}
    )
    model = PLUGIN.resolve_model(str(folder))
    engine = SlicingEngine(model.path, model_source_from(PLUGIN.settings_options(model, {})))
    with driven(engine, tmp_path / "a", base=BASE) as live:
        before, answers, exported = live.contents(), live.answers(PROMPTS), live.export()
        plan = parse_recovery_manifest(Path(exported.recovery_manifest.path).read_bytes()).replay_plan
        assert [(one.ptr - plan[0].ptr, one.size, len(one.pieces)) for one in plan] == [
            (0, 8000, 200),
            (8192, 3000, 2),
            (12_288, 5000, 1),
            (20_480, 7000, 1),
        ]
        assert {piece.file for piece in plan[1].pieces} == {"one.safetensors", "two.safetensors"}
        assert exported.residual_reasons == {
            PARTLY: 2000,
            "rounded in place": 900,
            "computed when the model was built": 1000,
            UNOBSERVED: 49_152 - 8000 - 3000 - 5000 - 9000 - 900 - 1000,
        }
        assert sum(exported.residual_reasons.values()) == exported.residual_bytes
        content = live.lose_pack(exported)
        for _ in range(2):
            live.sleep()
            live.wake(exported, PackSource.RECOVERY, materialize=Materialize.REQUIRED)
            assert live.contents() == before
            assert live.answers(PROMPTS) == answers
        assert exported.pack is not None
        assert Path(exported.pack.path).read_bytes() == content
        live.sleep()
        second = folder / "two.safetensors"
        data = bytearray(second.read_bytes())
        data[next(t.offset for f in checkpoint_files(folder) for t in f.tensors if f.path == second)] ^= 1
        second.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"other bytes in 2 tensors: halved \(one\..*, halved \(two\."):
            live.wake(exported, PackSource.RECOVERY)
        live.wake(exported)
        assert live.contents() == before
