"""Predictions: bytes left to move, and times by rates of receipts or a calibration, each with its source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.forecast import ForecastStep, Phase, Step
from coldsnap.core.receipt import parse_receipt, receipt_bytes
from coldsnap.errors import Refused
from coldsnap.ops import calibration
from coldsnap.ops import predict as predict_module
from coldsnap.ops.calibration import CALIBRATION_NAME, calibrate, known_calibration
from coldsnap.ops.predict import Prediction, predict
from coldsnap.ops.preparing import prepare
from coldsnap.testing.checkpoint import DEFAULT_TENSORS

from .conftest import Shop  # isort: skip

MIB = 1 << 20
MODEL_BYTES = sum(DEFAULT_TENSORS.values())


@pytest.fixture(autouse=True)
def small_calibration(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calibrations of 1 MiB, counted."""
    made: list[int] = []

    def quickly(state: Any) -> calibration.Calibration:
        made.append(1)
        return calibrate(state, num_bytes=MIB)

    monkeypatch.setattr(predict_module, "calibrate", quickly)
    return made


def ask(shop: Shop, *, measure: bool | None = None, **changes: Any) -> Prediction:
    return predict(shop.tools, shop.loaded, shop.request("predict-1", **changes), measure=measure)


def steps(found: Prediction) -> dict[str, ForecastStep]:
    return {one.name: one for one in found.forecast.steps}


def sizes(shop: Shop) -> tuple[int, int, int]:
    """(everything in the capsule, its process images, the residual bytes of the memory)."""
    promised = shop.loaded.expected_files("u0")
    images = sum(size for path, (size, _) in promised.items() if path.startswith("process/"))
    return sum(size for size, _ in promised.values()), images, shop.result.residual_bytes


def test_bytes_before_anything_was_prepared(shop: Shop) -> None:
    everything, images, residual = sizes(shop)
    found = ask(shop, measure=False)
    assert found.source == "native"
    assert steps(found)["unpack"].bytes == everything
    assert steps(found)["admit"].bytes == 0, "the capture itself proved the pack"
    assert steps(found)["thaw"].bytes == images
    assert steps(found)[Step.HYDRATE_CACHED.value].bytes == MODEL_BYTES + residual
    assert found.forecast.bytes(Phase.PREPARE) == everything


def test_nothing_is_left_to_prepare_after_a_prepare(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    found = ask(shop, measure=False)
    assert found.forecast.bytes(Phase.PREPARE) == 0
    assert found.forecast.seconds(Phase.PREPARE) == 0.0
    assert found.forecast.is_whole(Phase.PREPARE)


def test_a_pack_without_a_proof_must_be_admitted(shop: Shop) -> None:
    pack = shop.tools.store.path(shop.result.pack_digests[0])
    pack.with_name(pack.name + ".coldsnap-validation.json").unlink()
    assert steps(ask(shop, measure=False))["admit"].bytes == shop.result.pack_bytes


def test_without_a_pack_the_bytes_come_from_the_checkpoint(shop: Shop) -> None:
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    found = ask(shop, measure=False)
    assert found.source == "recovery"
    assert steps(found)[Step.RECOVER.value].bytes == MODEL_BYTES + sizes(shop)[2]
    assert "admit" not in steps(found)


def test_no_provider_is_a_refusal(shop: Shop) -> None:
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    with pytest.raises(Refused):
        ask(shop, weights="native")


def test_rates_are_those_of_the_receipts(shop: Shop, small_calibration: list[int]) -> None:
    shop.restore("restore-1")
    receipt = parse_receipt((shop.tools.state.receipts / "restore-1.json").read_bytes())
    assert receipt.timing is not None
    spans = {span.name: span for span in receipt.timing.spans}
    everything, images, residual = sizes(shop)
    # The capsule's own index is no file of the artifact's, and is unpacked nowhere.
    assert spans["unpack"].attributes == {"artifact": str(shop.loaded.digest), "bytes": everything}
    assert spans["thaw"].attributes == {"bytes": images}

    found = ask(shop)
    thaw, hydrate = steps(found)["thaw"], steps(found)[Step.HYDRATE_CACHED.value]
    assert thaw.bytes_per_s == pytest.approx(images / spans["thaw"].duration_seconds)
    seconds = receipt.result["seconds"]
    assert hydrate.bytes_per_s == pytest.approx((MODEL_BYTES + residual) / seconds["hydrate"])
    assert steps(found)["accept"].seconds == pytest.approx(seconds["accept"])
    assert steps(found)["serve"].seconds == pytest.approx(seconds["serve"])
    assert {one.source for one in (thaw, hydrate)} == {"receipt of this artifact, newest restore-1"}
    assert found.forecast.is_whole(Phase.RESTORE)
    assert found.forecast.seconds(Phase.RESTORE) == pytest.approx(
        spans["thaw"].duration_seconds + seconds["hydrate"] + seconds["accept"] + seconds["serve"]
    )
    assert small_calibration == [], "nothing had to be measured"


def test_before_the_first_thaw_a_freeze_stands_in_for_it(shop: Shop) -> None:
    thaw = steps(ask(shop))["thaw"]
    capture = parse_receipt((shop.tools.state.receipts / "capture-1.json").read_bytes())
    frozen = capture.result["image_bytes"] / capture.result["seconds"]["freeze"]
    assert thaw.bytes_per_s == pytest.approx(frozen)
    assert thaw.source.startswith("nothing was thawed here yet")
    assert "capture-1" in thaw.source


def test_what_no_receipt_knows_is_calibrated_once(shop: Shop, small_calibration: list[int]) -> None:
    first = ask(shop)
    assert small_calibration == [1]
    assert "calibration" in steps(first)["unpack"].source
    assert "this boot, this disk" in steps(first)["unpack"].source
    ask(shop)
    assert small_calibration == [1], "it is kept"
    ask(shop, measure=True)
    assert small_calibration == [1, 1]
    assert not list(shop.tools.state.staging.iterdir()), "the scratch folder is gone"


def test_without_a_calibration_the_total_is_a_lower_bound(shop: Shop, small_calibration: list[int]) -> None:
    found = ask(shop, measure=False)
    assert small_calibration == []
    assert not found.forecast.is_whole(Phase.PREPARE)
    assert steps(found)["unpack"].seconds is None


@pytest.mark.parametrize("field", ["boot_id", "device"])
def test_another_boot_or_disk_is_measured_anew(shop: Shop, small_calibration: list[int], field: str) -> None:
    ask(shop)
    path = shop.tools.state.path / CALIBRATION_NAME
    document = json.loads(path.read_text())
    document[field] = 1 if field == "device" else "another boot"
    path.write_text(json.dumps(document))
    assert known_calibration(shop.tools.state) is None
    ask(shop)
    assert small_calibration == [1, 1]


def test_a_calibration_that_others_can_write_is_not_believed(shop: Shop) -> None:
    calibrate(shop.tools.state, num_bytes=MIB)
    assert known_calibration(shop.tools.state) is not None
    (shop.tools.state.path / CALIBRATION_NAME).chmod(0o666)
    assert known_calibration(shop.tools.state) is None


def test_a_calibration_measures_every_step_it_can(shop: Shop) -> None:
    made = calibrate(shop.tools.state, num_bytes=2 * MIB)
    measured = {one.step for one in made.steps}
    assert measured - {Step.HYDRATE_DISK} == {Step.ADMIT, Step.UNPACK, Step.HYDRATE_CACHED, Step.RECOVER}
    assert {one.bytes for one in made.steps} == {2 * MIB}
    assert all(rate.bytes_per_s > 0 for rate in made.rates().values())
    assert known_calibration(shop.tools.state) == made


def test_receipts_of_an_earlier_boot_say_nothing(shop: Shop) -> None:
    shop.restore("restore-1")
    path = shop.tools.state.receipts / "restore-1.json"
    receipt = parse_receipt(path.read_bytes())
    path.write_bytes(receipt_bytes(receipt.model_copy(update={"started_at": "2001-01-01T00:00:00Z"})))
    assert "capture-1" in steps(ask(shop))["thaw"].source


def test_a_receipt_that_cannot_be_read_is_named(shop: Shop) -> None:
    (shop.tools.state.receipts / "broken.json").write_text("{")
    (note,) = ask(shop, measure=False).notes
    assert "broken.json" in note


def test_the_document(shop: Shop, tmp_path: Path) -> None:
    document = json.loads(json.dumps(ask(shop).document()))
    assert document["phases"]["prepare"]["bytes"] == sizes(shop)[0]
    assert {one["phase"] for one in document["steps"]} == {"prepare", "restore"}
    assert all(one["source"] or one["bytes"] == 0 for one in document["steps"])
    shutil.rmtree(shop.tools.state.receipts)
    shop.tools.state.receipts.mkdir(mode=0o700)
    assert not ask(shop).document()["phases"]["restore"]["whole"]
