"""A model in real vLLM, loaded through our load format: what is in its pack, and that it comes back as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.manifest import (
    MANIFEST_LIMIT_BYTES,
    NativeManifest,
    RecoveryManifest,
    parse_native_manifest,
    parse_recovery_manifest,
)
from coldsnap.engines.export import DIFFERS
from coldsnap.engines.observer import UNOBSERVED
from coldsnap.engines.safetensors import read_header
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.transformers.checkpoints import random_weights
from coldsnap.engines.transformers.checkpoints.random_weights import ModelShape, make_random
from coldsnap.engines.transformers.checkpoints.smollm2 import make_smollm2
from coldsnap.store.documents import read_private

CACHE = Path(__file__).parents[2] / ".cache"
# The processor's attention wants heads of 32 or more; a vocabulary that is padded shows what is not the model's.
SMALL = ModelShape(
    architecture="qwen3",
    hidden=256,
    layers=2,
    heads=4,
    key_value_heads=2,
    intermediate=512,
    vocabulary=330,
    head_dim=64,
    tied_embeddings=False,
)
PADDED_ROWS = 384 - 330


@dataclass(frozen=True)
class Story:
    """A model's folder, and what a watched and a plain vLLM did with it."""

    model: Path
    told: dict[str, Any]
    plain: dict[str, Any]

    def native(self, export: str) -> NativeManifest:
        path = Path(self.told[export]["native_manifest"]["path"])
        return parse_native_manifest(read_private(path, MANIFEST_LIMIT_BYTES))

    def recovery(self, export: str) -> RecoveryManifest:
        path = Path(self.told[export]["recovery_manifest"]["path"])
        return parse_recovery_manifest(read_private(path, MANIFEST_LIMIT_BYTES))


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Any) -> Story:
    folder = tmp_path_factory.mktemp("life", numbered=True)
    if request.param == "smollm2":
        model = make_smollm2(CACHE / "models/smollm2", cache=CACHE / "downloads")
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random_weights, "SIZES", {"small": SMALL})
            model = make_random(folder / "model", size="small", shard_bytes=1 << 20)
    out = folder / "out"
    out.mkdir(mode=0o700)
    told = play("life.py", model, out, environment={SETTINGS_VARIABLE: str(folder / "settings.json")})
    return Story(model=model, told=told, plain=play("life.py", model))


def test_the_answers_are_those_of_a_vllm_without_us(story: Story) -> None:
    assert story.told["num_asked"] == 1
    assert story.told["answers"] == story.plain["answers"]


def test_every_byte_is_the_models_or_has_a_reason(story: Story) -> None:
    first = story.told["first"]
    assert first["model_bytes"] + first["residual_bytes"] == story.told["allocated"]
    assert sum(first["residual_reasons"].values()) == first["residual_bytes"]
    assert UNOBSERVED not in first["residual_reasons"]
    assert DIFFERS not in first["residual_reasons"]


def test_every_stored_byte_is_in_the_pack(story: Story) -> None:
    stored = sum(one.size for path in story.model.glob("*.safetensors") for one in read_header(path).tensors)
    assert story.told["first"]["model_bytes"] == stored


def test_every_model_extent_is_the_bytes_of_its_place_in_the_checkpoint(story: Story) -> None:
    pack = Path(story.told["first"]["pack"]["path"]).read_bytes()
    offsets = {one.ptr: one.offset for one in story.native("first").model_weight_extents}
    files = {path.name: path.read_bytes() for path in story.model.glob("*.safetensors")}
    compared = 0
    for entry in story.recovery("first").replay_plan:
        for piece in entry.pieces:
            at = offsets[entry.ptr] + piece.extent_offset
            assert pack[at : at + piece.size] == files[piece.file][piece.file_offset : piece.file_offset + piece.size]
            compared += piece.size
    assert compared == story.told["first"]["model_bytes"]


def test_a_fused_matrix_is_several_tensors_of_the_checkpoint(story: Story) -> None:
    entries = {entry.pieces[0].tensor: entry for entry in story.recovery("first").replay_plan}
    q, k, v = (entries[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "qkv")
    assert (q.ptr + q.size, k.ptr + k.size) == (k.ptr, v.ptr)
    gate, up = (entries[f"model.layers.1.mlp.{one}_proj.weight"] for one in ("gate", "up"))
    assert gate.ptr + gate.size == up.ptr


def test_a_recovery_fills_empty_memory_with_the_same_bytes(story: Story) -> None:
    first, second = story.told["first"], story.told["second"]
    assert story.told["recovery"]["model_bytes"] == first["model_bytes"]
    assert story.told["recovery"]["residual_bytes"] == first["residual_bytes"]
    for name in ("pack", "residual"):
        assert second[name]["sha256"] == first[name]["sha256"]
    assert story.told["answers_after_recovery"] == story.plain["answers"]


def test_a_wake_from_the_pack_answers_and_empty_memory_does_not(story: Story) -> None:
    assert story.told["answers_after_native"] == story.plain["answers"]
    assert story.told["answers_of_zeros"] != story.plain["answers"]


def test_one_changed_byte_of_a_weight_leaves_the_pack_and_is_named(story: Story) -> None:
    flipped, first, third = (story.told[name] for name in ("flipped", "first", "third"))
    assert third["residual_reasons"][DIFFERS] == flipped["size"]
    assert third["num_model_extents"] == first["num_model_extents"] - 1
    before, after = (
        {piece.tensor for entry in story.recovery(name).replay_plan for piece in entry.pieces}
        for name in ("first", "third")
    )
    assert before - after == {flipped["tensor"]}


def test_a_padded_vocabulary_is_padded_by_residual_bytes(story: Story) -> None:
    reasons = story.told["first"]["residual_reasons"]
    padded = sum(size for reason, size in reasons.items() if reason.startswith("computed by aten."))
    if story.model.name == "model":
        assert padded >= 2 * PADDED_ROWS * SMALL.hidden * 2  # embedding and head, of two bytes a number
    assert reasons["cast from float32 to bfloat16"] > 0  # the rotary cache
