"""A plain vLLM that exports at its sleep: real weights go and come, and wrong settings end the start with a word."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES, parse_native_manifest, parse_recovery_manifest
from coldsnap.engines.local_model import resolve_local
from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.transformers.checkpoints import random_weights
from coldsnap.engines.transformers.checkpoints.random_weights import ModelShape, make_random
from coldsnap.engines.vllm.handsettings import EXPORT_VARIABLE, HandSettings
from coldsnap.errors import UserError
from coldsnap.store.documents import read_private

SHAPE = ModelShape(
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


class Place:
    """A model, the folder of its export, and the variables that ask for it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = folder / "model"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random_weights, "SIZES", {"small": SHAPE})
            make_random(self.model, size="small", shard_bytes=1 << 20)
        self.out = folder / "out"
        self.settings = folder / "settings.json"
        self.write({})

    def write(self, changes: dict[str, object]) -> None:
        record = {
            "format": 1,
            "kind": "coldsnap-vllm-by-hand",
            "folder": str(self.out),
            "state_root": str(self.out.parent / "state"),
        }
        self.settings.write_text(json.dumps({**record, **changes}))

    @property
    def environment(self) -> dict[str, str]:
        return {EXPORT_VARIABLE: "1", SETTINGS_VARIABLE: str(self.settings)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hand"))


@pytest.fixture(scope="module")
def told(place: Place, play: Any) -> dict[str, Any]:
    found: dict[str, Any] = play("hand.py", place.model, place.out / "w0", environment=place.environment)
    return found


@pytest.fixture(scope="module")
def plain(place: Place, play: Any) -> list[list[int]]:
    answers: list[list[int]] = play("hand.py", place.model)["answers"]
    return answers


def test_the_answers_are_vllm_s_own_before_and_after_every_night(told: dict[str, Any], plain: list[list[int]]) -> None:
    for which in (
        "answers",
        "answers from the pack",
        "answers from the checkpoint",
        "answers after damage",
        "answers after level 2",
    ):
        assert told[which] == plain, which
    assert told["answers of zeros"] != plain


def test_vllm_s_worker_would_ask_our_backend(told: dict[str, Any]) -> None:
    assert told["backend"] == "coldsnap"
    assert told["asleep"] == ["SUSPENDED", False]
    assert told["awake"] == ["RUNNING", True]


def test_the_first_sleep_writes_four_files_and_a_proof_and_the_next_none(told: dict[str, Any], place: Place) -> None:
    assert told["names"] == ["w0.lock"], "nothing is written before a sleep"
    written = {"model-weights.pack", "weights.blob", "native-manifest.json", "manifest.json"}
    assert set(told["files"]) == {*written, "weights.blob.coldsnap-validation.json"}
    assert told["files again"] == told["files"]


def test_the_manifests_are_of_this_worker_and_this_model(told: dict[str, Any], place: Place) -> None:
    folder = place.out / "w0"
    recovery = parse_recovery_manifest(read_private(folder / "manifest.json", MANIFEST_LIMIT_BYTES))
    native = parse_native_manifest(read_private(folder / "native-manifest.json", MANIFEST_LIMIT_BYTES))
    assert (native.worker, native.rank, recovery.worker, recovery.rank) == ("w0", 0, "w0", 0)
    pinned = resolve_local(place.model)
    assert recovery.model_source.revision == pinned.revision
    assert native.model_weights is not None
    assert str(native.model_weights.sha256) == told["files"]["model-weights.pack"] == told["pack again"]


def test_level_two_is_refused_before_anything_was_written(told: dict[str, Any]) -> None:
    assert "sleep at level 1 once" in told["level 2 at first"]


def test_a_damaged_pack_is_refused_and_the_engine_stays_asleep(told: dict[str, Any], place: Place) -> None:
    assert f"remove {place.out / 'w0/model-weights.pack'}" in told["damaged"]
    assert told["refused"] == ["RESUMING", False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"folder": "here"}, "must be an absolute path"), ({"kind": "coldsnap-worker-settings"}, "kind")],
)
def test_wrong_settings_end_the_start(
    place: Place, play: Any, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    wrong = Place(tmp_path)
    wrong.write(changes)
    error = play("hand.py", wrong.model, environment=wrong.environment)["error"]
    assert words in error
    assert error.startswith("InvalidDocument")
    assert not wrong.out.exists()


def test_the_folder_of_another_model_ends_the_start_and_stays(
    told: dict[str, Any], place: Place, play: Any, tmp_path: Path
) -> None:
    other = Place(tmp_path)
    other.model = other.model.rename(other.model.with_name("another"))
    other.write({"folder": str(place.out)})
    before = (place.out / "w0/manifest.json").read_bytes()
    error = play("hand.py", other.model, environment=other.environment)["error"]
    assert "holds the export of another model" in error
    assert (place.out / "w0/manifest.json").read_bytes() == before


def test_without_the_switch_vllm_is_vllm(place: Place, play: Any, plain: list[list[int]]) -> None:
    environment = {**place.environment, EXPORT_VARIABLE: "0"}
    environment.pop(SETTINGS_VARIABLE)
    assert play("hand.py", place.model, environment=environment)["answers"] == plain


def test_two_engines_of_one_command_are_refused(tmp_path: Path) -> None:
    from coldsnap.engines.vllm.byhand import supplied

    settings = HandSettings(
        format=1, kind="coldsnap-vllm-by-hand", folder=str(tmp_path / "out"), state_root=str(tmp_path / "state")
    )
    parallel = SimpleNamespace(data_parallel_size=2, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(model=str(tmp_path)))
    with pytest.raises(UserError, match="2 engines of one command"):
        supplied(settings, config)
    assert not (tmp_path / "out").exists()


def test_a_load_format_that_cannot_be_watched_ends_the_start(place: Place, play: Any) -> None:
    error = play("hand.py", place.model, "dummy", environment=place.environment)["error"]
    assert "'dummy' cannot be watched" in error
