"""The worker manifests: what is written is read back, and everything that is wrong is named with its path."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation, ModelExtent, ResidualExtent
from coldsnap.core.manifest import (
    Blob,
    ModelSource,
    NativeManifest,
    RecoveryManifest,
    ReplayEntry,
    ReplayPiece,
    native_manifest_bytes,
    native_manifest_schema,
    parse_native_manifest,
    parse_recovery_manifest,
    recovery_manifest_bytes,
    recovery_manifest_schema,
    tile_pieces,
)
from coldsnap.errors import InvalidDocument

BASE = 0x5000_0000_0000
D0, D1, D2 = (Digest.from_hex(c * 64) for c in "012")


def native() -> NativeManifest:
    """One allocation of two pages: 100 bytes of model, 16 and 3980 and 4096 of the rest in one piece each side."""
    return NativeManifest(
        capture_id="capture-1",
        worker="w0",
        rank=0,
        entries=(Allocation(ptr=BASE, size=8192, tag="weights"),),
        model_weight_extents=(
            ModelExtent(
                ptr=BASE + 16, size=100, allocation_ptr=BASE, semantic_id="a" * 64, sha256=D0, offset=0, crc32=7
            ),
            ModelExtent(
                ptr=BASE + 4096, size=4096, allocation_ptr=BASE, semantic_id="b" * 64, sha256=D1, offset=4096, crc32=8
            ),
        ),
        residual_extents=(
            ResidualExtent(ptr=BASE, size=16, allocation_ptr=BASE, offset=0, crc32=9),
            ResidualExtent(ptr=BASE + 116, size=3980, allocation_ptr=BASE, offset=4096, crc32=10),
        ),
        model_weights=Blob(name="model-weights.pack", bytes=8192, sha256=D2),
        residual=Blob(name="weights.blob", bytes=8192, sha256=D2),
    )


def recovery() -> RecoveryManifest:
    """The same memory from a checkpoint; the second extent from two tensors of one file."""
    one = native()
    return RecoveryManifest(
        capture_id=one.capture_id,
        worker=one.worker,
        rank=one.rank,
        model_source=ModelSource(model_id="tiny", revision="0" * 40, metadata_sha256=D1),
        entries=one.entries,
        replay_plan=(
            ReplayEntry(
                semantic_id="a" * 64,
                sha256=D0,
                ptr=BASE + 16,
                size=100,
                pieces=(
                    piece("model.safetensors", "norm", file_offset=208, tensor_offset=0, extent_offset=0, size=100),
                ),
            ),
            ReplayEntry(
                semantic_id="b" * 64,
                sha256=D1,
                ptr=BASE + 4096,
                size=4096,
                pieces=(
                    piece("part/m.safetensors", "q", file_offset=400, tensor_offset=8, extent_offset=0, size=96),
                    piece("part/m.safetensors", "k", file_offset=900, tensor_offset=0, extent_offset=96, size=4000),
                ),
            ),
        ),
        residual_extents=one.residual_extents,
        residual=one.residual,
    )


def piece(
    file: str, tensor: str, *, file_offset: int, tensor_offset: int, extent_offset: int, size: int
) -> ReplayPiece:
    return ReplayPiece(
        file=file,
        tensor=tensor,
        file_offset=file_offset,
        tensor_offset=tensor_offset,
        extent_offset=extent_offset,
        size=size,
    )


NATIVE = json.loads(native_manifest_bytes(native()))
RECOVERY = json.loads(recovery_manifest_bytes(recovery()))


def problems(parse: Callable[[bytes], object], document: object) -> dict[str, str]:
    """path -> message of everything ``parse`` finds; fails when it finds nothing."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(InvalidDocument) as caught:
        parse(data)
    for one in caught.value.problems:
        assert one.field
        assert one.cure or "byte" in one.message or "past" in one.message
    return {one.field: one.message for one in caught.value.problems}


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one member replaced; ``path`` like ``entries.0.size``."""
    made = copy.deepcopy(document)
    *way, last = path.split(".")
    here: Any = made
    for part in way:
        here = here[int(part)] if isinstance(here, list) else here[part]
    here[int(last) if isinstance(here, list) else last] = value
    return made


class TestRoundTrip:
    def test_native(self) -> None:
        assert parse_native_manifest(native_manifest_bytes(native())) == native()

    def test_recovery(self) -> None:
        assert parse_recovery_manifest(recovery_manifest_bytes(recovery())) == recovery()

    @pytest.mark.parametrize("document", [NATIVE, RECOVERY], ids=["native", "recovery"])
    def test_bytes_are_canonical_json_and_a_newline(self, document: dict[str, Any]) -> None:
        written = native_manifest_bytes(native()) if document is NATIVE else recovery_manifest_bytes(recovery())
        assert written == canonical_json(document) + b"\n"

    def test_the_golden_native_document(self) -> None:
        assert NATIVE == {
            "format": 1,
            "kind": "coldsnap-native-manifest",
            "capture_id": "capture-1",
            "worker": "w0",
            "rank": 0,
            "preserved_bytes": 8192,
            "model_weight_bytes": 4196,
            "residual_bytes": 3996,
            "entries": [{"ptr": BASE, "size": 8192, "tag": "weights"}],
            "model_weight_extents": [
                {
                    "ptr": BASE + 16,
                    "size": 100,
                    "allocation_ptr": BASE,
                    "semantic_id": "a" * 64,
                    "sha256": "sha256:" + "0" * 64,
                    "offset": 0,
                    "crc32": 7,
                },
                {
                    "ptr": BASE + 4096,
                    "size": 4096,
                    "allocation_ptr": BASE,
                    "semantic_id": "b" * 64,
                    "sha256": "sha256:" + "1" * 64,
                    "offset": 4096,
                    "crc32": 8,
                },
            ],
            "residual_extents": [
                {"ptr": BASE, "size": 16, "allocation_ptr": BASE, "offset": 0, "crc32": 9},
                {"ptr": BASE + 116, "size": 3980, "allocation_ptr": BASE, "offset": 4096, "crc32": 10},
            ],
            "model_weights": {"name": "model-weights.pack", "bytes": 8192, "sha256": "sha256:" + "2" * 64},
            "residual": {"name": "weights.blob", "bytes": 8192, "sha256": "sha256:" + "2" * 64},
        }

    def test_cover_is_proved_from_the_manifest_alone(self) -> None:
        proof = parse_native_manifest(native_manifest_bytes(native())).cover()
        assert (proof.preserved_bytes, proof.model_bytes, proof.residual_bytes) == (8192, 4196, 3996)

    def test_what_would_not_be_read_back_is_not_written(self) -> None:
        broken = NativeManifest(**{**_members(native()), "residual_extents": ()})
        with pytest.raises(InvalidDocument, match="belong to no extent"):
            native_manifest_bytes(broken)
        headless = RecoveryManifest(**{**_members(recovery()), "residual": None})
        with pytest.raises(InvalidDocument, match="residual: is null"):
            recovery_manifest_bytes(headless)

    def test_a_worker_without_model_bytes_or_residual(self) -> None:
        document = changed(NATIVE, "entries", [])
        for name in ("model_weight_extents", "residual_extents"):
            document[name] = []
        for name in ("preserved_bytes", "model_weight_bytes", "residual_bytes"):
            document[name] = 0
        document["model_weights"] = document["residual"] = None
        parsed = parse_native_manifest(json.dumps(document).encode())
        assert parsed.model_weights is None
        assert parsed.residual is None


def _members(record: object) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__slots__}  # type: ignore[attr-defined] # both records have slots


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "value", "field"),
        [
            ("format", 2, "format"),
            ("format", True, "format"),
            ("format", "1", "format"),
            ("kind", "coldsnap-recovery-manifest", "kind"),
            ("capture_id", "-x", "capture_id"),
            ("worker", "", "worker"),
            ("rank", -1, "rank"),
            ("rank", 1.0, "rank"),
            ("rank", False, "rank"),
            ("preserved_bytes", 8191, "preserved_bytes"),
            ("model_weight_bytes", 0, "model_weight_bytes"),
            ("residual_bytes", 4000, "residual_bytes"),
            ("entries", {}, "entries"),
            ("entries.0", [], "entries[0]"),
            ("entries.0", None, "entries[0]"),
            ("entries.0.tag", "a\nb", "entries[0].tag"),
            ("entries.0.size", "8192", "entries[0].size"),
            ("entries.0.ptr", 1 << 64, "entries[0].ptr"),
            ("model_weight_extents.1.sha256", "1" * 64, "model_weight_extents[1].sha256"),
            ("model_weight_extents.1.sha256", "sha256:" + "A" * 64, "model_weight_extents[1].sha256"),
            ("model_weight_extents.1.sha256", None, "model_weight_extents[1].sha256"),
            ("model_weight_extents.1.semantic_id", "sha256:" + "1" * 57, "model_weight_extents[1].semantic_id"),
            ("model_weight_extents.0.crc32", 1 << 32, "model_weight_extents[0].crc32"),
            ("model_weight_extents.0.offset", -4096, "model_weight_extents[0].offset"),
            ("residual_extents.1.size", None, "residual_extents[1].size"),
            ("model_weights.bytes", 4096, "model_weights.bytes"),
            ("model_weights.name", "other.pack", "model_weights.name"),
            ("model_weights.sha256", "", "model_weights.sha256"),
            ("model_weights", None, "model_weights"),
            ("residual", [], "residual"),
            ("residual.name", "../weights.blob", "residual.name"),
        ],
    )
    def test_one_wrong_member_is_named(self, path: str, value: object, field: str) -> None:
        assert field in problems(parse_native_manifest, changed(NATIVE, path, value))

    @pytest.mark.parametrize("name", sorted(NATIVE))
    def test_a_missing_member_is_named(self, name: str) -> None:
        document = copy.deepcopy(NATIVE)
        del document[name]
        assert problems(parse_native_manifest, document)[name] == "is missing"

    @pytest.mark.parametrize("path", ["", "entries.0", "model_weight_extents.1", "residual_extents.0", "residual"])
    def test_an_unknown_member_is_named(self, path: str) -> None:
        document = changed(NATIVE, f"{path}.zzz".lstrip("."), 1)
        field = ".".join([path.replace(".0", "[0]").replace(".1", "[1]"), "zzz"]).lstrip(".")
        assert problems(parse_native_manifest, document)[field] == "is not a field of this format"

    def test_a_blob_without_extents(self) -> None:
        document = changed(NATIVE, "model_weight_extents", [])
        assert problems(parse_native_manifest, document)["model_weights"] == "is named without any extent"

    def test_all_problems_come_together_in_document_order(self) -> None:
        document = changed(NATIVE, "model_weight_extents.1.sha256", "x")
        document["model_weight_extents"][0]["size"] = -1
        document["entries"][0]["tag"] = ""
        document["capture_id"] = "?"
        document["zzz"] = 1
        assert list(problems(parse_native_manifest, document)) == [
            "capture_id",
            "entries[0].tag",
            "model_weight_extents[0].size",
            "model_weight_extents[1].sha256",
            "zzz",
        ]

    def test_rules_still_look_at_the_lists_that_parsed(self) -> None:
        document = changed(NATIVE, "worker", "")
        document["residual_extents"][0]["size"] = 15
        found = problems(parse_native_manifest, document)
        assert {"worker", "residual_bytes", "entries[0]"} == set(found)

    @pytest.mark.parametrize(
        ("text", "field"),
        [
            (b"", "(document)"),
            (b"[]", "(document)"),
            (b"null", "(document)"),
            (b"{", "(document)"),
            (b"\xff\xfe", "(document)"),
            (b'{"rank":NaN}', "rank"),
            (b'{"rank":1,"rank":2}', "rank"),
            (b'{"entries":[{"ptr":1,"ptr":1}]}', "entries[0].ptr"),
            (b'{"rank":1e999}', "rank"),
            (b'{"worker":"\\ud800"}', "worker"),
            (b'{"rank":' + b"9" * 5000 + b"}", "rank"),
        ],
    )
    def test_text_that_is_no_strict_json(self, text: bytes, field: str) -> None:
        assert field in problems(parse_native_manifest, text)
        assert field in problems(parse_recovery_manifest, text)

    def test_bytes_after_the_document(self) -> None:
        data = native_manifest_bytes(native()) + b"{}"
        assert "(document)" in problems(parse_native_manifest, data)

    def test_nesting_without_end(self) -> None:
        data = b'{"entries":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert problems(parse_native_manifest, data)


class TestRecoveryRefusals:
    @pytest.mark.parametrize(
        ("path", "value", "field"),
        [
            ("model_source", {}, "model_source.revision"),
            ("model_source.metadata_sha256", "0", "model_source.metadata_sha256"),
            ("replay_plan.0", 5, "replay_plan[0]"),
            ("replay_plan.0.pieces", {}, "replay_plan[0].pieces"),
            ("replay_plan.0.pieces", [], "replay_plan[0].pieces"),
            ("replay_plan.0.pieces.0.file", "../x", "replay_plan[0].pieces[0].file"),
            ("replay_plan.0.pieces.0.file", "/x", "replay_plan[0].pieces[0].file"),
            ("replay_plan.0.pieces.0.file", "a//b", "replay_plan[0].pieces[0].file"),
            ("replay_plan.0.pieces.0.file", "a\0", "replay_plan[0].pieces[0].file"),
            ("replay_plan.0.pieces.0.tensor", "", "replay_plan[0].pieces[0].tensor"),
            ("replay_plan.0.pieces.0.size", 0, "replay_plan[0].pieces[0].size"),
            ("replay_plan.0.pieces.0.size", 99, "replay_plan[0].pieces"),
            ("replay_plan.0.pieces.0.size", 101, "replay_plan[0].pieces[0]"),
            ("replay_plan.1.pieces.1.extent_offset", 95, "replay_plan[1].pieces[1].extent_offset"),
            ("replay_plan.1.pieces.1.extent_offset", 97, "replay_plan[1].pieces[1].extent_offset"),
            ("replay_plan.1.ptr", BASE + 8192, "replay_plan[1]"),
            ("replay_plan.1.ptr", BASE, "replay_plan[1]"),
            ("residual_extents.0.offset", 1, "residual_extents[0].offset"),
            ("residual.bytes", 0, "residual.bytes"),
            ("model_weight_bytes", 1, "model_weight_bytes"),
        ],
    )
    def test_one_wrong_member_is_named(self, path: str, value: object, field: str) -> None:
        assert field in problems(parse_recovery_manifest, changed(RECOVERY, path, value))

    def test_a_plan_out_of_address_order(self) -> None:
        document = copy.deepcopy(RECOVERY)
        document["replay_plan"].reverse()
        assert "sorted by address" in problems(parse_recovery_manifest, document)["replay_plan[1]"]

    def test_a_gap_in_memory_is_named(self) -> None:
        document = copy.deepcopy(RECOVERY)
        del document["replay_plan"][1]
        document["model_weight_bytes"] = 100
        assert problems(parse_recovery_manifest, document) == {"entries[0]": "4096 bytes belong to no extent"}


class TestTilePieces:
    def one(self, tensor: str, start: int, size: int) -> ReplayPiece:
        return piece("m", tensor, file_offset=1000, tensor_offset=0, extent_offset=start, size=size)

    def test_the_last_write_wins_and_offsets_follow(self) -> None:
        tiles = tile_pieces([self.one("old", 0, 100), self.one("new", 40, 20)])
        assert [(t.tensor, t.extent_offset, t.size, t.file_offset, t.tensor_offset) for t in tiles] == [
            ("old", 0, 40, 1000, 0),
            ("new", 40, 20, 1000, 0),
            ("old", 60, 40, 1060, 60),
        ]

    def test_pieces_that_do_not_overlap_are_only_sorted(self) -> None:
        first, second = self.one("a", 0, 10), self.one("b", 10, 5)
        assert tile_pieces([second, self.one("empty", 3, 0), first]) == (first, second)

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=8))
    def test_agrees_with_writing_the_pieces_one_after_the_other(self, writes: list[tuple[int, int]]) -> None:
        memory: list[tuple[str, int] | None] = [None] * 48
        for number, (start, size) in enumerate(writes):
            for byte in range(size):
                memory[start + byte] = (f"t{number}", byte)
        tiles = tile_pieces(self.one(f"t{n}", start, size) for n, (start, size) in enumerate(writes))
        told: list[tuple[str, int] | None] = [None] * 48
        for tile in tiles:
            assert tile.file_offset == 1000 + tile.tensor_offset
            for byte in range(tile.size):
                assert told[tile.extent_offset + byte] is None
                told[tile.extent_offset + byte] = (tile.tensor, tile.tensor_offset + byte)
        assert told == memory
        assert list(tiles) == sorted(tiles, key=lambda tile: tile.extent_offset)


class TestArbitraryBytes:
    @given(st.binary(max_size=200))
    @settings(max_examples=100)
    def test_either_a_record_or_problems(self, data: bytes) -> None:
        for parse in (parse_native_manifest, parse_recovery_manifest):
            with pytest.raises(InvalidDocument) as caught:
                parse(data)
            assert caught.value.problems

    @given(st.sampled_from(["native", "recovery"]), st.data())
    @settings(max_examples=100)
    def test_one_changed_byte_never_crashes_a_reader(self, kind: str, data: st.DataObject) -> None:
        golden = native_manifest_bytes(native()) if kind == "native" else recovery_manifest_bytes(recovery())
        place = data.draw(st.integers(0, len(golden) - 1))
        damaged = bytearray(golden)
        damaged[place] = data.draw(st.integers(0, 255))
        parse: Callable[[bytes], object] = parse_native_manifest if kind == "native" else parse_recovery_manifest
        try:
            parsed = parse(bytes(damaged))
        except InvalidDocument:
            return
        again = (
            native_manifest_bytes(parsed)
            if isinstance(parsed, NativeManifest)
            else recovery_manifest_bytes(parsed)
            if isinstance(parsed, RecoveryManifest)
            else b""
        )
        assert json.loads(again) == json.loads(bytes(damaged))

    @given(st.data())
    @settings(max_examples=60)
    def test_one_value_exchanged_for_any_other_json(self, data: st.DataObject) -> None:
        json_values = st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(1 << 70), 1 << 70),
            st.floats(),
            st.text(max_size=5),
            st.just([]),
            st.just({}),
        )
        paths = [f"model_weight_extents.0.{name}" for name in NATIVE["model_weight_extents"][0]] + list(NATIVE)
        document = changed(NATIVE, data.draw(st.sampled_from(paths)), data.draw(json_values))
        try:
            manifest = parse_native_manifest(json.dumps(document).encode())
        except InvalidDocument:
            return
        assert json.loads(native_manifest_bytes(manifest)) == document


def test_schemas_list_every_member_and_allow_no_other() -> None:
    for schema, document in ((native_manifest_schema(), NATIVE), (recovery_manifest_schema(), RECOVERY)):
        assert set(schema["required"]) == set(document)  # type: ignore[call-overload] # a JSON value
        assert schema["additionalProperties"] is False


def test_ten_thousand_extents_are_read_in_a_tenth_of_a_second() -> None:
    count = 10_000
    entries = (Allocation(ptr=BASE, size=count * 4096, tag="weights"),)
    extents = tuple(
        ModelExtent(
            ptr=BASE + n * 4096,
            size=4096,
            allocation_ptr=BASE,
            semantic_id=f"{n:064x}",
            sha256=Digest.from_hex(f"{n:064x}"),
            offset=n * 4096,
            crc32=n,
        )
        for n in range(count)
    )
    manifest = NativeManifest(
        capture_id="c",
        worker="w",
        rank=0,
        entries=entries,
        model_weight_extents=extents,
        residual_extents=(),
        model_weights=Blob(name="model-weights.pack", bytes=count * 4096, sha256=D0),
        residual=None,
    )
    data = native_manifest_bytes(manifest)
    best = min(_seconds(data) for _ in range(5))
    assert best < (0.15 if sys.gettrace() is None else 1.0)  # seconds of this thread; coverage traces every line


def _seconds(data: bytes) -> float:
    start = time.thread_time()
    parse_native_manifest(data)
    return time.thread_time() - start
