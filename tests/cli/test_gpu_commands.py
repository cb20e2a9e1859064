"""Drivers and devices on the command line: what is chosen, what is refused, and how it is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, fake_inventory
from coldsnap.testing.desk import Desk

from .conftest import Coldsnap  # isort: skip


@pytest.fixture
def gpus(kit: Desk) -> Desk:
    """The kit on a machine with two GPUs."""
    kit.facts.append(replace(kit.facts[-1], nvidia_driver="580.159.04"))
    kit.tools = replace(kit.tools, accelerator=FakeCheckpoints().accelerator(fake_inventory(2)))
    return kit


def recipe(folder: Path, model: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"name": "svc", "engine": "fake", "model": str(model), **changes}))
    return path


def planned(coldsnap: Coldsnap, *words: object) -> dict[str, Any]:
    ran = coldsnap("plan", *words, "--quiet")
    assert ran.code == 0, ran.err
    said: dict[str, Any] = ran.said
    return said


def test_auto_takes_the_newest_driver_that_works(coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path) -> None:
    on_gpu = recipe(tmp_path, model, serve={"gpu": "/gpus"})
    assert planned(coldsnap, on_gpu)["snapshot_driver"] == {"id": "n610"}
    gpus.failed["cuda-initialized-state"] = "it does not come back"
    assert planned(coldsnap, on_gpu)["snapshot_driver"] == {"id": "n580"}
    on_cpu = recipe(tmp_path, model)
    assert planned(coldsnap, on_cpu)["snapshot_driver"] == {"id": "host"}


def test_a_flag_wins_over_the_recipe(coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, model, serve={"gpu": "/gpus"}, driver="n610", devices=["1"])
    assert planned(coldsnap, path, "--driver", "n580")["snapshot_driver"] == {"id": "n580"}
    assert planned(coldsnap, path)["launch"]["units"][0]["devices"] == ["1"]


@pytest.mark.parametrize("driver", ["n580", "n610"])
def test_a_driver_for_gpus_is_refused_on_the_processor(
    coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path, driver: str
) -> None:
    ran = coldsnap("capture", recipe(tmp_path, model), "-o", tmp_path / "a.json", "--driver", driver, "--json")
    assert ran.code == 3
    (problem,) = ran.said["problems"]
    assert (problem["field"], problem["value"]) == ("driver", driver)
    assert "use driver host" in problem["cure"]
    assert gpus.units.calls == []


def test_a_driver_that_does_not_exist_is_a_usage_error(
    coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path
) -> None:
    ran = coldsnap("capture", recipe(tmp_path, model), "-o", tmp_path / "a.json", "--driver", "n999", "--json")
    assert (ran.code, ran.said["error"]) == (2, "UsageError")
    assert "auto, n580, n610, host" in ran.said["cure"]


def test_every_missing_feature_is_named(coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path) -> None:
    gpus.failed |= {"cuda-checkpoint-api": "too old", "cuda-fresh-state": "no context"}
    path = recipe(tmp_path, model, serve={"gpu": "/gpus"})
    ran = coldsnap("capture", path, "-o", tmp_path / "a.json", "--json")
    assert ran.code == 3
    assert {problem["field"] for problem in ran.said["problems"]} == {
        "features.cuda-checkpoint-api",
        "features.cuda-fresh-state",
    }


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(
    coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path
) -> None:
    path = recipe(tmp_path, model, serve={"gpu": "/gpus"}, driver="n610", devices=["GPU-none"])
    ran = coldsnap("capture", path, "-o", tmp_path / "a.json", "--json")
    assert ran.code == 3
    assert [problem["field"] for problem in ran.said["problems"]] == ["launch.units[0].devices[0]"]
    assert gpus.units.calls == []


def test_capabilities_list_devices_and_every_feature(coldsnap: Coldsnap, gpus: Desk) -> None:
    gpus.failed["cuda-classic-ipc"] = "nothing proves it"
    said = coldsnap("capabilities", "--json").said
    assert [gpu["index"] for gpu in said["gpus"]] == [0, 1]
    drivers = {driver["driver"]: driver for driver in said["drivers"]}
    assert drivers["n610"]["usable"], "a feature for several communicating workers is in nobody else's way"
    features = {feature["feature"]: feature for feature in drivers["n610"]["features"]}
    assert (features["cuda-classic-ipc"]["base"], features["cuda-checkpoint-api"]["base"]) == (False, True)
    assert all(feature["reason"] for feature in features.values())
    shown = coldsnap("capabilities").out
    assert fake_inventory(2).gpus[1].uuid in shown
    assert "nccl-communicator-roundtrip" in shown


def test_devices_of_a_restore_are_for_artifacts_that_have_some(
    coldsnap: Coldsnap, gpus: Desk, model: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "a.json"
    assert coldsnap("capture", recipe(tmp_path, model), "-o", artifact, "--quiet").code == 0
    ran = coldsnap("restore", artifact, "--devices", "0,1", "--json")
    assert (ran.code, ran.said["error"]) == (2, "UsageError")
    assert "2 devices are named, and the artifact was captured with 0" in ran.said["message"]
