"""What a recipe becomes: every word of it, nothing of the caller's environment, and a pinned model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.request import DriverId, request_bytes, request_document, request_from, request_sha256
from coldsnap.errors import InvalidDocument, Refused, UserError
from coldsnap.ops.planning import BASE_ENVIRONMENT, choose_engine, plan_capture, resolve_launch
from coldsnap.ops.recipe import DEFAULT_PROMPTS, Recipe
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN, FakePlugin


def recipe(model: Path, **changes: Any) -> Recipe:
    return Recipe.model_validate({"name": "svc", "engine": "fake", "model": str(model), **changes})


def document(model: Path, *, port: int | None = None, **changes: Any) -> dict[str, Any]:
    planned = plan_capture(
        recipe(model, **changes),
        PLUGIN,
        operation_id="op-1",
        output=Path("/out/a.json"),
        driver=DriverId.HOST,
        port=port,
    )
    return request_document(planned.request)


def test_every_default_is_resolved(model: Path) -> None:
    made = document(model)
    unit = made["launch"]["units"][0]
    assert (made["format"], made["operation"], made["id"], made["output"]) == (4, "capture", "op-1", "/out/a.json")
    assert made["snapshot_driver"] == {"id": "host"}
    assert unit["environment"] == dict(BASE_ENVIRONMENT)
    assert unit["command"][-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert made["extension"]["prompts"] == [one.model_dump() for one in DEFAULT_PROMPTS]
    assert made["extension"]["port"] == 8000
    assert made["workload"] == {"cluster_id": "svc"}
    assert made["policy"]["weights"]["native"]["materialize"] == "off"


def test_every_word_of_the_recipe_arrives(model: Path, tmp_path: Path) -> None:
    made = document(
        model,
        serve={"host": "0.0.0.0", "port": 9000, "shuffle": 7},  # noqa: S104 - only a word here
        weights={"mode": "native", "repository": "org/packs", "revision": "main"},
        validation={"health_path": "/ready", "prompts": ["a", {"text": "b", "max_tokens": 2}]},
        environment={"LANG": "de_DE.UTF-8", "MINE": "x"},
        mounts=[{"source": str(tmp_path), "target": "/data", "read_only": False}],
        cache_seeds=["/var/cache/engine"],
        allow_secrets=["HF_TOKEN"],
        cold_start=True,
    )
    unit = made["launch"]["units"][0]
    assert unit["command"][-6:] == ["--host", "0.0.0.0", "--port", "9000", "--shuffle", "7"]  # noqa: S104
    assert unit["environment"] == {**BASE_ENVIRONMENT, "LANG": "de_DE.UTF-8", "MINE": "x"}
    assert unit["mounts"] == [{"source": str(tmp_path), "target": "/data", "read_only": False}]
    assert made["policy"]["weights"]["mode"] == "native"
    assert made["policy"]["weights"]["native"]["repository"] == "org/packs"
    assert made["policy"]["weights"]["native"]["revision"] == "main"
    assert made["policy"]["cache"] == {"seed": True, "paths": ["/var/cache/engine"]}
    assert made["validation"]["health_path"] == "/ready"
    assert made["validation"]["prompt"] == "a"
    assert made["extension"]["prompts"] == [{"text": "a", "max_tokens": 8}, {"text": "b", "max_tokens": 2}]
    assert (made["extension"]["allow_secrets"], made["extension"]["cold_start"]) == (["HF_TOKEN"], True)


def test_a_port_of_the_caller_wins_everywhere(model: Path) -> None:
    made = document(model, port=7777, serve={"port": 9000})
    assert made["launch"]["units"][0]["command"][-1] == "7777"
    assert made["extension"]["port"] == 7777


def test_nothing_of_the_callers_environment_is_inherited(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    assert "HF_TOKEN" not in str(document(model))


def test_the_document_is_a_request_with_the_same_digest(model: Path) -> None:
    planned = plan_capture(recipe(model), PLUGIN, operation_id="op-1", output=Path("/out/a.json"), driver=DriverId.HOST)
    again = request_from(request_document(planned.request))
    assert request_sha256(again) == request_sha256(planned.request)
    assert request_bytes(again) == request_bytes(planned.request)


@pytest.mark.parametrize("port", [0, 65536, -1, "8000", True, 1.5, None])
def test_ports_are_ports(model: Path, port: object) -> None:
    with pytest.raises(InvalidDocument, match=r"serve\.port: is a port from 1 to 65535"):
        document(model, serve={"port": port})


def test_wrong_address_and_port_are_reported_together(model: Path) -> None:
    with pytest.raises(InvalidDocument) as caught:
        document(model, serve={"host": 3, "port": 0})
    assert [problem.field for problem in caught.value.problems] == ["serve.host", "serve.port"]


def test_options_the_engine_does_not_know_are_refused(model: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"serve\.tensor_parallel: is no option of the fake engine"):
        document(model, serve={"tensor_parallel": 2})


def test_an_unknown_engine_lists_the_installed_ones() -> None:
    with pytest.raises(UserError, match=r"engine: no engine is called 'vlm'; installed engines: fake"):
        choose_engine({"fake": PLUGIN}, "vlm")
    with pytest.raises(UserError, match="installed engines: none"):
        choose_engine({}, "fake")


def test_a_strict_request_finds_its_model_again(model: Path) -> None:
    launch = request_from(document(model)).launch
    assert resolve_launch(PLUGIN, launch) == PLUGIN.resolve_model(str(model))


def test_a_strict_request_for_another_revision_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", seed=1)
    launch = request_from(document(model)).launch
    held = PLUGIN.resolve_model(str(model)).revision
    write_checkpoint(model, seed=2)
    found = PLUGIN.resolve_model(str(model)).revision
    assert found != held
    with pytest.raises(Refused) as caught:
        resolve_launch(PLUGIN, launch)
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("launch.model.revision", held)
    assert problem.cure is not None
    assert found in problem.cure


def test_the_engine_runs_where_the_recipe_says(model: Path) -> None:
    assert document(model)["launch"]["units"][0]["command"][0] == sys.executable
    assert document(model, python="/venv/bin/python")["launch"]["units"][0]["command"][0] == "/venv/bin/python"


def test_an_engine_is_told_where_its_caches_travel(model: Path) -> None:
    class Caching(FakePlugin):
        def unit_environment(self, cache_paths: Sequence[str]) -> Mapping[str, str]:
            return {"CACHES": ":".join(cache_paths), "LANG": "engine"}

    planned = plan_capture(
        recipe(model, cache_seeds=["/a", "/b"], environment={"LANG": "recipe"}),
        Caching(),
        operation_id="op-1",
        output=Path("/out/a.json"),
        driver=DriverId.HOST,
    )
    said = planned.request.launch.units[0].environment
    assert (said["CACHES"], said["LANG"]) == ("/a:/b", "recipe"), "the recipe has the last word"


# -- devices and drivers -----------------------------------------------------------------------------------


def on_gpu(model: Path, driver: DriverId, **changes: Any) -> dict[str, Any]:
    planned = plan_capture(
        recipe(model, **{"serve": {"gpu": "/gpus"}, **changes}),
        PLUGIN,
        operation_id="op-1",
        output=Path("/out/a.json"),
        driver=driver,
    )
    return request_document(planned.request)


@pytest.mark.parametrize("driver", [DriverId.N580, DriverId.N610])
def test_an_engine_on_a_gpu_gets_the_first_one_unless_the_recipe_names_another(model: Path, driver: DriverId) -> None:
    made = on_gpu(model, driver)
    assert (made["snapshot_driver"], made["launch"]["units"][0]["devices"]) == ({"id": driver.value}, ["0"])
    assert on_gpu(model, driver, devices=["GPU-1"])["launch"]["units"][0]["devices"] == ["GPU-1"]


def test_another_number_of_devices_than_the_engine_uses_is_refused(model: Path) -> None:
    with pytest.raises(InvalidDocument) as caught:
        on_gpu(model, DriverId.N610, devices=["0", "1"])
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("devices", "2")
    assert "the 1 that the engine's workers use" in problem.message
    with pytest.raises(InvalidDocument) as caught:
        document(model, devices=["0"])
    assert caught.value.problems[0].cure == "leave it out"


@pytest.mark.parametrize("driver", [DriverId.N580, DriverId.N610])
def test_drivers_for_gpus_are_refused_for_an_engine_on_the_processor(model: Path, driver: DriverId) -> None:
    with pytest.raises(Refused) as caught:
        on_gpu(model, driver, serve={})
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("driver", driver.value)
    assert "use driver host" in str(problem.cure)


def test_driver_host_is_refused_for_an_engine_on_a_gpu(model: Path) -> None:
    with pytest.raises(Refused) as caught:
        on_gpu(model, DriverId.HOST)
    assert caught.value.problems[0].cure == "use n610 or n580"
